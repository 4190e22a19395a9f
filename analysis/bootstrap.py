"""How far a difference between two traces could be chance: a bootstrap over requests with a fixed seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["STATS", "Sample", "interval", "mean_intervals"]

Floats = npt.NDArray[np.float64]
STATS = ("mean", "p50", "p95", "p99")
_QUANTILES = (0.5, 0.95, 0.99)
_SEED = 20260101
_DRAWS = 1000
_FEWEST = 100
_WORK = 100_000_000  # values times draws; more values get fewer draws


@dataclass(frozen=True)
class Sample:
    """Values in any order and whose each is, as positions 0 … requests − 1: tokens of one request are drawn together."""

    values: Floats
    owner: npt.NDArray[np.int64]
    requests: int


def interval(a: Sample, b: Sample, *, paired: bool) -> dict[str, tuple[float, float]]:
    """95 % interval of (B's − A's) mean, p50, p95 and p99 from redrawing requests with replacement.

    Paired: the same requests are drawn on both sides (position i is the same request on both). Empty where a side has under two
    requests: nothing can be said then.
    """
    if a.requests < 2 or b.requests < 2 or not len(a.values) or not len(b.values) or (paired and a.requests != b.requests):
        return {}
    draws = int(min(_DRAWS, max(_FEWEST, _WORK // (len(a.values) + len(b.values)))))
    rng = np.random.default_rng(_SEED)
    differences = np.empty((draws, len(STATS)))
    sorted_a, sorted_b = _sorted(a), _sorted(b)
    for i in range(draws):
        times_a = np.bincount(rng.integers(0, a.requests, a.requests), minlength=a.requests)
        times_b = times_a if paired else np.bincount(rng.integers(0, b.requests, b.requests), minlength=b.requests)
        differences[i] = _stats(*sorted_b, times_b) - _stats(*sorted_a, times_a)
    usable = differences[~np.isnan(differences).any(axis=1)]
    if len(usable) < _FEWEST // 2:
        return {}
    low, high = np.quantile(usable, [0.025, 0.975], axis=0)
    return {s: (float(low[k]), float(high[k])) for k, s in enumerate(STATS)}


def mean_intervals(a: Floats, b: Floats, *, paired: bool) -> list[tuple[float, float] | None]:
    """95 % intervals of (B's − A's) means, column by column; ``a`` and ``b`` have a row per request. See :func:`interval`."""
    if len(a) < 2 or len(b) < 2 or (paired and len(a) != len(b)):
        return [None] * a.shape[1]
    draws = int(min(_DRAWS, max(_FEWEST, _WORK // (len(a) + len(b)))))
    rng = np.random.default_rng(_SEED)
    differences = np.empty((draws, a.shape[1]))
    for i in range(draws):
        times_a = np.bincount(rng.integers(0, len(a), len(a)), minlength=len(a))
        times_b = times_a if paired else np.bincount(rng.integers(0, len(b), len(b)), minlength=len(b))
        differences[i] = times_b @ b / len(b) - times_a @ a / len(a)
    low, high = np.quantile(differences, [0.025, 0.975], axis=0)
    return list(zip(low.tolist(), high.tolist(), strict=True))


def _sorted(s: Sample) -> tuple[Floats, npt.NDArray[np.int64]]:
    order = np.argsort(s.values, kind="stable")
    return s.values[order], s.owner[order]


def _stats(values: Floats, owner: npt.NDArray[np.int64], times: npt.NDArray[np.int64]) -> Floats:
    """Mean and quantiles of the values, each taken as often as its request was drawn (quantiles: linear, as everywhere)."""
    weight = times[owner]
    upto = np.cumsum(weight)
    n = int(upto[-1])
    if n == 0:
        return np.full(len(STATS), np.nan)
    at = np.array(_QUANTILES) * (n - 1)
    low = np.floor(at)
    first = values[np.searchsorted(upto, low, side="right")]
    second = values[np.searchsorted(upto, np.minimum(low + 1, n - 1), side="right")]
    quantiles = first + (second - first) * (at - low)
    return np.concatenate([[float(values @ weight) / n], quantiles])
