"""What perf counts of the servers' threads: migrations, hardware events, and, where asked for, the calls by which they wait."""

from __future__ import annotations

from collections.abc import Iterator

from hoptrace.collectors.hardware.perf.events import HARDWARE, SOFTWARE, Event
from hoptrace.collectors.hardware.perf.not_asked import NotAsked
from hoptrace.collectors.hardware.perf.threads import ThreadEvents
from hoptrace.collectors.hardware.perf.tracepoints import COST, CpuTracepoints, found_at
from hoptrace.collectors.hardware.source import Asked, Source

__all__ = ["sources"]

# linux/perf_event.h: perf_sw_ids, perf_hw_id.
_SOFTWARE = {"migrations": (Event(SOFTWARE, 4),)}
_HARDWARE = {
    "cpu_cycles": (Event(HARDWARE, 0),), "instructions": (Event(HARDWARE, 1),), "llc_misses": (Event(HARDWARE, 3),),
    "stalled_cycles": (Event(HARDWARE, 8),),
}  # fmt: skip
_MOVED = "how often the server's threads were moved to another CPU"
_STALLED = "whether the server's cycles did work or waited for memory"
_WAITS = "how often the server's threads wait on locks, poll, yield, and call into drivers"


def sources(asked: Asked) -> Iterator[Source]:
    """Two sources for each server, and tracepoints by thread or by CPU, or none."""
    roots, several = asked.roots, len(asked.servers) > 1
    for server in asked.servers:
        at = f"@{server.name}" if several else ""
        yield ThreadEvents(f"perf-software{at}", _MOVED, server, _SOFTWARE, "times", roots=roots)
        yield ThreadEvents(f"perf-hardware{at}", _STALLED, server, _HARDWARE, "events", roots=roots)
    if asked.tracepoints is None:
        yield NotAsked("tracepoints", _WAITS, f"not asked for: {COST['cpu']}", "--tracepoints cpu, or thread (dearer)")
    elif asked.tracepoints == "cpu":
        yield CpuTracepoints(roots)
    else:
        events, why = found_at(roots)
        for server in asked.servers:
            name = f"tracepoints@{server.name}" if several else "tracepoints"
            if why is not None:
                yield NotAsked(name, _WAITS, why.reason or "", why.remedy, status=why.status)
            else:
                yield ThreadEvents(name, _WAITS, server, events, "calls", roots=roots, remark=COST["thread"])
