"""How far a difference between two traces could be chance: a bootstrap over requests with a fixed seed.

Bounded in time and memory. Up to :data:`MOST_REQUESTS` requests, all are redrawn. Of more, the same random :data:`MOST_REQUESTS`
of them are redrawn, and the interval is narrowed by √(drawn from ÷ all): the m-out-of-n bootstrap (Bickel, Götze, van Zwet 1997),
right for means and quantiles, whose error falls with the root of the number of requests.

Of a percentile that less than one request lies beyond (p99 of under 100, p95 of under 20) a redrawn sample knows nothing
larger than its largest: the bootstrap's interval misses in some 9 to 18 % of cases, not 5. It is widened by
:data:`FEW_BEYOND`, with which it missed in 0 to 5 % of simulated cases (log-normal and exponential, 12 to 90 requests).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = [
    "FEW_BEYOND",
    "MOST_REQUESTS",
    "STATS",
    "WINDOWS",
    "Sample",
    "chosen",
    "composition_intervals",
    "interval",
    "ratio_intervals",
    "ratios",
]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bounds = tuple[float, float]
STATS = ("mean", "p50", "p95", "p99")
# Windows of ranks by end-to-end time: those of hoptrace.analysis.latency.composition (a test holds them together).
WINDOWS: dict[str, tuple[float, float] | None] = {"mean": None, "p50": (0.50, 0.05), "p95": (0.95, 0.01), "p99": (0.99, 0.005)}
MOST_REQUESTS = 20_000
FEW_BEYOND = 1.5
_QUANTILES = (0.5, 0.95, 0.99)
_SEED = 20260101
_DRAWS = 1000
_FEWEST = 200
_CELLS = 4_000_000  # values times draws at once
_FEW = 500  # values up to which all draws are ranked at once: of more, one by one is quicker
_WORK = 60_000_000  # values times draws; more values get fewer draws


@dataclass(frozen=True)
class Sample:
    """Values in any order and whose each is, as positions 0 … requests − 1: tokens of one request are drawn together.

    ``of``: how many requests there are, where only ``requests`` of them are here (:func:`chosen`).
    """

    values: Floats
    owner: Ints
    requests: int
    of: int | None = None

    @property
    def narrower(self) -> float:
        """What the width of an interval from these requests is multiplied by to hold for all: √(requests ÷ of)."""
        return float(np.sqrt(self.requests / max(self.of or 0, self.requests))) if self.requests else 1.0


def chosen(n: int, most: int = MOST_REQUESTS) -> Ints | None:
    """Positions of at most ``most`` of ``n`` requests, ascending and the same each time; null for all."""
    if n <= most:
        return None
    return np.sort(np.random.default_rng(_SEED).choice(n, most, replace=False))


def interval(a: Sample, b: Sample, *, paired: bool) -> dict[str, Bounds]:
    """95 % interval of (B's − A's) mean, p50, p95 and p99 from redrawing requests with replacement.

    Paired: the same requests are drawn on both sides (position i is the same request on both). Empty where a side has under two
    requests: nothing can be said then.
    """
    if a.requests < 2 or b.requests < 2 or not len(a.values) or not len(b.values) or (paired and a.requests != b.requests):
        return {}
    sorted_a, sorted_b = _sorted(a), _sorted(b)
    found = _bounds(
        a.requests,
        b.requests,
        lambda times: _stats(*sorted_a, times),
        lambda times: _stats(*sorted_b, times),
        paired=paired,
        values=len(a.values) + len(b.values),
        narrower=(min(a.narrower, b.narrower) if paired else max(a.narrower, b.narrower))
        * np.array([1.0, *(_wider(min(a.requests, b.requests), q) for q in _QUANTILES)]),
    )
    return {} if found is None else dict(zip(STATS, found, strict=True))


def composition_intervals(a: Floats, b: Floats, *, paired: bool, narrower: float = 1.0) -> dict[str, tuple[Floats, Floats]]:
    """95 % intervals of (B's − A's) compositions by window (:data:`WINDOWS`): arrays ``low`` and ``high``, a value per column.

    ``a`` and ``b`` have a row per request; the first column is its end-to-end time, by whose rank windows are cut, the others are
    what is averaged over the window. In each draw the requests are ranked anew. The columns of the result: first the mean of each
    column of the input (that of end-to-end time too), then each column ÷ the first: shares. Empty with under two requests.
    """
    if len(a) < 2 or len(b) < 2 or (paired and len(a) != len(b)):
        return {}
    order_a, order_b = np.argsort(a[:, 0], kind="stable"), np.argsort(b[:, 0], kind="stable")
    ranked_a, ranked_b = a[order_a], b[order_b]
    width = a.shape[1]
    found = _bounds(
        len(a),
        len(b),
        lambda times: _compositions(ranked_a, times[order_a]),
        lambda times: _compositions(ranked_b, times[order_b]),
        paired=paired,
        values=(len(a) + len(b)) * 2,
        narrower=narrower
        * np.repeat([1.0 if w is None else _wider(min(len(a), len(b)), w[0]) for w in WINDOWS.values()], 2 * width),
    )
    if found is None:
        return {}
    low, high = np.array(found).T.reshape(2, len(WINDOWS), 2 * width)
    return {name: (low[i], high[i]) for i, name in enumerate(WINDOWS)}


def ratio_intervals(a: Floats, b: Floats, *, paired: bool, narrower: float = 1.0) -> list[Bounds]:
    """How far B's − A's ratios Σ column ÷ Σ first column may be off, for each column but the first: 95 % bounds around 0.

    ``a`` and ``b`` have a row per request. Empty with under two requests, or where a sum to divide by may be 0.
    """
    if len(a) < 2 or len(b) < 2 or (paired and len(a) != len(b)):
        return []

    def ratios(rows: Floats, times: Ints) -> Floats:
        sums = times @ rows
        return sums[1:] / sums[0] if sums[0] > 0 else np.full(rows.shape[1] - 1, np.nan)

    args = (len(a), len(b), lambda times: ratios(a, times), lambda times: ratios(b, times))
    found = _bounds(*args, paired=paired, values=a.size + b.size, narrower=narrower)
    point = ratios(b, np.ones(len(b), dtype=np.int64)) - ratios(a, np.ones(len(a), dtype=np.int64))
    return [] if found is None else [(low - p, high - p) for (low, high), p in zip(found, point.tolist(), strict=True)]


def ratios(above: Sequence[tuple[Sample, int]], below: Sequence[tuple[Sample, int]]) -> dict[str, tuple[float, Bounds | None]]:
    """Π ``above`` ÷ Π ``below`` of the mean, p50, p95 and p99, each with its 95 % interval (null where too few requests or draws
    tell one).

    Each sample comes with the number of its group: samples of one group hold the same requests at the same positions, which are
    drawn together; groups are drawn apart. A ratio that the samples do not tell (a figure of 0, no value) is missing.
    """
    samples = [*((s, g, 1.0) for s, g in above), *((s, g, -1.0) for s, g in below)]
    sizes = {g: s.requests for s, g, _ in samples}
    if any(s.requests != sizes[g] for s, g, _ in samples):
        raise ValueError("samples of one group must hold the same requests")
    if not all(len(s.values) for s, _, _ in samples):
        return {}
    ordered = [(*_sorted(s), g, sign) for s, g, sign in samples]

    def log(times: dict[int, Ints]) -> Floats:
        """A row per draw; ``times``: by group, how often each request is drawn in each."""
        found = np.zeros((len(next(iter(times.values()))), len(STATS)))
        with np.errstate(divide="ignore", invalid="ignore"):
            for values, owner, g, sign in ordered:
                found += sign * np.log(_stats_of_draws(values, owner, times[g]))
        return found

    point = log({g: np.ones((1, n), dtype=np.int64) for g, n in sizes.items()})[0]
    known = np.isfinite(point)
    bounds: list[Bounds | None] = [None] * len(STATS)
    least = min(sizes.values())
    if least >= 2 and known.any():
        drawn = _drawn(sizes, sum(len(s.values) for s, _, _ in samples), log)
        narrower = max(s.narrower for s, _, _ in samples)
        for k in np.flatnonzero(known).tolist():
            usable = drawn[np.isfinite(drawn[:, k]), k]
            if len(usable) < _FEWEST // 2:
                continue
            wider = narrower * (_wider(least, _QUANTILES[k - 1]) if k else 1.0)
            low, high = np.exp(point[k] + (np.quantile(usable, [0.025, 0.975]) - point[k]) * wider)
            bounds[k] = (float(low), float(high))
    return {name: (float(np.exp(point[k])), bounds[k]) for k, name in enumerate(STATS) if known[k]}


def _drawn(sizes: dict[int, int], values: int, of: Callable[[dict[int, Ints]], Floats]) -> Floats:
    """``of`` over all draws, as many at a time as memory holds well. ``values``: of all samples together."""
    draws = int(min(_DRAWS, max(_FEWEST, _WORK // max(values, 1))))
    at_once = max(1, min(draws, _CELLS // max(values, *sizes.values())))
    rng = np.random.default_rng(_SEED)
    parts = []
    for begin in range(0, draws, at_once):
        some = min(at_once, draws - begin)
        parts.append(of({g: rng.multinomial(n, np.full(n, 1 / n), size=some) for g, n in sizes.items()}))
    return np.concatenate(parts)


def ranks(n: int, window: tuple[float, float] | None) -> tuple[int, int]:
    """First and last rank (0-based, both included) of a window of ``n`` ranked requests, as the compositions are cut."""
    if window is None:
        return 0, n - 1
    q, half = window
    nearest = min(n - 1, max(0, round(q * (n - 1))))
    low = min(nearest, -int(-(q - half) * (n - 1) // 1))
    return max(0, low), min(n - 1, max(nearest, int((q + half) * (n - 1))))


def _wider(requests: int, q: float) -> float:
    """What an interval of the quantile q is widened by: see the module."""
    return FEW_BEYOND if requests * (1 - q) < 1 - 1e-9 else 1.0


def _bounds(
    n_a: int,
    n_b: int,
    of_a: Callable[[Ints], Floats],
    of_b: Callable[[Ints], Floats],
    *,
    paired: bool,
    values: int,
    narrower: float | Floats,
) -> list[Bounds] | None:
    """Percentile interval of each component of of_b − of_a; both take how often each request is drawn."""
    draws = int(min(_DRAWS, max(_FEWEST, _WORK // max(values, 1))))
    rng = np.random.default_rng(_SEED)
    point = of_b(np.ones(n_b, dtype=np.int64)) - of_a(np.ones(n_a, dtype=np.int64))
    differences = np.empty((draws, len(point)))
    for i in range(draws):
        times_a = np.bincount(rng.integers(0, n_a, n_a), minlength=n_a)
        times_b = times_a if paired else np.bincount(rng.integers(0, n_b, n_b), minlength=n_b)
        differences[i] = of_b(times_b) - of_a(times_a)
    usable = differences[~np.isnan(differences).any(axis=1)]
    if len(usable) < _FEWEST // 2 or np.isnan(point).any():
        return None
    low, high = np.quantile(usable, [0.025, 0.975], axis=0)
    low, high = point + (low - point) * narrower, point + (high - point) * narrower
    return list(zip(low.tolist(), high.tolist(), strict=True))


def _sorted(s: Sample) -> tuple[Floats, Ints]:
    order = np.argsort(s.values, kind="stable")
    return s.values[order], s.owner[order]


def _stats(values: Floats, owner: Ints, times: Ints) -> Floats:
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


def _stats_of_draws(values: Floats, owner: Ints, times: Ints) -> Floats:
    """:func:`_stats` for each row of ``times``, at once where the values are few."""
    if len(values) > _FEW:
        return np.stack([_stats(values, owner, row) for row in times])
    weight = times[:, owner]
    upto = np.cumsum(weight, axis=1)
    n = upto[:, -1]
    found = np.full((len(times), len(STATS)), np.nan)
    some = n > 0
    found[some, 0] = (weight[some] @ values) / n[some]
    for k, q in enumerate(_QUANTILES, start=1):
        at = q * (n - 1)
        low = np.floor(at)
        first, second = (
            values[np.minimum((upto <= rank[:, None]).sum(axis=1), len(values) - 1)] for rank in (low, np.minimum(low + 1, n - 1))
        )
        found[some, k] = (first + (second - first) * (at - low))[some]
    return found


def _compositions(ranked: Floats, times: Ints) -> Floats:
    """Means and shares by window, in one row. ``ranked``: requests by end-to-end time, ``times``: how often each is drawn."""
    upto = np.cumsum(times)
    length = ranked[:, 0]
    out = []
    for window in WINDOWS.values():
        low, high = ranks(int(upto[-1]), window)
        first, last = np.searchsorted(upto, [low, high], side="right")
        # Those that took as long as the first or the last belong to them, a request that is drawn twice too.
        start, end = np.searchsorted(length, length[first], "left"), np.searchsorted(length, length[last], "right")
        inside = slice(int(start), int(end))
        weight = times[inside]
        means = weight @ ranked[inside] / weight.sum()
        out += [means, means / means[0] if means[0] > 0 else np.zeros_like(means)]
    return np.concatenate(out)
