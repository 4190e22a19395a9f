"""Which tracepoints tell what a thread waits by, where their numbers are, and the source that counts them by CPU.

Every system call of every task takes the slow path of the kernel while one of these is open (TIF_SYSCALL_TRACEPOINT), so they are
only opened where they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.file import read_int, read_text
from hoptrace.collectors.hardware.perf.events import TRACEPOINT, Event, PerfEvent, make_room, why_not
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots, status_of

__all__ = ["CALLS", "COST", "CpuTracepoints", "found_at", "tracefs"]

CALLS: Mapping[str, tuple[str, ...]] = {
    "futex_calls": ("futex", "futex_wait", "futex_waitv", "futex_wake", "futex_requeue"),
    "poll_calls": ("poll", "ppoll", "epoll_wait", "epoll_pwait", "epoll_pwait2", "select", "pselect6"),
    "ioctl_calls": ("ioctl",),
    "yield_calls": ("sched_yield",),
    "sleep_calls": ("nanosleep", "clock_nanosleep"),
    "io_uring_calls": ("io_uring_enter",),
}
"""Counter → system calls (tracepoints syscalls:sys_enter_NAME). A free lock makes no call: futex counts waits and wakes."""

COST = {
    "thread": "counting by thread slows a server that calls often: threads that do nothing but wake each other (20,000 to 45,000 "
    "switches a second) ran some 33 % slower when it was measured",
    "cpu": "counting by CPU slowed threads that do nothing but wake each other by some 6 %, within the noise",
}
"""Measured on a two-core virtual machine, Linux 6.18, with the events sched_switch, raw_syscalls and futex."""


def tracefs(roots: Roots) -> Path | None:
    """Where tracefs is mounted and readable; null if it is not."""
    for place in ("kernel/tracing", "kernel/debug/tracing"):
        if read_text(roots.sys / place / "events/syscalls/sys_enter_futex/id") is not None:
            return roots.sys / place
    return None


def found_at(roots: Roots) -> tuple[dict[str, Sequence[Event]], Found | None]:
    """The events by counter, or why there are none. Calls that this kernel does not have are left out."""
    place = tracefs(roots)
    if place is None:
        there = (roots.sys / "kernel/tracing").is_dir()
        reason = "tracefs is not mounted, or only root may read it" if there else "this kernel has no tracepoints (CONFIG_FTRACE)"
        return {}, Found("absent", reason, "as root: mount -t tracefs nodev /sys/kernel/tracing" if there else None)
    events: dict[str, Sequence[Event]] = {}
    for name, calls in CALLS.items():
        numbers = [read_int(place / f"events/syscalls/sys_enter_{call}/id") for call in calls]
        if mine := [Event(TRACEPOINT, n) for n in numbers if n is not None]:
            events[name] = mine
    return events, None


class CpuTracepoints:
    """Calls of all tasks by CPU: ``cpu:N``, and their sum ``cpu``. Not the server's alone: the machine's."""

    name = "tracepoints"
    answers = "how often this machine's threads wait on locks, poll, yield, and call into drivers"
    pace: Pace = "fast"
    every_s = 1.0

    def __init__(self, roots: Roots | None = None) -> None:
        self._roots = roots or Roots()
        self._boot = procfs.boot_id(self._roots.proc)[:8]
        self._events: dict[str, Sequence[Event]] = {}
        self._open: dict[tuple[int, str], list[PerfEvent]] = {}

    def probe(self) -> Found:
        if not self._roots.live:
            return Found("unsupported", "this /sys is not this machine's own", "run hoptrace on the host")
        self._events, why = found_at(self._roots)
        if why is not None:
            return why
        make_room()
        try:
            PerfEvent(next(iter(self._events.values()))[0], cpu=_cpus(self._roots)[0]).close()
        except OSError as e:
            return why_not(e, "tracepoints of a CPU", self._roots.proc)
        return Found("ok", COST["cpu"], sees=", ".join(self._events))

    def open(self, out: Sink) -> None:
        for cpu in _cpus(self._roots):
            for name, events in self._events.items():
                self._open[cpu, name] = [PerfEvent(e, cpu=cpu) for e in events]

    def sample(self, out: Sink) -> None:
        before = out.now_ns()
        sums: dict[str, int | None] = dict.fromkeys(self._events, 0)
        found: list[tuple[int, str, int | OSError]] = []
        for (cpu, name), events in self._open.items():
            try:
                values = [e.read().value for e in events]
            except OSError as e:
                found.append((cpu, name, e))
                sums[name] = None  # without one CPU there is no sum
                continue
            n = sum(v or 0 for v in values)
            found.append((cpu, name, n))
            so_far = sums[name]
            sums[name] = None if so_far is None else so_far + n
        out.at(before, out.now_ns())
        for cpu, name, told in found:
            number = self._series(out, f"cpu:{cpu}", name)
            if isinstance(told, OSError):
                out.put(number, None, status_of(told))
            else:
                out.put(number, told)
        for name, total in sums.items():
            out.put(self._series(out, "cpu", name), total, "ok" if total is not None else "lost")

    def close(self) -> None:
        for events in self._open.values():
            for e in events:
                e.close()
        self._open.clear()

    def _series(self, out: Sink, entity: str, name: str) -> int:
        return out.series(entity, name, "calls", "cumulative", incarnation=self._boot, width_bits=64)


def _cpus(roots: Roots) -> list[int]:
    """CPUs that are online; the list is as in cputopology.rst (0-3,8)."""
    found: list[int] = []
    for part in (read_text(roots.sys / "devices/system/cpu/online") or "0").split(","):
        low, _, high = part.partition("-")
        if low.isdigit() and (high.isdigit() or not high):
            found += range(int(low), int(high or low) + 1)
    return found or [0]
