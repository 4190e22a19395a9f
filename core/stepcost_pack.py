"""Step costs as one vector of integers, as the replay's engines read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hoptrace.stepcost import RESIDUALS, StepCost
from hoptrace.stepcost_kernel import HEAD, PIECE

__all__ = ["pack"]

_Ints = np.ndarray[Any, np.dtype[np.int64]]


def pack(costs: Sequence[StepCost]) -> tuple[_Ints, _Ints]:
    """(all costs one after another, where each begins), int64. :func:`hoptrace.stepcost_kernel.step_ns` reads them."""
    parts: list[_Ints] = []
    starts, at = [], 0
    for cost in costs:
        part = _packed(cost)
        parts.append(part)
        starts.append(at)
        at += len(part)
    return np.concatenate(parts), np.array(starts, dtype=np.int64)


def _packed(cost: StepCost) -> _Ints:
    """Head, coefficients of both sides, residuals, heads of the pieces, their grids."""
    tables = [cost.residuals.get(k, ()) for k in RESIDUALS]
    body = cost.as_vector().tolist()
    residuals_at = HEAD + len(body) if any(tables) else 0
    body += [v for t in tables for v in t]
    pieces_at = HEAD + len(body)
    heads: list[int] = []
    grids: list[int] = []
    for piece in cost.pieces:
        heads += piece.head(pieces_at + PIECE * len(cost.pieces) + len(grids))
        grids += piece.grid.packed()
    length = pieces_at + len(heads) + len(grids)
    head = [1 + cost.kind, length, *(len(t) for t in tables), residuals_at, len(cost.pieces), pieces_at]
    return np.array(head + body + heads + grids, dtype=np.int64)
