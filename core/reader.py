"""Read a trace: Polars lazy frames by table name, DuckDB, and the manifest. A trace that is being written, or whose writer was
killed, reads like any other."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
import pyarrow as pa

from hoptrace.errors import InputError
from hoptrace.journal import read_journal
from hoptrace.manifest import Manifest, Part, read_manifest
from hoptrace.parts import conform, merge_rows
from hoptrace.row_groups import RowGroups
from hoptrace.schema import Table, table
from hoptrace.vantage import one_vantage, vantages_of_part, vantages_of_rows

if TYPE_CHECKING:
    import duckdb

__all__ = ["Trace", "open_trace"]

_RESTORE = "Restore it from a copy of the trace; `hoptrace validate` lists all that is wrong."


class Trace:
    """One trace folder. Cheap to make; nothing but the manifest is read until a table is asked for.

    It shows the trace as the manifest stood when it was opened, plus what journals have grown since; open it again to see more.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    @property
    def name(self) -> str:
        """The folder's name without ``.trace``."""
        return self.path.resolve().name.removesuffix(".trace")

    @property
    def origin(self) -> str:
        """recorded, imported or replayed. For people to read: no code may branch on it."""
        return self.manifest.origin

    def table(self, name: str) -> pl.LazyFrame:
        """All rows of a table, all columns of the schema (missing ones null), then those that only a newer minor version knows.

        Rows that merge are merged, one per key; of `tokens` each request's rows come from one vantage (:mod:`hoptrace.vantage`).

        Raises:
            KeyError: no such table in the schema.
            InputError: a file that the manifest names is missing or damaged; names it. Damage inside a Parquet part's pages shows
                only when the frame is collected, as Polars' own error.
        """
        return self._rows(name, None)

    def of_requests(self, name: str, low: int, high: int) -> pl.LazyFrame:
        """Like :meth:`table`, of the requests ``low ≤ request < high``; filtered first, merged then, so that a long trace can be
        read range by range. KeyError if the table has no column `request`."""
        if "request" not in table(name).names:
            raise KeyError(f"table {name!r} has no column request")
        mine = pl.col("request").is_between(low, high, closed="left")
        if type(self).table is not Trace.table:  # a trace in memory
            return self.table(name).filter(mine)
        return self._rows(name, mine)

    def several(self) -> pl.DataFrame:
        """Requests with more than one sequence (n > 1, beams, several prompts), ascending: request, sequences (as `tokens` or
        `stages` number them)."""
        frames = []
        for name in ("tokens", "stages"):
            more = pl.col("sequence") > 0
            # Filtered before anything else: next to no row of a long trace is left, and which vantage saw it does not matter.
            frame = self.table(name).filter(more) if type(self).table is not Trace.table else self._rows(name, more)
            frames.append(frame.select("request", pl.col("sequence") + 1))
        found = pl.concat(frames).group_by("request").agg(pl.col("sequence").max().alias("sequences"))
        return found.sort("request").collect(engine="streaming")

    def rows(self, name: str) -> int:
        """Rows of a table, as :meth:`table` gives them."""
        return int(self.table(name).select(pl.len()).collect().item())

    def has(self, name: str) -> bool:
        """Whether the table holds any row."""
        return bool(self.manifest.tables.get(name)) and self.table(name).head(1).collect().height > 0

    def duckdb(self, *names: str) -> duckdb.DuckDBPyConnection:
        """A new in-memory DuckDB connection with the tables ``names`` (all if none is named). Close it; use one per thread.

        It can neither read nor write any file outside a temporary folder; see :mod:`hoptrace.sqlview`.
        """
        from hoptrace.sqlview import connect

        return connect(self, names)

    def sql(self, query: str) -> pl.DataFrame:
        """Run one query over the tables by their names.

        Raises:
            UsageError: the query is wrong; with DuckDB's own words.
            InputError: a file is missing or damaged.
        """
        from hoptrace.sqlview import query as run

        return run(self, query)

    def files(self, name: str) -> list[Path] | None:
        """The table's Parquet files, if their rows as they lie there are the table's rows; else null."""
        spec = table(name)
        parts = self.manifest.tables.get(name, [])
        if not parts or any(p.kind != "parquet" for p in parts):
            return None
        if spec.merge and not self._merged(parts, spec):
            return None
        paths = [self._path(p) for p in parts]
        if name == "tokens":
            try:
                seen = [vantages_of_part(p) for p in paths]
            except (pa.ArrowException, OSError):
                return None  # missing or damaged: whoever reads it is told so
            if None in seen or len(set().union(*(s for s in seen if s is not None))) > 1:
                return None
        return paths

    # -- inside -------------------------------------------------------------------------------------------------------

    def _rows(self, name: str, mine: pl.Expr | None) -> pl.LazyFrame:
        """All rows, or those for which ``mine`` holds, which may ask for the key's own columns only."""
        spec = table(name)
        parts = self.manifest.tables.get(name, [])
        # The newest first: a live writer that goes on to the next journal meanwhile would leave a gap between what was read of
        # the one before and what stands in the next.
        pieces = [piece for part in reversed(parts) if (piece := self._piece(part, spec)) is not None][::-1]
        if not pieces:
            return pl.LazyFrame(schema=_dtypes(name))
        frames = [f if mine is None else f.filter(mine) for f, _ in pieces]
        frame = pl.concat(frames, how="diagonal") if len(frames) > 1 else frames[0]
        if spec.merge and not self._merged(parts, spec):
            frame = merge_rows(frame, spec)
        if name == "tokens":
            frame = one_vantage(frame, [seen for _, seen in pieces])
        return frame

    def _piece(self, part: Part, spec: Table) -> tuple[pl.LazyFrame, set[str | None] | None] | None:
        """The rows of one file and, of tokens, the vantages in it; null if there are none."""
        tokens = spec.name == "tokens"
        path = self._path(part)
        try:
            if part.kind == "parquet":
                return _scan(path, spec), vantages_of_part(path) if tokens else None
            data = read_journal(path).table()
        except FileNotFoundError:
            if part.kind == "journal":
                # A live writer has turned it into a part since the manifest was read; then the manifest says so by now.
                now = read_manifest(self.path).tables.get(spec.name, [])
                if part not in now:
                    successor = next((p for p in now if p.file == part.file.removesuffix(".journal") + ".parquet"), None)
                    return self._piece(successor, spec) if successor else None
            raise InputError(f"{path} is missing though the manifest names it.", hint=_RESTORE) from None
        if data is None:
            return None
        data = conform(data, spec)
        frame = pl.from_arrow(data)
        assert isinstance(frame, pl.DataFrame)
        return frame.lazy(), vantages_of_rows(data) if tokens else None

    def _merged(self, parts: list[Part], spec: Table) -> bool:
        """Whether there is one row per key: in each part there is, and no key can be in two parts."""
        if not all(p.merged and p.kind == "parquet" for p in parts):
            return False
        if len(parts) == 1:
            return True
        ranges = sorted(r for p in parts if (r := p.keys or self._leading(p, spec)) is not None)
        return len(ranges) == len(parts) and all(a[1] < b[0] for a, b in pairwise(ranges))

    def _leading(self, part: Part, spec: Table) -> tuple[int, int] | None:
        """Least and greatest value of the key's first column, if it is a number, from the part's footer."""
        if not pa.types.is_integer(spec.column(spec.key[0]).type):
            return None
        try:
            bounds = RowGroups([self._path(part)]).bounds(spec.key[0])
        except InputError:
            return None  # whoever reads it is told so
        if not len(bounds.low) or bounds.nulls.any():
            return None
        return int(bounds.low.min()), int(bounds.high.max())

    def _path(self, part: Part) -> Path:
        path = self.path / part.file
        if not path.resolve().is_relative_to(self.path.resolve()):
            raise InputError(f"{self.path / 'manifest.json'} names a file outside the trace: {part.file}.")
        return path


def _scan(path: Path, spec: Table) -> pl.LazyFrame:
    """One Parquet part with the schema's columns and types. FileNotFoundError; InputError if its footer is not whole."""
    try:
        frame = pl.scan_parquet(path, glob=False)
        have = frame.collect_schema()
    except FileNotFoundError:
        raise
    except (pl.exceptions.PolarsError, OSError) as e:
        why = (str(e).splitlines() or [type(e).__name__])[0]
        raise InputError(f"{path} is damaged ({why}).", hint=_RESTORE) from None
    want = _dtypes(spec.name)
    columns: list[pl.Expr] = []
    for name, kind in want.items():
        if name not in have:
            columns.append(pl.lit(None, dtype=kind).alias(name))
        elif have[name] != kind:
            columns.append(pl.col(name).cast(kind))
        else:
            columns.append(pl.col(name))
    return frame.select([*columns, *(n for n in have if n not in want)])


@cache
def _dtypes(name: str) -> dict[str, pl.DataType]:
    """The schema's columns as Polars types."""
    empty = pl.from_arrow(table(name).arrow.empty_table())
    assert isinstance(empty, pl.DataFrame)
    return dict(empty.schema)


def open_trace(path: Path | str) -> Trace:
    """Open a trace folder.

    Raises:
        InputError: there is none, it is damaged, or its schema is newer than this hoptrace reads.
    """
    folder = Path(path)
    return Trace(folder, read_manifest(folder))
