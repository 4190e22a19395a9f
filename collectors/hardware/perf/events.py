"""Counters of perf_event_open(2), by ctypes: no maintained Python package opens events of other processes and of devices.

Layout and numbers: linux/perf_event.h (struct perf_event_attr, 128 bytes since Linux 5.13; older kernels take it where the rest
is 0), perf_event_open(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hoptrace.collectors.hardware.file import read_int
from hoptrace.collectors.hardware.sink import Status
from hoptrace.collectors.hardware.source import Found

__all__ = [
    "CACHE",
    "HARDWARE",
    "SOFTWARE",
    "TRACEPOINT",
    "Count",
    "Event",
    "PerfEvent",
    "make_room",
    "room",
    "total_of",
    "why_not",
]

HARDWARE, SOFTWARE, TRACEPOINT, CACHE = 0, 1, 2, 3
"""perf_type_id."""

_SYSCALL = {"x86_64": 298, "aarch64": 241, "riscv64": 241, "ppc64le": 319, "s390x": 331}
_ATTR = struct.Struct("=IIQQQQQIIQQQQIiQIHHIIQ")
"""type, size, config, period, sample_type, read_format, flags, wakeup, bp_type, config1, config2, and what is 0 here."""
_ENABLED, _RUNNING, _CLOEXEC = 1, 2, 8
_EXCLUDE_KERNEL, _EXCLUDE_HV = 1 << 5, 1 << 6
_READ = struct.Struct("=QQQ")
_FILES, _EVENTS = 65536, 4096


@dataclass(frozen=True, slots=True)
class Event:
    """What to count: numbers of perf_event_attr."""

    type: int
    config: int
    config1: int = 0
    config2: int = 0


@dataclass(frozen=True, slots=True)
class Count:
    """``value``: the count, scaled up where the event shared its hardware counter with others (``scaled``); null where it never
    had one."""

    value: int | None
    scaled: bool = False


class PerfEvent:
    """One counter, from now on. ``pid`` -1: all tasks on ``cpu``; ``cpu`` -1: one task on any CPU.

    Raises:
        OSError: the kernel refuses; :func:`why_not` says why in words.
    """

    def __init__(self, event: Event, *, pid: int = -1, cpu: int = -1, user_only: bool = False) -> None:
        number = _SYSCALL.get(platform.machine())
        if number is None or ctypes.sizeof(ctypes.c_void_p) != 8:
            raise OSError(errno.ENOSYS, f"no perf_event_open for {platform.machine()}")
        flags = (_EXCLUDE_KERNEL | _EXCLUDE_HV) if user_only else 0
        attr = _ATTR.pack(
            event.type, _ATTR.size, event.config, 0, 0, _ENABLED | _RUNNING, flags, 0, 0, event.config1, event.config2,
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        )  # fmt: skip
        fd = _libc().syscall(number, ctypes.create_string_buffer(attr, len(attr)), pid, cpu, -1, _CLOEXEC)
        if fd < 0:
            raise OSError(e := ctypes.get_errno(), os.strerror(e))
        self._fd: int = fd
        self._last = (0, 0, 0)
        self._count = 0
        self._scaled = False

    def read(self) -> Count:
        """The count so far. OSError if it can't be read (ENODEV: the CPU went offline).

        Of an event that shared its hardware counter, each increase is scaled by the time enabled over the time counted since the
        last reading: scaling the whole count anew each time would make it fall when the share grows, and a fall reads as a reset.
        """
        data = os.read(self._fd, _READ.size)
        if len(data) < _READ.size:
            raise OSError(errno.ENODEV, "the event has lost its CPU")
        now = value, enabled, running = _READ.unpack(data)
        value_before, enabled_before, running_before = self._last
        more_enabled, more_running = enabled - enabled_before, running - running_before
        if more_enabled == more_running:
            self._count += value - value_before
        elif more_running > 0:
            self._count += (value - value_before) * more_enabled // more_running
            self._scaled = True
        else:  # it has not been counting since: the next reading that has covers this time too
            return Count(self._count if running else None, self._scaled)
        self._last = now
        return Count(self._count, self._scaled)

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._fd)


def total_of(events: Sequence[PerfEvent]) -> int | None:
    """What these have counted together; null where one of them can't be read or never had a hardware counter."""
    total = 0
    for event in events:
        try:
            n = event.read().value
        except OSError:
            return None
        if n is None:
            return None
        total += n
    return total


def room() -> int:
    """How many events one source may have open: a quarter of the files that this process may have, 4,096 at most."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _EVENTS if soft == resource.RLIM_INFINITY else min(_EVENTS, soft // 4)


def make_room() -> None:
    """Raise this process's limit of open files to what it may have: an event of a thread is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def why_not(error: OSError, what: str, proc: Path = Path("/proc")) -> Found:
    """Why an event could not be opened, and what would change it."""
    number = error.errno or 0
    status: Status = "error"
    reason, remedy = f"{what}: {error.strerror}", None
    if number in (errno.EACCES, errno.EPERM):
        status = "denied"
        paranoid = read_int(proc / "sys/kernel/perf_event_paranoid")
        level = "" if paranoid is None else f" (kernel.perf_event_paranoid is {paranoid})"
        reason = f"{what}: this user may not open it{level}"
        remedy = "run as root or with CAP_PERFMON; in a container, allow perf_event_open in its seccomp profile"
    elif number == errno.ENOENT:
        status, reason = "unsupported", f"{what}: this CPU, or this virtual machine, has no such event"
        remedy = "hardware whose hypervisor passes its counters on"
    elif number in (errno.EOPNOTSUPP, errno.ENODEV, errno.EINVAL):
        status, reason = "unsupported", f"{what}: this CPU or kernel does not offer it ({error.strerror})"
    elif number == errno.ENOSYS:
        status, reason = "unsupported", f"{what}: this kernel, or the container's seccomp profile, has no perf_event_open"
    elif number == errno.EMFILE:
        reason, remedy = f"{what}: no file descriptors are left", "ulimit -n 65536"
    elif number == errno.ESRCH:
        status, reason = "absent", f"{what}: the process is gone"
    return Found(status, reason, remedy)


_LIBC: list[ctypes.CDLL] = []


def _libc() -> ctypes.CDLL:
    if not _LIBC:
        _LIBC.append(ctypes.CDLL(None, use_errno=True))
    return _LIBC[0]
