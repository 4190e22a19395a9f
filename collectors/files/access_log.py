"""Access logs and other logs with a request a line: CSV, TSV, JSON lines, or lines of a format, by a mapping of their columns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from hoptrace.collectors.files.ahead import ahead
from hoptrace.collectors.files.base import Importer, Sink
from hoptrace.collectors.files.blocks import BAD, NOT_TEXT, ROW, Block, blocks
from hoptrace.collectors.files.csv_rows import CsvFile
from hoptrace.collectors.files.json_rows import json_frames, keys_of
from hoptrace.collectors.files.kinds import ARRAY
from hoptrace.collectors.files.log_formats import LineFormat, line_format, sniff_json, sniff_line
from hoptrace.collectors.files.logged import Logged
from hoptrace.collectors.files.mapping import Field, near, parse_map
from hoptrace.collectors.files.raw import head
from hoptrace.errors import InputError, UsageError

__all__ = ["IMPORTER", "AccessLog"]

_NO_TIME = "Add $request_time to nginx's log_format: without it nobody can tell when a request began."


class AccessLog(Importer):
    """Whatever has a request a line."""

    kind = "log"
    summary = "access logs: nginx, Envoy, or any CSV, TSV, JSON lines or line format that --map and --format describe"

    def matches(self, path: Path, head: bytes) -> bool:
        line = head.split(b"\n", 1)[0].decode(errors="replace").rstrip("\r")
        if line.lstrip().startswith("{"):
            return sniff_json(keys_of(head) or {}) is not None
        return sniff_line(line) is not None

    def read(self, path: Path, sink: Sink) -> None:
        """One request a line.

        Raises:
            UsageError: the mapping is wrong, names a column that is not there, or gives no arrival.
            InputError: there is no mapping and the log is of no usual format.
        """
        options = sink.options
        start = head(path)
        form = line_format(options.line_format) if options.line_format else None
        if form is None and options.mapping is None:
            line = start.split(b"\n", 1)[0].decode(errors="replace").rstrip("\r")
            form = sniff_json(keys_of(start) or {}) or sniff_line(line)
        text = options.mapping or (form.mapping if form else None)
        if text is None:
            raise InputError(f"{path}: what its columns mean is not known.", hint="Say it: --map arrival=COLUMN,prompt_tokens=…")
        fields = parse_map(text)
        if form is not None:
            said = "" if options.mapping else f" ({form.name}: {', '.join(f'{f.target} = {f.column}' for f in fields)})"
            sink.note(f"The columns were read as an access log's{said}.")
        columns = list(dict.fromkeys(f.column for f in fields))
        frames = self._frames(sink, start, form, fields, columns)
        logged = Logged(sink, fields, hint=_NO_TIME if form is not None and form.name == "nginx" else None)
        for frame in frames:
            logged.write(frame)
        logged.tell()

    def _frames(
        self, sink: Sink, start: bytes, form: LineFormat | None, fields: list[Field], columns: list[str]
    ) -> Iterator[pl.DataFrame]:
        if form is not None and form.pattern is not None:
            _known(sink, fields, form.columns)
            return _lines(sink, form, columns)
        if start.lstrip().startswith(b"{"):
            found = _paths(start)
            _known(sink, fields, found)
            top = {c.split(".")[0] for c in columns} | set(columns)
            self._unused(sink, [k for k in dict.fromkeys(p.split(".")[0] for p in found) if k not in top])
            return json_frames(sink, columns)
        if start.lstrip().startswith(b"[") and form is None:
            raise InputError(f"{sink.path} is one JSON array.", hint=ARRAY)
        file = CsvFile(sink)
        _known(sink, fields, file.names)
        for column in columns:
            file.column(column)
        self._unused(sink, [n for n in file.names if n not in columns])
        return file.frames(*columns)

    @staticmethod
    def _unused(sink: Sink, names: list[str]) -> None:
        if names:
            shown = ", ".join(names[:20])
            sink.note(f"Columns that were not used: {shown}{' …' if len(names) > 20 else ''}.")


def _known(sink: Sink, fields: list[Field], columns: Any) -> None:
    for f in fields:
        if f.column not in columns:
            raise UsageError(f"{sink.path} has no column {f.column!r} (--map, for {f.target}).", hint=near(f.column, columns))


def _paths(start: bytes) -> list[str]:
    """Dotted paths of all values in the JSON lines of the head."""
    found: dict[str, None] = {}

    def walk(value: dict[str, Any], before: str) -> None:
        for key, inner in value.items():
            found[before + key] = None
            if isinstance(inner, dict):
                walk(inner, f"{before}{key}.")

    for line in start.split(b"\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            walk(record, "")
    return list(found)


def _lines(sink: Sink, form: LineFormat, columns: list[str]) -> Iterator[pl.DataFrame]:
    """Lines of a format, as text columns; a line that is not of it is bad."""
    pattern = form.pattern
    assert pattern is not None

    def parse(block: Block) -> tuple[pl.DataFrame, bool]:
        texts = block.data.decode(errors="replace").split("\n")
        if texts and not texts[-1]:
            texts.pop()
        lines = pl.Series("line", texts, dtype=pl.String).str.strip_chars_end("\r")
        groups = lines.to_frame().select(pl.col("line").str.extract_groups(pattern)).to_series().struct.unnest()
        # Which lines match cannot be told from the groups: an optional one may be empty.
        known = lines.str.contains(pattern)
        frame = groups.rename(dict(zip(groups.columns, form.columns, strict=True))).select(columns)
        frame = frame.with_columns(
            pl.int_range(block.line, block.line + lines.len(), dtype=pl.Int64, eager=True).alias(ROW),
            pl.when(~known).then(pl.lit(f"the line is not of the format {form.name}")).alias(BAD),
        )
        return frame.filter(lines.str.strip_chars() != ""), block.damaged

    with sink.open() as file:
        for frame, damaged in ahead(blocks(file, path=sink.path), parse):
            if damaged:
                sink.note(NOT_TEXT)
            if frame.height:
                yield frame


IMPORTER = AccessLog()
