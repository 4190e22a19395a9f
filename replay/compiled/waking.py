"""The engines' heap, compiled: whose event is due next, and waking one that sleeps."""

from __future__ import annotations

import numpy as np

from hoptrace.replay.compiled import columns
from hoptrace.replay.compiled.columns import CALM, NEVER, PLACE, READY, STAGE, SWEEP, WHEN, World
from hoptrace.replay.jit import lean

__all__ = ["sift", "wake"]


@lean(columns)
def sift(order: np.ndarray, eng: np.ndarray, n: int, i: int) -> None:
    """Put the engine at place ``i`` of the heap of ``n``, ordered by (WHEN, engine), where it belongs."""
    e = order[i]
    when = eng[e, WHEN]
    while i > 0:
        p = (i - 1) >> 1
        x = order[p]
        if eng[x, WHEN] < when or (eng[x, WHEN] == when and x < e):
            break
        order[i] = x
        eng[x, PLACE] = i
        i = p
    while True:
        c = 2 * i + 1
        if c >= n:
            break
        x = order[c]
        if c + 1 < n:
            y = order[c + 1]
            if eng[y, WHEN] < eng[x, WHEN] or (eng[y, WHEN] == eng[x, WHEN] and y < x):
                c += 1
                x = y
        if when < eng[x, WHEN] or (when == eng[x, WHEN] and e < x):
            break
        order[i] = x
        eng[x, PLACE] = i
        i = c
    order[i] = e
    eng[e, PLACE] = i


@lean(columns, forceinline=True)
def wake(w: World, e: int, now: int) -> None:
    """Something changed for engine ``e``: if it sleeps it tries to begin a step, now or when it may."""
    eng = w.eng
    eng[e, CALM] = 0
    if eng[e, WHEN] == 4 * NEVER:
        at = max(now, eng[e, READY])
        # The engines before the one that tries now have had their turn.
        eng[e, WHEN] = 4 * at + (2 if at == now and w.g[STAGE] == 5 and e <= w.g[SWEEP] else 1)
        sift(w.order, eng, w.order.size, eng[e, PLACE])
