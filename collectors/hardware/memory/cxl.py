"""CXL memory devices and regions: their sizes, and whether a region is committed. sysfs-bus-cxl.

What crosses the link is counted by the CXL PMU (perf), where device and kernel have one.
"""

from __future__ import annotations

import re
from pathlib import Path

from hoptrace.collectors.hardware.file import read_int
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots

__all__ = ["CxlSource"]

_DEVICE, _REGION = re.compile(r"mem\d+"), re.compile(r"region\d+")


class CxlSource:
    """Entities ``cxl:memN`` and ``cxl:regionN``; one that comes or goes is an event."""

    name = "cxl"
    answers = "which CXL memory there is, of what size, and whether its regions are up"
    pace: Pace = "slow"
    every_s = 5.0

    def __init__(self, roots: Roots | None = None) -> None:
        self._base = (roots or Roots()).sys / "bus/cxl/devices"
        self._last: dict[str, dict[str, int]] = {}
        self._began = False

    def probe(self) -> Found:
        if not self._base.is_dir():
            return Found(
                "absent", "this machine shows no CXL bus", "CXL memory, and a kernel with CONFIG_CXL_BUS, CONFIG_CXL_MEM"
            )
        found = self._read()
        if not found:
            return Found("absent", "there is a CXL bus and no memory on it")
        devices, regions = (sum(bool(p.fullmatch(n)) for n in found) for p in (_DEVICE, _REGION))
        return Found("ok", sees=f"{devices} devices, {regions} regions")

    def open(self, out: Sink) -> None:
        return None

    def sample(self, out: Sink) -> None:
        before = out.now_ns()
        found = self._read()
        out.at(before, out.now_ns())
        for name, values in found.items():
            for what, value in values.items():
                out.put(out.series(f"cxl:{name}", what, "bytes" if what.endswith("_bytes") else "1", "gauge"), value)
        for name in sorted(self._last.keys() - found.keys()):
            out.fail(
                (out.series(f"cxl:{name}", w, "bytes" if w.endswith("_bytes") else "1", "gauge") for w in self._last[name]),
                "lost",
            )
            out.event("device error", f"CXL {name} is gone")
        if self._began:
            for name in sorted(found.keys() - self._last.keys()):
                out.event("device", f"CXL {name} came")
            for name in sorted(found.keys() & self._last.keys()):
                was, now = self._last[name].get("committed"), found[name].get("committed")
                if was != now:
                    out.event("configuration change", f"CXL {name}: committed {was} -> {now}")
        self._began, self._last = True, found

    def close(self) -> None:
        return None

    def _read(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        try:
            paths = sorted(self._base.iterdir())
        except OSError:
            return {}
        for path in paths:
            values: dict[str, int | None] = {}
            if _DEVICE.fullmatch(path.name):
                values = {"ram_bytes": read_int(path / "ram/size"), "persistent_bytes": read_int(path / "pmem/size")}
                values |= {"numa_node": _numa(path)}
            elif _REGION.fullmatch(path.name):
                values = {"size_bytes": read_int(path / "size"), "committed": read_int(path / "commit")}
                values |= {"interleave_ways": read_int(path / "interleave_ways")}
            if known := {k: v for k, v in values.items() if v is not None}:
                found[path.name] = known
        return found


def _numa(path: Path) -> int | None:
    node = read_int(path / "numa_node")
    return node if node is not None and node >= 0 else None
