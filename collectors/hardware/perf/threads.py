"""Events of a server's threads: one counter for each thread and event, those of threads that have ended kept in the sum."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.perf.counted import Counted
from hoptrace.collectors.hardware.perf.events import Event, PerfEvent, make_room, room, why_not
from hoptrace.collectors.hardware.sink import Sink, Status
from hoptrace.collectors.hardware.source import Found, Pace, Roots, Server, status_of
from hoptrace.collectors.hardware.tree import tree_lately

__all__ = ["ThreadEvents"]

_TREE_S, _SEARCH_S = 5.0, 2.0


class ThreadEvents:
    """``events``: name of the counter → the events that add up to it. A server's process is found by ``server.find``, its tree is
    looked at every five seconds, its threads at every sample.

    Counts begin when a thread is seen first, so what a thread did before is not in them, nor what one did that lived for less
    than the time between two samples: they are of this capture alone. ``user_mode``: where this user may only count what threads
    do outside the kernel, that is counted, under names that end in `_user`.
    """

    pace: Pace = "fast"

    def __init__(
        self, name: str, answers: str, server: Server, events: Mapping[str, Sequence[Event]], unit: str, *,
        roots: Roots | None = None, every_s: float | None = 1.0, remark: str | None = None, user_mode: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.answers, self.every_s = name, answers, every_s
        self._server, self._events, self._unit, self._remark, self._user_mode = server, events, unit, remark, user_mode
        self._roots = roots or Roots()
        self._boot = procfs.boot_id(self._roots.proc)[:8]
        self._there: dict[str, Sequence[Event]] = {}
        self._user_only = False
        self._processes: dict[int, Counted] = {}
        self._numbers: dict[tuple[int, int], list[tuple[str, int]]] = {}
        self._pid: int | None = None
        self._tree_due_s = self._search_due_s = 0.0
        self._full = False

    def probe(self) -> Found:
        if not self._roots.live:
            return Found("unsupported", "this /proc is not this machine's own", "run hoptrace on the host")
        found = self._server.find()
        if found.pid is None:
            return Found("absent", found.reason, "name the process after --pid")
        make_room()
        refused = self._try(found.pid, user_only=False)
        if not self._there and self._user_mode and refused is not None and refused.status == "denied":
            refused = self._try(found.pid, user_only=True) or refused
        if not self._there:
            return refused or Found("absent", "no events were asked for")
        self._pid = found.pid
        missing = [n for n in self._events if n not in self._there and f"{n}_user" not in self._there]
        why = [self._remark] if self._remark else []
        why += ["only what threads do outside the kernel is counted: more is not for this user"] if self._user_only else []
        why += [f"not here: {', '.join(sorted(missing))} ({refused.reason})"] if missing and refused else []
        return Found("ok", "; ".join(why) or None, refused.remedy if missing and refused else None, ", ".join(self._there))

    def open(self, out: Sink) -> None:
        return None

    def sample(self, out: Sink) -> None:
        now = time.monotonic()
        if self._pid is None and now >= self._search_due_s:
            self._search_due_s = now + _SEARCH_S
            self._pid = self._server.find().pid
            self._tree_due_s = 0.0
        if self._pid is not None and now >= self._tree_due_s:
            self._tree_due_s = now + _TREE_S
            self._look(self._pid)
        for process in list(self._processes.values()):
            self._one(process, out)

    def close(self) -> None:
        for process in self._processes.values():
            process.close()
        self._processes.clear()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _try(self, pid: int, *, user_only: bool) -> Found | None:
        """Note which events can be opened; gives why the first that can't be is refused."""
        self._there, self._user_only, refused = {}, user_only, None
        for name, events in self._events.items():
            usable = []
            for event in events:
                try:
                    PerfEvent(event, pid=pid, user_only=user_only).close()
                except OSError as e:
                    refused = refused or why_not(e, name, self._roots.proc)
                else:
                    usable.append(event)
            if usable:
                self._there[f"{name}_user" if user_only else name] = usable
        return refused

    def _look(self, pid: int) -> None:
        for p in tree_lately(pid, self._roots.proc):
            known = self._processes.get(p.pid)
            if known is None or known.start_ticks != p.start_ticks:
                if known is not None:
                    self._forget(known)
                self._processes[p.pid] = Counted(p.pid, p.start_ticks, self._there, user_only=self._user_only)

    def _one(self, process: Counted, out: Sink) -> None:
        folder = self._roots.proc / str(process.pid)
        before = out.now_ns()
        try:
            present = set(procfs.threads(folder))
        except OSError as e:
            status = status_of(e)
            if status not in ("absent", "lost"):
                out.at(before, out.now_ns())
                self._fail(process, status, out)
                return
            present = set()
        counted = process.threads
        for tid in sorted(present - counted):
            self._begin(process, tid, out)
        before = out.now_ns()
        process.read()
        out.at(before, out.now_ns())
        for tid in counted - present:
            # An event outlives its thread: this is all that the thread did.
            self._put_thread(process, tid, out)
            self._numbers.pop((process.pid, tid), None)
            if unknown := process.end(tid):
                out.drop("counters of ended threads that were never counted", unknown)
        for tid in process.counts:
            self._put_thread(process, tid, out)
        for name in self._there:
            total = process.total(name)
            out.put(self._series(process, name, out), total, "ok" if total is not None else "error")
        if not present:
            self._fail(process, "lost", out)
            self._forget(process)

    def _put_thread(self, process: Counted, tid: int, out: Sink) -> None:
        counts = process.counts[tid]
        for name, number in self._numbers[process.pid, tid]:
            n = counts[name]
            # Null: all the time that it ran, no hardware counter was free for it.
            out.put(number, n, "ok" if n is not None else "error")

    def _fail(self, process: Counted, status: Status, out: Sink) -> None:
        out.fail([self._series(process, name, out) for name in self._there], status)

    def _forget(self, process: Counted) -> None:
        for tid in process.threads:
            self._numbers.pop((process.pid, tid), None)
        process.close()
        self._processes.pop(process.pid, None)
        if process.pid == self._pid:
            self._pid = None

    def _series(self, process: Counted, name: str, out: Sink) -> int:
        life = f"{self._boot}/{process.start_ticks}"
        return out.series(f"process:{process.pid}", name, self._unit, "cumulative", incarnation=life, width_bits=64)

    def _begin(self, process: Counted, tid: int, out: Sink) -> None:
        events = sum(map(len, self._there.values()))
        if (len(self._numbers) + 1) * events > room():
            process.whole = False
            if not self._full:
                self._full = True
                out.event(
                    "gap", f"{self.name}: only {len(self._numbers)} threads can be counted; processes with others have no sum"
                )
            return
        try:
            start = procfs.process_stat(self._roots.proc / str(process.pid) / "task" / str(tid)).start_ticks
            process.begin(tid)
        except ValueError:
            return  # it ended
        except OSError as e:
            if status_of(e) not in ("absent", "lost"):
                process.whole = False
                out.drop(f"threads whose events could not be opened ({e.strerror})")
            return
        entity, life = f"thread:{process.pid}/{tid}", f"{self._boot}/{start}"
        self._numbers[process.pid, tid] = [
            (name, out.series(entity, name, self._unit, "cumulative", incarnation=life, width_bits=64)) for name in self._there
        ]
