"""What a fitted step cost leaves out, kept so that a replay can draw it: equal steps that took unequal time."""

from __future__ import annotations

from typing import Any

import numpy as np

from hoptrace.stepcost import RESIDUALS
from hoptrace.stepcost_table import MILLION, STALL

__all__ = ["residuals"]

_FEWEST = 20
"""Steps of a kind that tell how they scatter."""
_MOST = 2048
_BLOCK = 64  # of a longer recording: blocks of so many steps in a row, evenly spaced

_Floats = np.ndarray[Any, np.dtype[np.float64]]
_Ints = np.ndarray[Any, np.dtype[np.int64]]
_Mask = np.ndarray[Any, np.dtype[np.bool_]]


def residuals(took_ns: _Ints, predicted_ns: _Ints, prefill: _Mask, decode: _Mask, usual: _Mask) -> dict[str, tuple[int, ...]]:
    """What a step takes beyond its cost, by kind of step, in the order of the steps.

    Of ``usual`` steps took ÷ predicted − 1 in millionths. The others are stalls, which are as long whatever the step holds: their
    ns beyond the cost, plus :data:`hoptrace.stepcost_table.STALL`. A replay that draws evenly from a table spends on the steps
    of its kind what the recording spent, stalls included. Prefill and mixed steps share a table where either is rare.
    """
    kinds = dict(zip(RESIDUALS, (decode & ~prefill, prefill & ~decode, prefill & decode), strict=True))
    if min(kinds["prefill"].sum(), kinds["mixed"].sum()) < _FEWEST:
        kinds["prefill"] = kinds["mixed"] = prefill
    tables = {}
    for kind, rows in kinds.items():
        enough = (rows & usual).sum() >= _FEWEST
        tables[kind] = _table(took_ns[rows], predicted_ns[rows], usual[rows]) if enough else ()
    return tables if any(v for t in tables.values() for v in t) else {}


def _table(took_ns: _Ints, predicted_ns: _Ints, usual: _Mask) -> tuple[int, ...]:
    n, share = len(took_ns), float(took_ns.sum()) / max(float(predicted_ns.sum()), 1.0)
    if n > _MOST:
        begin = np.linspace(0, n - _BLOCK, _MOST // _BLOCK).astype(np.int64)
        some = (begin[:, None] + np.arange(_BLOCK)).ravel()
        took_ns, predicted_ns, usual = took_ns[some], predicted_ns[some], usual[some]
        n = len(some)
    predicted = np.maximum(predicted_ns, 1).astype(np.float64)
    stall = np.where(usual, 0, np.maximum(took_ns - predicted_ns, 0))
    ratio: _Floats = np.where(usual, took_ns / predicted, 1.0)
    # Right in the sum over the steps, in which long ones weigh more than in the mean of the ratios.
    total = float(predicted.sum())
    wanted = (share - float(stall.sum()) / total) * n - float((~usual).sum())
    ratio[usual] *= max(wanted, 0.0) / float(ratio[usual].sum())
    ppm = np.rint((ratio - 1) * MILLION).astype(np.int64)
    return tuple(np.where(stall > 0, STALL + stall, ppm).tolist())
