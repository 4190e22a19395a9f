"""A trace that lives in memory, for property tests that make thousands: it reads like one on the disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from hoptrace.manifest import Manifest, Server
from hoptrace.parts import merge_rows
from hoptrace.reader import Trace
from hoptrace.rows import to_arrow
from hoptrace.schema import table

SERVER = Server(name="s", max_sequences=2)


class MemoryTrace(Trace):
    """``rows``: lists of row mappings by table. ``source`` is filled in where it is missing."""

    def __init__(
        self, rows: Mapping[str, Sequence[Mapping[str, Any]]], manifest: Manifest | None = None, *, name: str = "memory"
    ) -> None:
        super().__init__(Path(f"{name}.trace"), manifest or Manifest(origin="recorded", servers=[SERVER], closed=True))
        self._frames: dict[str, pl.DataFrame] = {}
        for name, given in rows.items():
            spec = table(name)
            data, losses = to_arrow([{"source": "test", **r} for r in given], spec)
            assert not losses.rows and not losses.values, losses
            frame = pl.from_arrow(data)
            assert isinstance(frame, pl.DataFrame)
            self._frames[name] = merge_rows(frame.lazy(), spec).collect() if spec.merge else frame

    def table(self, name: str) -> pl.LazyFrame:
        if name in self._frames:
            return self._frames[name].lazy()
        empty = pl.from_arrow(table(name).arrow.empty_table())
        assert isinstance(empty, pl.DataFrame)
        return empty.lazy()

    def has(self, name: str) -> bool:
        return name in self._frames and self._frames[name].height > 0

    def files(self, name: str) -> None:
        return None
