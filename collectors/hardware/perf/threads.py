"""Events of a server's threads: one counter for each thread and event, those of threads that have ended kept in the sum."""

from __future__ import annotations

import errno
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.perf.events import Event, PerfEvent, make_room, why_not
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots, Server, status_of
from hoptrace.collectors.hardware.tree import tree_lately

__all__ = ["MAX_THREADS", "ThreadEvents"]

MAX_THREADS = 128
"""Threads of all of a server's processes that are counted, the oldest first."""

_TREE_S = 5.0


class _Process:
    """One life of a process: its threads' counters, and what ended ones have counted."""

    def __init__(self, pid: int, start_ticks: int) -> None:
        self.pid, self.start_ticks = pid, start_ticks
        self.threads: dict[int, dict[str, list[PerfEvent]]] = {}
        self.counted: dict[int, dict[str, int]] = {}
        self.ended: dict[str, int] = {}
        self.numbers: dict[int, dict[str, int]] = {}


class ThreadEvents:
    """``events``: name of the counter → the events that add up to it. A server's process is found by ``server.find``, its tree is
    looked at every five seconds, its threads at every sample.

    Counts begin when a thread is seen first, so what a thread did before is not in them: they are of this capture alone.
    """

    pace: Pace = "fast"

    def __init__(
        self, name: str, answers: str, server: Server, events: Mapping[str, Sequence[Event]], unit: str, *,
        roots: Roots | None = None, every_s: float | None = 1.0, remark: str | None = None,
    ) -> None:  # fmt: skip
        self.name, self.answers, self.every_s = name, answers, every_s
        self._server, self._events, self._unit, self._remark = server, events, unit, remark
        self._roots = roots or Roots()
        self._boot = procfs.boot_id(self._roots.proc)[:8]
        self._there: dict[str, Sequence[Event]] = {}
        self._processes: dict[int, _Process] = {}
        self._tree_due_s = 0.0
        self._full = False

    def probe(self) -> Found:
        if not self._roots.live:
            return Found("unsupported", "this /proc is not this machine's own", "run hoptrace on the host")
        found = self._server.find()
        if found.pid is None:
            return Found("absent", found.reason, "name the process after --pid")
        make_room()
        self._there, refused = {}, None
        for name, events in self._events.items():
            usable = []
            for event in events:
                try:
                    PerfEvent(event, pid=found.pid).close()
                except OSError as e:
                    refused = refused or why_not(e, name, self._roots.proc)
                else:
                    usable.append(event)
            if usable:
                self._there[name] = usable
        if not self._there:
            return refused or Found("absent", "no events were asked for")
        missing = sorted(set(self._events) - set(self._there))
        why = [self._remark] if self._remark else []
        why += [f"not here: {', '.join(missing)} ({refused.reason})"] if missing and refused else []
        return Found("ok", "; ".join(why) or None, refused.remedy if missing and refused else None, ", ".join(self._there))

    def open(self, out: Sink) -> None:
        return None

    def sample(self, out: Sink) -> None:
        if time.monotonic() >= self._tree_due_s:
            self._tree_due_s = time.monotonic() + _TREE_S
            self._look()
        for process in list(self._processes.values()):
            self._one(process, out)

    def close(self) -> None:
        for process in self._processes.values():
            for events in process.threads.values():
                _close(events)
        self._processes.clear()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        found = self._server.find()
        for p in tree_lately(found.pid, self._roots.proc) if found.pid is not None else []:
            known = self._processes.get(p.pid)
            if known is None or known.start_ticks != p.start_ticks:
                self._processes[p.pid] = _Process(p.pid, p.start_ticks)

    def _one(self, process: _Process, out: Sink) -> None:
        folder = self._roots.proc / str(process.pid)
        try:
            present = set(procfs.threads(folder))
        except OSError:
            present = set()
        for tid in sorted(present - process.threads.keys()):
            self._begin(process, folder, tid, out)
        before = out.now_ns()
        for tid, events in list(process.threads.items()):
            counts = _read(events)
            process.counted[tid] = counts
            if tid not in present:
                # An event outlives its thread: this is all that the thread did.
                for name, n in counts.items():
                    process.ended[name] = process.ended.get(name, 0) + n
                _close(process.threads.pop(tid))
                del process.counted[tid], process.numbers[tid]
        out.at(before, out.now_ns())
        for tid, counts in process.counted.items():
            numbers = process.numbers[tid]
            for name, n in counts.items():
                out.put(numbers[name], n)
        life = f"{self._boot}/{process.start_ticks}"
        for name in self._there:
            told = [c[name] for c in process.counted.values() if name in c]
            if told or name in process.ended:
                number = self._series(out, f"process:{process.pid}", life, name)
                out.put(number, process.ended.get(name, 0) + sum(told))
        if not present:
            self._gone(process, life, out)

    def _gone(self, process: _Process, life: str, out: Sink) -> None:
        for name in self._there:
            if name in process.ended:
                out.put(self._series(out, f"process:{process.pid}", life, name), None, "lost")
        self._processes.pop(process.pid, None)

    def _series(self, out: Sink, entity: str, life: str, name: str) -> int:
        return out.series(entity, name, self._unit, "cumulative", incarnation=life, width_bits=64)

    def _begin(self, process: _Process, folder: Path, tid: int, out: Sink) -> None:
        if sum(len(p.threads) for p in self._processes.values()) >= MAX_THREADS:
            if not self._full:
                self._full = True
                out.event("gap", f"{self.name}: more than {MAX_THREADS} threads; the others are not counted")
            return
        opened: dict[str, list[PerfEvent]] = {}
        try:
            start = procfs.process_stat(folder / "task" / str(tid)).start_ticks
            for name, events in self._there.items():
                opened[name] = []
                for event in events:
                    opened[name].append(PerfEvent(event, pid=tid))
        except (OSError, ValueError) as e:
            _close(opened)
            if isinstance(e, OSError) and e.errno not in (errno.ESRCH, errno.ENOENT):
                life = f"{self._boot}/{process.start_ticks}"
                out.at(out.now_ns(), out.now_ns())
                out.fail([self._series(out, f"process:{process.pid}", life, name) for name in self._there], status_of(e))
                out.drop(f"threads whose events could not be opened ({e.strerror})")
            return
        process.threads[tid] = opened
        life = f"{self._boot}/{start}"
        process.numbers[tid] = {name: self._series(out, f"thread:{process.pid}/{tid}", life, name) for name in opened}


def _read(events: Mapping[str, Sequence[PerfEvent]]) -> dict[str, int]:
    """Counts by name; one whose events have never been on a hardware counter is left out."""
    found: dict[str, int] = {}
    for name, mine in events.items():
        values = []
        for event in mine:
            try:
                values.append(event.read().value)
            except OSError:
                values.append(None)
        if all(v is not None for v in values):
            found[name] = sum(v for v in values if v is not None)
    return found


def _close(events: Mapping[str, Sequence[PerfEvent]]) -> None:
    for mine in events.values():
        for event in mine:
            event.close()
