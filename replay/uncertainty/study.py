"""What is drawn: the step cost, the residuals, the machine's speed, the times outside steps, the requests. One study serves any
number of what-ifs on one trace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from hoptrace.errors import InputError
from hoptrace.replay.overheads import Overheads, overheads
from hoptrace.replay.prepare import Prepared
from hoptrace.replay.setting import Ints
from hoptrace.replay.uncertainty.outside import halves
from hoptrace.replay.uncertainty.parameters import FORMS, from_covariance, refitted
from hoptrace.replay.uncertainty.residuals import Blocks, blocks
from hoptrace.replay.uncertainty.speed import drift_sd
from hoptrace.stepcost import StepCost, fit

__all__ = ["Draw", "Study", "often"]

_FREEDOM = 3  # four quarters, or a handful of repeats, tell a standard deviation: draws are Student's
_MOST_SPEED = 1.0  # |ln| of a drawn speed at most: e times as slow or fast


@dataclass(frozen=True)
class Draw:
    """What all sides of one draw share.

    Attributes:
        seed: of random routing and acceptance. speed: steps take so many times as long.
        cost: in place of the fitted one. outside: times outside steps, null: as measured.
        blocks: which stretches of the recorded residuals come, and in which order.
        often: int64[n], how often each request of the trace's work comes in another sample of like traffic.
    """

    seed: int
    speed: float
    cost: StepCost
    outside: Overheads | None
    blocks: Blocks
    often: Ints


class Study:
    """The draws for the what-ifs on one trace; :class:`hoptrace.replay.uncertainty.runner.Runner` runs them.

    Attributes:
        prepared: as given. base: the fitted step cost. measured: the times outside steps.
        draws: empty where ``unknown`` says why there can be none.
        speed_sd: standard deviation of ln(speed) between runs; speed_from: where it is from, in words.
        sources: what is drawn, in words. notes: what is not.
    """

    def __init__(self, prepared: Prepared, draws: int = 40, seed: int = 0, speed_sd: float | None = None) -> None:
        """``speed_sd``: from repeats (:func:`hoptrace.replay.uncertainty.speed.speed_sd_of`); null: from the drift within the
        recording."""
        p = prepared
        self.prepared = p
        self.base = p.own.plan.costs[p.own.plan.engines[0].cost]
        self.draws: list[Draw] = []
        self.sources: list[str] = []
        self.notes: list[str] = []
        self.speed_sd, self.speed_from = 0.0, ""
        self.unknown = ""
        if self.base.origin != "fitted":
            self.unknown = f"No intervals: how far a {self.base.origin} step cost is off the machine's is not known."
            self.measured = overheads(p.parent.trace, p.seen.steps, p.seen.residency)
            return
        rng = np.random.default_rng([seed, 20261130])
        costs = self._costs(draws, rng)
        self.sources.append("residuals: the recorded steps', in redrawn stretches")
        self._speed(speed_sd)
        self.measured, halved = halves(p.parent.trace, p.seen, draws, rng)
        if halved:
            self.sources.append("times outside steps: measured on half the requests")
        logs = self._logs(draws, rng)
        first = p.planned.plan.seed + 1
        for i in range(draws):
            self.draws.append(Draw(
                seed=first + i, speed=float(np.exp(logs[i])), cost=costs[i % len(costs)],
                outside=halved[i % len(halved)] if halved else None, blocks=blocks(rng), often=often(p.work.n, rng),
            ))  # fmt: skip

    def _costs(self, n: int, rng: np.random.Generator) -> list[StepCost]:
        p = self.prepared
        if p.how.get("kind") == "fitted" and self._is_of(p.seen.steps):
            found = refitted(p.seen.steps, n, rng)
            if found:
                self.sources.append(
                    f"step cost: {len(found)} fits to redrawn steps, in {min(FORMS, len(found))} choices of features"
                )
                return found
        found = from_covariance(self.base, p.seen.steps, n, rng)
        if found:
            self.sources.append("step cost: its covariance")
            return found
        self.notes.append("The step cost's own doubt is not in the intervals: it has no covariance.")
        return [self.base]

    def _is_of(self, steps: pl.DataFrame) -> bool:
        """Whether the step cost was fitted to these steps."""
        try:
            again = fit(steps)
        except InputError:
            return False
        return (again.coefficients_ps, again.pieces) == (self.base.coefficients_ps, self.base.pieces)

    def _speed(self, given: float | None) -> None:
        told, sd = "repeats", given
        if sd is None:
            told, sd = "drift between the quarters of the recording", drift_sd(self.prepared.seen.steps, self.base)
        if sd is None:
            told, sd = "not known", 0.0
            self.notes.append("Too few steps to tell the machine's drift: in the intervals its speed is steady.")
        self.speed_sd, self.speed_from = sd, told
        self.sources.append(f"machine speed: ±{100 * (np.exp(sd) - 1):.1f} % between runs (standard deviation; {told})")

    def _logs(self, n: int, rng: np.random.Generator) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """ln of the speeds, taken evenly from their distribution, in random order: the ends of an interval then hang less on the
        luck of few draws."""
        from scipy.special import stdtrit

        even = stdtrit(_FREEDOM, (np.arange(n) + 0.5) / n)
        found: np.ndarray[tuple[int], np.dtype[np.float64]] = np.clip(
            rng.permutation(even) * self.speed_sd, -_MOST_SPEED, _MOST_SPEED
        )
        return found


def often(n: int, rng: np.random.Generator) -> Ints:
    """How often each of n requests is drawn: blocks of √n requests that arrived one after another (Künsch 1989, circular), since
    those in one queue are late together."""
    length = max(1, round(n**0.5))
    begin = rng.integers(0, n, -(-n // length))
    index = (begin[:, None] + np.arange(length)).ravel()[:n] % n
    return np.bincount(index, minlength=n).astype(np.int64)
