"""What a fitted step cost leaves out, kept so that a replay can draw it: equal steps that took unequal time."""

from __future__ import annotations

from typing import Any

import numpy as np

from hoptrace.stepcost import RESIDUALS
from hoptrace.stepcost_table import MILLION

__all__ = ["residuals"]

_FEWEST = 8
"""Steps of a kind that have a table of their own."""
_MOST = 2048
_BLOCK = 64  # of a longer recording: blocks of so many steps in a row, evenly spaced

_Floats = np.ndarray[Any, np.dtype[np.float64]]
_Ints = np.ndarray[Any, np.dtype[np.int64]]
_Mask = np.ndarray[Any, np.dtype[np.bool_]]


def residuals(took_ns: _Ints, predicted_ns: _Ints, prefill: _Mask, decode: _Mask) -> dict[str, tuple[int, ...]]:
    """took ÷ predicted − 1 in millionths by kind of step, in the order of the steps, stalls included.

    A table's mean is Σ took ÷ Σ predicted − 1 over its steps (not the mean of the ratios, in which short steps weigh as much as
    long ones), so that a replay that draws from it evenly spends the time that the recording spent, its stalls included. Prefill
    and mixed steps share a table where either is rare; decode steps never lend them theirs: a stall of seven short steps' length
    would become one of seven prompts'.
    """
    kinds = dict(zip(RESIDUALS, (decode & ~prefill, prefill & ~decode, prefill & decode), strict=True))
    if min(kinds["prefill"].sum(), kinds["mixed"].sum()) < _FEWEST:
        kinds["prefill"] = kinds["mixed"] = prefill
    tables = {k: _table(took_ns[rows], predicted_ns[rows]) if rows.sum() >= _FEWEST else () for k, rows in kinds.items()}
    return tables if any(v for t in tables.values() for v in t) else {}


def _table(took_ns: _Ints, predicted_ns: _Ints) -> tuple[int, ...]:
    predicted = np.maximum(predicted_ns, 1).astype(np.float64)
    ratio: _Floats = took_ns / predicted
    n = len(ratio)
    if n > _MOST:
        begin = np.linspace(0, n - _BLOCK, _MOST // _BLOCK).astype(np.int64)
        ratio = ratio[(begin[:, None] + np.arange(_BLOCK)).ravel()]
    ratio = ratio * (float(took_ns.sum()) / float(predicted.sum()) / float(ratio.mean()))
    return tuple(int(v) for v in np.rint((ratio - 1) * MILLION).astype(np.int64))
