"""Energy of CPU packages and their memory: RAPL through powercap (Documentation/power/powercap/powercap.rst).

The counter wraps at ``max_energy_range_uj``, which is no power of two, so the wraps are counted here: ``energy_uj`` of
``rapl:package-0`` goes on. Where it can have wrapped more than once between two readings, a new series begins: nobody knows then.
"""

from __future__ import annotations

import os
from pathlib import Path

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.file import KeptFile, read_int, read_text
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots, found_by_error, status_of

__all__ = ["MOST_WATTS", "EnergySource", "Unwrapped"]

MOST_WATTS = 2000
"""More than any package draws: a counter that could turn once within a gap at this power is not trusted across it."""


class Unwrapped:
    """A counter that begins anew at ``most`` + 1 step: its total since the first reading, and which stretch of trust it is in."""

    def __init__(self, most_uj: int) -> None:
        self._most_uj = most_uj
        self._last: tuple[int, int] | None = None
        self._wrapped_uj = 0
        self.wraps = self.stretch = 0

    def add(self, value_uj: int, at_ns: int) -> int | None:
        """The reading with its wraps, in µJ; null for one beyond the range."""
        if value_uj < 0 or value_uj > self._most_uj:
            return None
        if self._last is not None:
            last_uj, last_ns = self._last
            # µJ ÷ W = µs. Between the two it turned once at most if the whole range takes longer than the gap.
            if (at_ns - last_ns) / 1000 * MOST_WATTS >= self._most_uj:
                self.stretch += 1
                self._wrapped_uj = 0
            elif value_uj < last_uj:
                self._wrapped_uj += self._most_uj
                self.wraps += 1
        self._last = (value_uj, at_ns)
        return self._wrapped_uj + value_uj


class EnergySource:
    """Once a second; a zone of 262 kJ turns in nine minutes at 500 W."""

    name = "rapl"
    answers = "how much energy the CPU packages and their memory took"
    pace: Pace = "slow"
    every_s = 1.0

    def __init__(self, roots: Roots | None = None) -> None:
        self._roots = roots or Roots()
        self._boot = procfs.boot_id(self._roots.proc)[:8]
        self._zones: list[tuple[str, KeptFile, Unwrapped]] = []

    def probe(self) -> Found:
        zones = _zones(self._roots)
        if not zones:
            why = "no RAPL zones in /sys/class/powercap: a virtual machine, a CPU without RAPL, or its driver is not loaded"
            return Found("absent", why, "modprobe intel_rapl_msr (also on AMD), on the host")
        refused = None
        readable = []
        for name, folder in zones:
            try:
                os.close(os.open(folder / "energy_uj", os.O_RDONLY))
                readable.append(name)
            except OSError as e:
                refused = refused or found_by_error(e, "run as root: energy_uj is readable by root only since CVE-2020-8694")
        if not readable:
            return refused or Found("absent", "no zone tells its energy")
        return Found("ok", refused.reason if refused else None, refused.remedy if refused else None, ", ".join(readable))

    def open(self, out: Sink) -> None:
        for name, folder in _zones(self._roots):
            most = read_int(folder / "max_energy_range_uj")
            if most is None or most <= 0:
                out.drop("zones without a range (their wraps could not be told)")
                continue
            self._zones.append((name, KeptFile(folder / "energy_uj"), Unwrapped(most)))

    def sample(self, out: Sink) -> None:
        for name, file, count in self._zones:
            before = out.now_ns()
            value: int | None
            try:
                word = file.read().strip()
            except OSError as e:
                out.at(before, out.now_ns())
                out.put(self._series(out, name, count.stretch), None, status_of(e))
                continue
            after = out.now_ns()
            out.at(before, after)
            stretch = count.stretch
            value = count.add(int(word), after) if word.isdigit() else None
            if count.stretch != stretch:
                out.event("gap", f"rapl:{name} was not read for so long that it can have wrapped twice: its energy begins anew")
            out.put(self._series(out, name, count.stretch), value, "ok" if value is not None else "error")
            out.put(out.series(f"rapl:{name}", "energy_wraps", "wraps", "cumulative", incarnation=self._boot), count.wraps)

    def close(self) -> None:
        for _, file, _ in self._zones:
            file.close()

    def _series(self, out: Sink, name: str, stretch: int) -> int:
        life = f"{self._boot}/{stretch}" if stretch else self._boot
        return out.series(f"rapl:{name}", "energy_uj", "uJ", "cumulative", incarnation=life)


def _zones(roots: Roots) -> list[tuple[str, Path]]:
    """(package-0 or package-0/dram, folder) of each zone. The memory mapped interface (intel-rapl-mmio) tells of the same package
    again and is left out."""
    try:
        folders = sorted((roots.sys / "class/powercap").iterdir())
    except OSError:
        return []
    found = []
    for folder in folders:
        kind, _, place = folder.name.partition(":")
        if kind != "intel-rapl" or not place:
            continue
        name = read_text(folder / "name") or folder.name
        parts = place.split(":")
        if len(parts) > 1:
            above = read_text(folder.parent / f"{kind}:{':'.join(parts[:-1])}" / "name")
            name = f"{above}/{name}" if above else name
        if (folder / "energy_uj").exists():
            found.append((name, folder))
    return found
