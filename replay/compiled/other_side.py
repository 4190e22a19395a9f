"""A request's room on its other engine, compiled: the decode engine's while its prompt is computed, then the prefill engine's."""

from __future__ import annotations

import numpy as np

from hoptrace.replay.compiled import columns, kv, store
from hoptrace.replay.compiled.columns import (
    COMPUTED,
    FLAGS,
    FLYING,
    HANDED,
    KEPT_NEXT,
    KEPT_PRIVATE,
    KEPT_SHARED,
    LOAD_NEED,
    LOADING_N,
    NEED,
    NEW_ENTRIES,
    NEXT_BLOCK,
    NOW,
    PENDING,
    PRIVATE,
    REST,
    SHARED,
    STREAMED,
    STREAMS,
    World,
)  # fmt: skip
from hoptrace.replay.compiled.kv import leave
from hoptrace.replay.compiled.waking import wake
from hoptrace.replay.jit import lean
from hoptrace.replay.outcome import REQUEST

__all__ = ["drop_room", "swap"]

_DECODE_ENGINE = REQUEST.index("decode_engine")


@lean(columns)
def swap(s: np.ndarray, r: int) -> None:
    """Look at ``r``'s room on its other engine."""
    s[r, PRIVATE], s[r, KEPT_PRIVATE] = s[r, KEPT_PRIVATE], s[r, PRIVATE]
    s[r, SHARED], s[r, KEPT_SHARED] = s[r, KEPT_SHARED], s[r, SHARED]
    s[r, NEXT_BLOCK], s[r, KEPT_NEXT] = s[r, KEPT_NEXT], s[r, NEXT_BLOCK]


@lean(columns, kv, store)
def drop_room(w: World, table: np.ndarray, entries: np.ndarray, r: int) -> None:
    """A request that is sent per layer is driven out: its room on the decode engine goes, what is under way goes for nothing."""
    s = w.s
    if s[r, FLAGS] & STREAMED == 0 or s[r, FLAGS] & HANDED:
        return
    e, computed, own, run = w.out[r, _DECODE_ENGINE], s[r, COMPUTED], s[r, columns.OWN], s[r, columns.TAIL_RUN]
    s[r, FLAGS] &= ~STREAMED
    s[r, STREAMS] += 1
    s[r, PENDING], s[r, REST] = 0, -1
    swap(s, r)
    s[r, COMPUTED] = 0
    leave(w, table, entries, e, r, False)
    s[r, COMPUTED], s[r, columns.OWN], s[r, columns.TAIL_RUN] = computed, own, run
    swap(s, r)
    w.eng[e, NEED] -= s[r, LOAD_NEED]
    w.eng[e, LOADING_N] -= 1
    w.g[FLYING] -= s[r, NEW_ENTRIES]
    wake(w, e, w.g[NOW])
