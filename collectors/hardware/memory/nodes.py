"""Each NUMA node: how full it is, where its pages were allocated from, what moved to it and away.

nodeN/{meminfo,numastat,vmstat}: Documentation/ABI/stable/sysfs-devices-node, admin-guide/numastat.rst. Promotions are counted on
the node that receives a page, demotions on the one that loses it. numastat counts pages at their allocation, not accesses.
"""

from __future__ import annotations

import time

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.file import KeptFile
from hoptrace.collectors.hardware.memory.keyed import Keyed
from hoptrace.collectors.hardware.memory.meminfo import meminfo_bytes
from hoptrace.collectors.hardware.memory.vmstat import unit_of, wanted
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots, status_of
from hoptrace.collectors.hardware.topology.memory import node_numbers

__all__ = ["NodesSource"]

_LIST_S = 5.0
_KEPT = ("total_bytes", "free_bytes", "used_bytes", "cached_bytes", "anonymous_bytes")


class _Node:
    def __init__(self, roots: Roots, n: int) -> None:
        base = roots.sys / f"devices/system/node/node{n}"
        self.entity = f"node:{n}"
        self.meminfo, self.numastat, self.vmstat = (KeptFile(base / f) for f in ("meminfo", "numastat", "vmstat"))
        self.allocated, self.moved = Keyed(lambda name: True), Keyed(wanted)
        self.series: dict[str, int] = {}

    def close(self) -> None:
        for file in (self.meminfo, self.numastat, self.vmstat):
            file.close()


class NodesSource:
    """Entities ``node:N``. Nodes may go and come (memory hot-plug): an event, and their series are lost meanwhile."""

    name = "numa"
    answers = "how full each memory node (DRAM, CXL, HBM) is, and what moved between them"
    pace: Pace = "fast"
    every_s = 1.0

    def __init__(self, roots: Roots | None = None) -> None:
        self._roots = roots or Roots()
        self._boot = procfs.boot_id(self._roots.proc)[:8]
        self._nodes: dict[int, _Node] = {}
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
        for node in self._nodes.values():
            self._one(node, out)

    def close(self) -> None:
        for node in self._nodes.values():
            node.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _list(self, out: Sink) -> None:
        self._due_s = time.monotonic() + _LIST_S
        now = set(node_numbers(self._roots))
        for n in sorted(self._nodes.keys() - now):
            node = self._nodes.pop(n)
            out.at(at := out.now_ns(), at)
            out.fail(node.series.values(), "lost")
            node.close()
            out.event("memory node", f"node {n} went offline")
        for n in sorted(now - self._nodes.keys()):
            self._nodes[n] = _Node(self._roots, n)
            if self._began:
                out.event("memory node", f"node {n} came online")

    def _one(self, node: _Node, out: Sink) -> None:
        before = out.now_ns()
        found: dict[str, tuple[int, str, bool]] = {}
        broken: list[OSError] = []
        for file in (node.meminfo, node.numastat, node.vmstat):
            try:
                data = file.read()
            except OSError as e:
                broken.append(e)
                continue
            if file is node.meminfo:
                found |= {n: (v, "bytes", False) for n, v in meminfo_bytes(data).items() if n in _KEPT}
            elif file is node.numastat:
                found |= {n: (v, "pages", True) for n, v in node.allocated.read(data).items()}
            else:
                found |= {n: (v, unit_of(n), True) for n, v in node.moved.read(data).items()}
        out.at(before, out.now_ns())
        for name, (value, unit, counted) in found.items():
            number = node.series.get(name)
            if number is None:
                number = node.series[name] = out.series(
                    node.entity, name, unit, "cumulative" if counted else "gauge",
                    incarnation=self._boot if counted else None, width_bits=64 if counted else None,
                )  # fmt: skip
            out.put(number, value)
        if broken:
            # At once, not at the next listing: what can't be read now has no value now.
            out.fail((n for name, n in node.series.items() if name not in found), status_of(broken[0]))
            self._due_s = 0.0
