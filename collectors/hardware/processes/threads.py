"""One process's threads between two samples: what they ran and waited, summed, so that a thread that ends keeps its share."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from hoptrace.collectors.hardware import procfs

__all__ = ["KEPT", "SUMMED_THREADS", "Thread", "Threads", "schedstat_of"]

SUMMED_THREADS = 1024
"""Threads of one process that are read."""

KEPT = 64
"""Threads of one process whose files stay open, and which are all read at every sample; those beyond are read once a second."""

_ENOUGH = 128
"""Bytes: a schedstat file is three numbers of at most 20 digits."""

_ENDED = (errno.ESRCH, errno.ENOENT)


def schedstat_of(data: bytes) -> tuple[int, int, int]:
    """Of a schedstat file: ns on a CPU, ns runnable but waiting for one, times it was put on one. ValueError if it is not
    in the kernel's format (Documentation/scheduler/sched-stats.rst)."""
    on_cpu, delay, slices = map(int, data.split()[:3])
    if on_cpu < 0 or delay < 0 or slices < 0:
        raise ValueError("a negative time in schedstat")
    return on_cpu, delay, slices


class Thread:
    """One thread. ``times``: as read last (see :func:`schedstat_of`), null before. ``busy_ns``: time on a CPU or waiting for one
    since it was seen first."""

    __slots__ = ("busy_ns", "fd", "path", "raw", "times")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = -1
        self.raw = b""
        self.times: tuple[int, int, int] | None = None
        self.busy_ns = 0

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Threads:
    """The threads of one process (one life of it).

    on_cpu_ns, run_delay_ns, timeslices: sums over all threads since the process was seen first. known: threads that can be read,
    by number. present: those that were there at the first look, also those that are not read.
    """

    def __init__(self, folder: Path, start_ticks: int) -> None:
        self.folder, self.start_ticks = folder, start_ticks
        self.on_cpu_ns = self.run_delay_ns = self.timeslices = 0
        self.known: dict[int, Thread] = {}
        self.present: frozenset[int] | None = None
        self._all: dict[int, Thread] = {}
        self._kept: list[tuple[int, Thread]] = []

    def look(self) -> None:
        """List the threads anew and read all of them. OSError if the process is gone."""
        listed = procfs.threads(self.folder)
        for tid in self._all.keys() - set(listed):
            self._forget(tid)
        for tid in listed:
            if tid not in self._all and len(self._all) < SUMMED_THREADS:
                self._all[tid] = Thread(self.folder / "task" / str(tid) / "schedstat")
        self._read(list(self._all.items()))
        if self.present is None:
            self.present = frozenset(listed)
        self.present &= frozenset(listed)  # the number of one that has ended may be given to a new one, whose work all counts
        # Files beyond the limit are opened for a reading only: a process may have 1,024 descriptors in all.
        entries = list(self._all.items())
        self._kept = entries[:KEPT]
        for _, thread in entries[KEPT:]:
            thread.close()

    def read(self) -> None:
        """Read the threads whose files are kept."""
        self._read(self._kept)

    def close(self) -> None:
        for thread in self._all.values():
            thread.close()
        self._all.clear()
        self._kept = []

    def _read(self, entries: list[tuple[int, Thread]]) -> None:
        ended = []
        pread = os.pread
        for tid, thread in entries:
            try:
                if thread.fd < 0:
                    thread.fd = os.open(thread.path, os.O_RDONLY | os.O_CLOEXEC)
                raw = pread(thread.fd, _ENOUGH, 0)
            except OSError as e:
                if e.errno in _ENDED:
                    ended.append(tid)  # between the listing and now
                continue  # of anything else (no descriptor is left) its share is counted at the next reading
            if raw == thread.raw:
                continue  # it has neither run nor waited: most threads, at most samples
            try:
                times = schedstat_of(raw)
            except ValueError:
                if not raw:
                    ended.append(tid)
                continue
            self._count(tid, thread, times)
            thread.raw = raw
        for tid in ended:
            self._forget(tid)
        if ended:
            self._kept = [(tid, thread) for tid, thread in self._kept if tid in self._all]

    def _count(self, tid: int, thread: Thread, times: tuple[int, int, int]) -> None:
        was = thread.times
        if was is None:
            # A thread that is new since the first look has done all of its work since then; of others none counts.
            old = self.present is None or tid in self.present
            was = times if old else (0, 0, 0)
            self.known[tid] = thread
        elif times[0] < was[0] or times[1] < was[1]:
            was = (0, 0, 0)  # the thread's number was given to a new one
        ran, waited = times[0] - was[0], times[1] - was[1]
        self.on_cpu_ns += ran
        self.run_delay_ns += waited
        self.timeslices += max(0, times[2] - was[2])
        thread.busy_ns += ran + waited
        thread.times = times

    def _forget(self, tid: int) -> None:
        thread = self._all.pop(tid, None)
        if thread is not None:
            thread.close()
        self.known.pop(tid, None)
