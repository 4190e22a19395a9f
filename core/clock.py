"""The trace clock: CLOCK_MONOTONIC of the lead host plus one UTC offset, fixed when the trace starts.

A step of the wall clock (NTP, an administrator) therefore never moves a row; it is seen by :meth:`TraceClock.wall_step_ns`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

__all__ = ["TraceClock"]


@dataclass(frozen=True, slots=True)
class TraceClock:
    """``now_ns() = CLOCK_MONOTONIC + utc_offset_ns``; all times in a trace are on this clock (int64 ns since 1970)."""

    utc_offset_ns: int

    @classmethod
    def start(cls) -> TraceClock:
        """Fix the offset now. The two clocks are read in the order M U M and the middle is taken."""
        before = time.monotonic_ns()
        utc = time.time_ns()
        after = time.monotonic_ns()
        return cls(utc - (before + after) // 2)

    def now_ns(self) -> int:
        """Now, on the trace clock, in ns."""
        return time.monotonic_ns() + self.utc_offset_ns

    def from_monotonic_ns(self, monotonic_ns: int) -> int:
        """Convert a CLOCK_MONOTONIC stamp of this host."""
        return monotonic_ns + self.utc_offset_ns

    def wall_step_ns(self) -> int:
        """How far the wall clock has moved away from the trace clock since the start, in ns (drift and steps)."""
        return time.time_ns() - self.now_ns()
