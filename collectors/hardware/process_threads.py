"""One process's threads between two samples: what they ran and waited, summed, so that a thread that ends keeps its share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hoptrace.collectors.hardware import procfs

__all__ = ["SUMMED_THREADS", "Sums", "Threads"]

SUMMED_THREADS = 1024
"""Threads of one process that are read."""


@dataclass(slots=True)
class Sums:
    """Totals over all threads since the collector saw the process first. A thread that ends keeps its share."""

    on_cpu_ns: int = 0
    run_delay_ns: int = 0
    timeslices: int = 0


@dataclass(slots=True)
class Threads:
    """The threads of one process (one life of it). ``busy``: time on a CPU or waiting for one, by thread, since it was seen
    first; ``present``: those that were there at the first sample."""

    start_ticks: int
    sums: Sums = field(default_factory=Sums)
    last: dict[int, procfs.SchedStat] = field(default_factory=dict)
    busy: dict[int, int] = field(default_factory=dict)
    present: set[int] = field(default_factory=set)

    def read(self, folder: Path) -> dict[int, procfs.SchedStat]:
        """Read /proc/PID/task and add up what each thread did since the last time."""
        first = not self.last
        seen: dict[int, procfs.SchedStat] = {}
        for tid in procfs.threads(folder)[:SUMMED_THREADS]:
            try:
                now = procfs.schedstat(folder / "task" / str(tid))
            except (OSError, ValueError):
                continue  # it ended between the listing and now
            seen[tid] = now
            was = self.last.get(tid)
            if was is None:
                # A thread that is new since the last sample has done all of its work since then; at the first sample none counts.
                was = now if first else procfs.SchedStat(0, 0, 0)
            if now.on_cpu_ns < was.on_cpu_ns or now.run_delay_ns < was.run_delay_ns:
                was = procfs.SchedStat(0, 0, 0)  # the thread's number was given to a new one
            self.sums.on_cpu_ns += now.on_cpu_ns - was.on_cpu_ns
            self.sums.run_delay_ns += now.run_delay_ns - was.run_delay_ns
            self.sums.timeslices += max(0, now.timeslices - was.timeslices)
            self.busy[tid] = self.busy.get(tid, 0) + now.on_cpu_ns - was.on_cpu_ns + now.run_delay_ns - was.run_delay_ns
        if first:
            self.present = set(seen)
        self.last = seen
        self.busy = {tid: busy for tid, busy in self.busy.items() if tid in seen}
        return seen
