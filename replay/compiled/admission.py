"""Admission, compiled: who joins the running ones in a scheduling pass."""

from __future__ import annotations

import numpy as np

from hoptrace.replay.compiled import (
    blocktable,
    columns,
    heap,
    kv,
    loading,
    moves,
    running,
    runs,
    slots,
    store,
    tiers,
    transfers,
)
from hoptrace.replay.compiled.columns import (
    ARRIVED,
    BLOCK,
    CACHE,
    CHUNKED,
    COMPUTED,
    D_CONTEXT,
    D_N,
    D_TOKENS,
    DECODING,
    DRIVEN_OUT,
    ENGINES,
    FIRST_SLOT,
    FLAGS,
    FRONT,
    GENERATED,
    HANDED,
    HELD_N,
    KEY,
    LATE_DECODERS,
    LEFT,
    LINK,
    LOADING_N,
    MAX_SEQUENCES,
    MODE,
    NONE,
    P_N,
    PASSED,
    POOL,
    PREFILL_FIRST,
    PRIVATE,
    PROMPT,
    PROMPTED,
    PROMPTS_FIRST,
    PROPOSED,
    PROPOSES,
    QUEUED_DECODE,
    QUEUED_DECODE_TOKENS,
    QUEUED_N,
    QUEUED_TOKENS,
    REQUEUE,
    RUN_PHASE,
    RUNNING,
    SHARE,
    SLOT,
    SLOTTED,
    STATE,
    STEPS,
    TAIL_FIRST,
    TIERS_N,
    WATERMARK,
    World,
)  # fmt: skip
from hoptrace.replay.compiled.handover import pull
from hoptrace.replay.compiled.kv import enter_prompt, hold_hits, look_up, wanted
from hoptrace.replay.compiled.loading import (
    begin_load,
    goes,
    is_loaded_by_another,
    last_arrived,
    look_in_tiers,
    room_for_load,
    worth_it,
)
from hoptrace.replay.compiled.running import drive_out, give_chunk, join_running
from hoptrace.replay.compiled.runs import end_run
from hoptrace.replay.compiled.slots import BUSY
from hoptrace.replay.compiled.slots import PROMPT as SLOT_PROMPT
from hoptrace.replay.compiled.store import EVICTABLE, FREE
from hoptrace.replay.compiled.tiers import will_offer
from hoptrace.replay.jit import lean
from hoptrace.replay.outcome import BUDGET as NO_BUDGET
from hoptrace.replay.outcome import KV, PREEMPTED, REQUEST, SLOTS

__all__ = ["admit", "candidate", "take_back"]

_SCHEDULED, _CACHED = REQUEST.index("scheduled_ns"), REQUEST.index("cached_tokens")
_TIER0, _ARRIVAL = REQUEST.index("cached_tier0_tokens"), REQUEST.index("arrival_ns")
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
    if s[r, RUN_PHASE] == PREEMPTED:
        eng[e, QUEUED_DECODE] -= 1
        eng[e, QUEUED_DECODE_TOKENS] -= s[r, PROMPT] + s[r, GENERATED]
    elif s[r, FLAGS] & HANDED:
        eng[e, QUEUED_DECODE] -= 1
        eng[e, QUEUED_DECODE_TOKENS] -= s[r, PROMPT]
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
    will_offer(w, e, r)
    if w.eng[e, TAIL_FIRST] < 0:
        w.eng[e, TAIL_FIRST] = r


@lean(columns, heap)
def _take_out(w: World, e: int, r: int) -> None:
    """Take ``r``, the next one, out of where it waits: the front or the queue."""
    if w.eng[e, FRONT] == r:
        w.eng[e, FRONT] = w.s[r, LINK]
    else:
        heap.dequeue(w.queues, w.nodes, e)


@lean(columns, heap)
def take_back(w: World, e: int) -> None:
    """Those that the pass has passed over get their places among those that wait back."""
    s, eng = w.s, w.eng
    r = eng[e, PASSED]
    while r >= 0:
        following = s[r, LINK]
        if s[r, STATE] == DRIVEN_OUT and w.g[REQUEUE] == 0:
            s[r, LINK] = eng[e, FRONT]
            eng[e, FRONT] = r
        else:
            heap.enqueue(w.queues, w.nodes, e, r, s[r, KEY], w.out[r, _ARRIVAL], r)
        r = following
    eng[e, PASSED] = NONE


@lean(columns)
def _prompt_tokens(w: World, e: int, r: int, rest: int) -> int:
    """How many of the ``rest`` of its tokens one that is admitted computes; 0: the budget does not do.

    Without chunks one that was driven out (its output has grown) may go beyond the budget, as the only prompt.
    """
    left = w.eng[e, LEFT]
    if rest <= left:
        return rest
    if w.eng[e, CHUNKED]:
        return left
    beyond = w.s[r, RUN_PHASE] == PREEMPTED or w.eng[e, MODE] == PROMPTS_FIRST
    return rest if beyond and w.eng[e, P_N] == 0 else 0


@lean(blocktable, columns, heap, kv, loading, running, runs, slots, store, tiers)
def _admit_arrived(w: World, table: np.ndarray, entries: np.ndarray, log: np.ndarray, e: int, now: int, r: int) -> int:
    """Admit ``r``, for which all has arrived: 0, or why not."""
    s, eng, caches = w.s, w.eng, w.caches
    known = s[r, PROMPT] + s[r, GENERATED]
    decoder = s[r, FLAGS] & HANDED != 0 and s[r, RUN_PHASE] != PREEMPTED
    if decoder:
        tokens = min(1 + eng[e, PROPOSES], eng[e, LEFT])
    else:
        tokens = _prompt_tokens(w, e, r, known - s[r, COMPUTED])
        if tokens == 0:
            return NO_BUDGET
    need = wanted(w, e, r, max(known, s[r, COMPUTED] + tokens))
    if eng[e, RUNNING] > 0:
        need += eng[e, WATERMARK]
    if need > caches[e, FREE] + caches[e, EVICTABLE]:
        if eng[e, RUNNING] == 0 and eng[e, LOADING_N] == 0 and eng[e, HELD_N] == 0:
            x = last_arrived(w, e)
            goes(w, e, x)
            _no_longer_waits(w, e, x)
            drive_out(w, table, entries, e, x)
        return KV
    heap.dequeue(w.queues, w.nodes, w.g[ENGINES] + e)
    goes(w, e, r)
    late = decoder and (eng[e, MODE] == PREFILL_FIRST or eng[e, MODE] == PROMPTS_FIRST)
    if not late:
        want = wanted(w, e, r, s[r, COMPUTED] + tokens)
        store.take(caches, table, entries, w.head, log, e, want)
        s[r, PRIVATE] += want
    _place(w, e, r, now, s[r, COMPUTED])
    if decoder:
        s[r, STATE], s[r, SHARE] = DECODING, 0
        if not late:
            s[r, SHARE] = tokens
            eng[e, LEFT] -= tokens
            eng[e, D_N] += 1
            eng[e, D_TOKENS] += tokens
            eng[e, D_CONTEXT] += s[r, COMPUTED]
            eng[e, PROPOSED] += tokens - 1
        else:
            eng[e, LATE_DECODERS] += 1
        return 0
    s[r, STATE] = PROMPTED
    give_chunk(w, e, r, tokens)
    if eng[e, CACHE] == POOL:
        enter_prompt(w, table, entries, log, e, r, s[r, COMPUTED] + tokens)
    return 0


@lean(blocktable, columns, heap, kv, loading, moves, running, runs, slots, store, tiers, transfers, forceinline=True)
def admit(w: World, table: np.ndarray, entries: np.ndarray, log: np.ndarray, e: int, now: int, r: int) -> int:
    """Admit ``r``, the next one: 0, or why not. There must be places for the entries of its blocks."""
    s, eng, caches = w.s, w.eng, w.caches
    if eng[e, RUNNING] >= eng[e, MAX_SEQUENCES]:
        return SLOTS
    if eng[e, LEFT] <= 0:
        return NO_BUDGET
    if s[r, STATE] == ARRIVED:
        return _admit_arrived(w, table, entries, log, e, now, r)
    driven_out = s[r, RUN_PHASE] == PREEMPTED
    if s[r, FLAGS] & HANDED and not driven_out:
        return 0 if pull(w, table, entries, log, e, r, now) else KV
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
    if w.g[TIERS_N] > 0 and s[r, FLAGS] & HANDED == 0:
        found = look_in_tiers(w, table, entries, e, r, hits)
        if found > 0 and worth_it(w, e, r, hits, hit, found):
            if is_loaded_by_another(w, table, entries, e, r, hits, found):
                _take_out(w, e, r)
                s[r, LINK] = eng[e, PASSED]
                eng[e, PASSED] = r
                return 0
            if not room_for_load(w, e, w.bend[w.ptr[r] + hits + found - 1], known, shared, evictable):
                return KV
            _take_out(w, e, r)
            begin_load(w, table, entries, log, e, r, hits, hit, found, now)
            return 0
    tokens = _prompt_tokens(w, e, r, known - hit)
    if tokens == 0:
        return NO_BUDGET
    block = eng[e, BLOCK]
    need = max(0, (known + block - 1) // block * block - shared)
    if eng[e, RUNNING] > 0:
        need += eng[e, WATERMARK]
    if need > caches[e, FREE] + caches[e, EVICTABLE] - evictable:
        return KV
    _take_out(w, e, r)
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
    if w.out[r, _CACHED] < 0:
        w.out[r, _CACHED] = hit
        for k in range(4):
            w.out[r, _TIER0 + k] = 0
    _place(w, e, r, now, hit)
    s[r, STATE] = PROMPTED
    give_chunk(w, e, r, tokens)
    if eng[e, CACHE] == POOL:
        enter_prompt(w, table, entries, log, e, r, hit + tokens)
    return 0
