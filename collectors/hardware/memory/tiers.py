"""What may move between memory tiers, and which nodes are in which: switches, tiers, interleave weights. They change by hand.

sysfs-kernel-mm-numa (demotion_enabled), admin-guide/sysctl/kernel.rst (numa_balancing: bit 1 balances, bit 2 promotes between
tiers), sysfs-kernel-mm-memory-tiers (a smaller number is a faster tier, by the kernel's reckoning),
sysfs-kernel-mm-mempolicy-weighted-interleave.

While `demotion_enabled` is 0 and bit 2 of `numa_balancing` is not set, nothing may move: counters that stand still then say
nothing about what would have moved.
"""

from __future__ import annotations

from pathlib import Path

from hoptrace.collectors.hardware.file import cpu_list, read_int, read_text
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots

__all__ = ["PROMOTES", "TiersSource"]

PROMOTES = 2
"""NUMA_BALANCING_MEMORY_TIERING, include/linux/sched/sysctl.h."""

_SWITCH = {"1": 1, "true": 1, "0": 0, "false": 0}


class TiersSource:
    """Gauges of entity ``memory`` (switches) and ``node:N`` (tier, interleave weight); a change is an event too."""

    name = "memory-tiers"
    answers = "whether the kernel may move pages between memory tiers (if not, those counters stay 0), and which node is in which"
    pace: Pace = "slow"
    every_s = 5.0

    def __init__(self, roots: Roots | None = None) -> None:
        self._roots = roots or Roots()
        self._last: dict[tuple[str, str], int] = {}
        self._began = False

    def probe(self) -> Found:
        found = self._read()
        if not found:
            return Found("absent", "this kernel has no memory tiers", "Linux 6.1 or later with CONFIG_NUMA")
        tiers = len({v for (_, what), v in found.items() if what == "tier"})
        off, how = [], []
        if not found.get(("memory", "demotion_enabled")):
            off.append("demotions")
            how.append("echo 1 > /sys/kernel/mm/numa/demotion_enabled")
        if not found.get(("memory", "numa_balancing"), 0) & PROMOTES:
            off.append("promotions")
            how.append("sysctl kernel.numa_balancing=2")
        why = f"{' and '.join(off)} are switched off: their counters stay 0" if off else None
        return Found("ok", why, "; ".join(how) if off and tiers > 1 else None, sees=f"{tiers} tier{'s' * (tiers != 1)}")

    def open(self, out: Sink) -> None:
        return None

    def sample(self, out: Sink) -> None:
        before = out.now_ns()
        found = self._read()
        out.at(before, out.now_ns())
        for (entity, what), value in found.items():
            out.put(out.series(entity, what, "1", "gauge"), value)
        for entity, what in self._last.keys() - found.keys():
            out.put(out.series(entity, what, "1", "gauge"), None, "absent")
        if self._began:
            for key in sorted(found.keys() | self._last.keys()):
                was, now = self._last.get(key), found.get(key)
                if was != now:
                    out.event("configuration change", f"{key[0]}: {key[1]} {_text(was)} -> {_text(now)}")
        self._last, self._began = found, True

    def close(self) -> None:
        return None

    # -- inside -------------------------------------------------------------------------------------------------------

    def _read(self) -> dict[tuple[str, str], int]:
        found: dict[tuple[str, str], int] = {}
        switch = _SWITCH.get(read_text(self._roots.sys / "kernel/mm/numa/demotion_enabled") or "")
        if switch is not None:
            found["memory", "demotion_enabled"] = switch
        if (mode := read_int(self._roots.proc / "sys/kernel/numa_balancing")) is not None:
            found["memory", "numa_balancing"] = mode
        for tier in _entries(self._roots.sys / "devices/virtual/memory_tiering"):
            number = tier.name.removeprefix("memory_tier")
            if number.isdigit():
                found |= {(f"node:{n}", "tier"): int(number) for n in sorted(cpu_list(read_text(tier / "nodelist")))}
        for weight in _entries(self._roots.sys / "kernel/mm/mempolicy/weighted_interleave"):
            value = read_int(weight)
            if weight.name.startswith("node") and weight.name[4:].isdigit() and value is not None:
                found[f"node:{weight.name[4:]}", "interleave_weight"] = value
        return found


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(value: int | None) -> str:
    return "none" if value is None else str(value)
