"""The running ones' part of a scheduling pass, compiled: all decoders at once, or one by one where that is not possible."""

from __future__ import annotations

import numpy as np

from hoptrace.replay.compiled import columns, decoders, heap, kv, other_side, runs, store
from hoptrace.replay.compiled.columns import (
    ADMITTED,
    AFTER,
    ALL_VICTIMS,
    BEFORE,
    BLOCK,
    BOUNDARY,
    CACHE,
    CHUNKED,
    COMPUTED,
    COUNTS,
    D_CONTEXT,
    D_N,
    D_TOKENS,
    DECODE_CONTEXT,
    DECODE_ROLE,
    DECODERS,
    DECODING,
    DRIVEN_OUT,
    FLAGS,
    FRONT,
    GENERATED,
    HEAD,
    HERE,
    KEY,
    LEFT,
    LINK,
    LONE,
    NEW_ENTRIES,
    NEXT_BLOCK,
    NONE,
    P_CONTEXT,
    P_N,
    P_TOKENS,
    PADDED,
    POOL,
    PREFILL,
    PROMPT,
    PROMPTED,
    PROPOSED,
    PROPOSES,
    QUEUED_DECODE,
    QUEUED_DECODE_TOKENS,
    REQUEUE,
    ROLE,
    RUNNING,
    SEPARATE,
    SEQ,
    SHARE,
    SHARED,
    SLOT,
    SLOTTED,
    SPEC_OFF,
    SPEC_TOKENS,
    STATE,
    STEPS,
    STREAMED,
    TAIL,
    TOOK_DECODERS,
    UNFINISHED,
    VICTIMS,
    World,
)  # fmt: skip
from hoptrace.replay.compiled.decoders import separate
from hoptrace.replay.compiled.kv import enter_prompt, leave, wanted
from hoptrace.replay.compiled.other_side import drop_room
from hoptrace.replay.compiled.runs import end_run, start_run
from hoptrace.replay.compiled.slots import BUSY
from hoptrace.replay.compiled.slots import PROMPT as SLOT_PROMPT
from hoptrace.replay.compiled.store import EVICTABLE, FREE
from hoptrace.replay.compiled.tiers import offers_no_more
from hoptrace.replay.jit import lean
from hoptrace.replay.outcome import PREEMPTED, REQUEST

__all__ = [
    "ALL",
    "DECODERS_ONLY",
    "PROMPTS_ONLY",
    "all_at_once",
    "drive_out",
    "give_chunk",
    "join_running",
    "leave_running",
    "one_by_one",
]

ALL, PROMPTS_ONLY, DECODERS_ONLY = 0, 1, 2

_ARRIVAL, _RECOMPUTED = REQUEST.index("arrival_ns"), REQUEST.index("recomputed_tokens")
_PREEMPTIONS, _PREFILL_PREEMPTIONS = REQUEST.index("preemptions"), REQUEST.index("prefill_preemptions")


@lean(columns, forceinline=True)
def join_running(s: np.ndarray, eng: np.ndarray, e: int, r: int) -> None:
    """Admit ``r``: behind all others."""
    tail = eng[e, TAIL]
    s[r, BEFORE], s[r, AFTER], s[r, SEQ] = tail, NONE, eng[e, ADMITTED]
    if tail < 0:
        eng[e, HEAD] = r
    else:
        s[tail, AFTER] = r
    eng[e, TAIL] = r
    eng[e, ADMITTED] += 1
    eng[e, RUNNING] += 1
    eng[e, HERE] += s[r, NEW_ENTRIES]


@lean(columns, forceinline=True)
def leave_running(s: np.ndarray, eng: np.ndarray, e: int, r: int) -> None:
    """Take ``r`` out of the running ones."""
    before, after = s[r, BEFORE], s[r, AFTER]
    if before < 0:
        eng[e, HEAD] = after
    else:
        s[before, AFTER] = after
    if after < 0:
        eng[e, TAIL] = before
    else:
        s[after, BEFORE] = before
    eng[e, RUNNING] -= 1
    eng[e, HERE] -= s[r, NEW_ENTRIES]
    if eng[e, UNFINISHED] == r:
        eng[e, UNFINISHED] = NONE


@lean(columns, forceinline=True)
def give_chunk(w: World, e: int, r: int, tokens: int) -> None:
    """``r``'s prompt has a part in this step; its room has been taken."""
    w.s[r, SHARE] = tokens
    w.eng[e, LEFT] -= tokens
    w.eng[e, P_N] += 1
    w.eng[e, P_TOKENS] += tokens
    w.eng[e, P_CONTEXT] += w.s[r, COMPUTED]


@lean(columns, kv, store, forceinline=True)
def all_at_once(w: World, table: np.ndarray, entries: np.ndarray, log: np.ndarray, e: int, which: int) -> bool:
    """Decoders take a token each, the unfinished prompt what is left. False, and nothing done, if budget or room is short."""
    s, eng, caches = w.s, w.eng, w.caches
    need, left, d, u = 0, eng[e, LEFT], eng[e, DECODERS], eng[e, UNFINISHED]
    if eng[e, LONE] > 0:
        return False
    if which != PROMPTS_ONLY:
        left -= d
        if left < 0:
            return False
        need = w.cal[eng[e, COUNTS] + eng[e, BOUNDARY]] * eng[e, BLOCK]
    tokens = 0
    want = need
    if which != DECODERS_ONLY and u >= 0:
        rest = s[u, PROMPT] + s[u, GENERATED] - s[u, COMPUTED]
        tokens = min(rest, left)
        if eng[e, CHUNKED] == 0 and tokens < rest:
            tokens = 0
        if tokens > 0:
            want += wanted(w, e, u, s[u, COMPUTED] + tokens)
    if want > caches[e, FREE] + caches[e, EVICTABLE]:
        return False
    if caches[e, FREE] >= want:
        caches[e, FREE] -= want
    else:
        store.take(caches, table, entries, w.head, log, e, want)
    if which != PROMPTS_ONLY:
        eng[e, TOOK_DECODERS], eng[e, LEFT] = 1, left
        eng[e, D_N], eng[e, D_TOKENS], eng[e, D_CONTEXT] = d, d, eng[e, DECODE_CONTEXT]
    if which != DECODERS_ONLY and u >= 0:
        s[u, SHARE] = 0
        if tokens > 0:
            s[u, columns.PRIVATE] += want - need
            give_chunk(w, e, u, tokens)
            if eng[e, CACHE] == POOL:
                enter_prompt(w, table, entries, log, e, u, s[u, COMPUTED] + tokens)
    return True


@lean(columns)
def worst(w: World, e: int) -> int:
    """Whom a lack of room drives out: the last admitted, or (priority) the one of the largest (key, arrival, number)."""
    s, r = w.s, w.eng[e, TAIL]
    while r >= 0 and s[r, STATE] == PADDED:
        r = s[r, BEFORE]
    if w.g[REQUEUE] == 0 or r < 0:
        return r
    found = r
    while r >= 0:
        if s[r, STATE] != PADDED:
            a, b = w.out[r, _ARRIVAL], w.out[found, _ARRIVAL]
            if s[r, KEY] > s[found, KEY] or (s[r, KEY] == s[found, KEY] and (a > b or (a == b and r > found))):
                found = r
        r = s[r, BEFORE]
    return found


@lean(columns, store)
def _undo(w: World, table: np.ndarray, entries: np.ndarray, e: int, r: int) -> None:
    """Take a part in this step back, and the blocks that it entered out of the cache."""
    s, eng, tokens = w.s, w.eng, w.s[r, SHARE]
    eng[e, LEFT] += tokens
    if s[r, STATE] == DECODING:
        eng[e, D_N] -= 1
        eng[e, D_TOKENS] -= tokens
        eng[e, D_CONTEXT] -= s[r, COMPUTED]
        eng[e, PROPOSED] -= tokens - 1
    else:
        eng[e, P_N] -= 1
        eng[e, P_TOKENS] -= tokens
        eng[e, P_CONTEXT] -= s[r, COMPUTED]
        if eng[e, CACHE] == POOL:
            bit = 2 if eng[e, ROLE] == DECODE_ROLE else 1
            j = s[r, NEXT_BLOCK] - 1
            while j >= w.ptr[r] and w.bend[j] > s[r, COMPUTED]:
                if w.held[j] & bit:
                    size = store.withdraw(w.caches, table, entries, w.head, e, store.find(table, entries, e, w.bid[j]))
                    w.held[j] &= ~bit & 3
                    s[r, columns.PRIVATE] += size
                    s[r, SHARED] -= size
                j -= 1
    s[r, SHARE] = 0


@lean(columns, heap, kv, other_side, runs, store)
def drive_out(w: World, table: np.ndarray, entries: np.ndarray, e: int, r: int) -> None:
    """``r``, which runs or has arrived, gives all up and waits again. There must be places for entries and rows."""
    s, eng = w.s, w.eng
    if s[r, SHARE] > 0:
        _undo(w, table, entries, e, r)
    if s[r, FLAGS] & STREAMED:
        drop_room(w, table, entries, r)
    offers_no_more(w, e, r)
    leave(w, table, entries, e, r, True)
    if eng[e, CACHE] == SLOTTED:
        w.slot[s[r, SLOT], BUSY], w.slot[s[r, SLOT], SLOT_PROMPT] = 0, -1
    end_run(s, w.g, w.runs, r, e, eng[e, STEPS] - 1)
    start_run(s, r, eng[e, STEPS], PREEMPTED, 0, s[r, COMPUTED], 0)
    known = s[r, PROMPT] + s[r, GENERATED]
    w.out[r, _RECOMPUTED] += s[r, COMPUTED]
    w.out[r, _PREEMPTIONS] += 1
    if eng[e, ROLE] == PREFILL:
        w.out[r, _PREFILL_PREEMPTIONS] += 1
    s[r, COMPUTED], s[r, SHARE], s[r, STATE] = 0, 0, DRIVEN_OUT
    eng[e, QUEUED_DECODE] += 1
    eng[e, QUEUED_DECODE_TOKENS] += known
    if w.g[REQUEUE]:
        heap.enqueue(w.queues, w.nodes, e, r, s[r, KEY], w.out[r, _ARRIVAL], r)
    else:
        s[r, LINK] = eng[e, FRONT]
        eng[e, FRONT] = r
    eng[e, VICTIMS] += 1
    eng[e, ALL_VICTIMS] += 1


@lean(columns, decoders, heap, kv, other_side, runs, store)
def one_by_one(w: World, table: np.ndarray, entries: np.ndarray, log: np.ndarray, e: int, which: int) -> None:
    """The running ones in the order of admission; whoever lacks room drives others out."""
    s, eng, caches = w.s, w.eng, w.caches
    separate(s, eng, w.cal, e)
    eng[e, SEPARATE], eng[e, TOOK_DECODERS] = 1, 0
    d = 0
    r = eng[e, HEAD]
    while r >= 0:
        if which != DECODERS_ONLY or s[r, STATE] == DECODING:
            s[r, SHARE] = 0
        d += s[r, STATE] == DECODING
        r = s[r, AFTER]
    if which != DECODERS_ONLY:
        eng[e, PROPOSES] = w.g[SPEC_TOKENS] if d <= w.g[SPEC_OFF] else 0
    proposals = eng[e, PROPOSES]
    r = eng[e, HEAD]
    while r >= 0 and eng[e, LEFT] > 0:
        state = s[r, STATE]
        if state == PADDED or (which == PROMPTS_ONLY and state != PROMPTED) or (which == DECODERS_ONLY and state != DECODING):
            r = s[r, AFTER]
            continue
        if state == DECODING:
            tokens = min(1 + proposals, eng[e, LEFT])
        else:
            rest = s[r, PROMPT] + s[r, GENERATED] - s[r, COMPUTED]
            tokens = min(rest, eng[e, LEFT])
            if tokens < rest and eng[e, CHUNKED] == 0:
                r = s[r, AFTER]
                continue
        want = wanted(w, e, r, s[r, COMPUTED] + tokens)
        gone = False
        while want > caches[e, FREE] + caches[e, EVICTABLE] and not gone:
            v = worst(w, e)
            leave_running(s, eng, e, v)
            drive_out(w, table, entries, e, v)
            gone = v == r
        if gone:
            break
        store.take(caches, table, entries, w.head, log, e, want)
        s[r, columns.PRIVATE] += want
        if state == DECODING:
            s[r, SHARE] = tokens
            eng[e, LEFT] -= tokens
            eng[e, D_N] += 1
            eng[e, D_TOKENS] += tokens
            eng[e, D_CONTEXT] += s[r, COMPUTED]
            eng[e, PROPOSED] += tokens - 1
        else:
            give_chunk(w, e, r, tokens)
            if eng[e, CACHE] == POOL:
                enter_prompt(w, table, entries, log, e, r, s[r, COMPUTED] + tokens)
        r = s[r, AFTER]
