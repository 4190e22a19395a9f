"""The end of a step, compiled: tokens come out, requests end, prompts become decoders."""

from __future__ import annotations

import numpy as np

from hoptrace.replay.compiled import begin as begin_module
from hoptrace.replay.compiled import columns, decoders, handover, heap, kv, running, runs, store
from hoptrace.replay.compiled.begin import end_batch
from hoptrace.replay.compiled.columns import (
    AFTER,
    AFTER_NS,
    AGGREGATED,
    ARRIVAL_NS,
    BEFORE_NS,
    BUSY,
    CACHE,
    CALM,
    CLIENT_QUEUE,
    CLIENTS,
    COMPUTED,
    DECODE_PHASE,
    DECODERS,
    DECODING,
    DONE_N,
    DUE_NEXT,
    END,
    ENDED,
    EXPLICIT,
    FIRST_AFTER,
    FLAGS,
    FLOOR,
    FRESH_FIRST,
    GAP,
    GENERATED,
    HEAD,
    LINK,
    LONE,
    MODE,
    NEXT_AFTER,
    NONE,
    OUTPUT,
    PADDED,
    PADS,
    PADS_CONTEXT,
    POOL,
    PREFILL,
    PROMPT,
    READY,
    RECOMPUTE,
    ROLE,
    ROUTER_QUEUE,
    RUNNING,
    SEPARATE,
    SHARE,
    SLOT,
    SLOTTED,
    STATE,
    STATIC,
    STEPS,
    STREAMED,
    SUCCESSORS,
    TAIL_FIRST,
    TAKEN,
    THINK,
    THINK_NS,
    TOOK_DECODERS,
    UNFINISHED,
    WHEN,
    WRITE_FIRST,
    World,
)  # fmt: skip
from hoptrace.replay.compiled.decoders import aggregate, due_now, tokens_of
from hoptrace.replay.compiled.handover import end_stream, hand_over
from hoptrace.replay.compiled.kv import leave
from hoptrace.replay.compiled.routing import is_gone
from hoptrace.replay.compiled.running import leave_running
from hoptrace.replay.compiled.runs import end_run, set_run
from hoptrace.replay.compiled.slots import BUSY as SLOT_BUSY
from hoptrace.replay.compiled.slots import USED
from hoptrace.replay.compiled.tiers import has_ended, write_through
from hoptrace.replay.jit import lean
from hoptrace.replay.outcome import CHUNK, DECODE, DONE, REQUEST, SKIPPED

__all__ = ["ended", "finish", "successors"]

_ARRIVAL = REQUEST.index("arrival_ns")
_FIRST, _LAST, _PREFILL_END = REQUEST.index("first_token_ns"), REQUEST.index("last_token_ns"), REQUEST.index("prefill_end_ns")
_GENERATED, _STATUS = REQUEST.index("generated_tokens"), REQUEST.index("status")


@lean(columns, heap, forceinline=True)
def successors(w: World, r: int, now: int) -> None:
    """``r`` has ended for its client at ``now``: who came after it arrives; a place of the closed loop is free."""
    g = w.g
    if g[CLIENTS]:
        heap.enqueue(w.queues, w.nodes, g[CLIENT_QUEUE], r, now + g[THINK] + g[BEFORE_NS], r, r)
    elif g[SUCCESSORS]:
        x = w.work[r, FIRST_AFTER]
        while x >= 0:
            at = now + w.work[x, THINK_NS]
            if w.work[x, FLOOR]:
                at = max(at, w.work[x, ARRIVAL_NS])
            if at <= g[columns.HORIZON]:
                w.out[x, _ARRIVAL] = at
            heap.enqueue(w.queues, w.nodes, g[ROUTER_QUEUE], x, at + g[BEFORE_NS], 0, x)
            x = w.work[x, NEXT_AFTER]


@lean(columns, heap, kv, running, runs, store, forceinline=True)
def ended(w: World, table: np.ndarray, entries: np.ndarray, e: int, r: int, now: int) -> None:
    """``r`` has its last token, at the end of the step that ends now. There must be places for entries and rows."""
    s, eng, out = w.s, w.eng, w.out
    out[r, _LAST], out[r, _GENERATED], out[r, _STATUS] = now, s[r, OUTPUT], DONE
    end_run(s, w.g, w.runs, r, e, eng[e, STEPS])
    is_gone(w, e)
    w.g[DONE_N] += 1
    has_ended(w, e, r)
    if eng[e, MODE] == STATIC:
        s[r, STATE] = PADDED
        eng[e, PADS] += 1
        eng[e, PADS_CONTEXT] += s[r, COMPUTED]
    else:
        s[r, STATE] = ENDED
        leave_running(s, eng, e, r)
        if eng[e, CACHE] == POOL:
            leave(w, table, entries, e, r, False)
        else:
            w.caches[e, store.FREE] += s[r, columns.PRIVATE]
            s[r, columns.PRIVATE] = 0
            if eng[e, CACHE] == SLOTTED:
                w.slot[s[r, SLOT], SLOT_BUSY], w.slot[s[r, SLOT], USED] = 0, now
    successors(w, r, now + w.g[AFTER_NS])


@lean(columns, decoders, handover, heap, kv, running, runs, store, forceinline=True)
def _one(w: World, table: np.ndarray, entries: np.ndarray, e: int, r: int, now: int) -> None:
    """What the step that ends now did for ``r``, which is not aggregated."""
    s, eng = w.s, w.eng
    step, tokens = eng[e, STEPS], s[r, SHARE]
    decoder = s[r, STATE] == DECODING
    context = s[r, COMPUTED]
    emitted, ends, hands_over = 0, False, False
    if decoder:
        if tokens > 0:
            emitted = 1 + s[r, TAKEN]
            s[r, COMPUTED] = context + emitted
    else:
        s[r, COMPUTED] = context + tokens
        ends = tokens > 0 and s[r, COMPUTED] == s[r, PROMPT] + s[r, GENERATED]
        hands_over = ends and eng[e, ROLE] == PREFILL and s[r, OUTPUT] > 1
        emitted = 1 if ends and not (hands_over and w.g[RECOMPUTE]) else 0
    set_run(s, w.g, w.runs, r, e, step, SKIPPED if tokens == 0 else (DECODE if decoder else CHUNK), tokens, context, emitted)
    if not decoder and not ends:
        eng[e, UNFINISHED] = r
        if s[r, FLAGS] & STREAMED:
            end_stream(w, e, r, now)
        return
    if ends:
        if eng[e, UNFINISHED] == r:
            eng[e, UNFINISHED] = NONE
        if w.out[r, _PREFILL_END] < 0:
            w.out[r, _PREFILL_END] = now
    s[r, GENERATED] += emitted
    if emitted > 0 and w.out[r, _FIRST] < 0:
        w.out[r, _FIRST] = now
    if s[r, GENERATED] == s[r, OUTPUT]:
        ended(w, table, entries, e, r, now)
        return
    s[r, SHARE], s[r, TAKEN] = 0, 0
    if s[r, GENERATED] == 0 and not ends:
        # Handed over without a token, and skipped: its room is not that of its tokens, and its first token is still to be seen.
        eng[e, LONE] += 1
        return
    if hands_over:
        hand_over(w, table, entries, e, r, now)
        return
    s[r, STATE] = DECODING
    if eng[e, EXPLICIT] == 0:
        aggregate(s, eng, w.cal, e, r)


@lean(begin_module, columns, decoders, handover, heap, kv, running, runs, store, forceinline=True)
def finish(w: World, table: np.ndarray, entries: np.ndarray, e: int, now: int) -> None:
    """Engine ``e``'s step ends now. There must be places for rows and entries."""
    s, eng, g = w.s, w.eng, w.g
    step = eng[e, STEPS]
    eng[e, LONE] = 0
    if eng[e, SEPARATE] == 0:
        if eng[e, DECODERS] > 0:
            took = eng[e, TOOK_DECODERS]
            phase = DECODE if took else SKIPPED
            if phase != eng[e, DECODE_PHASE]:
                r = eng[e, HEAD]
                while r >= 0:
                    if s[r, STATE] == AGGREGATED:
                        set_run(s, g, w.runs, r, e, step, phase, took, tokens_of(s, eng, e, r), took)
                    r = s[r, AFTER]
                eng[e, DECODE_PHASE] = phase
            else:
                r = eng[e, FRESH_FIRST]
                while r >= 0:
                    set_run(s, g, w.runs, r, e, step, phase, took, tokens_of(s, eng, e, r), took)
                    r = s[r, LINK]
            eng[e, FRESH_FIRST] = NONE
            if took:
                r = due_now(s, eng, w.cal, e)
                while r >= 0:
                    after = s[r, DUE_NEXT]
                    ended(w, table, entries, e, r, now)
                    r = after
        r = eng[e, TAIL_FIRST]
    else:
        r = eng[e, HEAD]
    while r >= 0:
        after = s[r, AFTER]
        if s[r, STATE] != PADDED:
            _one(w, table, entries, e, r, now)
        r = after
    if eng[e, PADS] > 0 and eng[e, PADS] == eng[e, RUNNING]:
        end_batch(w, table, entries, e)
    if eng[e, WRITE_FIRST] >= 0:
        write_through(w, table, entries, e, step, now)
    eng[e, STEPS] = step + 1
    eng[e, BUSY], eng[e, CALM], eng[e, READY] = 0, 0, now + eng[e, GAP]
    eng[e, WHEN] = 4 * eng[e, READY] + 1
    g[END] = max(g[END], now)
