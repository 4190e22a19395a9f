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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hoptrace.collectors.hardware.file import read_int
from hoptrace.collectors.hardware.sink import Status
from hoptrace.collectors.hardware.source import Found

__all__ = ["HARDWARE", "SOFTWARE", "TRACEPOINT", "Count", "Event", "PerfEvent", "make_room", "why_not"]

HARDWARE, SOFTWARE, TRACEPOINT = 0, 1, 2
"""perf_type_id."""

_SYSCALL = {"x86_64": 298, "aarch64": 241, "riscv64": 241, "ppc64le": 319, "s390x": 331}
_ATTR = struct.Struct("=IIQQQQQIIQQQQIiQIHHIIQ")
"""type, size, config, period, sample_type, read_format, flags, wakeup, bp_type, config1, config2, and what is 0 here."""
_ENABLED, _RUNNING, _CLOEXEC = 1, 2, 8
_EXCLUDE_KERNEL, _EXCLUDE_HV = 1 << 5, 1 << 6
_READ = struct.Struct("=QQQ")
_FILES = 65536


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

    def read(self) -> Count:
        """The count so far. OSError if it can't be read (ENODEV: the CPU went offline)."""
        data = os.read(self._fd, _READ.size)
        if len(data) < _READ.size:
            raise OSError(errno.ENODEV, "the event has lost its CPU")
        value, enabled, running = _READ.unpack(data)
        if running == enabled:
            return Count(value)
        if running == 0:
            return Count(None)
        return Count(value * enabled // running, scaled=True)

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._fd)


def make_room(root: Path = Path("/proc")) -> None:
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
