"""Per-request results of an accounting, batch by batch: in memory, or in temporary Parquet files where there are many."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import polars as pl

__all__ = ["PartStore"]


class PartStore:
    """Frames by kind ("parts", "ttft", …), in the order in which they were added. ``spill``: to files that go with the store."""

    def __init__(self, spill: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hoptrace-") if spill else None
        self._pieces: dict[str, list[Callable[[], pl.DataFrame]]] = {}

    def add(self, kind: str, frame: pl.DataFrame) -> None:
        """Keep one batch's frame. Raises OSError (a full disk)."""
        pieces = self._pieces.setdefault(kind, [])
        if self._folder is None:
            pieces.append(lambda: frame)
            return
        path = Path(self._folder.name) / f"{kind}-{len(pieces):06d}.parquet"
        frame.write_parquet(path, compression="lz4", statistics=False)
        pieces.append(partial(pl.read_parquet, path))

    def pieces(self, kind: str) -> list[Callable[[], pl.DataFrame]]:
        """What gives each batch's frame again."""
        return self._pieces.get(kind, [])

    def whole(self, kind: str, columns: list[str]) -> pl.DataFrame:
        """All batches in one frame."""
        return pl.concat([p().select(columns) for p in self.pieces(kind)])
