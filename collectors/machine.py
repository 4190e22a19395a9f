"""The machine around a capture's servers: the sources of counters, and what their probes found."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from hoptrace.collectors.base import Finding
from hoptrace.collectors.context import Options
from hoptrace.collectors.coverage import Coverage
from hoptrace.collectors.hardware import catalog
from hoptrace.collectors.hardware.listener import lately
from hoptrace.collectors.hardware.processes.process import ProcessSource
from hoptrace.collectors.hardware.source import Asked, Server
from hoptrace.collectors.hardware.station import Station
from hoptrace.collectors.status import Status
from hoptrace.collectors.target import Target
from hoptrace.writer import TraceWriter

__all__ = ["Machine", "asked_of"]


def asked_of(options: Options, targets: Sequence[Target] = ()) -> Asked:
    """What the sources are to look at."""
    servers = [Server(t.name, lately(t.ctx.find, options.roots.proc)) for t in targets if t.ctx.find is not None]
    return Asked(options.roots, servers, options.tracepoints, options.scrape, options.files)


class Machine:
    """Begins with :meth:`start`; ``coverage`` has each source from its first sample on, but for the time in which it hangs."""

    def __init__(
        self, writer: TraceWriter, host: str, asked: Asked, every_s: float, max_overhead: float | None,
        coverage: Coverage,
    ) -> None:  # fmt: skip
        begun, ended = partial(coverage.begin, "counters", server=None), partial(coverage.end, server=None)
        self._station = Station(writer, host, catalog.sources(asked), every_s, max_overhead, begun, ended)

    async def start(self) -> dict[str, Finding]:
        """Probe all sources and sample those that are there; gives what was found."""
        # In a thread: a driver may take a second to load.
        found = await asyncio.to_thread(self._station.probe)
        self._station.start()
        return {name: Finding(f.available, f.reason, f.remedy, f.sees, f.status) for name, f in found.items()}

    def pid(self, server: str) -> int | None:
        """The process of a server, if it was found."""
        mine = (r.source for r in self._station.running)
        return next((s.pid for s in mine if isinstance(s, ProcessSource) and s.server == server), None)

    def tell(self, status: Status) -> None:
        """Add the sources' figures to a status."""
        for run in self._station.running:
            if run.opened:
                status.samples[run.source.name] = run.sink.rows
            if run.missed:
                status.missed[run.source.name] = run.missed

    async def close(self) -> None:
        """Stop, with a last sample."""
        await asyncio.to_thread(self._station.close)
