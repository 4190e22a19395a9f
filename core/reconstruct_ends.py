"""When each iteration ended, from the times of its tokens: a token is never seen before its iteration has ended, and iterations
of one time last about as long; what came later than that was held up on its way."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

__all__ = ["sends_within", "step_ends"]

_Ints = np.ndarray[Any, np.dtype[np.int64]]

# A step's end is bounded by the first tokens of so many steps after it, less what steps of their composition take at least: the
# quantile, over so many steps around, of the mean of so many steps. Chosen on recorded vLLM runs of 5 to 100 ms a step
# (docs/steps.md).
_AHEAD = 4
_QUANTILE = 0.05
_AROUND = 65
_ENOUGH = 50
_ENOUGH_SENT = 200
_FIT_ROUNDS = 10
_FIT_ROWS = 10_000


def step_ends(first: _Ints, last: _Ints, reads: _Ints) -> _Ints:
    """End of each step, ns.

    Args:
        first, last: times of its first token and of its last one that was not late.
        reads: how many reads it has.

    An engine that sends its tokens before it goes on (llama.cpp samples slot after slot) ends a step with the last; there the end
    is the last token, but at most twice as long after the first as is usual for as many. One that hands them over and goes on
    (vLLM's API server is a process of its own) ends it before the first, and what made the first token late is not the step's.
    Which it is, the data tell: :func:`sends_within`. What every token takes on its way stays in: no token tells it.
    """
    if sends_within(first, last, reads):
        return _usual_end(first, last, reads)
    early = np.minimum.accumulate(first[::-1])[::-1]
    return np.maximum.accumulate(_without_delays(early, reads))


def sends_within(first: _Ints, last: _Ints, reads: _Ints) -> bool:
    """Whether sending is part of the step: then a step whose tokens take longer puts the next one off by as much.

    Among steps of equal numbers of reads (their own and the next one's), the fifth whose tokens lie farthest apart is compared
    with the fifth where they lie closest: by how much the distance to the next step's first token differs (medians), as a share
    of how much the spread does. It is 1 if sending is part of the step, 0 if it runs beside the next one; vLLM runs gave −0.1 to
    0.25, llama.cpp 0.66. True where fewer than 200 steps tell: they differ by a few hundredths of a step.
    """
    spread, gap = (last - first)[:-1], np.diff(first)
    some = reads[:-1] > 1
    if some.sum() < _ENOUGH_SENT:
        return True
    # Breaks and hold-ups say nothing of it.
    some &= (gap <= 3 * np.median(gap[some])) & (spread <= np.quantile(spread[some], 0.95))
    d = (
        pl.DataFrame({"n": reads[:-1][some], "next": reads[1:][some], "x": spread[some], "y": gap[some]})
        .filter(pl.len().over("n", "next") > 5)
        .select(pl.col(c) - pl.col(c).median().over("n", "next") for c in ("x", "y"))
    )
    if d.height < _ENOUGH_SENT:
        return True
    x, y = d["x"].to_numpy(), d["y"].to_numpy()
    long, short = x >= np.quantile(x, 0.8), x <= np.quantile(x, 0.2)
    apart = float(np.median(x[long]) - np.median(x[short]))
    return apart <= 0 or float(np.median(y[long]) - np.median(y[short])) > 0.5 * apart


def _usual_end(first: _Ints, last: _Ints, reads: _Ints) -> _Ints:
    """The last token, but at most twice as long after the first as is usual for as many tokens. A token that comes later still
    was held up on its way (a busy proxy or client), and is no reason to take the time off the next step."""
    spread = last - first
    end = last.copy()
    for n in np.unique(reads[reads > 1]):
        rows = reads == n
        end[rows] = first[rows] + np.minimum(spread[rows], 2 * int(np.median(spread[rows])))
    return end


def _without_delays(first: _Ints, reads: _Ints) -> _Ints:
    """``first`` less what later steps show to be delay: the first token of a step k steps on can't come earlier than k short
    steps after this one's end."""
    n = len(first)
    if n <= _AHEAD:
        return first
    gap = np.diff(first, prepend=first[0])
    usual = np.cumsum(_usual_length(gap, reads))
    rest = (first - first[0]) - usual
    # Over a break the distance is no length of steps.
    breaks = np.cumsum(gap > 3 * np.median(gap[gap > 0]) if (gap > 0).any() else gap > 0)
    whole = breaks[_AHEAD:] == breaks[:-_AHEAD]
    mean = np.full(n, np.nan)
    mean[:-_AHEAD][whole] = ((rest[_AHEAD:] - rest[:-_AHEAD]) / _AHEAD)[whole]
    short = (
        pl.Series(mean, nan_to_null=True)
        .rolling_quantile(_QUANTILE, interpolation="lower", window_size=_AROUND, center=True, min_samples=1)
        .to_numpy()
    )
    out = rest.copy()
    for k in range(1, _AHEAD + 1):
        out[:-k] = np.fmin(out[:-k], rest[k:] - k * short[:-k])
    bound: _Ints = np.rint(out + usual).astype(np.int64) + int(first[0])
    return bound


def _usual_length(gap: _Ints, reads: _Ints) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What steps of as many reads take beyond those of none: a line, least absolute errors (by weighted squares)."""
    some = gap > 0
    some &= gap <= 3 * np.median(gap[some]) if some.any() else False
    x, y = reads[some].astype(np.float64), gap[some].astype(np.float64)
    if len(y) < _ENOUGH:
        return np.zeros(len(gap))
    every = -(-len(y) // _FIT_ROWS)
    x, y = x[::every], y[::every]
    least = 0.02 * float(np.median(y))
    weight, slope = np.ones(len(y)), 0.0
    for _ in range(_FIT_ROUNDS):
        total = weight.sum()
        dx, dy = x - (weight @ x) / total, y - (weight @ y) / total
        square = float(weight @ (dx * dx))
        if square == 0:
            return np.zeros(len(gap))
        slope = float(weight @ (dx * dy)) / square
        weight = 1 / np.maximum(np.abs(dy - slope * dx), least)
    length: np.ndarray[Any, np.dtype[np.float64]] = reads.astype(np.float64) * float(round(max(slope, 0.0)))
    return length
