"""What is wrong with a policy file, in one sentence: the key, its line, and what is allowed."""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel

from hoptrace.errors import InputError

__all__ = ["explain", "sections"]


def sections(root: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The tables of a policy file, by name."""
    found = {n: f.annotation for n, f in root.model_fields.items()}
    return {n: a for n, a in found.items() if isinstance(a, type) and issubclass(a, BaseModel)}


def explain(root: type[BaseModel], error: Any, text: str, name: str) -> InputError:
    """pydantic's ``error`` about the file ``name`` with the content ``text``, for people."""
    tables = sections(root)
    # A union adds its branch's name to the place; what comes before is what the file has.
    place = [str(p) for p in error["loc"]]
    section = place[0] if place[0] in tables and len(place) > 1 else ""
    key = place[1] if section else place[0]
    model = tables[section] if section else root
    line = _line(text, section, key)
    where = f"{name}, line {line}" if line else name
    if error["type"] == "extra_forbidden":
        inside = f"[{section}]" if section else "a policy"
        near = difflib.get_close_matches(key, model.model_fields, n=1)
        home = [s for s, m in tables.items() if key in m.model_fields]
        hint = f"Did you mean {near[0]}? " if near else f"It belongs into [{home[0]}]. " if home else ""
        return InputError(f"{where}: {key} is not a key of {inside}.", hint=f"{hint}Keys: {', '.join(model.model_fields)}.")
    field = model.model_fields.get(key)
    allowed = "a table" if field is None or key in tables else _allowed(field.annotation)
    return InputError(f"{where}: {key} = {_shown(error['input'])} is not possible.", hint=f"Allowed: {allowed}.")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _allowed(annotation: Any) -> str:
    words: list[str] = []
    names = {bool: "true or false", str: "text"}

    def walk(part: Any) -> None:
        if get_origin(part) is Annotated:
            most = [m.le for field in get_args(part)[1:] for m in field.metadata if hasattr(m, "le")]
            words.append(f"a whole number from 1 to {most[0]}")
            return
        word = names.get(part) if isinstance(part, type) else f'"{part}"' if isinstance(part, str) else None
        if word and word not in words:
            words.append(word)
        for inner in get_args(part):
            walk(inner)

    walk(annotation)
    return " or ".join(words)


def _line(text: str, section: str, key: str) -> int | None:
    """The line of a file that sets ``key`` in ``section`` (or opens the table ``key``)."""
    current = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\s*([\w.-]+)\s*\]", line):
            current = header[1]
            if not section and current == key:
                return number
            continue
        m = re.match(r"\s*[\"']?([\w.-]+)[\"']?\s*=", line)
        if m and ((m[1] == key and current == section) or (not current and m[1] == f"{section}.{key}")):
            return number
    return None
