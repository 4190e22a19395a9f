"""How far two runs of one policy on one machine stand apart: the noise floor under every error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from hoptrace.analysis.fidelity.speed import machine_speed
from hoptrace.comparison import compare
from hoptrace.reader import Trace
from hoptrace.stepcost import StepCost

__all__ = ["Floor", "Noise", "noise_of"]


@dataclass(frozen=True, slots=True)
class Floor:
    """|later ÷ earlier − 1| in % over pairs of neighbouring runs: the median and the largest."""

    median_pct: float
    largest_pct: float


@dataclass(frozen=True)
class Noise:
    """``runs``: the names of the runs in the order in which they were made, A first; ``speeds``: how much longer equal steps took
    in each than in A (null where steps do not tell); ``floors``: by metric and statistic."""

    runs: tuple[str, ...]
    speeds: tuple[float | None, ...]
    floors: dict[tuple[str, str], Floor]

    def get(self, metric: str, statistic: str) -> Floor | None:
        """The floor of a figure; null where a run does not tell it."""
        return self.floors.get((metric, statistic))

    def as_dict(self) -> dict[str, Any]:
        speeds = [None if s is None else round(s, 6) for s in self.speeds]
        return {"runs": [{"trace": n, "speed": s} for n, s in zip(self.runs, speeds, strict=True)]}


def noise_of(a: Trace, repeats: Sequence[Trace], cost: StepCost | None) -> Noise | None:
    """Compare each run with the one before it, ``a`` the first; null without repeats."""
    if not repeats:
        return None
    runs = [a, *repeats]
    apart: dict[tuple[str, str], list[float]] = {}
    for earlier, later in pairwise(runs):
        for d in compare(earlier, later).differences:
            if d.error_pct is not None:
                apart.setdefault((d.metric, d.statistic), []).append(abs(d.error_pct))
    floors = {k: Floor(median(v), max(v)) for k, v in apart.items() if len(v) == len(repeats)}
    return Noise(tuple(t.name for t in runs), tuple(machine_speed(a, t, cost) for t in runs), floors)
