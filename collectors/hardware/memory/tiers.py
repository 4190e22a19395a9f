"""What may move between memory tiers, and which nodes are in which: switches, tiers, interleave weights. They change by hand.

sysfs-kernel-mm-numa (demotion_enabled), admin-guide/sysctl/kernel.rst (numa_balancing: 1 balances, 2 promotes between tiers),
sysfs-kernel-mm-memory-tiers, sysfs-kernel-mm-mempolicy-weighted-interleave.
"""

from __future__ import annotations

from pathlib import Path

from hoptrace.collectors.hardware.file import read_int, read_text
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots
from hoptrace.collectors.hardware.topology.memory import cpu_list

__all__ = ["TiersSource"]


class TiersSource:
    """Gauges of entity ``memory`` (switches) and ``node:N`` (tier, interleave weight); a change is an event too."""

    name = "memory-tiers"
    answers = "whether the kernel may move pages between memory tiers, and which node is in which"
    pace: Pace = "slow"
    every_s = 5.0

    def __init__(self, roots: Roots | None = None) -> None:
        self._roots = roots or Roots()
        self._last: dict[str, int] = {}

    def probe(self) -> Found:
        found = self._read()
        if not found:
            return Found("absent", "this kernel has no memory tiers (Linux 6.1 and later have)")
        tiers = len({v for k, v in found.items() if k.endswith(" tier")})
        off = [n for n in ("demotion_enabled", "numa_balancing") if found.get(n) == 0]
        why = f"off: {', '.join(off)}; promotions and demotions stay 0" if off else None
        return Found("ok", why, sees=f"{tiers} tier{'s' if tiers != 1 else ''}")

    def open(self, out: Sink) -> None:
        return None

    def sample(self, out: Sink) -> None:
        before = out.now_ns()
        found = self._read()
        out.at(before, out.now_ns())
        for key, value in found.items():
            node, _, what = key.rpartition(" ")
            out.put(out.series(node or "memory", what, "1", "gauge"), value)
            if self._last and self._last.get(key) != value:
                was = self._last.get(key)
                out.event("configuration change", f"{node or 'memory'}: {what} {'none' if was is None else was} -> {value}")
        for key in self._last.keys() - found.keys():
            node, _, what = key.rpartition(" ")
            out.put(out.series(node or "memory", what, "1", "gauge"), None, "absent")
        self._last = found

    def close(self) -> None:
        return None

    def _read(self) -> dict[str, int]:
        found: dict[str, int] = {}
        switch = read_text(self._roots.sys / "kernel/mm/numa/demotion_enabled")
        if switch is not None:
            found["demotion_enabled"] = int(switch in ("1", "true", "Y", "y"))
        if (mode := read_int(self._roots.proc / "sys/kernel/numa_balancing")) is not None:
            found["numa_balancing"] = mode
        for tier in _entries(self._roots.sys / "devices/virtual/memory_tiering"):
            number = tier.name.removeprefix("memory_tier")
            if number.isdigit():
                found |= {f"node:{n} tier": int(number) for n in sorted(cpu_list(read_text(tier / "nodelist")))}
        for weight in _entries(self._roots.sys / "kernel/mm/mempolicy/weighted_interleave"):
            value = read_int(weight)
            if weight.name.startswith("node") and weight.name[4:].isdigit() and value is not None:
                found[f"node:{weight.name[4:]} interleave_weight"] = value
        return found


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
