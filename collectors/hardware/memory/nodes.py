"""Each NUMA node: how full it is, where its pages were allocated from, what moved to it and away.

nodeN/{meminfo,numastat,vmstat}: Documentation/ABI/stable/sysfs-devices-node, admin-guide/numastat.rst. Promotions are counted on
the node that receives a page, demotions on the one that loses it (by node only in newer kernels: 6.12 has them, 6.1 not).
numastat counts pages at their allocation, not accesses; one allocation of a huge page counts once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.file import KeptFile
from hoptrace.collectors.hardware.memory.keyed import Keyed
from hoptrace.collectors.hardware.memory.meminfo import meminfo_bytes
from hoptrace.collectors.hardware.memory.vmstat import unit_of, wanted
from hoptrace.collectors.hardware.sink import Sink, Status
from hoptrace.collectors.hardware.source import Found, Pace, Roots, status_of
from hoptrace.collectors.hardware.topology.memory import node_numbers

__all__ = ["NodesSource"]

_LIST_S = 5.0
_KEPT = ("total_bytes", "free_bytes", "used_bytes", "cached_bytes", "anonymous_bytes", "shared_bytes", "locked_bytes")
_NUMASTAT = frozenset(("numa_hit", "numa_miss", "numa_foreign", "numa_interleave", "numa_local", "numa_other"))
_GONE = ("absent", "lost")


class _Node:
    """One node's files, how each is read, and the series that each has given so far."""

    def __init__(self, roots: Roots, n: int, life: str) -> None:
        base = roots.sys / f"devices/system/node/node{n}"
        self.entity, self.life = f"node:{n}", life
        allocated, moved = Keyed(lambda name: True), Keyed(lambda name: wanted(name) and name not in _NUMASTAT)
        self.files: list[tuple[KeptFile, Callable[[bytes], dict[str, int]], bool]] = [
            (KeptFile(base / "meminfo"), meminfo_bytes, False),
            (KeptFile(base / "numastat"), allocated.read, True),
            (KeptFile(base / "vmstat"), moved.read, True),
        ]
        self.series: list[dict[str, int]] = [{} for _ in self.files]

    def close(self) -> None:
        for file, *_ in self.files:
            file.close()


class NodesSource:
    """Entities ``node:N``. A node may go and come (memory hot-plug): an event, its series are lost meanwhile and begin anew,
    since its counters may have."""

    name = "numa"
    answers = "how full each memory node (DRAM, CXL, HBM) is, and what moved between them"
    pace: Pace = "fast"
    every_s = 1.0

    def __init__(self, roots: Roots | None = None) -> None:
        self._roots = roots or Roots()
        self._boot = procfs.boot_id(self._roots.proc)[:8]
        self._nodes: dict[int, _Node] = {}
        self._times: dict[int, int] = {}
        self._due_s = 0.0
        self._began = False

    def probe(self) -> Found:
        numbers = node_numbers(self._roots)
        if not numbers:
            return Found("absent", "this kernel shows no memory nodes (CONFIG_NUMA)")
        return Found("ok", sees=f"{len(numbers)} node{'s' if len(numbers) > 1 else ''}")

    def open(self, out: Sink) -> None:
        self._list(out)
        self._began = True

    def sample(self, out: Sink) -> None:
        if time.monotonic() >= self._due_s:
            self._list(out)
        for n, node in list(self._nodes.items()):
            if self._one(node, out):
                self._leave(n, out)

    def close(self) -> None:
        for node in self._nodes.values():
            node.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _list(self, out: Sink) -> None:
        self._due_s = time.monotonic() + _LIST_S
        now = set(node_numbers(self._roots))
        for n in sorted(self._nodes.keys() - now):
            self._leave(n, out)
        for n in sorted(now - self._nodes.keys()):
            if self._began and not (self._roots.sys / f"devices/system/node/node{n}/meminfo").exists():
                continue  # still said to be online, but its folder has gone
            times = self._times[n] = self._times.get(n, 0) + 1
            self._nodes[n] = _Node(self._roots, n, f"{self._boot}/{times}")
            if self._began:
                out.event("memory node", f"node {n} came online")

    def _leave(self, n: int, out: Sink) -> None:
        node = self._nodes.pop(n)
        out.at(at := out.now_ns(), at)
        for series in node.series:
            out.fail(series.values(), "lost")
        node.close()
        out.event("memory node", f"node {n} went offline")

    def _one(self, node: _Node, out: Sink) -> bool:
        """Read it; whether it has gone."""
        told: list[tuple[int, int, dict[str, int], Status]] = []
        for file, numbers_in, _ in node.files:
            before = out.now_ns()
            found: dict[str, int] = {}
            missing: Status = "absent"
            try:
                data = file.read()
                after = out.now_ns()
                found = numbers_in(data)
            except OSError as e:
                after, missing = out.now_ns(), status_of(e)
                if file is node.files[0][0] and missing in _GONE:
                    return True  # meminfo is there as long as the node is
            told.append((before, after, found, missing))
        for (_, _, counted), series, (before, after, found, missing) in zip(node.files, node.series, told, strict=True):
            out.at(before, after)
            for name, value in found.items():
                if (number := series.get(name)) is None:
                    if not counted and name not in _KEPT:
                        continue
                    number = series[name] = out.series(
                        node.entity, name, unit_of(name) if counted else "bytes", "cumulative" if counted else "gauge",
                        incarnation=node.life if counted else None, width_bits=64 if counted else None,
                    )  # fmt: skip
                out.put(number, value)
            if any(name not in found for name in series):
                out.fail((n for name, n in series.items() if name not in found), missing)
        return False
