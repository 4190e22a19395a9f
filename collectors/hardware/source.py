"""What a source of hardware and operating system counters is, what it finds, and where it looks.

A source is synchronous and is called from one thread of the :class:`~hoptrace.collectors.hardware.station.Station`, which keeps
the beat. Fast sources share a thread: none of them may take over a millisecond or two. What waits for a device, a firmware or a
network is "own" or "slow", and what blocks until something happens is "events".
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from hoptrace.collectors.hardware.listener import Found as FoundProcess
from hoptrace.collectors.hardware.sink import Sink, Status

__all__ = ["Asked", "Found", "Pace", "Roots", "Server", "Source", "Tracepoints", "found_by_error", "status_of"]

Pace = Literal["fast", "slow", "own", "events"]
"""fast: in the shared thread, at the rate that the user asked for. slow: in a shared thread, at most once a second. own: a thread
of its own, for what may block or hang. events: a thread of its own; ``sample`` waits for something to happen, 0.5 s at most."""

Tracepoints = Literal["thread", "cpu"]

_BY_ERROR: dict[int, Status] = {
    errno.ENOENT: "absent", errno.ENOTDIR: "absent",
    errno.EACCES: "denied", errno.EPERM: "denied",
    errno.ENODEV: "lost", errno.ENXIO: "lost", errno.ESRCH: "lost",
    errno.EOPNOTSUPP: "unsupported", errno.ENOSYS: "unsupported", errno.EINVAL: "unsupported",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Roots:
    """Where a machine is looked at: its own trees, a container's view of the host's (/host/proc), or recorded ones.

    ``nvml``, ``amdsmi``: the libraries, null for what the system's loader finds.
    """

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")
    nvml: str | None = None
    amdsmi: str | None = None

    @property
    def live(self) -> bool:
        """Whether this is the machine that hoptrace runs on: calls into the kernel or a library then tell of the same machine."""
        return self.proc == Path("/proc") and self.sys == Path("/sys")


@dataclass(frozen=True, slots=True)
class Found:
    """What a probe found.

    status: ok, or why there is nothing to read. reason: in words, exactly; also for a source that is there in part.
    remedy: what would make it so (a package, a permission, a driver, other hardware). sees: what it would read, in a few words
    ("2 GPUs, 36 NVLinks").
    """

    status: Status
    reason: str | None = None
    remedy: str | None = None
    sees: str | None = None

    @property
    def available(self) -> bool:
        return self.status == "ok"


class Source(Protocol):
    """One source. ``name`` is what its rows bear as `source`; ``answers`` the question that it answers, in one line.

    every_s: the shortest sensible time between two samples; null: as fast as the user asks.
    """

    @property
    def name(self) -> str: ...

    @property
    def answers(self) -> str: ...

    @property
    def pace(self) -> Pace: ...

    @property
    def every_s(self) -> float | None: ...

    def probe(self) -> Found:
        """Look whether it is there, without recording; called again every 30 s while it is not. Does not raise."""

    def open(self, out: Sink) -> None:
        """Begin: called once, after a probe that found it."""

    def sample(self, out: Sink) -> None:
        """Read once. What can't be read is a status row (see :meth:`Sink.put`); an error is counted and tried again."""

    def close(self) -> None:
        """Stop; called once, maybe while a sample hangs."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server of the capture: its name in the trace, and how to find its process (asked again when it has gone)."""

    name: str
    find: Callable[[], FoundProcess]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user wants to see.

    servers: whose processes are looked at. tracepoints: count futex, poll, ioctl and yield calls, by thread of the servers or by
    CPU; null: not. scrape: addresses of Prometheus pages. files: counters that other tools write (PCM's CSV), followed.
    """

    roots: Roots = field(default_factory=Roots)
    servers: Sequence[Server] = ()
    tracepoints: Tracepoints | None = None
    scrape: Sequence[str] = ()
    files: Sequence[Path] = ()


def status_of(error: OSError) -> Status:
    """Which status an error of a read means: EIO and all that is not known is `error`."""
    return _BY_ERROR.get(error.errno or 0, "error")


def found_by_error(error: OSError, remedy: str | None = None) -> Found:
    """A probe's finding from the error of a read, with the file's name."""
    where = f"{error.filename}: " if error.filename else ""
    return Found(status_of(error), f"{where}{error.strerror or error}", remedy)
