"""What the kernel's memory management did: pages moved between tiers and nodes, swapped, faulted in from a disk.

/proc/vmstat counts base pages (`page_size_bytes` of entity ``memory`` says of what size), also where a huge page moved.
Promotions and demotions stay 0 while the switches are off: :mod:`hoptrace.collectors.hardware.memory.tiers` records those.
"""

from __future__ import annotations

import os

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.file import KeptFile
from hoptrace.collectors.hardware.memory.keyed import Keyed
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots, found_by_error, status_of

__all__ = ["VmstatSource", "unit_of", "wanted"]

_PREFIXES = ("pgpromote_", "pgdemote_", "pgmigrate_", "numa_", "thp_", "allocstall", "pswp", "zswp", "swpin", "swpout")
_NAMES = frozenset(("pgmajfault", "oom_kill", "compact_stall"))
_FAULTS = frozenset(("numa_hint_faults", "numa_hint_faults_local", "pgmajfault"))
_TIMES = ("allocstall", "oom_kill", "compact_stall", "thp_", "numa_huge_pte_updates")


def wanted(name: str) -> bool:
    """Whether a name of vmstat is kept: what moves between nodes by prefix, since kernels add to it."""
    return name.startswith(_PREFIXES) or name in _NAMES


def unit_of(name: str) -> str:
    """pages, but for what counts faults or occasions (thp_… and numa_huge_… count huge pages, by their number)."""
    return "faults" if name in _FAULTS else "times" if name.startswith(_TIMES) else "pages"


class VmstatSource:
    """Entity ``memory``: the whole machine. Raw pages are kept; bytes are pages × `page_size_bytes`."""

    name = "vmstat"
    answers = "what moved between memory tiers (pages × page_size_bytes; memory-tiers: may it?), was swapped or faulted in"
    pace: Pace = "fast"
    every_s = 1.0

    def __init__(self, roots: Roots | None = None) -> None:
        self._roots = roots or Roots()
        self._file, self._keyed = KeptFile(self._roots.proc / "vmstat"), Keyed(wanted)
        self._boot = procfs.boot_id(self._roots.proc)[:8]
        self._numbers: dict[str, int] = {}

    def probe(self) -> Found:
        try:
            found = self._keyed.read(self._file.read())
        except OSError as e:
            return found_by_error(e)
        if not found:
            return Found("absent", "/proc/vmstat has none of the counters that are kept")
        tiering = sum(name.startswith(("pgpromote_", "pgdemote_")) for name in found)
        why = None if tiering else "this kernel counts no promotions and demotions (Linux 5.15, 5.18 and later do)"
        return Found("ok", why, sees=f"{len(found)} counters")

    def open(self, out: Sink) -> None:
        now = out.now_ns()
        out.at(now, now)
        out.put(out.series("memory", "page_size_bytes", "bytes", "gauge"), os.sysconf("SC_PAGE_SIZE"))

    def sample(self, out: Sink) -> None:
        before = out.now_ns()
        try:
            data = self._file.read()
        except OSError as e:
            out.at(before, out.now_ns())
            out.fail(self._numbers.values(), status_of(e))
            return
        out.at(before, out.now_ns())
        found = self._keyed.read(data)
        for name, n in found.items():
            number = self._numbers.get(name)
            if number is None:
                number = self._numbers[name] = out.series(
                    "memory", name, unit_of(name), "cumulative", incarnation=self._boot, width_bits=64
                )  # fmt: skip
            out.put(number, n)
        if len(found) < len(self._numbers):
            out.fail((n for name, n in self._numbers.items() if name not in found), "absent")

    def close(self) -> None:
        self._file.close()
