"""A step cost whose decoders follow a curve of their own: what n of them take is no straight line.

Kernels change with the rows of a matrix product. vLLM on one CPU core takes 22 ms for a step of one decoder, 27 for two, 21 for
three, four or five (SmolLM2, float32); llama.cpp 12, 23, 35 and 38 ms for one to four; a GPU captures graphs for some batch sizes
and pads to them. So here a step of decoders alone costs a curve of their number and a slope of their context, a step with prompt
tokens costs what these cost, and if both are in it, also a share of the curve: about 0 where all tokens go through the same
products (vLLM), about 1 where decoders and prompts are computed one after the other (llama.cpp's parts of a batch).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hoptrace.stepcost import FEATURES
from hoptrace.stepcost_robust import keep_usual, robust, solve
from hoptrace.stepcost_table import MILLION, Grid, Piece

__all__ = ["Curve", "curve"]

_Array = np.ndarray[Any, np.dtype[np.float64]]
_Mask = np.ndarray[Any, np.dtype[np.bool_]]

_EACH = 16  # up to so many decoders each number has a point of its own; beyond, one for each seventh more
_SMOOTH = 1.0
"""Neighbouring points differ from the straight line alike: the square of a difference between them, relative to the cost, weighs
as much as that of a point from one stretch of steps with as many decoders."""
_FAR = 4
_FEWEST = 20
_BENDS = 3  # numbers of decoders: two lie on a line
_N, _CONTEXT, _PREFILL = (FEATURES.index(f) for f in ("decode_requests", "decode_context_tokens", "prefill_tokens"))
_OF_PROMPTS = tuple(FEATURES.index(f) for f in ("any_prefill", "prefill_tokens", "prefill_context_tokens", "prefill_attention"))


@dataclass(frozen=True)
class Curve:
    """``knots``: numbers of decoders, ascending; ``ns``: what a step of so many costs; ``slope``: ns for each further one.

    ``beta``: by feature (length 9), those of prompts and the context's. ``share``: of the curve in steps of both.
    ``columns``: features of prompts.
    """

    knots: _Array
    ns: _Array
    slope: float
    beta: _Array
    share: float
    columns: tuple[int, ...] = ()

    def decoders(self, n: _Array) -> _Array:
        """What n decoders alone cost, ns; 0 for none."""
        beyond = np.maximum(n - self.knots[-1], 0) * self.slope
        return np.where(n > 0, np.interp(n, self.knots, self.ns) + beyond, 0.0)

    def predict(self, x: _Array) -> _Array:
        """ns of each step, from its features."""
        share = np.where(x[:, _PREFILL] > 0, self.share, 1.0)
        found: _Array = x @ self.beta + share * self.decoders(x[:, _N])
        return found

    def piece(self) -> Piece:
        """The curve as a part of a step cost. Beyond the last number that was seen it goes on in the straight line's slope."""
        n = np.unique(np.maximum(np.rint(self.knots), 1)).astype(np.int64)
        far = int(n[-1]) * _FAR
        points = [(int(k), float(v)) for k, v in zip(n, self.decoders(n.astype(np.float64)), strict=True)]
        points.append((far, float(self.decoders(np.array([float(far)]))[0])))
        row = tuple((k, max(round(v * 1000), 0)) for k, v in points)
        return Piece(Grid((0,), (row,)), "decode_batch", factors=(0, MILLION, round(self.share * MILLION)), name="decoders")


def curve(x: _Array, y: _Array, columns: list[int]) -> Curve | None:
    """Fit steps; null where too few hold decoders alone, or of too few numbers. ``columns``: features that may count."""
    alone = (x[:, _PREFILL] == 0) & (x[:, _N] > 0)
    if alone.sum() < _FEWEST or len(np.unique(x[alone, _N])) < _BENDS:
        return None
    context = _CONTEXT in columns
    d, t = x[alone], y[alone]
    line, c, knots, value, keep = _of_decoders(d, t, context)
    beta = np.zeros(len(FEATURES))
    beta[_CONTEXT] = c
    found = Curve(knots, value, line, beta, 0.0)
    found = _right(found, d[keep], t[keep])
    rest = ~alone
    return found if not rest.any() else _with_prompts(found, x[rest], y[rest], columns)


def _of_decoders(x: _Array, y: _Array, context: bool) -> tuple[float, float, _Array, _Array, _Mask]:
    n = x[:, _N]
    base = np.column_stack([np.ones(len(n)), n, *([x[:, _CONTEXT]] if context else [])])
    bins = _bins(n)
    knots = np.array([n[bins == b].mean() for b in np.unique(bins)])
    which = np.searchsorted(np.unique(bins), bins)
    keep = np.ones(len(y), dtype=bool)
    floor = 0.02 * float(np.median(y))
    expected = np.full(len(y), float(np.median(y)))
    beta, value = np.zeros(base.shape[1]), np.zeros(len(knots))
    c = 0.0
    for _ in range(6):
        beta = solve(base[keep], y[keep], 1 / np.maximum(expected[keep], floor))
        c = float(beta[2]) if context else 0.0
        straight = np.maximum(base[:, :2] @ beta[:2], floor)
        value = _smooth(knots, which, keep, (y - c * x[:, _CONTEXT]) / straight) * np.maximum(beta[0] + beta[1] * knots, floor)
        expected = np.maximum(np.interp(n, knots, value) + c * x[:, _CONTEXT], floor)
        keep = keep_usual(y, expected)
    return float(beta[1]), c, knots, value, keep


def _bins(n: _Array) -> np.ndarray[Any, np.dtype[np.int64]]:
    beyond = np.floor(np.log(np.maximum(n, _EACH + 1) / _EACH) / np.log(8 / 7)).astype(np.int64)
    return np.where(n <= _EACH, n.astype(np.int64), _EACH + 1 + beyond)


def _smooth(knots: _Array, which: np.ndarray[Any, Any], keep: _Mask, ratio: _Array) -> _Array:
    """Took ÷ straight line by point: their means, drawn together the more, the fewer stretches of steps tell them (steps in a row
    are alike, and count as one or two)."""
    k = len(knots)
    begins = np.concatenate(([True], which[1:] != which[:-1]))
    steps = np.bincount(which[keep], minlength=k).astype(np.float64)
    weight = np.minimum(np.bincount(which[begins & keep], minlength=k), steps).astype(np.float64)
    mean: _Array = np.bincount(which[keep], weights=ratio[keep], minlength=k) / np.maximum(steps, 1)
    if k == 1:
        return mean if steps[0] else np.ones(1)
    matrix = np.diag(weight + 1e-9)
    # The further apart two points, the less one says of the other.
    tie = _SMOOTH / np.maximum(np.log2(knots[1:] / knots[:-1]), 1e-3)
    for i in range(k - 1):
        matrix[i, i] += tie[i]
        matrix[i + 1, i + 1] += tie[i]
        matrix[i, i + 1] -= tie[i]
        matrix[i + 1, i] -= tie[i]
    return np.asarray(np.linalg.solve(matrix, weight * mean + 1e-9), dtype=np.float64)


def _right(c: Curve, x: _Array, y: _Array) -> Curve:
    """Scaled such that predicted and observed time are equal in sum."""
    total = float(c.predict(x).sum())
    factor = float(y.sum()) / total if total > 0 else 1.0
    return Curve(c.knots, c.ns * factor, c.slope * factor, c.beta * factor, c.share)


def _with_prompts(c: Curve, x: _Array, y: _Array, columns: list[int]) -> Curve:
    """With the costs of steps that hold prompt tokens, what decoders' contexts take in them known already."""
    both = bool((x[:, _N] > 0).any())
    use = [i for i in _OF_PROMPTS if i in columns]
    parts = [x[:, i] for i in use]
    if both:
        parts.append(c.decoders(x[:, _N]))
    beta, _ = robust(np.column_stack(parts), y, x[:, _CONTEXT] * c.beta[_CONTEXT])
    full = c.beta.copy()
    full[use] = beta[: len(use)]
    # Nobody has seen both together: as with a straight line, a decoder adds its slope.
    share = float(beta[-1]) if both else min(c.slope / max(float(c.ns[0]), 1.0), 1.0)
    return Curve(c.knots, c.ns, c.slope, full, share, tuple(use))
