"""Delimited text as frames of text: parsed in blocks by Polars, record by record only where quotes are not as they should be."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator

import polars as pl

from hoptrace.collectors.files.ahead import ahead
from hoptrace.collectors.files.base import Sink
from hoptrace.collectors.files.blocks import BAD, NOT_TEXT, ROW, Block, blocks
from hoptrace.collectors.files.raw import head
from hoptrace.errors import InputError

__all__ = ["CsvFile", "header_of", "separator_of"]

_SMALL = 1 << 16
_SURPLUS = "_surplus"
# A quoted field of more lines than this is taken for a quote that was never closed.
_MOST_LINES = 1_000
_TOO_MANY = "it has more fields than the header"
# Stands for a carriage return while Python's reader looks at a record: a character of private use.
_RETURN = "\ue00d"
_OPEN = "a quote opens in it and never closes"


def separator_of(head: bytes) -> str:
    """The separator of a text that begins so: the one of comma, tab and semicolon that its first line has most of."""
    line = head.lstrip(b"\r\n").split(b"\n", 1)[0]
    return max((",", "\t", ";"), key=lambda s: line.count(s.encode()))


def header_of(head: bytes, separator: str | None = None) -> list[str]:
    """Names in the first line that is not blank."""
    for line in head.decode(errors="replace").splitlines():
        if line.strip():
            return [n.strip() for n in next(csv.reader([line], delimiter=separator or separator_of(head)))]
    return []


class CsvFile:
    """One delimited file.

    Attributes:
        names: of its columns. A name that stands twice is there once as it is and then as ``name (2)``.
        doubled: names that stand twice.
    """

    def __init__(self, sink: Sink, *, names: list[str] | None = None, separator: str | None = None) -> None:
        """``names``: of a file that has no header.

        Raises:
            InputError: the file has no header.
        """
        self._sink = sink
        self._has_header = names is None
        start = head(sink.path)
        self._separator = separator or separator_of(start)
        found = names if names is not None else header_of(start, self._separator)
        if not found:
            raise InputError(f"{sink.path} has no header.", hint="Its first line must name the columns.")
        self.doubled = {n for n in found if found.count(n) > 1}
        self.names = [n if found[:i].count(n) == 0 else f"{n} ({found[:i].count(n) + 1})" for i, n in enumerate(found)]
        self._quotes = re.compile(rf'(?:^|{re.escape(self._separator)})"')

    def column(self, *names: str, needed: str | None = None) -> str | None:
        """The file's column of one of these names (capitals and spaces do not count); the first name that is there wins.

        Raises:
            InputError: it stands twice, or it is ``needed`` (what for, in words) and not there.
        """
        plain = {_plain(n): n for n in reversed(self.names)}
        for name in names:
            found = plain.get(_plain(name))
            if found is None:
                continue
            if found in self.doubled:
                raise InputError(f"{self._sink.path} has the column {found} twice.", hint="Rename or remove one of them.")
            return found
        if needed is not None:
            have = ", ".join(self.names[:12])
            raise InputError(f"{self._sink.path} has no column for {needed} (columns: {have}).", hint=f"Rename it to {names[0]}.")
        return None

    def frames(self, *names: str) -> Iterator[pl.DataFrame]:
        """The file's records, the columns ``names`` (all if none is given) as text, with ROW and BAD. Empty fields are null."""
        keep = [*(names or self.names), ROW, BAD]
        with self._sink.open() as file:
            for frame, damaged in ahead(self._bodies(blocks(file, quoted=True, path=self._sink.path)), self._frame):
                if damaged:
                    self._sink.note(NOT_TEXT)
                if frame.height:
                    yield frame.select(keep)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _bodies(self, found: Iterator[Block]) -> Iterator[Block]:
        """The blocks without the header."""
        waiting = self._has_header
        for block in found:
            data, line = block.data, block.line
            while waiting and data:
                first, _, data = data.partition(b"\n")
                line += 1
                waiting = not first.strip()
            if data:
                yield Block(data, line, block.damaged)

    def _frame(self, block: Block) -> tuple[pl.DataFrame, bool]:
        pieces = list(self._parsed(block.data, block.line))
        return (pl.concat(pieces) if pieces else pl.DataFrame()), block.damaged

    def _parsed(self, data: bytes, line: int) -> Iterator[pl.DataFrame]:
        if not data.strip():
            return
        lines = data.count(b"\n") + (not data.endswith(b"\n"))
        try:
            frame = self._fast(data)
            if frame.height != lines:
                raise ValueError("quoted line ends")
            yield self._numbered(frame, data, line)
            return
        except (pl.exceptions.PolarsError, ValueError):
            pass
        cut = data.rfind(b"\n", 0, len(data) // 2) + 1
        # A stretch may only be halved where no quote is open.
        if len(data) > _SMALL and cut and data.count(b'"', 0, cut) % 2 == 0 and data.count(b'"') % 2 == 0:
            yield from self._parsed(data[:cut], line)
            yield from self._parsed(data[cut:], line + data.count(b"\n", 0, cut))
        else:
            yield self._slow(data.decode(errors="replace"), line)

    def _fast(self, data: bytes) -> pl.DataFrame:
        return pl.read_csv(
            io.BytesIO(data),
            has_header=False,
            separator=self._separator,
            schema=dict.fromkeys([*self.names, _SURPLUS], pl.String),
            truncate_ragged_lines=True,
            missing_columns="insert",
        )

    def _numbered(self, frame: pl.DataFrame, data: bytes, line: int) -> pl.DataFrame:
        surplus = frame[_SURPLUS]
        bad = pl.lit(None, dtype=pl.String)
        if surplus.null_count() < frame.height:
            bad = pl.when(pl.col(_SURPLUS).is_not_null() & (pl.col(_SURPLUS) != "")).then(pl.lit(_TOO_MANY))
        frame = frame.with_columns(
            pl.int_range(line, line + frame.height, dtype=pl.Int64, eager=True).alias(ROW), bad.alias(BAD)
        ).drop(_SURPLUS)
        if b"\n\n" in data or b"\n\r\n" in data or data[:1] in b"\r\n":
            texts = data.split(b"\n")[: frame.height]
            frame = frame.filter(pl.Series([bool(t.strip()) for t in texts]))
        return frame

    def _slow(self, text: str, line: int) -> pl.DataFrame:
        rows: list[list[str | int | None]] = []
        for start, fields, why in _records(text.split("\n"), line, self._separator, self._quotes, len(self.names)):
            if why is None and len(fields) > len(self.names) and any(fields[len(self.names) :]):
                why = _TOO_MANY
            values: list[str | None] = [f or None for f in fields[: len(self.names)]]
            rows.append([*values, *[None] * (len(self.names) - len(values)), start, why])
        schema = {**dict.fromkeys(self.names, pl.String), ROW: pl.Int64, BAD: pl.String}
        return pl.DataFrame(rows, schema=schema, orient="row")


def _records(
    texts: list[str], line: int, separator: str, quotes: re.Pattern[str], width: int
) -> Iterator[tuple[int, list[str], str | None]]:
    """Records with their first line and, where they cannot be read, why."""
    i = 0
    while i < len(texts):
        text = texts[i].rstrip("\r")
        if not text.strip():
            i += 1
            continue
        n = 1
        if text.count('"') % 2 and quotes.search(text):
            # A quoted field may go on in the next lines: until the quotes are even again.
            whole = text
            while whole.count('"') % 2 and n < _MOST_LINES and i + n < len(texts):
                whole += "\n" + texts[i + n].rstrip("\r")
                n += 1
            if whole.count('"') % 2:
                yield line + i, [], _OPEN
                i += 1
                continue
            fields = _fields(whole, separator)
            if len(fields) > width and n > 1:
                yield line + i, [], _OPEN
                i += 1
                continue
        else:
            fields = _fields(text, separator)
        yield line + i, fields, None
        i += n


def _fields(record: str, separator: str) -> list[str]:
    """The fields of one record. A carriage return within it is a character, as Polars has it; Python would end the record."""
    found = next(csv.reader(io.StringIO(record.replace("\r", _RETURN), newline=""), delimiter=separator), [])
    return [f.replace(_RETURN, "\r") for f in found]


def _plain(name: str) -> str:
    return re.sub(r"[\s_]+", "", name).casefold()
