"""Which events of a CPU's own counters are asked for, and under which name each is the truth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hoptrace.collectors.hardware.perf.events import CACHE, HARDWARE, Event

__all__ = ["hardware_events"]

# linux/perf_event.h: perf_hw_id.
_CYCLES, _INSTRUCTIONS, _CACHE_MISSES, _STALLED_FRONT, _STALLED_BACK = 0, 1, 3, 7, 8
# perf_hw_cache_id LL, op READ, result MISS: id | op << 8 | result << 16.
_LAST_LEVEL_READ_MISS = 2 | 0 << 8 | 1 << 16


def hardware_events(proc: Path = Path("/proc")) -> Mapping[str, Sequence[Event]]:
    """Counter → event. What the CPU at hand lacks is refused when it is opened.

    The kernel's generic "cache misses" are misses of the last level on Intel alone; on AMD they are of the second level (event
    0x0964, arch/x86/events/amd/core.c), on Arm of the first (L1D_CACHE_REFILL, drivers/perf/arm_pmuv3.c). There the reads that
    missed the last level are asked for, which few AMD and many Arm CPUs count for a thread. ``stalled_cycles``: for want of data
    or of a unit to work on it (the back end); ``stalled_front_cycles``: for want of instructions.
    """
    last_level = (
        {"llc_misses": (Event(HARDWARE, _CACHE_MISSES),)}
        if _intel(proc)
        else {"llc_read_misses": (Event(CACHE, _LAST_LEVEL_READ_MISS),)}
    )
    return {
        "cpu_cycles": (Event(HARDWARE, _CYCLES),),
        "instructions": (Event(HARDWARE, _INSTRUCTIONS),),
        **last_level,
        "stalled_cycles": (Event(HARDWARE, _STALLED_BACK),),
        "stalled_front_cycles": (Event(HARDWARE, _STALLED_FRONT),),
    }


def _intel(proc: Path) -> bool:
    try:
        with (proc / "cpuinfo").open("rb") as file:
            return b"GenuineIntel" in file.read(4096)
    except OSError:
        return False
