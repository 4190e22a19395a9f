"""Which tracepoints tell what a thread waits by, and where their numbers are.

Every system call of every task takes the slow path of the kernel while one of these is open (TIF_SYSCALL_TRACEPOINT), so they are
only opened where they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hoptrace.collectors.hardware.file import read_int, read_text
from hoptrace.collectors.hardware.perf.events import TRACEPOINT, Event
from hoptrace.collectors.hardware.source import Found, Roots

__all__ = ["CALLS", "COST", "found_at", "tracefs"]

CALLS: Mapping[str, tuple[str, ...]] = {
    "futex_calls": ("futex", "futex_wait", "futex_waitv", "futex_wake", "futex_requeue"),
    "poll_calls": ("poll", "ppoll", "epoll_wait", "epoll_pwait", "epoll_pwait2", "select", "pselect6"),
    "ioctl_calls": ("ioctl",),
    "yield_calls": ("sched_yield",),
    "sleep_calls": ("nanosleep", "clock_nanosleep"),
    "io_uring_calls": ("io_uring_enter",),
}
"""Counter → system calls (tracepoints syscalls:sys_enter_NAME). A free lock makes no call: futex counts waits and wakes. Calls of
read and write are in /proc/PID/io, which costs the server nothing."""

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


def _why_not(place: Path) -> Found:
    try:
        mounted = any(place.iterdir())
    except PermissionError:
        return Found("denied", f"only root may read {place}", "run as root")
    except OSError:
        return Found("absent", "this kernel has no tracepoints (CONFIG_FTRACE)", "a kernel with CONFIG_FTRACE_SYSCALLS")
    if mounted:
        return Found("absent", "this kernel has no tracepoints of calls", "a kernel with CONFIG_FTRACE_SYSCALLS")
    return Found("absent", "tracefs is not mounted", "as root: mount -t tracefs nodev /sys/kernel/tracing")


def found_at(roots: Roots) -> tuple[dict[str, Sequence[Event]], Found | None]:
    """The events by counter, or why there are none. Calls that this kernel does not have are left out."""
    place = tracefs(roots)
    if place is None:
        return {}, _why_not(roots.sys / "kernel/tracing")
    events: dict[str, Sequence[Event]] = {}
    for name, calls in CALLS.items():
        numbers = [read_int(place / f"events/syscalls/sys_enter_{call}/id") for call in calls]
        if mine := [Event(TRACEPOINT, n) for n in numbers if n is not None]:
            events[name] = mine
    return events, None
