"""The server's processes as the operating system sees them, and the machine around them, so that foreign load can be told apart.

Entities: ``process:PID`` of each process of the server's tree (API servers, engines, workers), ``thread:PID/TID`` (at most 64 in
all, the busiest), ``cpu`` (the whole machine), ``hoptrace:PID`` (this process: collectors, proxy, and what else runs in it),
``pressure``. The machine's busy time less these processes' is what others took. Events of kind `process` say which is which.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from hoptrace.collectors.base import Finding
from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.listener import Found, find_listener
from hoptrace.collectors.hardware.process_threads import Threads
from hoptrace.collectors.hardware.tree import tree_of
from hoptrace.errors import UsageError
from hoptrace.writer import TraceWriter

__all__ = ["MAX_THREADS", "ProcessCollector"]

MAX_THREADS = 64
"""Threads that get rows of their own, of all of the server's processes together."""

_THREAD_UNITS = {
    "on_cpu_ns": "ns", "run_delay_ns": "ns", "timeslices": "times", "voluntary_switches": "switches",
    "involuntary_switches": "switches",
}  # fmt: skip
_THREADS_EVERY_NS = 1_000_000_000
_TREE_EVERY_NS = 5_000_000_000
_TOLD_ROLES = ("api", "engine", "worker")


# Who reads the machine and this process for a trace: of several servers' collectors one, else the same counter stands twice in
# it, read at other times, and seems to fall.
_READERS: WeakKeyDictionary[TraceWriter, int] = WeakKeyDictionary()


class ProcessCollector:
    """Samples a process and those that it has started. ``find`` tells its number, and is asked again when it has gone."""

    name = "process"
    tables = ("counters",)

    def __init__(self, find: Callable[[], Found], host: str, writer: TraceWriter | None, *, proc: Path = Path("/proc")) -> None:
        self._find = find
        self._host = host
        self._writer = writer
        self._proc = proc
        self._boot = procfs.boot_id(proc)[:8]
        self._lives: dict[int, Threads] = {}
        self._roles: dict[int, str] = {}
        self._tree_due_ns = 0
        self._threads_due_ns = 0
        self._look_again_ns = 0
        self._boot_ns: int | None = None
        self._began_ns: int | None = None
        self._told: set[tuple[int, int]] = set()
        self.pid: int | None = None

    async def probe(self) -> Finding:
        return await asyncio.to_thread(self._probe)

    async def start(self) -> None:
        return None

    async def sample(self) -> int:
        # In a thread: reading some hundred small files must not delay the proxy's stamps.
        return await asyncio.to_thread(self._sample)

    def restarted(self) -> None:
        """Nothing to do: a new process is told by its number and its start."""

    async def close(self) -> None:
        return None

    # -- inside -------------------------------------------------------------------------------------------------------

    def _probe(self) -> Finding:
        if not (self._proc / "stat").exists():
            return Finding(False, "this system has no Linux /proc")
        found = self._find()
        if found.pid is None:
            return Finding(False, found.reason)
        try:
            stat = procfs.process_stat(self._folder(found.pid))
        except (OSError, ValueError):
            return Finding(False, f"there is no process {found.pid} that this user may look at")
        self._take(found.pid, stat)
        try:
            procfs.schedstat(self._folder(found.pid) / "task" / str(found.pid))
        except (OSError, ValueError):
            return Finding(True, found.reason or "this kernel offers no schedstat: no run-queue delay")
        return Finding(True, found.reason)

    def _folder(self, pid: int) -> Path:
        return self._proc / str(pid)

    def _take(self, pid: int, stat: procfs.ProcessStat) -> None:
        self.pid = pid
        self._lives = {pid: Threads(stat.start_ticks)}
        self._roles = {}
        self._threads_due_ns = self._tree_due_ns = 0

    def _sample(self) -> int:
        assert self._writer is not None
        self._look_at_tree()
        before = self._writer.clock.now_ns()
        if self._began_ns is None and (up := procfs.uptime_ns(self._proc)) is not None:
            self._began_ns, self._boot_ns = before, before - up
        rows = list(self._machine()) if _READERS.setdefault(self._writer, id(self)) == id(self) else []
        if self.pid is None and before >= self._look_again_ns:
            self._look_again_ns = before + 2_000_000_000
            self._search()
            self._look_at_tree()
        if self.pid is not None:
            rows += self._processes(before)
        after = self._writer.clock.now_ns()
        stamp: dict[str, Any] = {"time_ns": (before + after) // 2, "uncertainty_ns": (after - before) // 2}
        stamp |= {"host": self._host, "source": self.name}
        # A row that knows its own time keeps it.
        self._writer.append("counters", [stamp | row for row in rows])
        return len(rows)

    def _look_at_tree(self) -> None:
        """Every five seconds: processes that the server has started. Those that have gone are seen when they are read."""
        assert self._writer is not None
        now = self._writer.clock.now_ns()
        if self.pid is None or now < self._tree_due_ns:
            return
        self._tree_due_ns = now + _TREE_EVERY_NS
        tree = tree_of(self.pid, self._proc)
        for process in tree:
            if process.pid in self._lives and process.pid in self._roles:
                continue
            self._lives.setdefault(process.pid, Threads(process.start_ticks))
            self._roles[process.pid] = process.role
            if len(tree) > 1 and process.role in _TOLD_ROLES:
                self._event("process", f"process {process.pid} is the server's: {process.role} ({process.command})")

    def _processes(self, now_ns: int) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        seen: dict[tuple[int, int], procfs.SchedStat] = {}
        for pid in list(self._lives):
            assert self._writer is not None
            before = self._writer.clock.now_ns()
            try:
                own = self._process(pid, seen)
                after = self._writer.clock.now_ns()
                # Of its own time: a server may have dozens of processes, with hundreds of threads to read.
                rows += [{"time_ns": (before + after) // 2, "uncertainty_ns": (after - before) // 2} | row for row in own]
            except (FileNotFoundError, ProcessLookupError, ValueError):
                rows.append(self._missing(pid, "lost"))
                self._gone(pid)
                if self.pid is None:
                    return rows
            except PermissionError:
                rows.append(self._missing(pid, "denied"))
        if now_ns >= self._threads_due_ns:
            self._threads_due_ns = now_ns + _THREADS_EVERY_NS
            rows += self._thread_rows(seen, now_ns)
        return rows

    def _missing(self, pid: int, status: str) -> dict[str, Any]:
        return self._row(f"process:{pid}", self._incarnation(pid), "cpu_user_ns", None, "ns", "cumulative", status)

    def _search(self) -> None:
        found = self._find()
        if found.pid is None:
            return
        try:
            self._take(found.pid, procfs.process_stat(self._folder(found.pid)))
        except (OSError, ValueError):
            return
        self._event("start", f"the server's process is {found.pid}")

    def _gone(self, pid: int) -> None:
        role = self._roles.pop(pid, None)
        del self._lives[pid]
        if pid == self.pid:
            self._event("stop", f"process {pid} is gone")
            self.pid, self._lives, self._roles = None, {}, {}
        elif role in _TOLD_ROLES:
            self._event("process", f"process {pid} is gone ({role})")  # "stop" is the server's

    def _event(self, kind: str, detail: str) -> None:
        assert self._writer is not None
        now = self._writer.clock.now_ns()
        self._writer.append("events", [{"time_ns": now, "host": self._host, "kind": kind, "detail": detail, "source": self.name}])

    def _incarnation(self, pid: int) -> str:
        return f"{self._boot}/{self._lives[pid].start_ticks}"

    def _process(self, pid: int, seen: dict[tuple[int, int], procfs.SchedStat]) -> list[dict[str, Any]]:
        folder, life = self._folder(pid), self._lives[pid]
        stat = procfs.process_stat(folder)
        if stat.start_ticks != life.start_ticks or stat.state in ("Z", "X"):
            raise ProcessLookupError(pid)  # the number was given to another process, or this one has ended
        threads = life.read(folder)
        seen |= {(pid, tid): value for tid, value in threads.items()}
        entity, incarnation = f"process:{pid}", self._incarnation(pid)

        def row(name: str, value: int, unit: str, semantics: str = "cumulative") -> dict[str, Any]:
            return self._row(entity, incarnation, name, value, unit, semantics)

        rows = [
            row("cpu_user_ns", stat.user_ns, "ns"),
            row("cpu_system_ns", stat.system_ns, "ns"),
            row("minor_faults", stat.minor_faults, "faults"),
            row("major_faults", stat.major_faults, "faults"),
            row("threads", stat.threads, "threads", "gauge"),
            row("rss_bytes", stat.rss_bytes, "bytes", "gauge"),
        ]
        if threads:
            # Over all threads, since this collector came.
            rows += [
                row("on_cpu_ns", life.sums.on_cpu_ns, "ns"),
                row("run_delay_ns", life.sums.run_delay_ns, "ns"),
                row("timeslices", life.sums.timeslices, "times"),
            ]
        return rows

    def _thread_rows(self, seen: dict[tuple[int, int], procfs.SchedStat], now_ns: int) -> Iterator[dict[str, Any]]:
        def idle(key: tuple[int, int]) -> tuple[int, int, int]:
            return -self._lives[key[0]].busy.get(key[1], 0), *key

        for pid, tid in sorted(sorted((k for k in seen if k[0] in self._lives), key=idle)[:MAX_THREADS]):
            folder = self._folder(pid) / "task" / str(tid)
            try:
                start_ticks = procfs.process_stat(folder).start_ticks
                incarnation = f"{self._boot}/{start_ticks}"
                changed = procfs.switches(folder)
            except (OSError, ValueError):
                continue
            entity, stat = f"thread:{pid}/{tid}", seen[pid, tid]
            values = {"on_cpu_ns": stat.on_cpu_ns, "run_delay_ns": stat.run_delay_ns, "timeslices": stat.timeslices}
            if changed is not None:
                values |= {"voluntary_switches": changed[0], "involuntary_switches": changed[1]}
            born = self._birth(pid, tid, start_ticks, now_ns)
            for name, value in values.items():
                row = self._row(entity, incarnation, name, value, _THREAD_UNITS[name], "cumulative")
                if born is not None:
                    yield row | {"value_int": 0, "time_ns": born, "uncertainty_ns": procfs.TICK_NS}
                yield row

    def _birth(self, pid: int, tid: int, start_ticks: int, now_ns: int) -> int | None:
        """When a thread that has no rows yet began, if that was in this capture: all that it has counted belongs to it then, and
        its counters began there at 0."""
        if (tid, start_ticks) in self._told:
            return None
        self._told.add((tid, start_ticks))
        if self._boot_ns is None or self._began_ns is None:
            return None
        born = self._boot_ns + start_ticks * procfs.TICK_NS
        # Uptime and start are cut to 10 ms each, so by these alone a thread that was there before may look 10 ms too young.
        if tid in self._lives[pid].present and born <= self._began_ns + 2 * procfs.TICK_NS:
            return None
        return min(max(born, self._began_ns), now_ns)

    def _machine(self) -> Iterator[dict[str, Any]]:
        try:
            times = procfs.cpu_times(self._proc)
        except (OSError, ValueError):
            times = {}
        for name, value in times.items():
            unit, semantics = ("cpus", "gauge") if name == "cpus" else ("ns", "cumulative")
            yield self._row("cpu", self._boot, name, value, unit, semantics)
        # What the capture itself costs: not the server's, and no stranger's either.
        yield self._row(f"hoptrace:{os.getpid()}", self._boot, "on_cpu_ns", time.process_time_ns(), "ns", "cumulative")
        for name, value in procfs.pressure(self._proc).items():
            yield self._row("pressure", self._boot, name, value, "ns", "cumulative")

    @staticmethod
    def _row(
        entity: str, incarnation: str, name: str, value: int | None, unit: str, semantics: str, status: str = "ok"
    ) -> dict[str, Any]:
        return {
            "entity": entity, "incarnation": incarnation, "name": name, "value_int": value, "unit": unit, "semantics": semantics,
            "width_bits": 64 if semantics == "cumulative" else None, "status": status,
        }  # fmt: skip


def fixed(pid: int, url: str | None = None) -> Callable[[], Found]:
    """``find`` for a number that the user gave, with a remark where another process holds ``url``'s port.

    Raises:
        UsageError: there is no such process.
    """
    if Path("/proc/stat").exists() and not Path(f"/proc/{pid}").exists():
        raise UsageError(f"There is no process {pid}.", hint="Give the server's number, or --pid auto.")
    holder = find_listener(url).pid if url is not None else None
    # An engine may well be another process than the one that listens: a remark, no refusal.
    other = holder not in (None, pid)
    remark = f"process {pid} does not hold the server's port, {holder} does: is it the server's?" if other else None
    return lambda: Found(pid, remark) if Path(f"/proc/{pid}").exists() else Found(None, f"there is no process {pid}")


def own_host() -> str:
    """Name of this host in rows."""
    return os.uname().nodename
