"""Tracepoints counted by CPU: the calls of all tasks of this machine, at little cost to any of them."""

from __future__ import annotations

from collections.abc import Sequence

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.file import cpu_list, read_text
from hoptrace.collectors.hardware.perf.events import Event, PerfEvent, make_room, total_of, why_not
from hoptrace.collectors.hardware.perf.tracepoints import COST, found_at
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots

__all__ = ["CpuTracepoints"]


class CpuTracepoints:
    """``cpu:N``, and their sum ``cpu``. Not the server's alone: the machine's.

    An event of a CPU that goes offline stands still, also after it is back: all are opened anew whenever the list of CPUs
    changes, as another incarnation.
    """

    name = "tracepoints"
    answers = "how often this machine's threads wait on locks, poll, yield, and call into drivers"
    pace: Pace = "fast"
    every_s = 1.0

    def __init__(self, roots: Roots | None = None) -> None:
        self._roots = roots or Roots()
        self._boot = procfs.boot_id(self._roots.proc)[:8]
        self._events: dict[str, Sequence[Event]] = {}
        self._open: list[tuple[int, str, list[PerfEvent]]] = []
        self._numbers: dict[tuple[int | None, str], int] = {}
        self._online = ""
        self._times = 0

    def probe(self) -> Found:
        if not self._roots.live:
            return Found("unsupported", "this /sys is not this machine's own", "run hoptrace on the host")
        self._events, why = found_at(self._roots)
        if why is not None:
            return why
        if not self._events:
            return Found("unsupported", "this kernel has no tracepoints of system calls", "a kernel with CONFIG_FTRACE_SYSCALLS")
        make_room()
        try:
            PerfEvent(next(iter(self._events.values()))[0], cpu=min(cpu_list(self._list()), default=0)).close()
        except OSError as e:
            return why_not(e, "tracepoints of a CPU", self._roots.proc)
        return Found("ok", COST["cpu"], sees=", ".join(self._events))

    def open(self, out: Sink) -> None:
        return None

    def sample(self, out: Sink) -> None:
        online = self._list()
        if online != self._online or not self._open:
            self._begin(online, out)
        before = out.now_ns()
        counts = [(cpu, name, total_of(events)) for cpu, name, events in self._open]
        out.at(before, out.now_ns())
        sums: dict[str, int | None] = dict.fromkeys(self._events, 0)
        for cpu, name, n in counts:
            out.put(self._numbers[cpu, name], n, "ok" if n is not None else "error")
            so_far = sums[name]
            sums[name] = None if n is None or so_far is None else so_far + n  # without one CPU there is no sum
        for name, total in sums.items():
            out.put(self._numbers[None, name], total, "ok" if total is not None else "error")

    def close(self) -> None:
        for _, _, events in self._open:
            for e in events:
                e.close()
        self._open = []

    def _begin(self, online: str, out: Sink) -> None:
        self.close()
        if self._online:
            out.event("cpus", f"CPUs online: {online} (before: {self._online}); calls are counted anew")
        self._online = online
        self._times += 1
        life = self._boot if self._times == 1 else f"{self._boot}/{self._times}"
        for name in self._events:
            self._numbers[None, name] = _series("cpu", name, life, out)
        for cpu in sorted(cpu_list(online)) or [0]:
            for name, events in self._events.items():
                mine: list[PerfEvent] = []
                self._open.append((cpu, name, mine))
                mine += (PerfEvent(e, cpu=cpu) for e in events)
                self._numbers[cpu, name] = _series(f"cpu:{cpu}", name, life, out)

    def _list(self) -> str:
        return read_text(self._roots.sys / "devices/system/cpu/online") or "0"


def _series(entity: str, name: str, life: str, out: Sink) -> int:
    return out.series(entity, name, "calls", "cumulative", incarnation=life, width_bits=64)
