"""What a user says of a log's columns: ``--map TARGET=COLUMN[:FORMAT],…``, with the targets there are and their near names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from hoptrace.collectors.files.values import FORMATS, NS_PER
from hoptrace.errors import UsageError

__all__ = ["COUNTS", "DURATIONS", "TEXTS", "TIMES", "Field", "near", "parse_map"]

# Moments. `arrival` is when the server (or the gateway that wrote the log) had the request.
TIMES = {
    "arrival": "received_ns", "received": "received_ns", "intended": "intended_ns", "sent": "sent_ns", "queued": "queued_ns",
    "scheduled": "scheduled_ns", "first_token": "first_token_ns", "last_token": "last_token_ns", "finish": "finish_ns",
}  # fmt: skip
# Lengths of time: duration from arrival to finish, ttft from arrival to the first token, think from the parent's end to arrival.
DURATIONS = ("duration", "ttft", "think")
COUNTS = {
    "prompt_tokens": "tokens", "output_tokens": "tokens", "max_tokens": "tokens", "cached_tokens": "tokens",
    "prompt_chars": "characters", "priority": "priority", "context_tokens": "tokens",
}  # fmt: skip
TEXTS = ("request_id", "session", "model", "tenant", "adapter", "finish_reason", "error", "server", "status", "path")
_ALL = (*TIMES, *DURATIONS, *COUNTS, *TEXTS)


@dataclass(frozen=True, slots=True)
class Field:
    """One column: ``target`` without its unit, the ``column`` (a path in JSON), and the ``form`` of its time or the unit."""

    target: str
    column: str
    form: str | None = None


def parse_map(text: str) -> list[Field]:
    """The fields of a ``--map``. A column or format that has a comma, a colon or an equals sign in it stands in double quotes.

    Raises:
        UsageError: a target does not exist (says the nearest one), is named twice, lacks its unit, or a format is unknown.
    """
    fields: list[Field] = []
    for part in _split(text, ","):
        if not part.strip():
            continue
        name, *rest = _split(part, "=", 1)
        if not rest or not rest[0].strip():
            raise UsageError(f"--map: {part.strip()!r} names no column.", hint="Write TARGET=COLUMN, as in prompt_tokens=Ctx.")
        column, *form = (_bare(x) for x in _split(rest[0], ":", 1))
        fields.append(_field(_bare(name), column, form[0] if form else None))
    if not fields:
        raise UsageError("--map names no column.", hint="Write TARGET=COLUMN, as in prompt_tokens=Ctx.")
    doubled = [f.target for i, f in enumerate(fields) if f.target in {g.target for g in fields[:i]}]
    if doubled:
        raise UsageError(f"--map names {doubled[0]} twice.", hint="Name each target once.")
    return fields


def near(name: str, known: Iterable[str], *, most: int = 12) -> str:
    """A hint: the nearest of the known names, or the first of them."""
    known = list(known)
    plain = {re.sub(r"[\W_]+", "", k).casefold(): k for k in reversed(known)}
    found = difflib.get_close_matches(re.sub(r"[\W_]+", "", name).casefold(), plain, n=1, cutoff=0.6)
    if found:
        return f"Did you mean {plain[found[0]]}?"
    return f"There are: {', '.join(known[:most])}{' …' if len(known) > most else ''}."


def _field(name: str, column: str, form: str | None) -> Field:
    if name in COUNTS or name in TEXTS:
        if form is not None:
            raise UsageError(f"--map: {name} takes no format ({form!r}).", hint="Put a column that has a colon in double quotes.")
        return Field(name, column)
    target, unit = name, None
    for u in NS_PER:
        if name.endswith(f"_{u}"):
            target, unit = name.removesuffix(f"_{u}"), u
    if target not in TIMES and target not in DURATIONS:
        raise UsageError(f"--map: there is no target {name!r}.", hint=near(name, _ALL, most=99))
    if unit is not None and form is not None and form != unit:
        raise UsageError(f"--map: {name} says its unit twice ({unit} and {form!r}).", hint="Leave one of them out.")
    form = form or unit
    if target in DURATIONS and form not in NS_PER:
        raise UsageError(f"--map: {name} needs its unit.", hint=f"Write {target}_s, {target}_ms, {target}_us or {target}_ns.")
    if form is not None and form not in FORMATS and "%" not in form:
        raise UsageError(
            f"--map: there is no time format {form!r} (of {name}).",
            hint=f"Choose one of {', '.join(FORMATS)}, or give a strptime pattern such as %d.%m.%Y %H:%M:%S.",
        )
    return Field(target, column, form)


def _split(text: str, at: str, times: int = 0) -> list[str]:
    """Split outside double quotes."""
    parts, inside = [""], False
    for c in text:
        if c == '"':
            inside = not inside
        if c == at and not inside and (not times or len(parts) <= times):
            parts.append("")
        else:
            parts[-1] += c
    if inside:
        raise UsageError(f"--map: a double quote is not closed in {text.strip()!r}.", hint="Close it.")
    return parts


def _bare(text: str) -> str:
    return text.strip().replace('"', "")
