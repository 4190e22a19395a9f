"""What is wrong with a policy file, in one sentence: the key, its line, and what is allowed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hoptrace.errors import InputError
from hoptrace.replay.policy.refused import refusal

__all__ = ["Place", "allowed", "explain", "line_of", "place_name", "sections", "wrong"]

_A_NAME = "a name of letters, digits, dots, dashes and underscores"

_CALLED = {
    "continuous": "mixed", "chunked": "mixed", "decode_first": "mixed", "decode-first": "mixed",
    "mixed_batching": "prompts_first", "prefill-first": "prefill_first", "prompts-first": "prompts_first",
    "fifo": "fcfs", "sjf": "shortest", "slo": "slack",
    "round-robin": "round_robin", "rr": "round_robin", "jsq": "least_load", "least-load": "least_load", "p2c": "power_of_two",
    "power_of_2": "power_of_two", "prefix-aware": "prefix_aware", "kv-aware": "kv_use", "kv_aware": "kv_use", "sticky": "session",
    "host_dram": "dram", "host": "dram", "cpu": "dram", "disk": "nvme", "ssd": "nvme", "cxl": "cxl_pool", "rdma": "remote_dram",
    "write_through": "through", "write-through": "through", "write_back": "back", "write-back": "back", "per-layer": "per_layer",
    "layerwise": "per_layer", "read": "pull", "bfloat16": "bf16", "float16": "f16", "fp16": "f16", "float32": "f32",
    "e4m3": "fp8_e4m3",
}  # fmt: skip
"""What others call it."""

Place = tuple[str | int, ...]
"""Where something stands in a file: names of tables and keys, numbers in arrays."""


def sections(root: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The tables of a policy file, by name: ``batching``, ``split.decode_server``; ``tiers`` for each of ``[[tiers]]``, ``links``
    for each of ``[links.NAME]``. What stands as [batching] says it is not repeated."""
    found: dict[str, type[BaseModel]] = {}

    def add(model: type[BaseModel], inside: str) -> None:
        for name, field in model.model_fields.items():
            part = _model_in(field.annotation)
            if part is None or (inside and part in found.values() and part.__name__ in ("Batching", "Kv", "PrefixCache")):
                continue
            found[inside + name] = part
            add(part, f"{inside}{name}.")

    add(root, "")
    return found


def explain(root: type[BaseModel], errors: Sequence[Any], data: Any, text: str, name: str) -> InputError:
    """pydantic's first error about the file ``name`` with the content ``text`` (``data`` once read), for people."""
    # A name that is refused says more than that a required key beside it is missing.
    error = min(errors, key=lambda e: {"extra_forbidden": 0, "missing": 2}.get(e["type"], 1))
    place = _place(error["loc"], data)
    model = _model_at(root, place[:-1]) or root
    key = str(place[-1])
    where = _where(text, name, place)
    inside = place_name(place[:-1])
    new_key = error["type"] == "extra_forbidden"
    if refused := refusal(key, None if new_key else error.get("input")):
        asked = key if new_key else f'{key} = "{error["input"]}"'
        return InputError(
            f"{where}: {asked} is not modelled ({refused.what}): {refused.why}.", hint=f"What there is: {refused.instead}."
        )
    if new_key:
        near = difflib.get_close_matches(key, model.model_fields, n=1)
        home = [s for s, m in sections(root).items() if key in m.model_fields]
        hint = f"Did you mean {near[0]}? " if near else f"It belongs into [{home[0]}]. " if home else ""
        return InputError(f"{where}: {key} is not a key of {inside}.", hint=f"{hint}Keys: {', '.join(model.model_fields)}.")
    if error["type"] == "missing":
        missing = str(error["loc"][-1])
        field = _model_at(root, place)
        wanted = allowed(field.model_fields[missing]) if field is not None else "a value"
        return InputError(f"{where}: {place_name(place)} lacks {missing}.", hint=f"Allowed: {wanted}.")
    field_info = model.model_fields.get(key)
    if isinstance(place[-1], int):
        field_info = (_model_at(root, place[:-2]) or root).model_fields.get(str(place[-2]))
        key = str(place[-2])
    words = "a table" if field_info is None else allowed(field_info)
    called = _CALLED.get(str(error.get("input")).lower()) if isinstance(error.get("input"), str) else None
    if called is not None and f'"{called}"' in words:
        words = f'{words}. Did you mean "{called}"?'.removesuffix(".")
    if error["loc"][-1] == "[key]":
        words = _A_NAME
    end = "" if words.endswith("?") else "."
    return InputError(f"{where}: {key} = {_shown(error['input'])} is not possible.", hint=f"Allowed: {words}{end}")


def wrong(place: Place, sentence: str, hint: str, text: str, name: str) -> InputError:
    """A policy whose keys are allowed one by one, but not together."""
    return InputError(f"{_where(text, name, place)}: {sentence}", hint=hint or None)


def place_name(place: Place) -> str:
    """``[split.decode_server]``, ``[[tiers]] 2``, or ``a policy`` for its top."""
    if not place:
        return "a policy"
    if isinstance(place[-1], int):
        return f"[[{'.'.join(str(p) for p in place[:-1])}]] {place[-1] + 1}"
    return f"[{'.'.join(str(p) for p in place)}]"


def line_of(text: str, place: Place) -> int | None:
    """The line of a file that sets the key at ``place``, or opens its table; of what stands in an inline table, that table's."""
    best: tuple[int, int] = (0, 0)
    table: Place = ()
    seen: dict[Place, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\[\s*([^\[\]]+?)\s*\]\]", line):
            path = _keys(header[1])
            seen[path] = seen.get(path, -1) + 1
            table = (*path, seen[path])
            found: Place = table
        elif header := re.match(r"\s*\[\s*([^\[\]]+?)\s*\]", line):
            path = _keys(header[1])
            # [tiers.x] below [[tiers]] belongs to the last of them.
            table = (path[0], seen[path[:1]], *path[1:]) if path[:1] in seen and len(path) > 1 else path
            found = table
        elif key := re.match(r"\s*((?:[\w-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[\w-]+|\"[^\"]*\"|'[^']*'))*)\s*=", line):
            found = (*table, *_keys(key[1]))
        else:
            continue
        depth = len(found)
        if depth > best[0] and place[:depth] == found:
            best = (depth, number)
        elif depth > len(place) and found[: len(place)] == place and best[0] < len(place):
            best = (len(place), number)
    # A table's own line is no place for a key that it lacks only where nothing nearer is found.
    return best[1] or None


def _keys(dotted: str) -> Place:
    return tuple(k.strip().strip("\"'") for k in dotted.split("."))


def _where(text: str, name: str, place: Place) -> str:
    line = line_of(text, place) if text else None
    return f"{name}, line {line}" if line else name


def _place(loc: Sequence[Any], data: Any) -> Place:
    """The part of pydantic's place that the file has: a union adds its branch's name behind it."""
    place: list[str | int] = []
    for step in loc:
        inside = (
            step in data if isinstance(data, Mapping) else isinstance(data, list) and isinstance(step, int) and step < len(data)
        )
        if inside:
            data = data[step]
        elif place:
            break
        place.append(step)
    return tuple(place)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The table type that a field holds, itself, in an array, by name, or or-null."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((m for m in map(_model_in, get_args(annotation)) if m is not None), None)


def _model_at(root: type[BaseModel], place: Place) -> type[BaseModel] | None:
    model: type[BaseModel] | None = root
    by_name = False
    for step in place:
        if model is None:
            return None
        if by_name or isinstance(step, int):
            by_name = False
            continue
        field = model.model_fields.get(step)
        if field is None:
            return None
        by_name = get_origin(field.annotation) is dict
        model = _model_in(field.annotation)
    return model


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def allowed(field: FieldInfo) -> str:
    """The values that a field takes, in words."""
    words: list[str] = []
    names = {bool: "true or false", str: "text"}

    def add(word: str | None) -> None:
        if word and word not in words:
            words.append(word)

    def walk(part: Any) -> None:
        origin = get_origin(part)
        if origin is Annotated:
            add(_bounded(*get_args(part)))
        elif origin is Literal:
            for value in get_args(part):
                add(f'"{value}"')
        elif _model_in(part) is not None and origin in (None, list, tuple, dict):
            add("tables" if origin else "a table")
        elif origin is list:
            add("a list of such")
        elif isinstance(part, type):
            add(names.get(part))
        else:
            for inner in get_args(part):
                walk(inner)

    if field.annotation in (int, float):
        # Of a type that is nothing but a bounded number the bounds stand in the field.
        add(_bounded(field.annotation, *field.metadata))
    else:
        walk(field.annotation)
    return " or ".join(words)


def _bounded(kind: Any, *more: Any) -> str:
    """A number with its bounds, or a name."""
    marks = [m for field in more for m in getattr(field, "metadata", [field])]
    if kind is str:
        return '"python:NAME"' if any("python:" in str(getattr(m, "pattern", "")) for m in marks) else _A_NAME
    low = next((m.ge for m in marks if getattr(m, "ge", None) is not None), None)
    above = next((m.gt for m in marks if getattr(m, "gt", None) is not None), None)
    most = next((m.le for m in marks if getattr(m, "le", None) is not None), None)
    if kind is int:
        return f"a whole number from {low} to {most}"
    return f"a number from {low:g} to {most:,.0f}" if above is None else f"a number above {above:g}, at most {most:,.0f}"
