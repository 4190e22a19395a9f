"""Admission, compiled: who joins the running ones in a scheduling pass."""

from __future__ import annotations

import numpy as np

from hoptrace.replay.compiled import columns, heap, kv, running, runs, slots, store
from hoptrace.replay.compiled.columns import (
    BLOCK,
    CACHE,
    CHUNKED,
    COMPUTED,
    ENGINES,
    FIRST_SLOT,
    FLAGS,
    FRONT,
    GENERATED,
    HANDED,
    LEFT,
    LINK,
    MAX_SEQUENCES,
    MODE,
    NONE,
    P_N,
    POOL,
    PRIVATE,
    PROMPT,
    PROMPTED,
    PROMPTS_FIRST,
    QUEUED_DECODE,
    QUEUED_DECODE_TOKENS,
    QUEUED_N,
    QUEUED_TOKENS,
    RUN_PHASE,
    RUNNING,
    SLOT,
    SLOTTED,
    STATE,
    STEPS,
    TAIL_FIRST,
    WATERMARK,
    World,
)  # fmt: skip
from hoptrace.replay.compiled.kv import enter_prompt, hold_hits, look_up, wanted
from hoptrace.replay.compiled.running import give_chunk, join_running
from hoptrace.replay.compiled.runs import end_run
from hoptrace.replay.compiled.slots import BUSY
from hoptrace.replay.compiled.slots import PROMPT as SLOT_PROMPT
from hoptrace.replay.compiled.store import EVICTABLE, FREE
from hoptrace.replay.jit import lean
from hoptrace.replay.outcome import BUDGET as NO_BUDGET
from hoptrace.replay.outcome import KV, PREEMPTED, REQUEST, SLOTS

__all__ = ["admit", "candidate"]

_SCHEDULED, _CACHED = REQUEST.index("scheduled_ns"), REQUEST.index("cached_tokens")
_DECODE_SCHEDULED = REQUEST.index("decode_scheduled_ns")
_RESUMED, _RECOMPUTED = REQUEST.index("resumed_tokens"), REQUEST.index("recomputed_tokens")


@lean(columns, heap, forceinline=True)
def candidate(w: World, e: int) -> int:
    """Who is next: arrived ones, driven-out ones, the queue; -1 if nobody waits."""
    r = heap.first(w.queues, w.nodes, w.g[ENGINES] + e)
    if r >= 0:
        return r
    r = w.eng[e, FRONT]
    return r if r >= 0 else heap.first(w.queues, w.nodes, e)


@lean(columns, heap, forceinline=True)
def _no_longer_waits(w: World, e: int, r: int) -> None:
    """Count ``r`` out of those that wait, and take it out of where it stood if that is the front or the queue."""
    s, eng = w.s, w.eng
    if s[r, RUN_PHASE] == PREEMPTED or s[r, FLAGS] & HANDED:
        eng[e, QUEUED_DECODE] -= 1
        eng[e, QUEUED_DECODE_TOKENS] -= s[r, PROMPT] + s[r, GENERATED]
    else:
        eng[e, QUEUED_N] -= 1
        eng[e, QUEUED_TOKENS] -= s[r, PROMPT]


@lean(columns, heap, kv, running, runs, slots, store, forceinline=True)
def _place(w: World, e: int, r: int, now: int, hit: int) -> None:
    """``r`` gets its place; ``hit`` tokens are computed."""
    s, out = w.s, w.out
    _no_longer_waits(w, e, r)
    if s[r, RUN_PHASE] == PREEMPTED:
        end_run(s, w.g, w.runs, r, e, w.eng[e, STEPS] - 1)
        out[r, _RESUMED] += hit
        out[r, _RECOMPUTED] -= hit
    if s[r, FLAGS] & HANDED:
        if out[r, _DECODE_SCHEDULED] < 0:
            out[r, _DECODE_SCHEDULED] = now
    elif out[r, _SCHEDULED] < 0:
        out[r, _SCHEDULED] = now
    s[r, COMPUTED] = hit
    join_running(s, w.eng, e, r)
    if w.eng[e, TAIL_FIRST] < 0:
        w.eng[e, TAIL_FIRST] = r


@lean(columns, heap, kv, running, runs, slots, store, forceinline=True)
def admit(w: World, table: np.ndarray, entries: np.ndarray, log: np.ndarray, e: int, now: int, r: int) -> int:
    """Admit ``r``, the next one: 0, or why not. There must be places for the entries of its blocks."""
    s, eng, caches = w.s, w.eng, w.caches
    if eng[e, RUNNING] >= eng[e, MAX_SEQUENCES]:
        return SLOTS
    if eng[e, LEFT] <= 0:
        return NO_BUDGET
    driven_out = s[r, RUN_PHASE] == PREEMPTED
    known = s[r, PROMPT] + s[r, GENERATED]
    hits, hit, shared, evictable, slot = 0, 0, 0, 0, 0
    if eng[e, CACHE] == POOL:
        hits, hit, shared, evictable = look_up(w, table, entries, e, r)
    elif eng[e, CACHE] == SLOTTED:
        first = eng[e, FIRST_SLOT]
        mine = w.slot[first : first + eng[e, MAX_SEQUENCES]]
        slot, hit = slots.choose_slot(r, s[r, PROMPT], w.ptr, w.bid, w.bend, mine)
        slot += first
        hit = min(hit, known - 1)
    tokens = known - hit
    if tokens > eng[e, LEFT]:
        # Without chunks only a driven-out one may go beyond the budget (its output has grown), as the only prompt.
        if eng[e, CHUNKED] == 0:
            if (not driven_out and eng[e, MODE] != PROMPTS_FIRST) or eng[e, P_N] > 0:
                return NO_BUDGET
        else:
            tokens = eng[e, LEFT]
    block = eng[e, BLOCK]
    need = max(0, (known + block - 1) // block * block - shared)
    if eng[e, RUNNING] > 0:
        need += eng[e, WATERMARK]
    if need > caches[e, FREE] + caches[e, EVICTABLE] - evictable:
        return KV
    if driven_out and eng[e, FRONT] == r:
        eng[e, FRONT] = s[r, LINK]
    else:
        heap.dequeue(w.queues, w.nodes, e)
    if hits > 0:
        hold_hits(w, table, entries, e, r, hits)
    else:
        s[r, columns.NEXT_BLOCK] = w.ptr[r]
        s[r, columns.OWN], s[r, columns.TAIL_RUN] = NONE, NONE
    want = wanted(w, e, r, hit + tokens)
    if caches[e, FREE] >= want:
        caches[e, FREE] -= want
    else:
        store.take(caches, table, entries, w.head, log, e, want)
    s[r, PRIVATE] += want
    if eng[e, CACHE] == SLOTTED:
        w.slot[slot, BUSY], w.slot[slot, SLOT_PROMPT], s[r, SLOT] = 1, r, slot
    if w.out[r, _SCHEDULED] < 0:
        w.out[r, _CACHED] = hit
    _place(w, e, r, now, hit)
    s[r, STATE] = PROMPTED
    give_chunk(w, e, r, tokens)
    if eng[e, CACHE] == POOL:
        enter_prompt(w, table, entries, log, e, r, hit + tokens)
    return 0
