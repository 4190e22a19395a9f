"""What an importer is, and the sink that it writes to: rows, rejects, notes, each counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

import polars as pl

from hoptrace.collectors.files.raw import open_raw
from hoptrace.collectors.files.rejects import Rejects
from hoptrace.errors import InputError
from hoptrace.manifest import Manifest
from hoptrace.schema import TABLES
from hoptrace.writer import TraceWriter

__all__ = ["Importer", "Options", "Sink"]

# The time by which a table's rows are covered, where it has one.
_TIMES = ("arrival_ns", "time_ns", "start_ns", "enqueued_ns")
_NUMBERS = ("request", "parent_request")


@dataclass(frozen=True, slots=True)
class Options:
    """What the user said of the files.

    ``mapping`` is the text of ``--map``, ``line_format`` of ``--format``; ``context_tokens`` the model's longest context,
    ``block_tokens`` what a block hash stands for, ``seed`` that of kinds which are sampled.
    """

    mapping: str | None = None
    line_format: str | None = None
    context_tokens: int | None = None
    block_tokens: int | None = None
    seed: int = 0


class Importer(Protocol):
    """One kind of file. Subclass it, and name an instance ``IMPORTER`` in a module that ``kinds.py`` lists."""

    kind: str
    summary: str

    def matches(self, path: Path, head: bytes) -> bool:
        """Whether a file is of this kind. ``head``: its first 64 KiB, decompressed, as UTF-8 without a byte order mark."""
        ...

    def companions(self, path: Path) -> list[Path]:
        """Other files that :meth:`read` of ``path`` reads too: they are not imported a second time."""
        return []

    def read(self, path: Path, sink: Sink) -> None:
        """Read one file into the sink, in pieces.

        Each record (line, element) is counted once with :meth:`Sink.count` and then either becomes a row of the main table or is
        rejected. InputError is for a file that cannot be read at all: it names the file and the remedy.
        """
        ...


class _Covered:
    """Columns that a table's rows of this file fill, and from when to when they are."""

    def __init__(self) -> None:
        self.columns: set[str] = set()
        self.first: int | None = None
        self.last: int | None = None


class Sink:
    """Takes what one file holds.

    Attributes:
        options: what the user said of the file.
        manifest: the trace's; servers, hosts and platform may be filled in.
        sha256: of the file, in hex.
        main: the table whose rows are the file's records. ``read = written + rejected`` is checked for it.
        hint: the remedy to name if every record is rejected.
        epoch: whether times are UTC or count from the log's own start; files of both in one trace are told to the user.
        read, written, rejected: records so far.
    """

    def __init__(
        self,
        path: Path,
        kind: str,
        writer: TraceWriter,
        rejects: Rejects,
        *,
        options: Options,
        offset: int = 0,
        sha256: str = "",
        advance: Callable[[int], None] = lambda n: None,
    ) -> None:
        self.path = path
        self.kind = kind
        self.options = options
        self.sha256 = sha256
        self.main = "requests"
        self.hint: str | None = None
        self.epoch: Literal["utc", "relative"] | None = None
        self.read = self.written = self.rejected = 0
        self.next_request = offset
        self._offset = offset
        self._writer = writer
        self._rejects = rejects
        self._advance = advance
        self._notes: list[str] = []
        self._tallies: dict[str, int] = {}
        self._covered: dict[tuple[str, str], _Covered] = {}

    @property
    def manifest(self) -> Manifest:
        """The manifest of the trace."""
        return self._writer.manifest

    @property
    def source(self) -> str:
        """What stands in the column `source`."""
        return f"import:{self.kind}"

    def open(self, path: Path | None = None) -> BinaryIO:
        """The file (or a companion) for reading, gzip and zstandard undone. What is read moves the progress bar.

        Raises:
            InputError: it cannot be opened. Damage inside a compressed file raises InputError while it is read.
        """
        return open_raw(path or self.path, self._advance)

    def count(self, n: int = 1) -> None:
        """``n`` more records were read."""
        self.read += n

    def write(self, table: str, frame: pl.DataFrame) -> None:
        """Write rows of a table: columns of the schema, what is missing is null. ``request`` counts from 0 within the file.

        Raises:
            KeyError: there is no such table or column (a fault of the importer).
        """
        if not frame.height:
            return
        spec = TABLES[table]
        if "source" not in frame.columns:
            frame = frame.with_columns(pl.lit(self.source).alias("source"))
        for name in _NUMBERS:
            if name in frame.columns and name in spec.names:
                frame = frame.with_columns(pl.col(name).cast(pl.Int64) + self._offset)
        if "request" in frame.columns and (last := frame["request"].max()) is not None:
            self.next_request = max(self.next_request, int(last) + 1)  # type: ignore[arg-type]
        if table == self.main:
            self.written += frame.height
        self._cover(table, frame)
        self._writer.append_arrow(table, frame.to_arrow())

    def reject(self, row: int, reason: str, value: object = None) -> None:
        """One record is not used. ``row``: its line (or record) number from 1; ``value``: what stands there."""
        self.reject_many(pl.DataFrame({"row": [row], "reason": [reason], "value": [None if value is None else str(value)]}))

    def reject_many(self, frame: pl.DataFrame) -> None:
        """Records that are not used: columns `row`, `reason`, and where there is one `value`.

        Reasons are counted: keep what differs from record to record in ``value``.
        """
        if frame.height:
            self.rejected += frame.height
            self._rejects.add(self.path, frame)

    def note(self, text: str) -> None:
        """A sentence for the screen and the manifest; the same one twice is kept once."""
        if text not in self._notes:
            self._notes.append(text)

    def tally(self, text: str, n: int = 1) -> None:
        """Count what was kept but must be told: ``text`` is a sentence that has ``{n}`` in it."""
        if n:
            self._tallies[text] = self._tallies.get(text, 0) + int(n)

    def lost(self, what: str, n: int = 1) -> None:
        """Count values that were not kept (null instead), by ``table.column: reason``."""
        if n:
            dropped = self.manifest.values_dropped
            dropped[what] = dropped.get(what, 0) + int(n)

    # -- for whoever drives it ----------------------------------------------------------------------------------------

    def notes(self) -> list[str]:
        """All notes, tallies filled in."""
        return [*self._notes, *(text.replace("{n}", f"{n:,}") for text, n in self._tallies.items())]

    def coverage(self) -> list[dict[str, object]]:
        """Rows of `coverage` for what was written, but for tables whose importer wrote its own."""
        own = self._covered.get(("coverage", self.source)) is not None
        if own:
            return []
        main = next((c for (t, _), c in self._covered.items() if t == self.main and c.first is not None), None)
        rows: list[dict[str, object]] = []
        for (table, source), seen in self._covered.items():
            first, last = (seen.first, seen.last) if seen.first is not None else (main.first, main.last) if main else (None, None)
            if first is not None:
                columns = [n for n in TABLES[table].names if n in seen.columns and n not in ("request", "source")]
                rows.append({"table": table, "columns": columns, "from_ns": first, "to_ns": last, "source": source})
        return rows

    def finish(self) -> None:
        """Check the count.

        Raises:
            InputError: there is no record, or every one was rejected; names the first reason.
            RuntimeError: the importer counted wrong.
        """
        if self.read != self.written + self.rejected:
            counted = f"read {self.read}, written {self.written}, rejected {self.rejected}"
            raise RuntimeError(f"importer {self.kind} counted wrong: {counted}")
        if not self.read and not self._covered:
            raise InputError(f"{self.path} has no record.")
        if self.rejected and not self.written:
            why = self._rejects.first(self.path)
            all_were = "its only one was" if self.rejected == 1 else f"all {self.rejected:,} were"
            raise InputError(f"No record of {self.path} can be used: {all_were} rejected. The first: {why}.", hint=self.hint)

    def _cover(self, table: str, frame: pl.DataFrame) -> None:
        sources = frame["source"].unique().to_list() if frame["source"].n_unique() > 1 else [frame["source"][0]]
        time = next((t for t in _TIMES if t in frame.columns), None)
        for source in sources:
            mine = frame if len(sources) == 1 else frame.filter(pl.col("source") == source)
            seen = self._covered.setdefault((table, str(source)), _Covered())
            nulls = mine.null_count().row(0)
            seen.columns |= {c for c, n in zip(mine.columns, nulls, strict=True) if n < mine.height}
            if time is not None and (first := mine[time].min()) is not None:
                last = mine[time].max()
                seen.first = int(first) if seen.first is None else min(seen.first, int(first))  # type: ignore[arg-type]
                seen.last = int(last) if seen.last is None else max(seen.last, int(last))  # type: ignore[arg-type]
