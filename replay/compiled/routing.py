"""The two routers of a run, compiled: new requests among the entry engines, handed-over ones among the decode engines."""

from __future__ import annotations

import numpy as np

from hoptrace.replay.compiled import columns, routers, store
from hoptrace.replay.compiled.columns import CACHE, DECODE_ROLE, POOL, POSITION, ROLE, World
from hoptrace.replay.jit import lean

__all__ = ["ENTRY", "TO_DECODE", "is_gone", "look", "route"]

ENTRY, TO_DECODE = 0, 1
"""Rows of ``World.router`` and of what belongs to it."""

_PREFIX_AWARE = routers.KINDS.index("prefix_aware")


@lean(columns, routers)
def look(w: World, now: int) -> None:
    """At the begin of an instant: routers of the kind kv_use look at their engines when their knowledge is too old."""
    for k in range(2):
        n = w.router[k, routers.N]
        if n > 0:
            routers.see(w.router[k], w.value[k, :n], w.capacity[k, :n], w.caches, w.members[k, :n], now)


@lean(columns, routers, store)
def route(w: World, table: np.ndarray, entries: np.ndarray, k: int, r: int, now: int) -> int:
    """The engine that router ``k`` sends ``r`` to; it is in flight there from now on."""
    n = w.router[k, routers.N]
    load, value, members = w.load[k, :n], w.value[k, :n], w.members[k, :n]
    kind = w.router[k, routers.KIND]
    if kind == _PREFIX_AWARE:
        routers.prefixes(value, w.scratch, table, entries, w.head, members, w.bid, w.bend, w.ptr[r], w.ptr[r + 1])
        for p in range(n):
            if w.eng[members[p], CACHE] != POOL:
                value[p] = 0
    else:
        routers.use(w.router[k], value, w.capacity[k, :n], w.caches, members)
    p = routers.choose(w.router[k], load, value, r, w.session[r], now)
    load[p] += 1
    return members[p]


@lean(columns, forceinline=True)
def is_gone(w: World, e: int) -> None:
    """A request that was sent to ``e`` is done, or handed over."""
    w.load[1 if w.eng[e, ROLE] == DECODE_ROLE else 0, w.eng[e, POSITION]] -= 1
