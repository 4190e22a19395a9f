"""On which nodes the servers' memory lies: /proc/PID/numa_maps, numa(7).

The kernel walks all of a process's memory for it and holds its map meanwhile, so it is read every ten seconds at most, and only
where there is more than one node. It is for the server's own user and root.
"""

from __future__ import annotations

import errno
import re
import time

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots, Server, found_by_error, status_of
from hoptrace.collectors.hardware.topology.memory import node_numbers
from hoptrace.collectors.hardware.tree import tree_lately

__all__ = ["NumaMapsSource", "bytes_by_node"]

_NODE, _PAGE = re.compile(rb" N(\d{1,5})=(\d{1,15})(?=\s|$)"), re.compile(rb" kernelpagesize_kB=(\d{1,9})(?=\s|$)")
_REST = 1000


def bytes_by_node(data: bytes) -> dict[int, int]:
    """Resident bytes by node of a numa_maps. A line without its page size counts base pages; one without its end is left out."""
    found: dict[int, int] = {}
    for line in data.split(b"\n")[:-1]:
        size = _PAGE.search(line)
        page_bytes = int(size[1]) * 1024 if size else procfs.PAGE_BYTES
        for m in _NODE.finditer(line):
            found[int(m[1])] = found.get(int(m[1]), 0) + int(m[2]) * page_bytes
    return found


class NumaMapsSource:
    """Entities ``process:PID``: `node0_bytes` …, also of nodes where nothing of it lies: a walk that found none is a zero."""

    answers = "on which memory nodes the server's data lies"
    pace: Pace = "own"
    every_s = 10.0

    def __init__(self, server: Server, roots: Roots | None = None, *, several: bool = False) -> None:
        self.name = f"numa-maps@{server.name}" if several else "numa-maps"
        self._server, self._roots = server, roots or Roots()
        self._boot = procfs.boot_id(self._roots.proc)[:8]
        self._rest_until_s = 0.0
        self._series: dict[tuple[int, int], dict[int, int]] = {}

    def probe(self) -> Found:
        if len(node_numbers(self._roots)) < 2:
            return Found("absent", "there is one memory node: all lies there", "a machine with several")
        found = self._server.find()
        if found.pid is None:
            return Found("absent", found.reason, "name the process after --pid")
        try:
            (self._roots.proc / str(found.pid) / "numa_maps").read_bytes()
        except OSError as e:
            return found_by_error(e, "run as the server's user or root (in a container: CAP_SYS_PTRACE); CONFIG_NUMA")
        return Found("ok")

    def open(self, out: Sink) -> None:
        return None

    def sample(self, out: Sink) -> None:
        if time.monotonic() < self._rest_until_s:
            return
        nodes = node_numbers(self._roots)
        found = self._server.find()
        seen: set[tuple[int, int]] = set()
        for process in tree_lately(found.pid, self._roots.proc) if found.pid is not None else []:
            seen.add(key := (process.pid, process.start_ticks))
            self._one(key, nodes, out)
        for key in self._series.keys() - seen:
            out.at(at := out.now_ns(), at)
            out.fail(self._series.pop(key).values(), "lost")

    def close(self) -> None:
        return None

    def _one(self, key: tuple[int, int], nodes: list[int], out: Sink) -> None:
        series = self._series.setdefault(key, {})
        before, began = out.now_ns(), time.monotonic()
        try:
            data = (self._roots.proc / str(key[0]) / "numa_maps").read_bytes()
            if not data:  # it has ended: what lives has memory
                raise ProcessLookupError(errno.ESRCH, "no memory")
        except OSError as e:
            out.at(before, out.now_ns())
            for node in nodes:
                self._number(key, node, out)
            out.fail(series.values(), status_of(e))
            return
        out.at(before, out.now_ns())
        # A walk that takes long holds up the process's own page faults: rest a thousand times as long.
        self._rest_until_s = max(self._rest_until_s, time.monotonic() + _REST * (time.monotonic() - began))
        found = bytes_by_node(data)
        for node in sorted({*nodes, *found, *series}):
            out.put(self._number(key, node, out), found.get(node, 0))

    def _number(self, key: tuple[int, int], node: int, out: Sink) -> int:
        series = self._series[key]
        if node not in series:
            life = f"{self._boot}/{key[1]}"
            series[node] = out.series(f"process:{key[0]}", f"node{node}_bytes", "bytes", "gauge", incarnation=life)
        return series[node]
