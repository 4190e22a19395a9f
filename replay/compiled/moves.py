"""Transfers of a run, compiled: who they are for, and their rows."""

from __future__ import annotations

import numpy as np

from hoptrace.replay.compiled import columns, transfers
from hoptrace.replay.compiled.columns import END, N_MOVES, World
from hoptrace.replay.compiled.transfers import BLOCKS, BYTES, START, TAG, WAY
from hoptrace.replay.jit import lean

__all__ = ["ENGINE", "KIND", "OF", "REQUEST", "STEP", "TIER", "begin_move", "end_move", "places"]

REQUEST, ENGINE, KIND, STEP, TIER, OF = TAG, TAG + 1, TAG + 2, TAG + 3, TAG + 4, TAG + 5
"""Columns of ``under_way``; the first five go into the row. ``OF``: the caller's."""


@lean(columns, transfers)
def begin_move(
    w: World, now: int, way: int, blocks: int, nbytes: int, request: int, engine: int, kind: int, step: int, tier: int
) -> int:
    """A transfer begins: its row in ``under_way``."""
    t = w.under_way
    x = transfers.start(t, w.thead, w.ways, now, way, blocks, nbytes)
    t[x, REQUEST], t[x, ENGINE], t[x, KIND], t[x, STEP], t[x, TIER], t[x, OF] = request, engine, kind, step, tier, 0
    return x


@lean(columns, transfers)
def end_move(w: World, x: int, now: int) -> None:
    """Write the row of a transfer that has ended now."""
    t, m, n = w.under_way, w.moves, w.g[N_MOVES]
    m[n, 0], m[n, 1], m[n, 2], m[n, 3], m[n, 4] = t[x, START], now, t[x, REQUEST], t[x, ENGINE], t[x, KIND]
    m[n, 5], m[n, 6], m[n, 7], m[n, 8], m[n, 9] = t[x, WAY], t[x, BYTES], t[x, BLOCKS], t[x, STEP], t[x, TIER]
    w.g[N_MOVES] = n + 1
    w.g[END] = max(w.g[END], now)


@lean(transfers)
def places(under_way: np.ndarray, thead: np.ndarray) -> int:
    """How many transfers may begin, at least, before the arrays have to grow."""
    return under_way.shape[0] - transfers.used(thead)
