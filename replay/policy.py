"""Policies: how an engine batches, and what KV space and prefix cache it has. A policy file says what differs from the trace.

A file is TOML with the keys of :class:`Policy`; what it leaves out stays as the trace's own server had it. :func:`resolve` puts
the two together into numbers, and says what neither of them knows.
"""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hoptrace.errors import InputError, UsageError
from hoptrace.manifest import Server
from hoptrace.replay.policy_errors import explain, sections

__all__ = [
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

# The kernel's integers have 64 bits; more than this of anything is `unlimited`.
MOST = 1 << 40
# Each place costs memory and a look at every admission, busy or not; no engine has so many.
MOST_SEQUENCES = 1 << 16

Size = Annotated[int, Field(ge=1, le=MOST)]
Count = Size | Literal["unlimited"]
Places = Annotated[int, Field(ge=1, le=MOST_SEQUENCES)] | Literal["unlimited"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Batching(_Part):
    """How requests are put together into steps."""

    max_sequences: Places | None = Field(
        default=None,
        description="Requests that hold a place at once: slots (llama.cpp), max-num-seqs (vLLM). As the trace's server.",
    )
    max_batched_tokens: Count | None = Field(
        default=None, description="Tokens of one step at most: n_batch, max-num-batched-tokens. As the trace's server."
    )
    mode: Literal["mixed", "prefill_first"] | None = Field(
        default=None,
        description="mixed: running requests first, then prompt tokens up to the budget, in one step (llama.cpp, vLLM v1; the "
        "default). prefill_first: prompts first, decoders only in steps without any prompt token.",
    )
    chunked_prefill: bool | None = Field(
        default=None, description="Whether a prompt may be computed in several steps. true in mixed, false in prefill_first."
    )


class Kv(_Part):
    """The KV space."""

    capacity_tokens: Count | None = Field(
        default=None, description="Tokens of KV space over all requests. As the trace's server."
    )
    block_size_tokens: Size | None = Field(
        default=None, description="KV is allocated in blocks of so many tokens. As the trace's server; 1 if unknown."
    )
    context_tokens: Count | None = Field(
        default=None, description="Longest sequence, prompt and output: a slot's context, max-model-len. As the trace's server."
    )


class PrefixCache(_Part):
    """Reuse of prompts' beginnings. Which prompts begin alike is known from the trace's prefix blocks only."""

    enabled: bool | None = Field(default=None, description="As the trace's server; false if that is unknown.")
    kind: Literal["pool", "slot"] | None = Field(
        default=None,
        description="pool: blocks stay in the KV space, least recently used evicted first (vLLM). slot: each slot keeps its last "
        "prompt (llama.cpp, without its host prompt cache). slot if the trace's engine is llama.cpp, else pool.",
    )
    capacity_tokens: Count | None = Field(
        default=None, description="pool only: tokens that cached blocks may take. Bounded by the KV space only, if not given."
    )


class Policy(_Part):
    """A policy file."""

    name: str = Field(default="unnamed", description="Short name.")
    description: str = Field(default="", description="One line: what it is.")
    batching: Batching = Field(default_factory=Batching)
    kv: Kv = Field(default_factory=Kv)
    prefix_cache: PrefixCache = Field(default_factory=PrefixCache)

    def changes(self) -> dict[str, Any]:
        """What it sets, without name and description; empty if it leaves the trace's server as it was."""
        d = self.model_dump(exclude_none=True, exclude={"name", "description"})
        return {k: v for k, v in d.items() if v}

    def to_toml(self) -> str:
        """As a file. :func:`parse_policy` gives the equal policy back."""
        import tomli_w

        head = {"name": self.name, "description": self.description}
        return tomli_w.dumps(head | self.changes())


@dataclass(frozen=True)
class Resolved:
    """A policy in numbers; null is unlimited. ``notes`` says what was taken for want of knowledge."""

    max_sequences: int | None
    max_batched_tokens: int | None
    mode: str
    chunked_prefill: bool
    capacity_tokens: int | None
    block_size_tokens: int
    context_tokens: int | None
    cache: str | None
    cache_capacity_tokens: int | None
    notes: tuple[str, ...] = ()

    def as_config(self) -> dict[str, Any]:
        """What a manifest's server has no field for; :func:`resolve` reads it back, so that a replay can be replayed."""
        found: dict[str, Any] = {"batching_mode": self.mode, "chunked_prefill": self.chunked_prefill}
        if self.cache is not None:
            found["prefix_cache_kind"] = self.cache
        if self.cache_capacity_tokens is not None:
            found["prefix_cache_capacity_tokens"] = self.cache_capacity_tokens
        if self.capacity_tokens is None:
            # A capacity that is null is unknown; this one was taken as without a limit, so there is always room.
            found["kv_unlimited"] = True
        return found

    def as_dict(self) -> dict[str, Any]:
        """Plain values in the layout of a policy file, for the manifest."""

        def limit(value: int | None) -> int | str:
            return "unlimited" if value is None else value

        cache: dict[str, Any] = {"enabled": self.cache is not None}
        if self.cache is not None:
            cache["kind"] = self.cache
        if self.cache == "pool":
            cache["capacity_tokens"] = limit(self.cache_capacity_tokens)
        return {
            "batching": {
                "max_sequences": limit(self.max_sequences),
                "max_batched_tokens": limit(self.max_batched_tokens),
                "mode": self.mode,
                "chunked_prefill": self.chunked_prefill,
            },
            "kv": {
                "capacity_tokens": limit(self.capacity_tokens),
                "block_size_tokens": self.block_size_tokens,
                "context_tokens": limit(self.context_tokens),
            },
            "prefix_cache": cache,
        }


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
    return _validate(data, text, name)


def with_settings(policy: Policy, settings: tuple[str, ...] | list[str]) -> Policy:
    """``policy`` with ``batching.max_sequences=1`` and the like on top.

    Raises:
        UsageError: a setting is not KEY=VALUE.
        InputError: the key or the value is not allowed.
    """
    data = policy.model_dump(exclude_none=True)
    for setting in settings:
        key, equals, value = setting.partition("=")
        parts = key.strip().split(".")
        if not equals or len(parts) != 2 or not all(parts):
            raise UsageError(f"{setting!r} is not a setting.", hint="Write --set batching.max_sequences=1.")
        section = data.setdefault(parts[0], {})
        if not isinstance(section, dict):
            raise UsageError(f"{parts[0]!r} is not a section of a policy.", hint=f"Sections: {', '.join(sections(Policy))}.")
        try:
            section[parts[1]] = tomllib.loads(f"v = {value.strip()}")["v"]
        except ValueError:
            section[parts[1]] = value.strip()
    changed = _validate(data, "", f"--set {' '.join(settings)}")
    return changed.model_copy(update={"name": f"{policy.name}, {', '.join(settings)}"}) if settings else changed


def resolve(policy: Policy, server: Server | None) -> Resolved:
    """The policy on top of the trace's own server.

    Raises:
        InputError: the parts do not fit together.
    """
    own = server or Server(name="unknown")
    b, kv, cache = policy.batching, policy.kv, policy.prefix_cache
    notes: list[str] = []

    def known(asked: Count | None, recorded: int | None, what: str) -> int | None:
        if asked == "unlimited":
            return None
        value = asked if asked is not None else recorded
        if value is None:
            notes.append(f"{what} is unknown: taken as unlimited.")
        return value

    mode = b.mode or own.config.get("batching_mode") or "mixed"
    chunked = b.chunked_prefill
    if chunked is None and b.mode is None:
        chunked = own.config.get("chunked_prefill")
    capacity = own.kv_capacity_tokens
    if capacity is None and own.block_count and own.block_size_tokens:
        capacity = own.block_count * own.block_size_tokens
    # Only what the engine is decides, never where the trace came from; a replay's server says it in its configuration.
    usual = "slot" if (own.engine or "").startswith("llama") else "pool"
    kind = cache.kind or own.config.get("prefix_cache_kind") or usual
    entries = cache.capacity_tokens
    if entries is None and kind == "pool":
        entries = own.config.get("prefix_cache_capacity_tokens")
    enabled = cache.enabled if cache.enabled is not None else own.prefix_caching
    if enabled is None:
        notes.append("Whether the server reuses prefixes is unknown: taken as not.")
    result = Resolved(
        max_sequences=known(b.max_sequences, own.max_sequences, "How many requests run at once (max_sequences)"),
        max_batched_tokens=known(b.max_batched_tokens, own.max_batched_tokens, "The token budget of a step (max_batched_tokens)"),
        mode=mode,
        chunked_prefill=chunked if chunked is not None else mode == "mixed",
        capacity_tokens=known(kv.capacity_tokens, capacity, "The KV space (capacity_tokens)"),
        block_size_tokens=kv.block_size_tokens or own.block_size_tokens or 1,
        context_tokens=known(kv.context_tokens, own.context_tokens, "The longest sequence (context_tokens)"),
        cache=kind if enabled else None,
        cache_capacity_tokens=entries if isinstance(entries, int) else None,
        notes=tuple(notes),
    )
    if result.cache == "slot":
        _check_slots(result, cache)
        if note := _host_cache(own):
            result = replace(result, notes=(*result.notes, note))
    return result


def _host_cache(own: Server) -> str | None:
    """A server with slots may keep prompts of others in host memory besides (llama.cpp's --cache-ram, on by default)."""
    size = own.config.get("cache_ram_mib", own.config.get("cache_ram"))
    if isinstance(size, int | float) and size == 0:
        return None
    known = "is on" if isinstance(size, int | float) else "may be on (its size is unknown)"
    return (
        f"llama.cpp's host prompt cache (--cache-ram) {known} and is not modelled: "
        "prompts that only it would find again are computed anew."
    )


def _check_slots(r: Resolved, cache: PrefixCache) -> None:
    if cache.capacity_tokens is not None:
        raise InputError(
            'prefix_cache.capacity_tokens does not go with kind = "slot": a slot keeps one prompt.', hint="Leave it out."
        )
    if r.max_sequences is None:
        raise InputError(
            'prefix_cache.kind = "slot" needs batching.max_sequences: the number of slots.',
            hint="Set it, or set prefix_cache.enabled = false.",
        )
    if r.capacity_tokens is not None and (r.context_tokens is None or r.capacity_tokens < r.max_sequences * r.context_tokens):
        raise InputError(
            f'prefix_cache.kind = "slot" needs KV space for every slot: {r.max_sequences} slots of '
            f"{r.context_tokens or 'unlimited'} tokens do not fit into {r.capacity_tokens}.",
            hint="A KV space that slots share (--kv-unified) is not modelled. Set kv.context_tokens or kv.capacity_tokens.",
        )


def _validate(data: dict[str, Any], text: str, name: str) -> Policy:
    try:
        return Policy.model_validate(data)
    except ValidationError as e:
        raise explain(Policy, e.errors()[0], text, name) from None
