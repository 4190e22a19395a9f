"""How far a what-if's figures may be off: intervals from the step cost's doubt, the steps' scatter, the machine's speed, and the
requests' luck. docs/uncertainty.md says what each source is and how the coverage was measured.
"""

from __future__ import annotations

from hoptrace.replay.uncertainty.assembly import intervals
from hoptrace.replay.uncertainty.budget import DRAWS, FEWEST, LEVEL, Affordable, affordable
from hoptrace.replay.uncertainty.figures import statistics
from hoptrace.replay.uncertainty.result import Interval, Intervals
from hoptrace.replay.uncertainty.runner import Runner
from hoptrace.replay.uncertainty.speed import drift_sd, speed_sd_of
from hoptrace.replay.uncertainty.study import Draw, Study

__all__ = [
    "DRAWS", "FEWEST", "LEVEL", "Affordable", "Draw", "Interval", "Intervals", "Runner", "Study", "affordable", "drift_sd",
    "intervals", "speed_sd_of", "statistics",
]  # fmt: skip
