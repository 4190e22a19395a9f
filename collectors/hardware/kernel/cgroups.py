"""The control groups of the servers: how long they wanted a resource and had none, and how long a CPU limit held them back.

Entities: ``pressure:PATH`` (pressure of the group's tasks, as ``pressure`` is the machine's) and ``cgroup:PATH``.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.file import KeptFile
from hoptrace.collectors.hardware.kernel.cgroup_files import Place, keyed, place_of
from hoptrace.collectors.hardware.pressure import pressure_totals
from hoptrace.collectors.hardware.sink import Semantics, Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots, Server, found_by_error, status_of

__all__ = ["CgroupSource"]

_LOOK_S = 5.0
_RESOURCES = ("cpu", "memory", "io")
_Fields = tuple[tuple[bytes, str, str, int], ...]
_CPU: Final[_Fields] = (
    (b"usage_usec", "cpu_ns", "ns", 1000), (b"nr_periods", "limit_periods", "periods", 1),
    (b"nr_throttled", "throttled_periods", "periods", 1), (b"throttled_usec", "throttled_ns", "ns", 1000),
)  # fmt: skip
_CPU_V1: Final[_Fields] = (
    (b"nr_periods", "limit_periods", "periods", 1), (b"nr_throttled", "throttled_periods", "periods", 1),
    (b"throttled_time", "throttled_ns", "ns", 1),
)  # fmt: skip
_MEMORY: Final[_Fields] = (
    (b"high", "memory_high_events", "times", 1), (b"max", "memory_max_events", "times", 1),
    (b"oom_kill", "oom_kills", "processes", 1),
)  # fmt: skip
"""Key, name, unit, factor. throttled: added up over the CPUs on which the group had to wait (cgroup-v2.rst, cpu.stat)."""


class _Group:
    """A group's files that are there, and their series."""

    def __init__(self, place: Place, boot: str) -> None:
        assert place.path is not None
        self.path, self.boot = place.path, boot
        made = next((f.stat().st_ctime_ns for f in (place.folder, place.cpu_v1) if f is not None), 0)
        self.life = f"{boot}/{made}"
        self.pressure: dict[str, KeptFile] = {}
        self.tables: list[tuple[KeptFile, _Fields]] = []
        self.current: KeptFile | None = None
        cpu: tuple[Path, _Fields] | None = None if place.cpu_v1 is None else (place.cpu_v1, _CPU_V1)
        if (folder := place.folder) is not None:
            self.pressure = {r: KeptFile(folder / f"{r}.pressure") for r in _RESOURCES if (folder / f"{r}.pressure").is_file()}
            if (folder / "memory.events").is_file():
                self.tables.append((KeptFile(folder / "memory.events"), _MEMORY))
            if (folder / "memory.current").is_file():
                self.current = KeptFile(folder / "memory.current")
            if cpu is None or b"nr_throttled" in _content(folder / "cpu.stat"):
                cpu = (folder, _CPU)
        if cpu is not None and (cpu[0] / "cpu.stat").is_file():
            self.tables.append((KeptFile(cpu[0] / "cpu.stat"), cpu[1]))
        self.known: list[int] = []

    def series(self, out: Sink, entity: str, name: str, unit: str, semantics: Semantics = "cumulative") -> int:
        number = out.series(
            f"{entity}:{self.path}", name, unit, semantics, incarnation=self.life,
            width_bits=64 if semantics == "cumulative" else None,
        )  # fmt: skip
        if number not in self.known:
            self.known.append(number)
        return number

    @property
    def empty(self) -> bool:
        return not self.pressure and not self.tables

    def close(self) -> None:
        for file in (*self.pressure.values(), *(f for f, _ in self.tables), *([self.current] if self.current else [])):
            file.close()


class CgroupSource:
    """One source for all servers: several may be in one group. Twice a second; groups are looked up every five seconds."""

    name = "cgroups"
    answers = "whether a CPU or memory limit of its container holds a server back"
    pace: Pace = "fast"
    every_s = 0.5

    def __init__(self, servers: tuple[Server, ...], roots: Roots | None = None) -> None:
        self._servers = servers
        self._roots = roots or Roots()
        self._boot = procfs.boot_id(self._roots.proc)[:8]
        self._groups: dict[str, _Group] = {}
        self._due_s = 0.0

    def probe(self) -> Found:
        if not self._servers:
            return Found("absent", "no server is named whose group could be looked at", "hoptrace attach")
        found, reasons, remedy = [], [], "name the process after --pid, or run as root"
        for server in self._servers:
            process = server.find()
            if process.pid is None:
                reasons.append(process.reason or "its process is not known")
                continue
            remedy = "put the server into a group of its own (systemd, a container)"
            try:
                place = place_of(process.pid, self._roots.proc, self._roots.sys)
            except OSError as e:
                reasons.append(found_by_error(e).reason or "")
                continue
            if place.path is None or (group := _Group(place, self._boot)).empty:
                reasons.append(place.reason or f"control group {place.path} has no files of pressure or CPU time")
                continue
            found.append(f"{place.path}{'' if group.pressure else ' (first version: no pressure)'}")
        if not found:
            return Found("absent", "; ".join(dict.fromkeys(reasons)), remedy)
        return Found("ok", "; ".join(dict.fromkeys(reasons)) or None, sees=", ".join(dict.fromkeys(found)))

    def open(self, out: Sink) -> None:
        return None

    def sample(self, out: Sink) -> None:
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + _LOOK_S
            self._look()
        for path, group in list(self._groups.items()):
            self._one(group, out)
            if group.known and not _lives(group):
                out.fail(group.known, "lost")
                group.close()
                del self._groups[path]

    def close(self) -> None:
        for group in self._groups.values():
            group.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        for server in self._servers:
            process = server.find()
            if process.pid is None:
                continue
            try:
                place = place_of(process.pid, self._roots.proc, self._roots.sys)
                if place.path is not None and place.path not in self._groups:
                    group = _Group(place, self._boot)
                    if not group.empty:
                        self._groups[place.path] = group
            except OSError:
                continue  # gone meanwhile: it is looked for again

    def _one(self, group: _Group, out: Sink) -> None:
        for resource, file in group.pressure.items():
            before = out.now_ns()
            try:
                data = file.read()
            except OSError as e:
                out.at(before, out.now_ns())
                out.fail([group.series(out, "pressure", f"{resource}_{k}_ns", "ns") for k in ("some", "full")], status_of(e))
                continue
            out.at(before, out.now_ns())
            for kind, total_us in pressure_totals(data):
                out.put(group.series(out, "pressure", f"{resource}_{kind.decode()}_ns", "ns"), total_us * 1000)
        for file, fields in group.tables:
            before = out.now_ns()
            try:
                told = keyed(file.read())
            except OSError as e:
                out.at(before, out.now_ns())
                out.fail([group.series(out, "cgroup", name, unit) for _, name, unit, _ in fields], status_of(e))
                continue
            out.at(before, out.now_ns())
            for key, name, unit, factor in fields:
                if (n := told.get(key)) is not None:
                    out.put(group.series(out, "cgroup", name, unit), n * factor)
        if group.current is not None:
            number = group.series(out, "cgroup", "memory_used_bytes", "bytes", "gauge")
            before = out.now_ns()
            try:
                word = group.current.read().strip()
            except OSError as e:
                out.at(before, out.now_ns())
                out.put(number, None, status_of(e))
                return
            out.at(before, out.now_ns())
            out.put(number, int(word) if word.isdigit() else None, "ok" if word.isdigit() else "error")


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _lives(group: _Group) -> bool:
    file = next(iter(group.pressure.values()), None) or group.tables[0][0]
    return file.path.exists()
