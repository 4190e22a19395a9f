"""What the footers of a table's Parquet files tell of their row groups, so that only those are decoded that a question needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from hoptrace.errors import InputError
from hoptrace.schema import table

__all__ = ["Bounds", "RowGroups"]

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
_LEAST, _MOST = int(np.iinfo(np.int64).min), int(np.iinfo(np.int64).max)


@dataclass(frozen=True)
class Bounds:
    """Of one integer column, by row group: least and greatest value that can be in it (the whole range of an int64 where the
    statistics do not tell) and whether it may hold nulls."""

    low: Ints
    high: Ints
    nulls: Bools


class RowGroups:
    """The row groups of some Parquet files, in order. ``rows``: int64[groups].

    Raises InputError: a file is missing or its footer damaged.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._meta: list[pq.FileMetaData] = []
        for path in self._paths:
            try:
                self._meta.append(pq.read_metadata(path))
            except (pa.ArrowException, OSError) as e:
                raise _damaged(path, e) from None
        self._place = [(f, g) for f, m in enumerate(self._meta) for g in range(m.num_row_groups)]
        self.rows: Ints = np.array([self._meta[f].row_group(g).num_rows for f, g in self._place], dtype=np.int64)

    @classmethod
    def of(cls, paths: Sequence[Path] | None, name: str, columns: Sequence[str] | None = None) -> RowGroups | None:
        """Those of a table's files (null: it has none that are its rows as they lie there), where these ``columns`` (null: all
        that they have of the schema's) are of the schema's types, so that they can be read as they are; else null."""
        if paths is None:
            return None
        groups = cls(paths)
        want = {c.name: c.type for c in table(name).columns if columns is None or c.name in columns}
        have = ({f.name: f.type for f in m.schema.to_arrow_schema()} for m in groups._meta)
        return None if any(t.get(c, k) != k for t in have for c, k in want.items()) else groups

    def bounds(self, column: str) -> Bounds:
        """Of an integer column. A file without it holds nulls only."""
        n = len(self._place)
        low, high = np.full(n, _LEAST, dtype=np.int64), np.full(n, _MOST, dtype=np.int64)
        nulls = np.ones(n, dtype=bool)
        at = [_leaf(m, column) for m in self._meta]
        for i, (f, g) in enumerate(self._place):
            if (c := at[f]) is None:
                continue
            stats = self._meta[f].row_group(g).column(c).statistics
            if stats is None:
                continue
            nulls[i] = stats.null_count is None or stats.null_count > 0
            if stats.has_min_max and isinstance(stats.min, int):
                low[i], high[i] = stats.min, stats.max
        return Bounds(low, high, nulls)

    def arrays(self, groups: Sequence[int] | Ints, columns: Sequence[str]) -> list[npt.NDArray[np.generic]]:
        """Like :meth:`read`, of columns without nulls that every file has, as plain arrays (views of the decoded data where they
        can be).

        Raises InputError: a file is damaged.
        """
        data = self._table(groups, columns)
        return [np.concatenate([c.to_numpy(zero_copy_only=False) for c in data.column(n).chunks]) for n in columns]

    def read(self, groups: Sequence[int] | Ints, columns: Sequence[str], *, threads: bool = False) -> pl.DataFrame:
        """The rows of these row groups in the order given; a file that lacks a column gives nulls (of type Null).

        Raises InputError: a file is damaged.
        """
        data = self._table(groups, columns, threads=threads)
        if data is None:
            return pl.DataFrame(schema=dict.fromkeys(columns, pl.Null))
        frame = pl.from_arrow(data)
        assert isinstance(frame, pl.DataFrame)
        return frame

    def _table(self, groups: Sequence[int] | Ints, columns: Sequence[str], *, threads: bool = False) -> pa.Table:
        """Null without row groups."""
        tables: list[pa.Table] = []
        wanted: list[tuple[int, list[int]]] = []
        for i in groups:
            f, g = self._place[int(i)]
            if wanted and wanted[-1][0] == f:
                wanted[-1][1].append(g)
            else:
                wanted.append((f, [g]))
        for f, numbers in wanted:
            path = self._paths[f]
            have = [c for c in columns if _leaf(self._meta[f], c) is not None]
            try:
                with pq.ParquetFile(path, metadata=self._meta[f], page_checksum_verification=True) as file:
                    data = file.read_row_groups(numbers, columns=have, use_threads=threads)
            except (pa.ArrowException, OSError) as e:
                raise _damaged(path, e) from None
            for c in columns:
                if c not in have:
                    data = data.append_column(c, pa.nulls(data.num_rows))
            tables.append(data.select(list(columns)))
        return pa.concat_tables(tables, promote_options="permissive") if tables else None


def _leaf(meta: pq.FileMetaData, column: str) -> int | None:
    """Position of a flat column among the file's leaves."""
    leaves: dict[str, int] = {}
    for i in range(meta.num_columns):
        leaves.setdefault(meta.schema.column(i).path, i)
    return leaves.get(column)


def _damaged(path: Path, e: Exception) -> InputError:
    if isinstance(e, FileNotFoundError):
        why = f"{path} is missing though the manifest names it."
    else:
        why = f"{path} is damaged ({(str(e).splitlines() or [type(e).__name__])[0]})."
    return InputError(why, hint="Restore it from a copy of the trace; `hoptrace validate` lists all that is wrong.")
