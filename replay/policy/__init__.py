"""Policies: how engines batch, what they keep, and how work is spread. A policy file says what differs from the trace.

A file is TOML with the keys of :class:`Policy` (docs/policies.md); what it leaves out stays as the trace's own server had it.
:func:`hoptrace.replay.planning.plan_of` puts the two together into numbers, and says what neither of them knows.
"""

from __future__ import annotations

import difflib
import itertools
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hoptrace.errors import InputError, UsageError
from hoptrace.replay.policy.checks import problems
from hoptrace.replay.policy.errors import explain, sections, wrong
from hoptrace.replay.policy.model import Policy
from hoptrace.replay.policy.parts import MOST_SEQUENCES, Batching, Kv, PrefixCache
from hoptrace.replay.policy.resolve import Resolved, resolve

__all__ = [
    "MOST_SEQUENCES",
    "Batching",
    "Kv",
    "Policy",
    "PrefixCache",
    "Resolved",
    "load_policy",
    "parse_policy",
    "presets",
    "resolve",
    "with_settings",
]


def presets() -> dict[str, Policy]:
    """The policies that come with hoptrace, by name."""
    found = {}
    for entry in sorted(files("hoptrace.replay.policies").iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".toml"):
            policy = parse_policy(entry.read_text(encoding="utf-8"), entry.name)
            found[policy.name] = policy
    return found


def load_policy(name_or_path: str | Path) -> Policy:
    """A preset by its name, or a policy file by its path.

    Raises:
        UsageError: neither.
        InputError: the file is no policy; names the key, the line and what is allowed.
    """
    text = str(name_or_path)
    if not text.endswith(".toml") and "/" not in text:
        known = presets()
        if text in known:
            return known[text]
        if not Path(text).is_file():
            near = difflib.get_close_matches(text, known, n=1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            raise UsageError(f"There is no policy {text!r}.", hint=f"{hint}There are: {', '.join(known)}; or give a TOML file.")
    path = Path(text)
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"There is no policy file {path}.", hint="`hoptrace policies` lists the policies there are.") from None
    except IsADirectoryError:
        raise UsageError(
            f"{path} is a folder, not a policy file.", hint="`hoptrace policies` lists the policies there are."
        ) from None
    except OSError as e:
        raise InputError(f"{path} cannot be read: {e.strerror}.") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} cannot be read: it is not text in UTF-8.") from None
    policy = parse_policy(content, str(path))
    return policy if policy.name != "unnamed" else policy.model_copy(update={"name": path.stem})


def parse_policy(text: str, name: str = "the policy") -> Policy:
    """A policy from TOML text. InputError names key, line and what is allowed."""
    try:
        data = tomllib.loads(text)
    except ValueError as e:  # TOMLDecodeError is one; an integer of thousands of digits raises a plain one
        raise InputError(f"{name} is not TOML: {e}.") from None
    except RecursionError:
        raise InputError(f"{name} is not TOML that can be read: it is nested too deeply.") from None
    return _validate(data, text, name)


def with_settings(policy: Policy, settings: tuple[str, ...] | list[str]) -> Policy:
    """``policy`` with ``batching.max_sequences=1``, ``tiers.0.capacity_tokens=5`` and the like on top.

    Raises:
        UsageError: a setting is not KEY=VALUE.
        InputError: the key or the value is not allowed.
    """
    data: dict[str, Any] = policy.changes() | {"name": policy.name, "description": policy.description}
    for setting in settings:
        key, equals, value = setting.partition("=")
        parts = [p.strip() for p in key.strip().split(".")]
        if not equals or len(parts) < 2 or not all(parts):
            raise UsageError(f"{setting!r} is not a setting.", hint="Write --set batching.max_sequences=1.")
        if parts[0] in Policy.model_fields and parts[0] not in sections(Policy):
            raise UsageError(f"{parts[0]!r} is not a section of a policy.", hint=f"Sections: {', '.join(sections(Policy))}.")
        _put(data, parts, _value(value), setting)
    changed = _validate(data, "", f"--set {' '.join(settings)}")
    return changed.model_copy(update={"name": f"{policy.name}, {', '.join(settings)}"}) if settings else changed


def _put(data: Any, parts: list[str], value: Any, setting: str) -> None:
    """Set ``value`` deep inside ``data``; tables that are not there are made, entries of arrays are numbers from 0."""
    for step, following in itertools.pairwise(parts):
        if isinstance(data, list):
            if not step.isdecimal() or int(step) >= len(data):
                raise UsageError(f"{setting!r}: there is no entry {step} of {len(data)}.", hint="They count from 0.")
            data = data[int(step)]
        elif isinstance(data, dict):
            data = data.setdefault(step, [] if following.isdecimal() and step == "tiers" else {})
        else:
            raise UsageError(f"{setting!r} is not a setting.", hint=f"{step} is not in a table.")
    if not isinstance(data, dict):
        raise UsageError(f"{setting!r} is not a setting.", hint=f"{parts[-2]} is not a table.")
    data[parts[-1]] = value


def _value(text: str) -> Any:
    """A TOML value; what is none is text."""
    try:
        return tomllib.loads(f"v = {text.strip()}")["v"]
    except (ValueError, RecursionError):
        return text.strip()


def _validate(data: dict[str, Any], text: str, name: str) -> Policy:
    try:
        policy = Policy.model_validate(data)
    except ValidationError as e:
        raise explain(Policy, e.errors(), data, text, name) from None
    for problem in problems(policy):
        raise wrong(problem.place, problem.sentence, problem.hint, text, name)
    return policy
