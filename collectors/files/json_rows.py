"""JSON lines as frames of text: parsed in blocks by Polars, and line by line only where a line is not as it should be."""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import polars as pl

from hoptrace.collectors.files.ahead import ahead
from hoptrace.collectors.files.base import Sink
from hoptrace.collectors.files.blocks import BAD, NOT_TEXT, ROW, Block, blocks
from hoptrace.collectors.files.raw import head

__all__ = ["json_frames", "keys_of", "note_unused"]

_SMALL = 1 << 15
_WHOLE = pl.List(pl.Int64)
_SEPARATOR = "."


def keys_of(head: bytes) -> dict[str, Any] | None:
    """The first line's object, if it is one; of a line longer than the head, null."""
    for line in head.split(b"\n"):
        if line.strip():
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                return None
            return found if isinstance(found, dict) else None
    return None


def note_unused(sink: Sink, used: Collection[str]) -> None:
    """Tell which keys of the file's first record nobody reads."""
    if names := [k for k in keys_of(head(sink.path)) or {} if k not in used]:
        shown = ", ".join(names[:20])
        sink.note(f"Keys that were not used: {shown}{' …' if len(names) > 20 else ''}.")


def json_frames(sink: Sink, names: Sequence[str], lists: Sequence[str] = ()) -> Iterator[pl.DataFrame]:
    """The file's lines: a text column per name (``a.b`` is b of a; a key that has the dot itself goes first), whole-number lists
    for ``lists``, and ROW and BAD. What a line lacks, and NaN, is null; numbers are text as JSON has them."""
    reader = _Reader(names, lists)
    with sink.open() as file:
        for frame, damaged in ahead(blocks(file, path=sink.path), reader.frame):
            if damaged:
                sink.note(NOT_TEXT)
            if frame.height:
                yield frame


class _Reader:
    def __init__(self, names: Sequence[str], lists: Sequence[str]) -> None:
        self._names, self._lists = list(names), list(lists)
        self._out: dict[str, Any] = {**dict.fromkeys(self._names, pl.String), **dict.fromkeys(self._lists, _WHOLE)}
        # A key that does not occur in a stretch of text need not be looked for in its lines.
        self._marks = {n: b'"' + n.split(_SEPARATOR, 1)[0].encode() + b'"' for n in self._out}

    def frame(self, block: Block) -> tuple[pl.DataFrame, bool]:
        pieces = [self._lined(f, data, line) for f, data, line in self._parsed(block.data, block.line)]
        columns = [*self._names, *self._lists, ROW, BAD]
        return (pl.concat([p.select(columns) for p in pieces]) if pieces else pl.DataFrame()), block.damaged

    def _parsed(self, data: bytes, line: int) -> Iterator[tuple[pl.DataFrame | None, bytes, int]]:
        """Frames of stretches that parse, and null for lines that Python must look at."""
        if not data.strip():
            return
        try:
            yield self._fast(data), data, line
            return
        except (pl.exceptions.PolarsError, ValueError):
            pass
        cut = data.rfind(b"\n", 0, len(data) // 2) + 1
        if len(data) <= _SMALL or not cut:
            yield None, data, line
            return
        yield from self._parsed(data[:cut], line)
        yield from self._parsed(data[cut:], line + data.count(b"\n", 0, cut))

    def _fast(self, data: bytes) -> pl.DataFrame:
        here = {n: t for n, t in self._out.items() if self._marks[n] in data or b"\\u" in data}
        if not here:
            raise ValueError("none of the keys is in it")
        nested = [n for n in here if _SEPARATOR in n]
        if any(b'"' + n.encode() + b'"' in data for n in nested):
            raise ValueError("a key has a dot in it")
        frame = pl.read_ndjson(io.BytesIO(data), schema=pl.Schema(_tree(here)) if nested else here)
        none = (pl.lit(None, dtype=t).alias(n) for n, t in self._out.items() if n not in here)
        return frame.select(*((_path(n).alias(n) if n in nested else pl.col(n)) for n in here), *none)

    def _lined(self, frame: pl.DataFrame | None, data: bytes, line: int) -> pl.DataFrame:
        lines = data.count(b"\n") + (not data.endswith(b"\n"))
        if frame is not None and frame.height == lines:
            return frame.with_columns(
                pl.int_range(line, line + lines, dtype=pl.Int64, eager=True).alias(ROW), pl.lit(None, dtype=pl.String).alias(BAD)
            )
        numbered = [(line + i, text) for i, text in enumerate(data.split(b"\n")) if text.strip()]
        if frame is not None and frame.height == len(numbered):
            rows = pl.Series(ROW, [n for n, _ in numbered], dtype=pl.Int64)
            return frame.with_columns(rows, pl.lit(None, dtype=pl.String).alias(BAD))
        records = [self._record(text) | {ROW: n} for n, text in numbered]
        return pl.DataFrame(records, schema={**self._out, ROW: pl.Int64, BAD: pl.String})

    def _record(self, text: bytes) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return {BAD: "it is not JSON"}
        if not isinstance(found, dict):
            return {BAD: "it is not a JSON object"}
        record: dict[str, Any] = {n: _text(_at(found, n)) for n in self._names}
        for name in self._lists:
            value = found.get(name)
            if value is None:
                continue
            if not isinstance(value, list) or any(type(v) is not int or not -(2**63) <= v < 2**63 for v in value):
                record[BAD] = f"{name} is not a list of whole numbers"
            else:
                record[name] = value
        return record


def _tree(types: dict[str, Any]) -> dict[str, Any]:
    """The schema of nested objects that hold these paths. ValueError: one is both a value and an object."""
    tree: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for name, kind in types.items():
        first, _, rest = name.partition(_SEPARATOR)
        if rest:
            below.setdefault(first, {})[rest] = kind
        else:
            tree[first] = kind
    if tree.keys() & below.keys():
        raise ValueError("a key is both a value and an object")
    return {**tree, **{first: pl.Struct(_tree(more)) for first, more in below.items()}}


def _path(name: str) -> pl.Expr:
    first, *rest = name.split(_SEPARATOR)
    found = pl.col(first)
    for key in rest:
        found = found.struct.field(key)
    return found


def _at(found: Any, name: str) -> Any:
    if isinstance(found, dict):
        if name in found:
            return found[name]
        first, _, rest = name.partition(_SEPARATOR)
        if rest and first in found:
            return _at(found[first], rest)
    return None


def _text(value: Any) -> str | None:
    if value is None or (isinstance(value, float) and value != value):
        return None
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return json.dumps(value)
