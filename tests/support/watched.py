"""A hardware source sampled by hand into a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hoptrace
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found, Source
from hoptrace.manifest import Manifest
from hoptrace.writer import TraceWriter

__all__ = ["Watched"]


class Watched:
    """One source with a trace of its own at ``path``."""

    def __init__(self, source: Source, path: Path) -> None:
        self.source = source
        self.writer = TraceWriter(path, Manifest(origin="recorded"), background=False)
        self.sink = Sink(self.writer, "h", source.name)
        self._opened = False

    def probe(self) -> Found:
        return self.source.probe()

    def sample(self, n: int = 1) -> None:
        if not self._opened:
            self.source.open(self.sink)
            self._opened = True
        for _ in range(n):
            self.source.sample(self.sink)

    def rows(self, table: str = "counters") -> list[dict[str, Any]]:
        """All rows so far; ends the capture."""
        self.source.close()
        self.sink.settle()
        self.sink.flush()
        self.writer.close()
        return hoptrace.open(self.writer.path).table(table).collect().sort("time_ns").to_dicts()

    def values(self, entity: str, name: str) -> list[int | float | str]:
        """Values of one counter in their order, or its status where it has none; equal neighbours are one."""
        told: list[int | float | str] = []
        for r in self.rows():
            if (r["entity"], r["name"]) == (entity, name):
                value = r["value_int"] if r["value_int"] is not None else r["value_float"]
                told += [v] if (v := r["status"] if value is None else value) not in told[-1:] else []
        return told

    def last(self) -> dict[tuple[str, str], int | float | str]:
        """The last value or status of each counter by (entity, name)."""
        found: dict[tuple[str, str], int | float | str] = {}
        for r in self.rows():
            value = r["value_int"] if r["value_int"] is not None else r["value_float"]
            found[r["entity"], r["name"]] = r["status"] if value is None else value
        return found

    def events(self) -> list[tuple[str, str]]:
        """Kind and detail of each event."""
        return [(r["kind"], r["detail"]) for r in self.rows("events")]
