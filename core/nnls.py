"""Non-negative least squares of a few unknowns, without scipy's optimizers, whose import takes longer than most reports."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["nnls"]

_Array = np.ndarray[Any, np.dtype[np.floating[Any]]]


def nnls(a: _Array, b: _Array) -> _Array:
    """argmin ‖a·x − b‖, x ≥ 0; ``a``: float64[m, n] of few columns, m ≥ n.

    The active-set method of Lawson and Hanson, "Solving Least Squares Problems" (1974), chapter 23. Where the unconstrained
    solution has no negative element it is the answer, and is tried first.
    """
    n = a.shape[1]
    x, _, rank, _ = np.linalg.lstsq(a, b, rcond=None)
    if rank == n and (x > 0).all():
        return x
    x = np.zeros(n)
    free = np.zeros(n, dtype=bool)
    enough = 10 * max(a.shape) * float(np.finfo(np.float64).eps) * float(np.abs(a).sum(axis=0).max(initial=0.0))
    for _ in range(3 * n + 10):
        slope = np.where(free, -np.inf, a.T @ (b - a @ x))
        if free.all() or slope.max() <= enough * max(1.0, float(np.abs(b).max(initial=0.0))):
            break
        free[int(np.argmax(slope))] = True
        while True:
            step = np.zeros(n)
            step[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            below = free & (step <= 0)
            if not below.any():
                x = step
                break
            # As far towards the solution as all stay non-negative; those that reach zero are held there.
            way = float((x[below] / np.maximum(x[below] - step[below], np.finfo(np.float64).tiny)).min())
            x = np.where(free, np.maximum(x + way * (step - x), 0), 0)
            free &= ~(below & (x <= 1e-12 * max(1.0, float(x.max()))))
            if not free.any():
                break
    return x
