"""Residuals of another run: the recorded ones redrawn in long blocks, so that slow phases stay slow phases."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Blocks", "blocks", "redrawn"]

_BLOCKS = 8
Blocks = tuple[tuple[float, float], ...]
"""(begin, length) of each block, as shares of the recording; lengths add up to 1 or more."""


def blocks(rng: np.random.Generator) -> Blocks:
    """Blocks of the stationary bootstrap (Politis and Romano 1994): anywhere, of geometric length, an eighth of the recording on
    average. As shares, so that all kinds of step take the same stretches of time."""
    found, total = [], 0.0
    while total < 1:
        length = min(float(rng.exponential(1 / _BLOCKS)) + 1e-3, 1.0)
        found.append((float(rng.random()), length))
        total += length
    return tuple(found)


def redrawn(tables: dict[str, tuple[int, ...]], drawn: Blocks) -> dict[str, tuple[int, ...]]:
    """Tables of residuals (``StepCost.residuals``) redrawn; each as long as it was."""
    return {kind: _one(table, drawn) for kind, table in tables.items()}


def _one(table: tuple[int, ...], drawn: Blocks) -> tuple[int, ...]:
    n = len(table)
    if not n:
        return table
    values = np.array(table, dtype=np.int64)
    at: list[Any] = []
    for begin, length in drawn:
        first = int(begin * n)
        at.append(np.arange(first, first + max(1, round(length * n))))
    index = np.concatenate(at)[:n] % n
    if len(index) < n:
        index = np.concatenate([index, (index[-1] + 1 + np.arange(n - len(index))) % n])
    return tuple(int(v) for v in values[index])
