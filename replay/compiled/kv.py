"""The KV space of the engines, compiled: what requests hold, find again, enter into the prefix cache and leave there.

Counting is in tokens of room: each is free, private to a request, or in a cached block (held by requests, or evictable).
``caches`` of :mod:`hoptrace.replay.compiled.store` keeps the counts of all engines, those without a cache too.
"""

from __future__ import annotations

import numpy as np

from hoptrace.replay.compiled import columns, store
from hoptrace.replay.compiled.columns import (
    BLOCK,
    CACHE,
    CACHE_CAPACITY,
    COMPUTED,
    DECODE_ROLE,
    DISTINCT,
    GENERATED,
    NEXT_BLOCK,
    NONE,
    OWN,
    OWN_IDS,
    POOL,
    PRIVATE,
    PROMPT,
    ROLE,
    SHARED,
    TAIL_RUN,
    WRITES,
    World,
)  # fmt: skip
from hoptrace.replay.compiled.store import EVICTABLE, FREE, HOLDERS, RESIDENT, SIZE
from hoptrace.replay.jit import lean
from hoptrace.replay.outcome import UNLIMITED

__all__ = ["enter_prompt", "fits", "hold_hits", "leave", "look_up", "wanted"]


@lean(columns, forceinline=True)
def wanted(w: World, e: int, r: int, tokens: int) -> int:
    """Room that ``r`` still needs on engine ``e`` to hold so many tokens."""
    block = w.eng[e, BLOCK]
    return max(0, (tokens + block - 1) // block * block - w.s[r, SHARED] - w.s[r, PRIVATE])


@lean(columns, store, forceinline=True)
def fits(w: World, table: np.ndarray, entries: np.ndarray, log: np.ndarray, more: int) -> bool:
    """Whether the store has places for so many more entries; if not, the loop has to come back for them."""
    want = w.head[store.LIVE] + more
    logged = w.head[store.LOGS] == 0 or w.head[store.EVICTED] + store.LEVELS * want <= log.size
    if want <= entries.shape[0] and 2 * want <= table.size and logged:
        return True
    w.g[columns.WANTED] = more
    return False


@lean(columns, store)
def look_up(w: World, table: np.ndarray, entries: np.ndarray, e: int, r: int) -> tuple[int, int, int, int]:
    """What engine ``e``'s cache holds of ``r``'s beginning: (blocks, tokens computed, room in shared blocks, evictable room).

    ``w.found[: blocks]``: the entries; those that are its own, from before it was driven out, as −2 − entry.
    """
    first, last = w.ptr[r], w.ptr[r + 1]
    known = w.s[r, PROMPT] + w.s[r, GENERATED]
    own, run = w.s[r, OWN], w.s[r, TAIL_RUN]
    hits, shared, evictable = store.leading(table, entries, e, w.bid, first, last, w.found)
    mine = 0
    if own >= 0:
        # Driven out before: a block may be there as its own copy only.
        while first + hits < last:
            at = store.find(table, entries, e, w.bid[first + hits])
            if at >= 0:
                w.found[hits] = at
                shared += entries[at, SIZE]
                if entries[at, HOLDERS] == 0:
                    evictable += entries[at, SIZE]
            else:
                at = store.find(table, entries, e, own + hits)
                if at < 0:
                    break
                w.found[hits] = -2 - at
                mine += entries[at, SIZE]
            hits += 1
    computed = w.bend[first + hits - 1] if hits > 0 else 0
    if hits > 0 and computed >= known:
        hits -= 1
        at = w.found[hits]
        if at >= 0:
            shared -= entries[at, SIZE]
            if entries[at, HOLDERS] == 0:
                evictable -= entries[at, SIZE]
        else:
            mine -= entries[-2 - at, SIZE]
        return hits, w.bend[first + hits - 1] if hits > 0 else 0, shared + mine, evictable + mine
    if run >= 0 and first + hits == last:
        at = store.kept(table, entries, run)
        if at >= 0:
            tokens = min(entries[at, SIZE], (known - 1 - computed) // w.eng[e, BLOCK] * w.eng[e, BLOCK])
            if tokens == entries[at, SIZE]:
                computed += tokens
                mine += tokens
                hits += 1
                w.found[hits - 1] = -2 - at
    return hits, computed, shared + mine, evictable + mine


@lean(columns, store)
def hold_hits(w: World, table: np.ndarray, entries: np.ndarray, e: int, r: int, hits: int) -> None:
    """Take what :func:`look_up` has just found; the rest of what it had left stays to be evicted."""
    s, caches, bit = w.s, w.caches, 2 if w.eng[e, ROLE] == DECODE_ROLE else 1
    first, n = w.ptr[r], w.ptr[r + 1] - w.ptr[r]
    for k in range(hits):
        at = w.found[k]
        if at >= 0:
            store.hold(caches, entries, e, at)
            w.held[first + k] |= bit
            s[r, SHARED] += entries[at, SIZE]
        else:
            s[r, PRIVATE] += store.reclaim(caches, table, entries, w.head, e, -2 - at)
    s[r, NEXT_BLOCK] = first + min(hits, n)
    s[r, OWN], s[r, TAIL_RUN] = NONE, NONE


@lean(columns, store)
def enter_prompt(w: World, table: np.ndarray, entries: np.ndarray, log: np.ndarray, e: int, r: int, computed: int) -> None:
    """Put ``r``'s prompt blocks that are computed by now into the cache; it holds them until it leaves.

    A block that another request put there meanwhile stays its own copy. There must be places for the entries.
    """
    s, caches, bit = w.s, w.caches, 2 if w.eng[e, ROLE] == DECODE_ROLE else 1
    capacity = w.eng[e, CACHE_CAPACITY]
    while s[r, NEXT_BLOCK] < w.ptr[r + 1] and w.bend[s[r, NEXT_BLOCK]] <= computed:
        j = s[r, NEXT_BLOCK]
        s[r, NEXT_BLOCK] = j + 1
        b = w.bid[j]
        size = w.btok[b]
        if s[r, PRIVATE] < size or store.find(table, entries, e, b) >= 0:
            continue
        while caches[e, RESIDENT] + size > capacity and caches[e, EVICTABLE] > 0:
            store.evict(caches, table, entries, w.head, log, e)
        if caches[e, RESIDENT] + size > capacity:
            continue
        at = store.enter(caches, table, entries, w.head, e, b, size)
        if w.eng[e, WRITES]:
            store.mark_fresh(caches, entries, e, at)
        w.held[j] |= bit
        s[r, PRIVATE] -= size
        s[r, SHARED] += size


@lean(columns, store)
def leave(w: World, table: np.ndarray, entries: np.ndarray, e: int, r: int, back: bool) -> None:
    """Give back what ``r`` holds on engine ``e``. Its full blocks become evictable, the last one first: tails are evicted first.

    ``back``: it may come back and look for them. There must be places for the entries.
    """
    s, caches = w.s, w.caches
    private = s[r, PRIVATE]
    s[r, PRIVATE], s[r, SHARED], s[r, OWN], s[r, TAIL_RUN] = 0, 0, NONE, NONE
    if w.eng[e, CACHE] != POOL:
        caches[e, FREE] += private
        return
    bit = 2 if w.eng[e, ROLE] == DECODE_ROLE else 1
    first, last, block, capacity = w.ptr[r], w.ptr[r + 1], w.eng[e, BLOCK], w.eng[e, CACHE_CAPACITY]
    computed = s[r, COMPUTED]
    end = w.bend[last - 1] if last > first else 0
    own = capacity >= UNLIMITED  # in a cache of stated size only blocks with ids are kept
    if own and computed >= end + block:
        full = min(computed - end, private) // block
        if full > 0:
            at = store.keep(caches, table, entries, w.head, e, full * block, 0, back)
            if back:
                s[r, TAIL_RUN] = entries[at, store.KEY]
            private -= full * block
    for j in range(last - 1, first - 1, -1):
        b = w.bid[j]
        if w.held[j] & bit:
            w.held[j] &= ~bit & 7
            store.release(caches, entries, e, store.find(table, entries, e, b))
        elif own and w.bend[j] <= computed and private >= w.btok[b]:
            if s[r, OWN] < 0:
                s[r, OWN] = w.g[DISTINCT] + w.g[OWN_IDS]
                w.g[OWN_IDS] += last - first
            private -= w.btok[b]
            at = store.enter(caches, table, entries, w.head, e, s[r, OWN] + j - first, w.btok[b])
            store.release(caches, entries, e, at)
    caches[e, FREE] += private
