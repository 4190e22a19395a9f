"""One process's threads between two samples: what they ran and waited, summed, so that a thread that ends keeps its share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.file import KeptFile

__all__ = ["KEPT", "SUMMED_THREADS", "Threads"]

SUMMED_THREADS = 1024
"""Threads of one process that are read."""

KEPT = 64
"""Threads of one process whose files stay open, and which are all read at every sample; those beyond are read once a second."""


@dataclass(slots=True)
class Threads:
    """The threads of one process (one life of it).

    on_cpu_ns, run_delay_ns, timeslices: sums over all threads since the process was seen first. busy: time on a CPU or waiting
    for one, by thread, since it was seen first. present: those that were there at the first look. last: what each was read as
    last.
    """

    folder: Path
    start_ticks: int
    on_cpu_ns: int = 0
    run_delay_ns: int = 0
    timeslices: int = 0
    last: dict[int, procfs.SchedStat] = field(default_factory=dict)
    busy: dict[int, int] = field(default_factory=dict)
    present: set[int] = field(default_factory=set)
    _files: dict[int, KeptFile] = field(default_factory=dict)
    _looked: bool = False

    def look(self) -> None:
        """List the threads anew and read all of them. OSError if the process is gone."""
        now = procfs.threads(self.folder)[:SUMMED_THREADS]
        for tid in self._files.keys() - set(now):
            self._forget(tid)
        for tid in now:
            if tid not in self._files:
                self._files[tid] = KeptFile(self.folder / "task" / str(tid) / "schedstat")
        self._read(list(self._files))
        if not self._looked:
            self._looked = True
            self.present = set(self.last)
        # Files beyond the limit are opened for a reading only: a process may have 1,024 descriptors in all.
        for tid in list(self._files)[KEPT:]:
            self._files[tid].close()

    def read(self) -> None:
        """Read the threads whose files are kept."""
        self._read(list(self._files)[:KEPT])

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _read(self, tids: list[int]) -> None:
        for tid in tids:
            try:
                on_cpu, delay, slices = map(int, self._files[tid].read().split()[:3])
            except (OSError, ValueError):
                self._forget(tid)  # it ended between the listing and now, or this kernel does not tell
                continue
            now = procfs.SchedStat(on_cpu, delay, slices)
            was = self.last.get(tid)
            if was is None:
                # A thread that is new since the last look has done all of its work since then; at the first look none counts.
                was = procfs.SchedStat(0, 0, 0) if self._looked else now
            elif on_cpu < was.on_cpu_ns or delay < was.run_delay_ns:
                was = procfs.SchedStat(0, 0, 0)  # the thread's number was given to a new one
            ran, waited = on_cpu - was.on_cpu_ns, delay - was.run_delay_ns
            self.on_cpu_ns += ran
            self.run_delay_ns += waited
            self.timeslices += max(0, slices - was.timeslices)
            self.busy[tid] = self.busy.get(tid, 0) + ran + waited
            self.last[tid] = now

    def _forget(self, tid: int) -> None:
        file = self._files.pop(tid, None)
        if file is not None:
            file.close()
        self.last.pop(tid, None)
        self.busy.pop(tid, None)
