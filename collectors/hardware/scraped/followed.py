"""Intel PCM's CSV, followed as it grows: `pcm-memory -csv=F`, `pcm-iio -csv=F`, `pcm-pcie -csv=F`, `pcm -csv=F`.

Two header rows: what a group of columns is about (System, SKT0 …), and the column. Values are rates over the tool's interval, and
where the header tells no unit none is made up: the column's name is kept as it is. PCM prints megabytes of 1,000,000 bytes
(MB/s). A file without a header (pcm-raw) is refused by name: its columns are not told.
"""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path

from hoptrace.collectors.hardware.appended import Appended
from hoptrace.collectors.hardware.network.ucx_text import is_report
from hoptrace.collectors.hardware.sink import Direction, Sink
from hoptrace.collectors.hardware.source import Found, Pace, found_by_error, status_of

__all__ = ["PcmSource", "headers"]

_TIME = re.compile(r"\d{4}-\d{2}-\d{2}|\d{1,2}:\d{2}:\d{2}(\.\d+)?")
_WAYS: tuple[tuple[re.Pattern[str], Direction], ...] = (
    (re.compile(r"read|\brd\b", re.I), "read"), (re.compile(r"writ|\bwr\b", re.I), "write"),
)  # fmt: skip
_MB = re.compile(r"\(MB/s\)|Mem(ory)? \(MB/s\)|(Read|Write|Memory|PMM)[^,]*\(MB/s\)|CXL\.(mem|cache)", re.I)
_MOST_COLUMNS = 5000


def headers(first: list[str], second: list[str]) -> list[tuple[str, str]] | None:
    """(group, column) of each column from the two header rows; null if they are none. A group stands over its first column, or
    over each."""
    if not second or any(_TIME.fullmatch(c.strip()) for c in [*first, *second]):
        return None
    group, found = "", []
    for i, column in enumerate(second):
        group = first[i].strip() if i < len(first) and first[i].strip() else group
        found.append((group, column.strip()))
    return found if any(name for _, name in found) else None


class PcmSource:
    """One file. Entities ``pcm:GROUP``."""

    answers = "what Intel PCM counts: memory, CXL, PCIe and IIO bandwidth"
    pace: Pace = "slow"
    every_s = 1.0

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = f"pcm {path.name}"
        self._file = Appended(path)
        self._heads: list[list[str]] = []
        self._columns: list[tuple[str, str]] | None = None
        self._skip = True
        self._last_ns: int | None = None
        self._numbers: set[int] = set()

    def probe(self) -> Found:
        try:
            with self._path.open("rb") as f:
                begin = f.read(1 << 16)
        except OSError as e:
            return found_by_error(e, "start PCM first: pcm-memory 1 -csv=FILE")
        text = begin.decode("utf-8", "replace")
        if is_report(text):
            return Found("unsupported", f"{self._path.name} has become a text of UCX statistics", "begin the capture anew")
        rows = [cells for line in text.splitlines()[:2] if (cells := _cells(line))]
        if len(rows) < 2:
            return Found("ok", "the file has no header yet")
        columns = headers(rows[0], rows[1])
        if columns is None:
            return Found(
                "unsupported", f"{self._path.name} has no header rows: its columns are not told", "PCM's -csv, not pcm-raw"
            )
        return Found("ok", sees=f"{len(columns)} columns")

    def open(self, out: Sink) -> None:
        return None

    def sample(self, out: Sink) -> None:
        before = out.now_ns()
        try:
            anew, lines = self._file.lines(out)
        except OSError as e:
            out.at(before, out.now_ns())
            if self._file.lost(e, out):
                out.fail(self._numbers, status_of(e))  # each column is unknown from here on, which is told once
            return
        if anew:
            self._heads, self._columns = [], None
        out.at(before, out.now_ns())
        for line in lines:
            self._line(line.decode("utf-8", "replace").rstrip("\r"), out)
        # What stood in the file before the capture began belongs to another time.
        self._skip = False

    def close(self) -> None:
        return None

    def _line(self, text: str, out: Sink) -> None:
        cells = _cells(text)
        if cells is None:
            out.drop("lines that are no CSV")
            return
        if not cells:
            return
        if self._columns is None:
            self._heads.append(cells)
            if len(self._heads) == 2:
                self._columns = headers(*self._heads)
                if self._columns is None:
                    out.drop("lines without a header")
                    self._heads = self._heads[1:]
                elif len(self._columns) > _MOST_COLUMNS:
                    out.drop(f"columns beyond the first {_MOST_COLUMNS}", len(self._columns) - _MOST_COLUMNS)
            return
        if self._skip:
            return
        if len(cells) > len(self._columns) + 1:
            out.drop("lines with more columns than the header")
            return
        now = out.now_ns()
        window_ns = None if self._last_ns is None else now - self._last_ns
        self._last_ns = now
        for (group, column), cell in zip(self._columns[:_MOST_COLUMNS], cells, strict=False):
            if not column or column in ("Date", "Time"):
                continue
            self._value(group, column, cell.strip(), window_ns, out)

    def _value(self, group: str, column: str, cell: str, window_ns: int | None, out: Sink) -> None:
        entity = f"pcm:{group or 'System'}"
        megabytes = bool(_MB.search(column))
        way = next((w for pattern, w in _WAYS if pattern.search(column)), None) if megabytes else None
        unit = "bytes/s" if megabytes else None
        # The tool's interval is not told: the time since its last line is, to within our own beat, and is no part of the name.
        number = out.series(entity, column, unit, "rate" if megabytes else "gauge", direction=way)
        self._numbers.add(number)
        try:
            value = float(cell)
        except ValueError:
            if cell:
                out.put(number, None, "absent" if cell.upper() in ("N/A", "-") else "error")
            return
        if not math.isfinite(value * 1e6):
            out.put(number, None, "absent" if math.isnan(value) else "error")
            return
        out.put(number, value * 1e6 if megabytes else value)


def _cells(line: str) -> list[str] | None:
    """The cells of a line; null if it is none (a cell of more than 128 KiB, a zero byte in older versions of Python)."""
    try:
        return next(csv.reader([line]), [])
    except csv.Error:
        return None
