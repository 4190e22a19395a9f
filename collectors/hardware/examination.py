"""What can be counted on this machine, found out by doing it for a second: `hoptrace doctor`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hoptrace.collectors.hardware import catalog
from hoptrace.collectors.hardware.source import Asked, Found, Pace
from hoptrace.collectors.hardware.station import Running, Station
from hoptrace.manifest import Manifest
from hoptrace.writer import TraceWriter

__all__ = ["Entry", "examine"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One source: what it answers, whether it is there, what it costs.

    cpu_us: CPU time of one sample. every_s: how often a capture takes one. core_share: what that takes of one core. series: how
    many there are. Null where nothing was sampled. failed: why a source that is there could not be read.
    """

    name: str
    answers: str
    pace: Pace
    found: Found
    every_s: float
    samples: int = 0
    series: int | None = None
    cpu_us: float | None = None
    core_share: float | None = None
    failed: str | None = None


def examine(
    asked: Asked, host: str, out: Path, *, seconds: float = 1.0, every_s: float = 0.1, say: Callable[[str], None] = lambda _: None
) -> list[Entry]:
    """Probe every source, sample those that are there for ``seconds`` into the trace ``out``, and tell how each fared.

    Raises:
        UsageError, EnvironmentProblem: as :class:`~hoptrace.writer.TraceWriter`.
    """
    with TraceWriter(out, Manifest(origin="recorded", title="doctor"), background=False) as writer:
        station = Station(writer, host, list(catalog.sources(asked)), every_s, None)
        say("looking for sources")
        station.probe()
        if seconds > 0:
            say(f"sampling for {seconds:g} s")
            station.start()
            time.sleep(seconds)
        station.close()
        return [_entry(run, seconds) for run in station.running]


def _entry(run: Running, seconds: float) -> Entry:
    assert run.found is not None
    s = run.source
    told = Entry(s.name, s.answers, s.pace, run.found, run.every_s, run.samples)
    if not run.opened:
        return told
    cpu_us = run.cpu_ns / run.samples / 1e3 if run.samples else None
    # What waits for events samples when they come, not at a beat.
    beat = run.every_s if s.pace != "events" else seconds / max(1, run.samples)
    share = cpu_us / 1e6 / beat if cpu_us is not None and beat > 0 else None
    return Entry(
        s.name, s.answers, s.pace, run.found, run.every_s, run.samples, run.sink.series_count, cpu_us, share,
        run.last_error if run.faults else None,
    )  # fmt: skip
