"""Steps that the step cost was not measured on: how much rests on them, and how far that may be off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import polars as pl

from hoptrace.replay.calibration.coverage import COVERED, HALF, coverage
from hoptrace.replay.outcome import STEP
from hoptrace.replay.plan import Plan
from hoptrace.replay.rows.recorder import PRICED
from hoptrace.replay.setting import Ints
from hoptrace.replay.uncertainty.study import Draw
from hoptrace.stepcost_domain import Domain

__all__ = ["HALF", "Beyond", "doubted"]

_TWICE = float(np.log(2) / 1.645)
"""Standard deviation of ln(truth ÷ extrapolated cost): within a factor of two nine times of ten. Not measured: a straight line
that was fitted to one decoder gave four of them 0.6 of their time on llama.cpp (the sample traces)."""


class Beyond:
    """A :class:`hoptrace.replay.outcome.Sink` that holds steps against what their costs were measured on."""

    def __init__(self, plan: Plan) -> None:
        self._of = np.array([e.cost for e in plan.engines], dtype=np.int64)
        self.domains = [Domain(cost) for cost in plan.costs]

    def take(self, kind: str, rows: Ints) -> None:
        """See :class:`hoptrace.replay.outcome.Sink`."""
        if kind != "step" or not len(rows):
            return
        of = self._of[rows[:, STEP.index("engine")]]
        for i, domain in enumerate(self.domains):
            mine = rows[of == i]
            domain.add(pl.DataFrame({n: mine[:, STEP.index(n)] for n in PRICED}))

    def share(self) -> float:
        """Of the step time, what rests on extrapolated step costs; 0 where the costs do not say what they know."""
        return coverage(self.domains).share or 0.0


def doubted(draws: Sequence[Draw], share: float) -> list[Draw]:
    """The draws with the doubt of that share on top: steps as a whole so much slower or faster, evenly from a normal distribution
    in an order of its own. Of a covered run as they are."""
    if share <= COVERED or not draws:
        return list(draws)
    from scipy.special import ndtri

    even = ndtri((np.arange(len(draws)) + 0.5) / len(draws))
    logs = np.random.default_rng([draws[0].seed, 2]).permutation(even) * share * _TWICE
    return [replace(d, speed=d.speed * float(np.exp(x))) for d, x in zip(draws, logs, strict=True)]
