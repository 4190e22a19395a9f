"""Whether two series go together: Spearman's rank correlation with an interval that minds that neighbours are alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["FEWEST", "Floats", "Rank", "drawn", "rank"]

FEWEST = 10
"""Pairs from which a correlation is given."""
_DRAWS = 1000
_SEED = 20260101

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Rank:
    """``rho`` from −1 to 1 over ``n`` pairs, with the 95 % interval ``low`` … ``high``; null: ``why``."""

    n: int
    rho: float | None
    low: float | None
    high: float | None
    why: str | None = None

    @property
    def rises(self) -> bool:
        """Whether one rises with the other beyond doubt."""
        return self.low is not None and self.low > 0

    def as_dict(self) -> dict[str, Any]:
        digits = {k: None if v is None else round(v, 3) for k, v in (("rho", self.rho), ("low", self.low), ("high", self.high))}
        return {"n": self.n, **digits, "why": self.why}


def rank(x: Floats, y: Floats, least_spread: float = 0.0) -> Rank:
    """Spearman's ρ. ``least_spread``: by how much the middle eight tenths of ``x`` have to differ for it to mean anything.

    The interval is that of a moving-block bootstrap (Künsch 1989, blocks of ⌈n^⅓⌉ neighbours, 1,000 draws, a fixed seed).
    """
    n = len(x)
    if n < FEWEST:
        return Rank(n, None, None, None, f"{n} bins can be compared, and {FEWEST} are needed")
    if float(np.quantile(x, 0.9) - np.quantile(x, 0.1)) <= least_spread or np.ptp(y) == 0:
        return Rank(n, None, None, None, "it hardly varied, so nothing can go together with it")
    rho = _spearman(x, y)
    low, high = drawn(n, lambda i: _spearman(x[i], y[i]))
    return Rank(n, rho, low, high)


def drawn(n: int, figure: Callable[[np.ndarray[Any, np.dtype[np.int64]]], float]) -> tuple[float, float]:
    """The 95 % interval of a figure of n neighbours in a row, from blocks of them drawn with replacement; what comes out as no
    number counts as 0."""
    length = max(1, round(n ** (1 / 3)))
    rng = np.random.default_rng(_SEED)
    starts = rng.integers(0, n - length + 1, (_DRAWS, -(-n // length)))
    values = [figure((row[:, None] + np.arange(length)).ravel()[:n]) for row in starts]
    low, high = np.quantile(np.nan_to_num(np.array(values)), (0.025, 0.975))
    return float(low), float(high)


def _spearman(x: Floats, y: Floats) -> float:
    a, b = _ranks(x), _ranks(y)
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size else 0.0


def _ranks(x: Floats) -> Floats:
    """Ranks from 0, equal values sharing the mean of theirs."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((last - counts + last - 1) / 2)[inverse]
