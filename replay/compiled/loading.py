"""Blocks from tiers, compiled: are there some, is it worth it, is there room; and what happens when they have arrived."""

from __future__ import annotations

import numpy as np

from hoptrace import stepcost_kernel
from hoptrace.replay.compiled import blocktable, columns, heap, kv, moves, store, transfers
from hoptrace.replay.compiled.columns import (
    AFTER,
    ARRIVED,
    BEFORE,
    BEGUN,
    BLOCK,
    BREAK_EVEN,
    COMING,
    COMPUTED,
    COST,
    ENGINES,
    FLYING,
    GENERATED,
    HEAD,
    INSTANCE,
    LOAD_FROM,
    LOAD_NEED,
    LOAD_TO,
    LOADING,
    LOADING_N,
    LOADS,
    NEED,
    NEW_ENTRIES,
    NONE,
    OFFERED,
    PENDING,
    PRIVATE,
    PROMPT,
    PROMPTED,
    READ_WAY,
    READING,
    RUNNING,
    SEPARATE,
    STATE,
    STEPS,
    TAIL_FIRST,
    TIERS_N,
    TOKEN_BYTES,
    WATERMARK,
    World,
)  # fmt: skip
from hoptrace.replay.compiled.kv import enter_prompt, hold_hits, wanted
from hoptrace.replay.compiled.moves import begin_move
from hoptrace.replay.compiled.store import EVICTABLE, FREE, MARK, find
from hoptrace.replay.compiled.tiers import USED
from hoptrace.replay.jit import lean
from hoptrace.replay.outcome import MOVE_READ, REQUEST
from hoptrace.stepcost_kernel import step_ns

__all__ = [
    "arrives",
    "begin_load",
    "comes",
    "goes",
    "is_loaded_by_another",
    "last_arrived",
    "look_in_tiers",
    "read",
    "room_for_load",
    "worth_it",
]

_CACHED, _TIER0 = REQUEST.index("cached_tokens"), REQUEST.index("cached_tier0_tokens")
_LOAD_START, _LOAD_END = REQUEST.index("load_start_ns"), REQUEST.index("load_end_ns")


@lean(blocktable, columns, store)
def look_in_tiers(w: World, table: np.ndarray, entries: np.ndarray, e: int, r: int, hits: int) -> int:
    """How many of ``r``'s blocks after its ``hits`` on the device are in tiers: ``w.found[hits + k]`` is tier + 8 × entry."""
    first, last = w.ptr[r], w.ptr[r + 1]
    engines, levels = w.eng.shape[0], w.g[TIERS_N]
    k = 0
    while first + hits + k < last:
        at, level = -1, 0
        while level < levels:
            at = find(table, entries, w.tier[level * engines + e, INSTANCE], w.bid[first + hits + k])
            if at >= 0:
                break
            level += 1
        if at < 0:
            break
        w.found[hits + k] = level + 8 * at
        k += 1
    return k


@lean(columns)
def _of_level(w: World, r: int, hits: int, hit: int, found: int, level: int) -> int:
    """Tokens that one tier gives."""
    tokens, begin = 0, hit
    for k in range(hits, hits + found):
        end = w.bend[w.ptr[r] + k]
        if w.found[k] & 7 == level:
            tokens += end - begin
        begin = end
    return tokens


@lean(columns)
def _blocks_of(w: World, hits: int, found: int, level: int) -> int:
    n = 0
    for k in range(hits, hits + found):
        n += w.found[k] & 7 == level
    return n


@lean(columns, stepcost_kernel, transfers)
def worth_it(w: World, e: int, r: int, hits: int, hit: int, found: int) -> bool:
    """Whether loading takes less time on empty links than computing."""
    if w.g[BREAK_EVEN] == 0:
        return True
    engines, block = w.eng.shape[0], w.eng[e, BLOCK]
    load = 0
    for level in range(w.g[TIERS_N]):
        if _blocks_of(w, hits, found, level) > 0:
            tokens = _of_level(w, r, hits, hit, found, level)
            way = w.tier[level * engines + e, READ_WAY]
            load = max(
                load,
                transfers.alone_ns(w.ways, w.links, way, (tokens + block - 1) // block, tokens * w.g[TOKEN_BYTES]),
            )
    known, end, at = w.s[r, PROMPT] + w.s[r, GENERATED], w.bend[w.ptr[r] + hits + found - 1], w.eng[e, COST]
    saved = step_ns(w.costs, at, -1, 1, known - hit, hit, 0, 0, 0)
    if known > end:
        saved -= step_ns(w.costs, at, -1, 1, known - end, end, 0, 0, 0)
    return load < saved


@lean(blocktable, columns, store)
def is_loaded_by_another(w: World, table: np.ndarray, entries: np.ndarray, e: int, r: int, hits: int, found: int) -> bool:
    """Whether one of the blocks is being loaded to the engine."""
    j, last = w.ptr[r] + hits, w.ptr[r] + hits + found
    while j < last and find(table, entries, w.g[READING] + e, w.bid[j]) < 0:
        j += 1
    return j < last


@lean(columns, kv)
def room_for_load(w: World, e: int, tokens: int, whole: int, shared: int, evictable: int) -> bool:
    """Whether one with hits of ``shared`` room may take room for ``tokens`` (hits included) beside what the others need."""
    s, eng, block = w.s, w.eng, w.eng[e, BLOCK]
    there = w.caches[e, FREE] + w.caches[e, EVICTABLE] - evictable
    if eng[e, RUNNING] > 0:
        there -= eng[e, WATERMARK]
    if max(0, (whole + block - 1) // block * block - shared) > there:
        return False
    others = eng[e, NEED]
    r = eng[e, TAIL_FIRST] if eng[e, SEPARATE] == 0 else eng[e, HEAD]
    while r >= 0:
        if s[r, STATE] == PROMPTED:
            others += wanted(w, e, r, s[r, PROMPT] + s[r, GENERATED])
        r = s[r, AFTER]
    return max(0, (tokens + block - 1) // block * block - shared) + others <= there


@lean(columns, kv)
def comes(w: World, e: int, r: int, whole: int) -> None:
    """``r`` has room on engine ``e`` for what is on its way to it: it is loading."""
    s, eng = w.s, w.eng
    s[r, STATE], s[r, BEGUN] = LOADING, w.g[LOADS]
    w.g[LOADS] += 1
    first = eng[e, COMING]
    s[r, BEFORE], s[r, AFTER] = NONE, first
    if first >= 0:
        s[first, BEFORE] = r
    eng[e, COMING] = r
    s[r, LOAD_NEED] = wanted(w, e, r, whole)
    eng[e, NEED] += s[r, LOAD_NEED]
    eng[e, LOADING_N] += 1
    w.g[FLYING] += s[r, NEW_ENTRIES]


@lean(columns, heap)
def arrives(w: World, e: int, r: int) -> None:
    """All is there for ``r``, which was loading."""
    w.eng[e, LOADING_N] -= 1
    w.g[FLYING] -= w.s[r, NEW_ENTRIES]
    w.s[r, STATE] = ARRIVED
    heap.enqueue(w.queues, w.nodes, w.g[ENGINES] + e, r, w.s[r, BEGUN], 0, r)


@lean(columns)
def goes(w: World, e: int, r: int) -> None:
    """``r`` does not load, and has not arrived, any more: it is admitted, or gives up. The caller takes it out of the queue."""
    s, eng = w.s, w.eng
    before, after = s[r, BEFORE], s[r, AFTER]
    if before < 0:
        eng[e, COMING] = after
    else:
        s[before, AFTER] = after
    if after >= 0:
        s[after, BEFORE] = before
    eng[e, NEED] -= s[r, LOAD_NEED]


@lean(columns, heap)
def last_arrived(w: World, e: int) -> int:
    """Of those that have arrived the one whose load began last; it is taken out of their queue."""
    s, q = w.s, w.g[ENGINES] + e
    last, r = NONE, w.eng[e, COMING]
    while r >= 0:
        if s[r, STATE] == ARRIVED and (last < 0 or s[r, BEGUN] > s[last, BEGUN]):
            last = r
        r = s[r, AFTER]
    others = NONE
    while w.queues[q, heap.COUNT] > 0:
        r = heap.dequeue(w.queues, w.nodes, q)
        if r != last:
            s[r, columns.LINK] = others
            others = r
    while others >= 0:
        heap.enqueue(w.queues, w.nodes, q, others, s[others, BEGUN], 0, others)
        others = s[others, columns.LINK]
    return last


@lean(blocktable, columns, kv, moves, store, transfers)
def begin_load(
    w: World, table: np.ndarray, entries: np.ndarray, log: np.ndarray, e: int, r: int, hits: int, hit: int, found: int, now: int
) -> None:
    """Take room and start a transfer for each tier that gives blocks. There must be places for entries and transfers."""
    s, out, engines, block = w.s, w.out, w.eng.shape[0], w.eng[e, BLOCK]
    first = w.ptr[r]
    end, known = w.bend[first + hits + found - 1], s[r, PROMPT] + s[r, GENERATED]
    if out[r, _LOAD_START] < 0:
        out[r, _LOAD_START] = now
    if out[r, _CACHED] < 0:
        out[r, _CACHED] = hit
        for level in range(4):
            out[r, _TIER0 + level] = 0
        for level in range(w.g[TIERS_N]):
            out[r, _TIER0 + level] = _of_level(w, r, hits, hit, found, level)
        if end == known:
            out[r, _TIER0 + (w.found[hits + found - 1] & 7)] -= 1
    s[r, LOAD_FROM], s[r, LOAD_TO], s[r, OFFERED] = first + hits, first + hits + found, hits + found
    s[r, PENDING] = 0
    for level in range(w.g[TIERS_N]):
        if _blocks_of(w, hits, found, level) == 0:
            continue
        i = w.tier[level * engines + e, INSTANCE]
        for k in range(hits, hits + found):
            if w.found[k] & 7 == level:
                store.pin(w.caches, entries, i, w.found[k] >> 3)
                w.held[first + k] |= USED
                at = store.enter(w.caches, table, entries, w.head, w.g[READING] + e, w.bid[first + k], 0)
                entries[at, MARK] = level
        tokens = _of_level(w, r, hits, hit, found, level)
        way = w.tier[level * engines + e, READ_WAY]
        begin_move(w, now, way, (tokens + block - 1) // block, tokens * w.g[TOKEN_BYTES], r, e, MOVE_READ, w.eng[e, STEPS], level)
        s[r, PENDING] += 1
    # Last, since it changes what is found.
    hold_hits(w, table, entries, e, r, hits)
    want = wanted(w, e, r, end)
    store.take(w.caches, table, entries, w.head, log, e, want)
    s[r, PRIVATE] += want
    s[r, COMPUTED] = end
    comes(w, e, r, known)


@lean(blocktable, columns, heap, kv, store)
def read(w: World, table: np.ndarray, entries: np.ndarray, log: np.ndarray, e: int, r: int, level: int, now: int) -> bool:
    """A transfer from a tier to ``r`` has ended; whether all have. There must be places for entries."""
    s, i, reading = w.s, w.tier[level * w.eng.shape[0] + e, INSTANCE], w.g[READING] + e
    for j in range(s[r, LOAD_FROM], s[r, LOAD_TO]):
        if entries[find(table, entries, reading, w.bid[j]), MARK] == level:
            store.unpin(w.caches, entries, i, find(table, entries, i, w.bid[j]))
    s[r, PENDING] -= 1
    if s[r, PENDING] > 0:
        return False
    for j in range(s[r, LOAD_FROM], s[r, LOAD_TO]):
        store.withdraw(w.caches, table, entries, w.head, reading, find(table, entries, reading, w.bid[j]))
    w.out[r, _LOAD_END] = now
    if w.eng[e, columns.CACHE] == columns.POOL:
        enter_prompt(w, table, entries, log, e, r, s[r, COMPUTED])
    s[r, COMPUTED] = min(s[r, COMPUTED], s[r, PROMPT] + s[r, GENERATED] - 1)
    arrives(w, e, r)
    return True
