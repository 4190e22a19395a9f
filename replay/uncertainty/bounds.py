"""From draws of a figure to the interval that one more draw lies in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hoptrace.replay.uncertainty.result import Interval

__all__ = ["bounds"]

_MANY = 19
"""Draws from which on 90 % lie between two of them: fewer have no 5 % quantile."""
_FARTHEST = 600.0  # |ln|: what a float can hold


def bounds(draws: Sequence[float], level: float, point: float | None = None) -> Interval | None:
    """The interval that one more draw of the same kind lies in with probability ``level``; null with under two draws.

    Of many draws, between two of them (ranks (n + 1)(1 ∓ level) ÷ 2, linear between: exact whatever the distribution). Of
    few, Student's prediction interval, mean ∓ t·s·√(1 + 1 ÷ n), of the logarithms where all are positive. ``point``: the figure
    that is printed, which is a draw too: the interval holds it.
    """
    x = np.asarray(draws, dtype=np.float64)
    x = x[np.isfinite(x)]
    n = len(x)
    if n < 2:
        return None
    tail = (1 - level) / 2
    if n >= _MANY and (n + 1) * tail >= 1 - 1e-9:
        low, high = (float(v) for v in np.quantile(x, [tail, 1 - tail], method="weibull"))
    else:
        logs = bool((x > 0).all())
        y = np.log(x) if logs else x
        reach = _student(n - 1, 1 - tail) * float(y.std(ddof=1)) * math.sqrt(1 + 1 / n)
        low, high = (float(y.mean()) - reach, float(y.mean()) + reach)
        if logs:
            low, high = (float(v) for v in np.exp(np.clip([low, high], -_FARTHEST, _FARTHEST)))
        low = max(low, 0.0)
    if point is not None and math.isfinite(point):
        low, high = min(low, point), max(high, point)
    return Interval(low, high)


def _student(freedom: int, q: float) -> float:
    from scipy.special import stdtrit

    found: Any = stdtrit(freedom, q)
    return float(found)
