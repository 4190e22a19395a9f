"""CXL memory devices and regions: their sizes, whether a region is committed, and which memory node it is. sysfs-bus-cxl.

What crosses the link is counted by the CXL PMU (perf), where device and kernel have one. A device's health and its poison list
are not in sysfs: `cxl list -H` and the trace events of cxl ask the device for them.
"""

from __future__ import annotations

import re
from pathlib import Path

from hoptrace.collectors.hardware.sink import Sink, Status
from hoptrace.collectors.hardware.source import Found, Pace, Roots, status_of
from hoptrace.collectors.hardware.topology.memory import cxl_nodes

__all__ = ["CxlSource"]

_DEVICE, _REGION, _ENDPOINT = (re.compile(rf"{kind}\d+") for kind in ("mem", "region", "endpoint"))
_OF_DEVICE = {"ram_bytes": "ram/size", "persistent_bytes": "pmem/size", "numa_node": "numa_node"}
_OF_REGION = {
    "size_bytes": "size", "committed": "commit", "interleave_ways": "interleave_ways",
    "interleave_granularity_bytes": "interleave_granularity",
}  # fmt: skip
_Value = tuple[int | None, Status]


class CxlSource:
    """Entities ``cxl:memN`` and ``cxl:regionN``; one that comes or goes, or whose decoders change, is an event.

    `numa_node` of a device is where it is plugged in (absent where the firmware does not say), of a region the memory node that
    it is (absent where nobody tells). `decoders_committed` of a device: those of its endpoint port.
    """

    name = "cxl"
    answers = "which CXL memory there is, of what size, whether its regions are up and which memory nodes they are"
    pace: Pace = "slow"
    every_s = 5.0

    def __init__(self, roots: Roots | None = None) -> None:
        self._roots = roots or Roots()
        self._base = self._roots.sys / "bus/cxl/devices"
        self._last: dict[str, dict[str, _Value]] = {}
        self._began = False

    def probe(self) -> Found:
        try:
            found = self._read()
        except OSError:
            return Found(
                "absent", "this machine shows no CXL bus", "CXL memory, and a kernel with CONFIG_CXL_BUS, CONFIG_CXL_MEM"
            )
        if not found:
            return Found("absent", "there is a CXL bus and no memory on it")
        devices, regions = (sum(bool(p.fullmatch(n)) for n in found) for p in (_DEVICE, _REGION))
        return Found(
            "ok", "health and poison are not in sysfs: cxl list -H",
            sees=f"{devices} device{'s' * (devices != 1)}, {regions} region{'s' * (regions != 1)}",
        )  # fmt: skip

    def open(self, out: Sink) -> None:
        return None

    def sample(self, out: Sink) -> None:
        before = out.now_ns()
        try:
            found = self._read()
        except OSError:
            found = {}
        out.at(before, out.now_ns())
        for name, values in found.items():
            for what, (value, status) in values.items():
                out.put(_series(out, name, what), value, status)
        for name in sorted(self._last.keys() - found.keys()):
            out.fail((_series(out, name, what) for what in self._last[name]), "lost")
            out.event("device error", f"CXL {name} is gone")
        if self._began:
            for name in sorted(found.keys() - self._last.keys()):
                out.event("device", f"CXL {name} came")
            for name in sorted(found.keys() & self._last.keys()):
                for what in ("committed", "decoders_committed", "numa_node", "size_bytes"):
                    was, now = (side[name].get(what, (None, "absent")) for side in (self._last, found))
                    if was != now:
                        out.event("configuration change", f"CXL {name}: {what} {_text(was)} -> {_text(now)}")
        self._began, self._last = True, found

    def close(self) -> None:
        return None

    # -- inside -------------------------------------------------------------------------------------------------------

    def _read(self) -> dict[str, dict[str, _Value]]:
        """OSError where there is no CXL bus."""
        found: dict[str, dict[str, _Value]] = {}
        names = sorted(p.name for p in self._base.iterdir())
        nodes = {region: node for node, region in cxl_nodes(self._roots).items()}
        for name in names:
            if _DEVICE.fullmatch(name):
                found[name] = {what: _value(self._base / name / path) for what, path in _OF_DEVICE.items()}
            elif _REGION.fullmatch(name):
                found[name] = {what: _value(self._base / name / path) for what, path in _OF_REGION.items()}
                node = nodes.get(name)
                found[name]["numa_node"] = (node, "absent" if node is None else "ok")
        for name in names:
            if _ENDPOINT.fullmatch(name):
                device = (self._base / name / "uport").resolve().name
                if device in found:
                    found[device]["decoders_committed"] = _value(self._base / name / "decoders_committed")
        return found


def _value(path: Path) -> _Value:
    """A small file's number, decimal or 0x…; -1 is the kernel's word for none."""
    try:
        value = int(path.read_text("ascii", "replace").strip(), 0)
    except OSError as e:
        return None, status_of(e)
    except ValueError:
        return None, "error"
    return (value, "ok") if value >= 0 else (None, "absent")


def _series(out: Sink, name: str, what: str) -> int:
    return out.series(f"cxl:{name}", what, "bytes" if what.endswith("_bytes") else "1", "gauge")


def _text(value: _Value) -> str:
    return value[1] if value[0] is None else str(value[0])
