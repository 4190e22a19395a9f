"""This host's clocks against the trace's, once a second, and steps of the wall clock.

The trace clock is CLOCK_MONOTONIC plus an offset that never changes. Stamps of other clocks (a driver's in UTC, a profiler's in
CLOCK_MONOTONIC_RAW, a kernel's in time since boot) are put on it through these rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from hoptrace.collectors.hardware.file import read_text
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots

__all__ = ["STEP_NS", "ClocksSource"]

STEP_NS = 50_000_000
"""A wall clock that moves by more against the trace clock within a second has been set: drift is below 500 ppm (adjtimex(2))."""

_TRIES = 5
_CLOCKS = {"utc": time.CLOCK_REALTIME, "boottime": time.CLOCK_BOOTTIME, "monotonic_raw": time.CLOCK_MONOTONIC_RAW}


class ClocksSource:
    """``read`` reads a clock by its number (time.clock_gettime_ns)."""

    name = "clocks"
    answers = "where stamps of other clocks lie on the trace's, and whether the wall clock was set"
    pace: Pace = "fast"
    every_s = 1.0

    def __init__(self, roots: Roots | None = None, read: Callable[[int], int] = time.clock_gettime_ns) -> None:
        self._roots = roots or Roots()
        self._read = read
        self._utc_ns: int | None = None

    def probe(self) -> Found:
        clock = read_text(self._roots.sys / "devices/system/clocksource/clocksource0/current_clocksource")
        return Found("ok", sees=f"clock source {clock}" if clock else None)

    def open(self, out: Sink) -> None:
        return None

    def sample(self, out: Sink) -> None:
        for name, number in _CLOCKS.items():
            offset_ns, half_ns, at_ns = self._offset(number, out)
            out.clock(name, offset_ns, half_ns, at_ns)
            if name == "utc":
                if self._utc_ns is not None and abs(moved_ns := offset_ns - self._utc_ns) > STEP_NS:
                    out.event("clock step", f"the wall clock was set by {moved_ns / 1e9:+.3f} s; rows keep the trace clock")
                self._utc_ns = offset_ns

    def close(self) -> None:
        return None

    def _offset(self, clock: int, out: Sink) -> tuple[int, int, int]:
        """Foreign less trace time, half the bracket's width, and when: the tightest of five brackets."""
        best: tuple[int, int, int] | None = None
        for _ in range(_TRIES):
            before = self._read(time.CLOCK_MONOTONIC)
            there = self._read(clock)
            after = self._read(time.CLOCK_MONOTONIC)
            if best is None or after - before < best[1] - best[0]:
                best = (before, after, there)
        assert best is not None
        at_ns = out.from_monotonic_ns((best[0] + best[1]) // 2)
        return best[2] - at_ns, (best[1] - best[0] + 1) // 2, at_ns
