"""A trace in memory: what a replay gives where nothing has to be written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import polars as pl
import pyarrow as pa

from hoptrace.manifest import Manifest
from hoptrace.reader import Trace
from hoptrace.schema import TABLES

__all__ = ["FramesTrace", "Parts"]


class FramesTrace(Trace):
    """The same ``table`` and ``manifest`` as a trace on the disk."""

    def __init__(self, tables: dict[str, pl.DataFrame], manifest: Manifest, name: str) -> None:
        super().__init__(Path(f"{name}.trace"), manifest)
        self.frames = tables

    def table(self, name: str) -> pl.LazyFrame:
        """All rows of a table; see :meth:`hoptrace.reader.Trace.table`."""
        if name in self.frames:
            return self.frames[name].lazy()
        empty = pl.from_arrow(TABLES[name].arrow.empty_table())
        assert isinstance(empty, pl.DataFrame)
        return empty.lazy()

    def has(self, name: str) -> bool:
        """Whether the table holds any row."""
        return name in self.frames and self.frames[name].height > 0


class Parts:
    """Keeps the parts of tables; :meth:`frames` puts them together, sorted as a trace has them."""

    def __init__(self) -> None:
        self._parts: dict[str, list[pa.Table]] = {}

    def submit(self, name: str, make: Callable[[], pa.Table]) -> None:
        """See :meth:`hoptrace.bulk.BulkWriter.submit`."""
        self._parts.setdefault(name, []).append(make())

    def frames(self) -> dict[str, pl.DataFrame]:
        """All tables, with exactly the columns of the schema."""
        found = {}
        for name, parts in self._parts.items():
            frame = pl.from_arrow(pa.concat_tables(parts))
            assert isinstance(frame, pl.DataFrame)
            spec = TABLES[name]
            found[name] = frame.sort(*(spec.sort or spec.names), nulls_last=True, maintain_order=True)
        return found
