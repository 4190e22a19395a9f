"""Weighted least squares without negative coefficients, and which steps are like the others: for the fits of a step cost."""

from __future__ import annotations

from typing import Any

import numpy as np

from hoptrace.nnls import nnls

__all__ = ["OUTLIER", "keep_usual", "robust", "sigma", "solve"]

OUTLIER = 8.0
"""Robust standard deviations."""
_MOST_OUTLIERS = 0.1  # share of the steps that may be left out
_FLOOR = 0.02
"""A step counts as if it took at least this share of the median."""

_Array = np.ndarray[Any, np.dtype[np.float64]]
_Mask = np.ndarray[Any, np.dtype[np.bool_]]


def solve(x: _Array, y: _Array, weight: _Array) -> _Array:
    """argmin Σ weight² (y − xβ)², β ≥ 0, by QR, so that the cost of the active-set search does not grow with the steps."""
    a, b = x * weight[:, None], y * weight
    scale = np.sqrt((a * a).sum(axis=0))
    scale[scale == 0] = 1
    # With y as a last column, R holds Qᵀy too, and Q itself need not be made.
    k = x.shape[1]
    r: _Array = np.linalg.qr(np.column_stack([a / scale, b]), mode="r")  # type: ignore[assignment]
    return nnls(r[:k, :k], r[:k, k]) / scale  # type: ignore[no-any-return]


def sigma(residual: _Array) -> float:
    """Robust standard deviation: 1.4826 × median absolute deviation; at least one in ten thousand, for data without noise."""
    return max(1.4826 * float(np.median(np.abs(residual - np.median(residual)))), 1e-4)


def keep_usual(y: _Array, expected: _Array) -> _Mask:
    """Which steps are no outliers: within eight robust standard deviations of what is expected, nine tenths in any case."""
    relative = (y - expected) / expected
    residual = np.abs(relative)
    keep: _Mask = residual <= max(OUTLIER * sigma(relative), float(np.quantile(residual, 1 - _MOST_OUTLIERS)))
    return keep


def robust(x: _Array, y: _Array, known: _Array | None = None) -> tuple[_Array, _Mask]:
    """Coefficients (ns per unit), right in the sum of the steps that were kept; and which were kept.

    Args:
        known: what of each step's time needs no coefficient, ns; null: nothing.
    """
    known = np.zeros(len(y)) if known is None else known
    floor = float(np.median(y)) * _FLOOR
    rest = y - known
    beta = solve(x, rest, 1 / np.maximum(y, floor))
    for _ in range(12):
        expected = np.maximum(x @ beta + known, floor)
        residual = (y - expected) / expected
        huber = np.minimum(1, 1.345 * sigma(residual) / np.maximum(np.abs(residual), 1e-12))
        new = solve(x, rest, np.sqrt(huber) / expected)
        if np.allclose(new, beta, rtol=1e-6):
            break
        beta = new
    keep = keep_usual(y, np.maximum(x @ beta + known, floor))
    # With a constant among the columns, squares weighted by 1 ÷ cost make both the relative errors and the errors in ns add up to
    # nothing (the columns times 1 ÷ cost hold 1 ÷ cost, and, in sum, 1). So neither short nor long steps are off as a whole.
    for _ in range(6):
        beta = solve(x[keep], rest[keep], 1 / np.sqrt(np.maximum(x[keep] @ beta + known[keep], floor)))
    total = float((x[keep] @ beta).sum())
    return (beta * (float(rest[keep].sum()) / total) if total > 0 and rest[keep].sum() > 0 else beta), keep
