"""How fast the machine was in each of several captures of one server, to be taken out before they are fitted as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from hoptrace.nnls import nnls
from hoptrace.stepcost import FEATURES, features_array

__all__ = ["DOUBTED", "Speed", "speeds"]

DOUBTED = 0.1
"""A factor with a larger standard error is not told: the captures hold too little that is alike."""
_MOST = 5_000  # steps of a capture that are looked at
_BLOCKS = 15  # of steps in a row: neighbours are alike, so that errors are told from blocks
_BATCHES = 32  # numbers of decoders that have a column of their own, if they have
_FEWEST = 10  # steps
_ROUNDS = 60
_HUBER = 1.345

_Floats = np.ndarray[Any, np.dtype[np.float64]]
_Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Speed:
    """``factor``: how long equal steps took in this capture against the mean of all, weighted by step time; 1.2 is slower.
    ``error``: its standard error (relative); null where there is one capture, or where ``told`` is false: then it is 1."""

    factor: float = 1.0
    error: float | None = None
    told: bool = True


def speeds(captures: Sequence[pl.DataFrame]) -> list[Speed]:
    """The factor of each capture, from usable steps (:func:`hoptrace.replay.calibration.held.usable`), in the order given.

    Model: took = factor of the capture × Σ coefficient × feature. Factors and coefficients are fitted together, by weighted least
    squares of the relative error, outliers weighing less (Huber). The error is that of a linearised model with all of them free,
    so that captures which hold unlike steps have a large one; residuals of blocks of steps may go together (a sandwich over
    blocks, as in Cameron and Miller, J. Human Resources 50 (2015) 317).
    """
    n = len(captures)
    if n < 2:
        return [Speed()] * n
    some = [f.gather_every(max(1, -(-f.height // _MOST))) for f in captures]
    x = _design(np.concatenate([features_array(f) for f in some]).astype(np.float64))
    y = np.concatenate([(f["end_ns"] - f["start_ns"]).to_numpy() for f in some]).astype(np.float64)
    of = np.repeat(np.arange(n), [f.height for f in some])
    total = np.array([float((f["end_ns"] - f["start_ns"]).sum()) for f in captures])
    factor, beta, weight = _fitted(x, y, of, n)
    error = _errors(x, y, of, factor, beta, weight, np.concatenate([_blocks(f.height) for f in some]))
    told = error <= DOUBTED
    if told.sum() < 2:
        return [Speed(told=False)] * n
    # The mean speed of those that can be compared: their steps take as long in sum as they did.
    factor = factor / (total[told].sum() / (total[told] / factor[told]).sum())
    return [Speed(float(f), float(e)) if t else Speed(told=False) for f, e, t in zip(factor, error, told, strict=True)]


def _design(x: _Floats) -> _Floats:
    """The columns of the model: the features of a step cost, and one for each number of decoders that enough steps hold: what n
    of them take is no straight line, and captures of unlike batches would lend each other's bends to the machine."""
    x[:, FEATURES.index("prefill_attention")] /= 1000
    numbers, counts = np.unique(x[:, FEATURES.index("decode_requests")], return_counts=True)
    usual = [n for n, c in zip(numbers, counts, strict=True) if n > 0 and c >= _FEWEST][:_BATCHES]
    alone = x[:, FEATURES.index("prefill_tokens")] == 0
    bends = [((x[:, FEATURES.index("decode_requests")] == n) & alone).astype(np.float64) for n in usual]
    whole: _Floats = np.column_stack([x, *bends])
    return whole[:, whole.any(axis=0)]


def _fitted(x: _Floats, y: _Floats, of: _Ints, n: int) -> tuple[_Floats, _Floats, _Floats]:
    """Factors (the first is 1), coefficients at the speed of the first, and the weight of each step, by turns."""
    factor = np.ones(n)
    beta = _solve(x, y, 1 / y)
    weight = np.ones(len(y))
    floor = 0.02 * float(np.median(y))
    for _ in range(_ROUNDS):
        expected = np.maximum(x @ beta, floor)
        ratio = y / expected
        new = np.array([_middle(ratio[of == k], expected[of == k]) for k in range(n)])
        relative = ratio / new[of] - 1
        sigma = max(1.4826 * float(np.median(np.abs(relative - np.median(relative)))), 1e-4)
        weight = np.minimum(1, _HUBER * sigma / np.maximum(np.abs(relative), 1e-12))
        new = np.array([_mean(ratio[of == k], (weight * expected**0.5)[of == k]) for k in range(n)])
        beta = _solve(x, y / new[of], np.sqrt(weight) / expected)
        settled = np.allclose(new / new[0], factor / factor[0], rtol=1e-5)
        factor = new
        if settled:
            break
    return factor / factor[0], beta * factor[0], weight


def _middle(ratio: _Floats, weight: _Floats) -> float:
    """Weighted median."""
    order = np.argsort(ratio)
    reached = np.cumsum(weight[order])
    return float(ratio[order][np.searchsorted(reached, reached[-1] / 2)])


def _mean(ratio: _Floats, weight: _Floats) -> float:
    return float((ratio * weight).sum() / weight.sum())


def _solve(x: _Floats, y: _Floats, weight: _Floats) -> _Floats:
    a, b = x * weight[:, None], y * weight
    scale = np.sqrt((a * a).sum(axis=0))
    scale[scale == 0] = 1
    k = x.shape[1]
    r: _Floats = np.linalg.qr(np.column_stack([a / scale, b]), mode="r")  # type: ignore[assignment]
    found: _Floats = nnls(r[:k, :k], r[:k, k]) / scale
    return found


def _blocks(n: int) -> _Ints:
    return np.arange(n) * min(_BLOCKS, n) // max(n, 1)


def _errors(x: _Floats, y: _Floats, of: _Ints, factor: _Floats, beta: _Floats, weight: _Floats, block: _Ints) -> _Floats:
    """Relative standard error of each factor against the mean of the others; infinite where it cannot be told."""
    n = len(factor)
    expected = np.maximum((x @ beta) * factor[of], 1.0)
    used = beta > 0
    # d(log took): one column a capture but the first, one a coefficient that is there.
    design = np.column_stack([of == k for k in range(1, n)] + [x[:, used] * factor[of, None] / expected[:, None]]).astype(float)
    root = np.sqrt(weight)[:, None]
    a, residual = design * root, (y / expected - 1) * root[:, 0]
    scale = np.sqrt((a * a).sum(axis=0))
    scale[scale == 0] = 1
    a = a / scale
    gram = a.T @ a
    if np.linalg.cond(gram) > 1e10:
        # Some column of the design says nothing new. Which one hardly matters: a ridge keeps the others.
        gram = gram + 1e-9 * np.eye(len(gram))
    inverse = np.linalg.inv(gram)
    clusters = of * (_BLOCKS + 1) + block
    meat = np.zeros_like(gram)
    ids = np.unique(clusters)
    for c in ids:
        g = a[clusters == c].T @ residual[clusters == c]
        meat += np.outer(g, g)
    covariance = inverse @ meat @ inverse * len(ids) / max(len(ids) - 1, 1) / np.outer(scale, scale)
    # Where a direction of the design has next to no length, its blocks tell nothing of it: the plain variance is large there.
    plain = inverse * float(residual @ residual) / max(len(y) - a.shape[1], 1) / np.outer(scale, scale)
    # Contrast of each with the mean of all: the first has no column of its own.
    contrast = np.eye(n) - 1 / n
    spread = np.zeros(n)
    for c in (covariance, plain):
        full = np.zeros((n, n))
        full[1:, 1:] = c[: n - 1, : n - 1]
        spread = np.maximum(spread, np.sqrt(np.maximum(np.einsum("ij,jk,ik->i", contrast, full, contrast), 0)))
    return np.where(np.isfinite(spread), spread, np.inf)
