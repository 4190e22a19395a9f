"""A server's processes as the operating system sees them.

Entities: ``process:PID`` of each process of the server's tree (API servers, engines, workers), ``thread:PID/TID`` (at most 64 in
all, the busiest, once a second). Events of kind `process` say which is which. Files: proc_pid_stat(5), proc_pid_io(5),
Documentation/scheduler/sched-stats.rst.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.file import KeptFile
from hoptrace.collectors.hardware.processes.slowly import Slowly
from hoptrace.collectors.hardware.processes.thread_rows import ThreadRows
from hoptrace.collectors.hardware.processes.threads import SUMMED_THREADS, Threads, schedstat_of
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots, Server, status_of
from hoptrace.collectors.hardware.tree import tree_of

__all__ = ["MAX_THREADS", "ProcessSource"]

MAX_THREADS = 64
"""Threads that get rows of their own, of all of the server's processes together."""

_THREADS_EVERY_NS, _TREE_EVERY_NS, _SEARCH_EVERY_NS = 1_000_000_000, 5_000_000_000, 2_000_000_000
_SEARCHES = 5  # a server that stays away is looked for ever less often, every ten seconds at last: all processes are gone through
_TOLD_ROLES = ("api", "engine", "worker")
_SUMS = (("on_cpu_ns", "ns"), ("unread_cpu_ns", "ns"), ("run_delay_ns", "ns"), ("timeslices", "times"))
"""Over all threads since the process was seen first. ``unread_cpu_ns``: what of on_cpu_ns was of threads that ended between two
samples or are beyond those that are read, by the process's own time (whole ticks, two of which are let go): how long those waited
for a CPU nobody knows, so the two after it are lower bounds then."""
_STAT = (
    ("cpu_user_ns", "ns"), ("cpu_system_ns", "ns"), ("minor_faults", "faults"), ("major_faults", "faults"),
)  # fmt: skip


class _Life:
    """One life of one process: its files and its series."""

    def __init__(self, pid: int, folder: Path, start_ticks: int, boot: str, out: Sink) -> None:
        self.pid, self.start_ticks = pid, start_ticks
        self.stat = KeptFile(folder / "stat")
        self.threads = Threads(folder, start_ticks)
        self.listed = 0
        self.summed = False  # whether there were threads whose time could be read
        self.first_cpu_ns: int | None = None
        self.unread_ns = 0
        self.crowded = False
        entity, self.incarnation = f"process:{pid}", f"{boot}/{start_ticks}"
        self.counted = [
            out.series(entity, name, unit, "cumulative", incarnation=self.incarnation, width_bits=64) for name, unit in _STAT
        ]
        self.gauges = [
            out.series(entity, name, unit, "gauge", incarnation=self.incarnation)
            for name, unit in (("threads", "threads"), ("rss_bytes", "bytes"))
        ]
        self.sums = [
            out.series(entity, name, unit, "cumulative", incarnation=self.incarnation, width_bits=64) for name, unit in _SUMS
        ]
        self.slowly = Slowly(folder, entity, self.incarnation)
        self.rows: dict[int, ThreadRows] = {}

    def account(self, cpu_ns: int) -> None:
        """After all threads were read: what their sum lacks of the process's own time, which those that ended are part of."""
        if self.first_cpu_ns is None:
            self.first_cpu_ns = cpu_ns
        self.unread_ns = max(self.unread_ns, cpu_ns - self.first_cpu_ns - 2 * procfs.TICK_NS - self.threads.on_cpu_ns)

    def close(self) -> None:
        for thread in self.rows.values():
            thread.close()
        self.stat.close()
        self.threads.close()
        self.slowly.close()


class ProcessSource:
    """Samples a server's process and those that it has started. ``server.find`` tells its number, and is asked again when it has
    gone. ``several``: of several servers, the source bears the server's name."""

    answers = "whether the server's threads ran, waited for a CPU, or slept; their switches, faults and memory"
    pace: Pace = "fast"
    every_s = None

    def __init__(self, server: Server, roots: Roots | None = None, *, several: bool = False) -> None:
        self._server = server
        self.name = f"process@{server.name}" if several else "process"
        self.server = server.name
        self._proc = (roots or Roots()).proc
        self._boot = procfs.boot_id(self._proc)[:8]
        self._lives: dict[int, _Life] = {}
        self._roles: dict[int, str] = {}
        self._tree_due_ns = self._search_due_ns = self._threads_due_ns = 0
        self._boot_ns: int | None = None
        self._began_ns: int | None = None
        self._searched = 0
        self._told: set[tuple[int, int]] = set()
        self.pid: int | None = None
        self._start_ticks = 0

    def probe(self) -> Found:
        if not (self._proc / "stat").exists():
            return Found("absent", "this system has no Linux /proc", "hoptrace counters need Linux")
        found = self._server.find()
        if found.pid is None:
            return Found("absent", found.reason, "name the process after --pid")
        folder = self._proc / str(found.pid)
        try:
            self._start_ticks = procfs.process_stat(folder).start_ticks
        except (OSError, ValueError):
            return Found(
                "absent", f"there is no process {found.pid} that this user may look at", "run as the server's user or root"
            )
        self.pid = found.pid
        sees = f"process {found.pid}"
        try:
            schedstat_of((folder / "task" / str(found.pid) / "schedstat").read_bytes())
        except (OSError, ValueError):
            return Found("ok", found.reason or "this kernel offers no schedstat: no run-queue delay", sees=sees)
        return Found("ok", found.reason, sees=sees)

    def open(self, out: Sink) -> None:
        if self.pid is not None:
            self._take(self.pid, self._start_ticks, out)

    def sample(self, out: Sink) -> None:
        now = out.now_ns()
        if self._began_ns is None and (up := procfs.uptime_ns(self._proc)) is not None:
            self._began_ns, self._boot_ns = now, now - up
        if self.pid is None and now >= self._search_due_ns:
            self._searched = min(self._searched + 1, _SEARCHES)
            self._search_due_ns = now + self._searched * _SEARCH_EVERY_NS
            self._search(out)
        if self.pid is None:
            return
        if now >= self._tree_due_ns:
            self._tree_due_ns = now + _TREE_EVERY_NS
            self._look_at_tree(out)
        threads_too = now >= self._threads_due_ns
        if threads_too:
            self._threads_due_ns = now + _THREADS_EVERY_NS
        for life in list(self._lives.values()):
            self._one(life, threads_too, out)
        if threads_too and self.pid is not None:
            self._threads(now, out)

    def close(self) -> None:
        for life in self._lives.values():
            life.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _take(self, pid: int, start_ticks: int, out: Sink) -> None:
        self.pid = pid
        self._lives = {pid: _Life(pid, self._proc / str(pid), start_ticks, self._boot, out)}
        self._roles = {}
        self._threads_due_ns = self._tree_due_ns = self._searched = 0

    def _search(self, out: Sink) -> None:
        found = self._server.find()
        if found.pid is None:
            return
        try:
            start_ticks = procfs.process_stat(self._proc / str(found.pid)).start_ticks
        except (OSError, ValueError):
            return
        self._take(found.pid, start_ticks, out)
        out.event("start", f"the server's process is {found.pid}", self.server)

    def _look_at_tree(self, out: Sink) -> None:
        """Processes that the server has started. Those that have gone are seen when they are read."""
        assert self.pid is not None
        tree = tree_of(self.pid, self._proc)
        for process in tree:
            if process.pid in self._lives and process.pid in self._roles:
                continue
            if process.pid not in self._lives:
                folder = self._proc / str(process.pid)
                self._lives[process.pid] = _Life(process.pid, folder, process.start_ticks, self._boot, out)
            self._roles[process.pid] = process.role
            if len(tree) > 1 and process.role in _TOLD_ROLES:
                detail = f"process {process.pid} is the server's: {process.role} ({process.command})"
                out.event("process", detail, self.server)

    def _one(self, life: _Life, threads_too: bool, out: Sink) -> None:
        """One process. Its rows have its own time: a server may have dozens of processes, with hundreds of threads to read."""
        before = out.now_ns()
        try:
            stat = procfs.stat_of(life.stat.read())
            if stat.start_ticks != life.start_ticks or stat.state in ("Z", "X"):
                raise ProcessLookupError(errno.ESRCH, "gone")  # the number was given to another process, or this one has ended
            if threads_too or stat.threads != life.listed:
                life.threads.look()
                life.account(stat.user_ns + stat.system_ns)
                life.listed = stat.threads
            else:
                life.threads.read()
        except (OSError, ValueError) as e:
            status = status_of(e) if isinstance(e, OSError) else "lost"  # of a process that has ended a kept file may be empty
            gone = status in ("lost", "absent")
            out.at(before, out.now_ns())
            out.fail([*life.counted, *life.gauges, *(life.sums if life.summed else ())], "lost" if gone else status)
            if gone:
                life.slowly.lost(out)
                out.fail([n for thread in life.rows.values() for n in thread.numbers], "lost")
                self._gone(life, out)
            return
        out.at(before, out.now_ns())
        out.put_all(life.counted, (stat.user_ns, stat.system_ns, stat.minor_faults, stat.major_faults))
        out.put_all(life.gauges, (stat.threads, stat.rss_bytes))
        life.summed = life.summed or bool(life.threads.known)
        if life.summed:
            seen, unread = life.threads, life.unread_ns
            out.put_all(life.sums, (seen.on_cpu_ns + unread, unread, seen.run_delay_ns, seen.timeslices))
        if stat.threads > SUMMED_THREADS and not life.crowded:
            life.crowded = True
            out.event(
                "process", f"process {life.pid} has {stat.threads} threads, of which {SUMMED_THREADS} are read", self.server
            )
        if threads_too:
            life.slowly.sample(out)

    def _gone(self, life: _Life, out: Sink) -> None:
        role = self._roles.pop(life.pid, None)
        self._lives.pop(life.pid, None)
        life.close()
        if life.pid == self.pid:
            out.event("stop", f"process {life.pid} is gone", self.server)
            self.close()
            self.pid, self._lives, self._roles = None, {}, {}
        elif role in _TOLD_ROLES:
            out.event("process", f"process {life.pid} is gone ({role})", self.server)  # "stop" is the server's

    def _threads(self, now_ns: int, out: Sink) -> None:
        """The busiest threads, each with rows of its own time."""
        keys = [(-t.busy_ns, life.pid, tid) for life in self._lives.values() for tid, t in life.threads.known.items()]
        keys.sort()
        shown = sorted((pid, tid) for _, pid, tid in keys[:MAX_THREADS])
        chosen = set(shown)
        for life in self._lives.values():
            for tid in [t for t in life.rows if (life.pid, t) not in chosen]:
                life.rows.pop(tid).close()
        for pid, tid in shown:
            life = self._lives[pid]
            thread = life.rows.get(tid)
            if thread is None:
                try:
                    thread = life.rows[tid] = ThreadRows(life.threads.folder / "task" / str(tid), life.pid, tid, self._boot, out)
                except (OSError, ValueError):
                    continue  # it ended
                for born in self._birth(life, tid, thread.start_ticks, now_ns):
                    out.at(born - procfs.TICK_NS, born + procfs.TICK_NS)
                    out.put_all(thread.numbers, [0] * len(thread.numbers))
            times = life.threads.known[tid].times
            if times is not None and not thread.sample(times, out):
                life.rows.pop(tid).close()

    def _birth(self, life: _Life, tid: int, start_ticks: int, now_ns: int) -> Iterator[int]:
        """When a thread that has no rows yet began, if that was in this capture: all that it has counted belongs to it then, and
        its counters began there at 0."""
        if (tid, start_ticks) in self._told:
            return
        self._told.add((tid, start_ticks))
        if self._boot_ns is None or self._began_ns is None:
            return
        born = self._boot_ns + start_ticks * procfs.TICK_NS
        # Uptime and start are cut to 10 ms each, so by these alone a thread that was there before may look 10 ms too young.
        if tid in (life.threads.present or ()) and born <= self._began_ns + 2 * procfs.TICK_NS:
            return
        yield min(max(born, self._began_ns), now_ns)
