"""Sampling on a fixed beat: beats that a slow source misses are counted and skipped, a failing one is asked less often."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from hoptrace.collectors.base import Collector, ServerAway
from hoptrace.collectors.coverage import Coverage
from hoptrace.writer import TraceWriter

__all__ = ["Beat", "Source"]

_AWAY_SLOWER, _FAULT_SLOWER = 4, 6


@dataclass(slots=True)
class Source:
    """One collector that runs. ``label`` is its name on the screen and in the manifest; ``server`` the one it looks at, if one.

    ``renewed``: it has been told of a restart that the watch has not seen yet.
    """

    label: str
    collector: Collector
    server: str | None = None
    rows: int = 0
    missed: int = 0
    renewed: bool = False


@dataclass(slots=True)
class Beat:
    """Runs sources every ``every_s`` until ``stop`` is set."""

    writer: TraceWriter
    coverage: Coverage
    every_s: float
    stop: asyncio.Event
    away: Callable[[Source], bool]
    sources: list[Source] = field(default_factory=list)

    async def run(self, source: Source) -> None:
        """Sample until the end, and once more then: what came since the last beat is worth having."""
        due = time.monotonic()
        faults = 0
        while not self.stop.is_set():
            faults = await self._once(source, faults)
            due += self.every_s * 2**faults
            late = time.monotonic() - due
            if late > 0:
                skipped = int(late / self.every_s) + 1
                source.missed += skipped
                due += skipped * self.every_s
            with suppress(TimeoutError):
                await asyncio.wait_for(self.stop.wait(), max(0.0, due - time.monotonic()))

    async def last(self, source: Source) -> None:
        """One more sample at the end, then close; neither may take long or raise."""
        with suppress(Exception):
            async with asyncio.timeout(2.0):
                source.rows += await source.collector.sample()
        with suppress(Exception):
            async with asyncio.timeout(2.0):
                await source.collector.close()

    async def _once(self, source: Source, faults: int) -> int:
        """One sample; gives the faults in a row after it."""
        c = source.collector
        try:
            source.rows += await c.sample()
        except ServerAway:
            self.coverage.end(c.name, source.server)
            if faults == 0:
                # Now, not when the watch has seen it: no sample of the new server may count on from the old one's totals.
                c.restarted()
                source.renewed = True
            return min(faults + 1, _AWAY_SLOWER)
        except Exception as e:
            self.writer.drop(f"{source.label}: {type(e).__name__}", 1)
            return min(faults + 1, _FAULT_SLOWER)
        for table in c.tables:
            self.coverage.begin(table, c.name, source.server)
        if not self.away(source):
            source.renewed = False
        return 0
