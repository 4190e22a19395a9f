"""A server's flags from its command line: those that are listed, and nothing else. Command lines hold keys and tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from hoptrace.collectors.context import Context
from hoptrace.collectors.hardware.tree import arguments, tree_of

__all__ = ["Allowed", "Flags", "flags", "of_server"]

Form = Literal["int", "float", "word", "flag", "json", "list"]

Allowed = Mapping[str, Form]
"""Flag as the engine spells it, with its dashes (``--block-size``, ``-tp``) → form of its value. One name may stand for another
with ``=``: ``"-tp=--tensor-parallel-size"``."""

# Of JSON values, the keys that say how the engine is set; everything else in them is left out.
_JSON_KEYS = frozenset(
    ("kv_connector", "kv_role", "kv_rank", "kv_parallel_size", "kv_buffer_device", "kv_buffer_size", "kv_load_failure_policy",
     "enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint", "topic", "buffer_steps", "method", "model",
     "num_speculative_tokens", "draft_tensor_parallel_size", "prompt_lookup_max", "prompt_lookup_min", "mode",
     "cudagraph_mode")
)  # fmt: skip
_LONGEST = 300

Flags = dict[str, Any]


def flags(argv: Sequence[str], allowed: Allowed) -> Flags:
    """The allowed flags that ``argv`` sets, by name without dashes and with underscores; the last of a repeated one wins.

    Understood: ``--flag value``, ``--flag=value``, ``--flag`` alone, ``--no-flag``, dashes or underscores, JSON values (in whole
    or by ``--flag.key value``). A value that is not of its form is left out, as is a text of more than 300 characters.
    """
    table: dict[str, tuple[str, Form]] = {}
    for spelled, form in allowed.items():
        alias, _, real = spelled.partition("=")
        table[_plain(alias)] = (_plain(real or alias).lstrip("-").replace("-", "_"), form)
    out: Flags = {}
    i = 0
    while i < len(argv):
        word = argv[i]
        i += 1
        if not word.startswith("-"):
            continue
        name, equals, value = word.partition("=")
        known = table.get(_plain(name))
        if known is None and "." in name and (part := table.get(_plain(name.partition(".")[0]))) and part[1] == "json":
            # --kv-events-config.endpoint tcp://*:5557 (vLLM: FlexibleArgumentParser)
            if not equals and i < len(argv):
                value = argv[i]
                i += 1
            told = _json(json.dumps({name.partition(".")[2].replace("-", "_"): _scalar(value)}))
            out[part[0]] = (out[part[0]] if isinstance(out.get(part[0]), dict) else {}) | (told or {})
            continue
        if known is None:
            off = table.get(_plain("--" + name[5:])) if name.startswith(("--no-", "--no_")) else None
            if off is not None and off[1] == "flag":
                out[off[0]] = False
            continue
        real, form = known
        if form == "flag":
            if equals:
                out[real] = value.lower() not in ("false", "0", "no")
            else:
                follows = argv[i].lower() if i < len(argv) else ""
                out[real] = follows not in ("false", "0", "no", "off")
            continue
        if not equals:
            if i >= len(argv) or (argv[i].startswith("--") and form != "json"):
                continue
            value = argv[i]
            i += 1
            if form == "list":
                while i < len(argv) and not argv[i].startswith("-"):
                    value += " " + argv[i]
                    i += 1
        told = _value(value, form)
        if told is not None:
            out[real] = told
    return out


def of_server(ctx: Context, allowed: Allowed, program: re.Pattern[str] | None = None) -> tuple[Flags | None, list[str]]:
    """The flags of the first process of the server's tree that has any, and what it serves (``vllm serve MODEL``); null where no
    process is known here. ``program``: what the program's own name must hold."""
    pid = ctx.find().pid if ctx.find is not None else None
    if pid is None:
        return None, []
    for process in tree_of(pid):
        argv = arguments(process.pid)
        if len(argv) < 2 or (program is not None and not program.search(Path(argv[0]).name)):
            continue
        found, subject = flags(argv[1:], allowed), _subject(argv)
        if found or subject:
            return found, subject
    return {}, []


def _subject(argv: Sequence[str]) -> list[str]:
    """What stands behind the subcommand: ``vllm serve MODEL``, ``trtllm-serve MODEL``."""
    for i, word in enumerate(argv[:4]):
        name = Path(word).name
        if name == "serve" or name == "trtllm-serve":
            follows = argv[i + 1 : i + 3] if i + 1 < len(argv) else []
            if follows and follows[0] == "serve":
                follows = follows[1:]
            return [follows[0]] if follows and not follows[0].startswith("-") else []
    return []


def _plain(name: str) -> str:
    dashes = len(name) - len(name.lstrip("-"))
    return "-" * dashes + name[dashes:].replace("_", "-")


def _value(text: str, form: Form) -> Any:
    if form == "json":
        return _json(text)
    if len(text) > _LONGEST:
        return None
    if form == "int":
        return _int(text)
    if form == "float":
        try:
            return float(text)
        except ValueError:
            return None
    # An address may hold a name and a password.
    text = re.sub(r"//[^/@\s]*@", "//", text)
    return text.split() if form == "list" else text


def _int(text: str) -> int | None:
    """vLLM's human numbers too: 1k is 1000, 1K is 1024 (vllm/engine/arg_utils.py, human_readable_int)."""
    units = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
    try:
        if text and text[-1] in units:
            return int(float(text[:-1]) * units[text[-1]])
        return int(text)
    except (ValueError, OverflowError):
        return None


def _scalar(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, str | int | float | bool | None) else None


def _json(text: str) -> Any:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    return {
        k: v for k, v in data.items()
        if k in _JSON_KEYS and isinstance(v, str | int | float | bool | None) and (not isinstance(v, str) or len(v) <= _LONGEST)
    }  # fmt: skip
