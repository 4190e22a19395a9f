"""What perf counts of the servers' threads: migrations, hardware events, and, where asked for, the calls by which they wait."""

from __future__ import annotations

from collections.abc import Iterator

from hoptrace.collectors.hardware.perf.by_cpu import CpuTracepoints
from hoptrace.collectors.hardware.perf.events import SOFTWARE, Event
from hoptrace.collectors.hardware.perf.hardware import hardware_events
from hoptrace.collectors.hardware.perf.not_asked import NotAsked
from hoptrace.collectors.hardware.perf.threads import ThreadEvents
from hoptrace.collectors.hardware.perf.tracepoints import COST, found_at
from hoptrace.collectors.hardware.source import Asked, Source

__all__ = ["sources"]

# linux/perf_event.h: perf_sw_ids. Of the others (switches, faults, time on a CPU) /proc tells more, cheaper, and without rights.
_SOFTWARE = {"migrations": (Event(SOFTWARE, 4),)}
_MOVED = "how often the server's threads were moved to another CPU"
_STALLED = "whether the server's cycles did work or waited for memory"
_WAITS = "how often the server's threads wait on locks, poll, yield, and call into drivers"


def sources(asked: Asked) -> Iterator[Source]:
    """Two sources for each server, and tracepoints by thread or by CPU, or none."""
    roots, several = asked.roots, len(asked.servers) > 1
    for server in asked.servers:
        at = f"@{server.name}" if several else ""
        yield ThreadEvents(f"perf-software{at}", _MOVED, server, _SOFTWARE, "times", roots=roots)
        events = hardware_events(roots.proc)
        yield ThreadEvents(f"perf-hardware{at}", _STALLED, server, events, "events", roots=roots, user_mode=True)
    if asked.tracepoints is None:
        yield NotAsked("tracepoints", _WAITS, f"not asked for: {COST['cpu']}", "--tracepoints cpu, or thread (dearer)")
    elif asked.tracepoints == "cpu":
        yield CpuTracepoints(roots)
    else:
        calls, why = found_at(roots)
        for server in asked.servers:
            name = f"tracepoints@{server.name}" if several else "tracepoints"
            if why is not None:
                yield NotAsked(name, _WAITS, why.reason or "", why.remedy, status=why.status)
            else:
                yield ThreadEvents(name, _WAITS, server, calls, "calls", roots=roots, remark=COST["thread"])
