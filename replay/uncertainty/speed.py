"""How fast the machine was: drift within a recording, and how far another run's speed may lie from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from hoptrace.comparison import COMPOSITION, speed
from hoptrace.stepcost import StepCost

__all__ = ["drift_sd", "speeds", "speed_sd_of"]

_PARTS = 4
_FEWEST = 40
_Floats = np.ndarray[Any, np.dtype[np.float64]]


def drift_sd(steps: pl.DataFrame, cost: StepCost) -> float | None:
    """Standard deviation of ln(speed of another run ÷ speed of this one), as the drift between the quarters of this one tells
    it; null with under 40 steps that ``cost`` can price.

    Time ÷ cost of each quarter: half the mean square of its differences from quarter to quarter is the Allan variance at a
    quarter of the recording (Allan, Proc. IEEE 54, 1966). Less what the steps' own scatter, redrawn in blocks, explains of it,
    and held to be the same at the length of a run, as it is of flicker noise (load that comes and goes at all scales), it gives
    two runs one after the other a difference of twice that variance. White scatter has none left; a machine that changes
    between runs, and not within them, can only be seen by repeats (:func:`speed_sd_of`).
    """
    frame = steps.drop_nulls(COMPOSITION).filter(
        (pl.col("end_ns") > pl.col("start_ns")) & (pl.col("prefill_tokens") + pl.col("decode_requests") > 0)
    )
    if frame.height < _FEWEST:
        return None
    frame = frame.sort("start_ns")
    took = (frame["end_ns"] - frame["start_ns"]).to_numpy().astype(np.float64)
    expected = np.maximum(cost.cost_ns_array(frame).astype(np.float64), 1)
    logs = np.array([_log(took[q], expected[q]) for q in np.array_split(np.arange(len(took)), _PARTS)])
    allan = float((np.diff(logs) ** 2).mean()) / 2
    return float(np.sqrt(2 * max(0.0, allan - _white(took, expected))))


def _log(took: _Floats, expected: _Floats) -> float:
    return float(np.log(took.sum() / expected.sum()))


def _white(took: _Floats, expected: _Floats) -> float:
    """Variance of a quarter's ln(time ÷ cost) if steps scattered each for itself."""
    beyond = took - expected * (took.sum() / expected.sum())
    return float((beyond**2).sum() / expected.sum() ** 2 * _PARTS)


def speeds(runs: Sequence[pl.DataFrame], cost: StepCost) -> list[float]:
    """Time that the steps of each run took ÷ what ``cost`` gives them; those that cannot be priced are left out."""
    found = (speed(steps, cost) for steps in runs)
    return [s for s in found if s is not None and s > 0]


def speed_sd_of(runs: Sequence[pl.DataFrame], cost: StepCost) -> float | None:
    """``speed_sd`` from repeats: the steps of several runs of the same server, one of which ``cost`` was fitted to. Null with
    under two that can be priced.

    The difference between two runs has twice the variance of one; of few runs the standard deviation is itself unsure, and the
    interval's draws are Student's for that.
    """
    logs = np.log(speeds(runs, cost))
    return float(np.sqrt(2) * logs.std(ddof=1)) if len(logs) >= 2 else None
