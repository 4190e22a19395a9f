"""On which nodes the servers' memory lies: /proc/PID/numa_maps, numa(7).

The kernel walks all of a process's memory for it and holds its map meanwhile, so it is read every ten seconds at most, and only
where there is more than one node. It is for the server's own user and root.
"""

from __future__ import annotations

import re
import time

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots, Server, found_by_error, status_of
from hoptrace.collectors.hardware.topology.memory import node_numbers
from hoptrace.collectors.hardware.tree import tree_lately

__all__ = ["NumaMapsSource", "bytes_by_node"]

_NODE, _PAGE = re.compile(rb" N(\d+)=(\d+)"), re.compile(rb" kernelpagesize_kB=(\d+)")


def bytes_by_node(data: bytes) -> dict[int, int]:
    """Resident bytes by node of a numa_maps; a line without its page size counts base pages of 4 KiB."""
    found: dict[int, int] = {}
    for line in data.splitlines():
        size = _PAGE.search(line)
        page_bytes = int(size[1]) * 1024 if size else 4096
        for m in _NODE.finditer(line):
            found[int(m[1])] = found.get(int(m[1]), 0) + int(m[2]) * page_bytes
    return found


class NumaMapsSource:
    """Entities ``process:PID``: `node0_bytes` …"""

    answers = "on which memory nodes the server's data lies"
    pace: Pace = "own"
    every_s = 10.0

    def __init__(self, server: Server, roots: Roots | None = None, *, several: bool = False) -> None:
        self.name = f"numa-maps@{server.name}" if several else "numa-maps"
        self._server, self._roots = server, roots or Roots()
        self._boot = procfs.boot_id(self._roots.proc)[:8]
        self._rest_until_s = 0.0

    def probe(self) -> Found:
        if len(node_numbers(self._roots)) < 2:
            return Found("absent", "there is one memory node: all lies there")
        found = self._server.find()
        if found.pid is None:
            return Found("absent", found.reason, "name the process after --pid")
        try:
            (self._roots.proc / str(found.pid) / "numa_maps").read_bytes()
        except OSError as e:
            return found_by_error(e, "run as the server's user or root")
        return Found("ok")

    def open(self, out: Sink) -> None:
        return None

    def sample(self, out: Sink) -> None:
        if time.monotonic() < self._rest_until_s:
            return
        found = self._server.find()
        for process in tree_lately(found.pid, self._roots.proc) if found.pid is not None else []:
            before = out.now_ns()
            life = f"{self._boot}/{process.start_ticks}"
            began = time.monotonic()
            try:
                data = (self._roots.proc / str(process.pid) / "numa_maps").read_bytes()
            except OSError as e:
                out.at(before, out.now_ns())
                out.put(self._series(out, process.pid, life, 0), None, status_of(e))
                continue
            out.at(before, out.now_ns())
            # A walk that takes long holds up the process's own page faults: rest a thousand times as long.
            self._rest_until_s = max(self._rest_until_s, time.monotonic() + 1000 * (time.monotonic() - began))
            for node, n in bytes_by_node(data).items():
                out.put(self._series(out, process.pid, life, node), n)

    def close(self) -> None:
        return None

    def _series(self, out: Sink, pid: int, life: str, node: int) -> int:
        return out.series(f"process:{pid}", f"node{node}_bytes", "bytes", "gauge", incarnation=life)
