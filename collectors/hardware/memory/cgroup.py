"""The memory of the servers' control groups: what lies on which node, limit, swap, what moved between tiers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.file import KeptFile
from hoptrace.collectors.hardware.memory.cgroup_files import FILES, Memory, memory_of
from hoptrace.collectors.hardware.sink import Sink, Status
from hoptrace.collectors.hardware.source import Found, Pace, Roots, Server, found_by_error, status_of

__all__ = ["CgroupMemorySource"]

_LOOK_S = 5.0


class _Group:
    def __init__(self, place: Memory, folder: Path, boot: str) -> None:
        self.entity, self.folder = f"cgroup:{place.path}", folder
        # A group that is made again has another number, and counts from 0.
        self.life = f"{boot}/{folder.stat().st_ino}"
        self.files = [(KeptFile(folder / name), read) for name, read in FILES[place.version].items() if (folder / name).is_file()]
        self.series: list[dict[str, int]] = [{} for _ in self.files]

    def close(self) -> None:
        for file, _ in self.files:
            file.close()


class CgroupMemorySource:
    """Entities ``cgroup:PATH``. Both versions of control groups; the first counts neither by tier nor its limit's pressure."""

    name = "cgroup-memory"
    answers = "how much memory the servers' control groups hold on which node, of what limit, and what moved between tiers"
    pace: Pace = "slow"
    every_s = 2.0

    def __init__(self, servers: Sequence[Server], roots: Roots | None = None) -> None:
        self._servers, self._roots = servers, roots or Roots()
        self._boot = procfs.boot_id(self._roots.proc)[:8]
        self._groups: dict[Path, _Group] = {}
        self._due_s = 0.0

    def probe(self) -> Found:
        if not self._servers:
            return Found("absent", "no server is named whose group could be looked at", "hoptrace attach")
        found, reasons = [], []
        for server in self._servers:
            place, why = self._place(server)
            if place is None:
                reasons.append(why)
                continue
            old = " (cgroup v1: nothing by tier)" if place.version == 1 else ""
            found.append(f"{place.path}{old}")
        told = "; ".join(dict.fromkeys(reasons)) or None
        if not found:
            known = any(s.find().pid is not None for s in self._servers)
            group = "put the server into a group of its own (systemd, a container)"
            return Found("absent", told, group if known else "name the process after --pid, or run as root")
        return Found("ok", told, sees=", ".join(dict.fromkeys(found)))

    def open(self, out: Sink) -> None:
        return None

    def sample(self, out: Sink) -> None:
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + _LOOK_S
            for server in self._servers:
                place, _ = self._place(server)
                if place is not None and place.folder is not None and place.folder not in self._groups:
                    try:
                        self._groups[place.folder] = _Group(place, place.folder, self._boot)
                    except OSError:
                        continue  # gone meanwhile
        for folder, group in list(self._groups.items()):
            if self._one(group, out):
                del self._groups[folder]

    def close(self) -> None:
        for group in self._groups.values():
            group.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _place(self, server: Server) -> tuple[Memory | None, str]:
        process = server.find()
        if process.pid is None:
            return None, process.reason or "its process is not known"
        try:
            place = memory_of(process.pid, self._roots.proc, self._roots.sys)
        except OSError as e:
            return None, found_by_error(e).reason or ""
        return (place, "") if place.path is not None else (None, place.reason or "")

    def _one(self, group: _Group, out: Sink) -> bool:
        """Read it; whether it has gone."""
        gone = not group.folder.is_dir()
        for (file, reading), series in zip(group.files, group.series, strict=True):
            before = out.now_ns()
            missing: Status = "absent"
            try:
                found = reading(file.read())
            except OSError as e:
                found, missing = {}, status_of(e)
            out.at(before, out.now_ns())
            for name, (value, unit, semantics) in found.items():
                number = series.get(name)
                if number is None:
                    width = 64 if semantics == "cumulative" else None
                    number = series[name] = out.series(
                        group.entity, name, unit, semantics, incarnation=group.life, width_bits=width
                    )  # fmt: skip
                out.put(number, value, "ok" if value is not None else "absent")
            out.fail((n for name, n in series.items() if name not in found), "lost" if gone else missing)
        if gone:
            group.close()
        return gone
