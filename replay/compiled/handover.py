"""From the prefill engine to the decode engine, compiled: choosing it, room there, the transfer, whole or per layer.

While a request has room on both engines, ``PRIVATE``, ``SHARED`` and ``NEXT_BLOCK`` are those on the engine that schedules it,
and ``KEPT_*`` those on the other: the decode engine until its prompt has ended, then the prefill engine.
"""

from __future__ import annotations

import numpy as np

from hoptrace.replay.compiled import (
    columns,
    heap,
    kv,
    loading,
    moves,
    other_side,
    routing,
    runs,
    store,
    tiers,
    transfers,
)
from hoptrace.replay.compiled.columns import (
    AFTER,
    ARRANGE,
    BEFORE,
    BEGUN,
    BLOCK,
    CACHE,
    COMING,
    COMPUTED,
    FLAGS,
    FLYING,
    GENERATED,
    HANDED,
    HEAD,
    HELD_N,
    JOIN_QUEUE,
    JOINED,
    KEPT_NEXT,
    KEPT_PRIVATE,
    KEPT_SHARED,
    KEY,
    LAYERS,
    LINK,
    LOAD_NEED,
    LOADING,
    LOADING_N,
    LOADS,
    NEED,
    NEW_ENTRIES,
    NONE,
    OUTPUT,
    PENDING,
    POOL,
    POSITION,
    PRIVATE,
    PROMPT,
    PROMPT_STEP,
    PUSH,
    QUEUED_DECODE,
    QUEUED_DECODE_TOKENS,
    RECOMPUTE,
    REST,
    SHARE,
    SHARED,
    STARTED,
    STATE,
    STEPS,
    STREAMED,
    STREAMS,
    TOKEN_BYTES,
    UNSEEN,
    WAITING,
    World,
)  # fmt: skip
from hoptrace.replay.compiled.kv import enter_prompt, hold_hits, leave, look_up, wanted
from hoptrace.replay.compiled.loading import arrives, room_for_load
from hoptrace.replay.compiled.moves import begin_move
from hoptrace.replay.compiled.other_side import swap
from hoptrace.replay.compiled.routing import TO_DECODE, is_gone, route
from hoptrace.replay.compiled.running import leave_running
from hoptrace.replay.compiled.store import FREE
from hoptrace.replay.compiled.tiers import has_ended, stash
from hoptrace.replay.compiled.waking import wake
from hoptrace.replay.jit import lean
from hoptrace.replay.outcome import MOVE_HANDOVER, MOVE_STREAM, REQUEST

__all__ = ["begin_streams", "end_stream", "hand_over", "join", "plan_stream", "pull", "sent"]

_ARRIVAL, _ENGINE, _DECODE_ENGINE = REQUEST.index("arrival_ns"), REQUEST.index("engine"), REQUEST.index("decode_engine")
_START, _END, _TOKENS = REQUEST.index("handover_start_ns"), REQUEST.index("handover_end_ns"), REQUEST.index("handover_tokens")
_CACHED, _QUEUED = REQUEST.index("decode_cached_tokens"), REQUEST.index("decode_queued_ns")


@lean(columns, routing)
def _choose(w: World, table: np.ndarray, entries: np.ndarray, r: int, now: int) -> int:
    """The decode engine of a request, chosen once."""
    if w.out[r, _DECODE_ENGINE] < 0:
        w.out[r, _DECODE_ENGINE] = route(w, table, entries, TO_DECODE, r, now)
    return w.out[r, _DECODE_ENGINE]


@lean(columns)
def _way(w: World, r: int) -> int:
    return w.ways_of[w.eng[w.out[r, _ENGINE], POSITION], w.eng[w.out[r, _DECODE_ENGINE], POSITION]]


@lean(columns, kv, loading, store)
def _take_room(w: World, table: np.ndarray, entries: np.ndarray, log: np.ndarray, e: int, r: int) -> int:
    """Room for ``r``'s prompt on the decode engine ``e``, if there is: how many of its tokens are there already, else -1.

    ``GENERATED`` must be what it will be there.
    """
    s, hits, hit, shared, evictable = w.s, 0, 0, 0, 0
    if w.eng[e, CACHE] == POOL:
        hits, hit, shared, evictable = look_up(w, table, entries, e, r)
    whole = s[r, PROMPT] + s[r, GENERATED]
    if not room_for_load(w, e, s[r, PROMPT], whole, shared, evictable):
        return -1
    hold_hits(w, table, entries, e, r, hits)
    want = wanted(w, e, r, s[r, PROMPT])
    if w.caches[e, FREE] >= want:
        w.caches[e, FREE] -= want
    else:
        store.take(w.caches, table, entries, w.head, log, e, want)
    s[r, PRIVATE] += want
    s[r, BEGUN] = w.g[LOADS]
    w.g[LOADS] += 1
    s[r, LOAD_NEED] = wanted(w, e, r, whole)
    w.eng[e, NEED] += s[r, LOAD_NEED]
    w.eng[e, LOADING_N] += 1
    w.g[FLYING] += s[r, NEW_ENTRIES]
    w.out[r, _CACHED] = hit
    return hit


@lean(columns)
def _list(w: World, e: int, r: int) -> None:
    """``r`` is one of those that come to ``e``."""
    first = w.eng[e, COMING]
    w.s[r, STATE], w.s[r, BEFORE], w.s[r, AFTER] = LOADING, NONE, first
    if first >= 0:
        w.s[first, BEFORE] = r
    w.eng[e, COMING] = r


@lean(columns, kv, moves, tiers)
def _give_back(w: World, table: np.ndarray, entries: np.ndarray, r: int, now: int) -> None:
    """The room on the prefill engine is free again, once."""
    e, s = w.out[r, _ENGINE], w.s
    if s[r, FLAGS] & columns.HOLDS == 0:
        return
    s[r, FLAGS] &= ~columns.HOLDS
    computed = s[r, COMPUTED]
    swap(s, r)
    s[r, COMPUTED] = s[r, PROMPT]
    leave(w, table, entries, e, r, False)
    s[r, COMPUTED] = computed
    swap(s, r)
    w.eng[e, HELD_N] -= 1
    w.g[FLYING] -= s[r, NEW_ENTRIES]
    wake(w, e, now)


@lean(columns, heap, kv, loading, store, tiers)
def _arrived(w: World, table: np.ndarray, entries: np.ndarray, log: np.ndarray, r: int, now: int) -> None:
    """All of ``r``'s KV is on its decode engine, whose queue it has reached."""
    s, out, e = w.s, w.out, w.out[r, _DECODE_ENGINE]
    if out[r, _TOKENS] < 0:
        out[r, _START], out[r, _END], out[r, _TOKENS] = now, now, 0
    if out[r, _END] < 0:
        out[r, _END] = now
    if w.eng[e, CACHE] == POOL:
        enter_prompt(w, table, entries, log, e, r, s[r, PROMPT])
        stash(w, table, entries, log, e)
    s[r, FLAGS] &= ~STREAMED
    s[r, COMPUTED] = s[r, PROMPT] - w.g[RECOMPUTE]
    arrives(w, e, r)
    wake(w, e, now)


@lean(columns, heap, kv, loading, moves, store, tiers, transfers)
def _send(
    w: World, table: np.ndarray, entries: np.ndarray, log: np.ndarray, r: int, hit: int, starter: int, step: int, now: int
) -> None:
    """Start the transfer of what the decode engine does not have."""
    s, out, e = w.s, w.out, w.out[r, _DECODE_ENGINE]
    _list(w, e, r)
    tokens, block = s[r, PROMPT] - hit, w.eng[e, BLOCK]
    out[r, _TOKENS] = max(0, out[r, _TOKENS]) + tokens
    if out[r, _START] < 0:
        out[r, _START] = now
    if tokens == 0:
        out[r, _END] = now
        _give_back(w, table, entries, r, now)
        _arrived(w, table, entries, log, r, now)
        return
    s[r, PENDING] += 1
    x = begin_move(
        w, now, _way(w, r), (tokens + block - 1) // block, tokens * w.g[TOKEN_BYTES], r, starter, MOVE_HANDOVER, step, -1
    )
    w.under_way[x, moves.OF] = s[r, STREAMS]


@lean(columns, heap, kv, loading, moves, store, tiers, transfers)
def pull(w: World, table: np.ndarray, entries: np.ndarray, log: np.ndarray, e: int, r: int, now: int) -> bool:
    """A pass of the decode engine comes to a request that is still on its prefill engine; whether there was room for it, which
    is then to be taken out of the queue by the caller, before."""
    hit = _take_room(w, table, entries, log, e, r)
    if hit < 0:
        return False
    heap.dequeue(w.queues, w.nodes, e)
    _send(w, table, entries, log, r, hit, e, w.eng[e, STEPS], now)
    return True


@lean(columns, heap, kv, loading, moves, other_side, routing, runs, store, tiers, transfers)
def hand_over(w: World, table: np.ndarray, entries: np.ndarray, e: int, r: int, now: int) -> None:
    """``r``'s prompt has ended on the prefill engine ``e``: it leaves for its decode engine, its room here stays for now."""
    s, g = w.s, w.g
    runs.end_run(s, g, w.runs, r, e, w.eng[e, STEPS])
    _choose(w, table, entries, r, now)
    leave_running(s, w.eng, e, r)
    s[r, PROMPT_STEP] = w.eng[e, STEPS]
    s[r, FLAGS] |= HANDED | columns.HOLDS
    s[r, STATE], s[r, COMPUTED] = WAITING, 0
    is_gone(w, e)
    has_ended(w, e, r)
    w.eng[e, HELD_N] += 1
    g[FLYING] += s[r, NEW_ENTRIES]
    if s[r, FLAGS] & STREAMED:
        # From now on the decode engine's room is its own.
        end_stream(w, e, r, now)
        swap(s, r)
        if s[r, PENDING] == 0:
            _give_back(w, table, entries, r, now)
    else:
        swap(s, r)
        s[r, PRIVATE], s[r, SHARED] = 0, 0
        s[r, PENDING] = 0
    heap.enqueue(w.queues, w.nodes, g[JOIN_QUEUE], r, now + g[ARRANGE], 0, r)


@lean(columns, heap, kv, loading, moves, store, tiers, transfers)
def join(w: World, table: np.ndarray, entries: np.ndarray, log: np.ndarray, r: int, now: int) -> None:
    """``r`` reaches the queue of its decode engine."""
    s, e = w.s, w.out[r, _DECODE_ENGINE]
    s[r, FLAGS] |= JOINED
    w.out[r, _QUEUED] = now
    w.eng[e, QUEUED_DECODE] += 1
    w.eng[e, QUEUED_DECODE_TOKENS] += s[r, PROMPT]
    s[r, LINK] = w.eng[e, UNSEEN]
    w.eng[e, UNSEEN] = r
    wake(w, e, now)
    if s[r, FLAGS] & STREAMED:
        _list(w, e, r)
        if s[r, PENDING] == 0:
            _arrived(w, table, entries, log, r, now)
        return
    if w.g[PUSH]:
        hit = _take_room(w, table, entries, log, e, r)
        if hit >= 0:
            stash(w, table, entries, log, e)
            _send(w, table, entries, log, r, hit, w.out[r, _ENGINE], s[r, PROMPT_STEP], now)
            return
    heap.enqueue(w.queues, w.nodes, e, r, s[r, KEY], w.out[r, _ARRIVAL], r)


@lean(columns, heap, kv, loading, moves, store, tiers, transfers)
def sent(w: World, table: np.ndarray, entries: np.ndarray, log: np.ndarray, r: int, stream: int, now: int) -> None:
    """A transfer of ``r``'s has ended; ``stream`` tells whether its room on the decode engine is still the one it went to."""
    s = w.s
    if stream != s[r, STREAMS]:
        return
    s[r, PENDING] -= 1
    w.out[r, _END] = now
    if s[r, PENDING] == 0 and s[r, FLAGS] & HANDED:
        _give_back(w, table, entries, r, now)
        if s[r, FLAGS] & JOINED:
            _arrived(w, table, entries, log, r, now)


@lean(columns, kv, loading, routing, store)
def plan_stream(w: World, table: np.ndarray, entries: np.ndarray, log: np.ndarray, e: int, r: int, now: int) -> None:
    """``r``'s prompt is scheduled on the prefill engine ``e``: at the first time, per layer, choose the decode engine and take
    room there."""
    s, g = w.s, w.g
    if s[r, OUTPUT] == 1 or w.out[r, _DECODE_ENGINE] >= 0:
        return
    to = _choose(w, table, entries, r, now)
    s[r, KEPT_PRIVATE], s[r, KEPT_SHARED], s[r, KEPT_NEXT] = 0, 0, 0
    stash(w, table, entries, log, e)
    swap(s, r)
    s[r, GENERATED] = 1 - g[RECOMPUTE]
    hit = _take_room(w, table, entries, log, to, r)
    s[r, GENERATED] = 0
    swap(s, r)
    stash(w, table, entries, log, to)
    if hit >= 0:
        s[r, FLAGS] |= STREAMED
        s[r, FLAGS] &= ~STARTED
        s[r, REST], s[r, PENDING] = -1, 0


@lean(columns, moves, transfers)
def _stream(w: World, e: int, r: int, nbytes: int, blocks: int, now: int) -> None:
    w.s[r, PENDING] += 1
    x = begin_move(w, now, _way(w, r), blocks, nbytes, r, e, MOVE_STREAM, w.eng[e, STEPS], -1)
    w.under_way[x, moves.OF] = w.s[r, STREAMS]


@lean(columns, moves, transfers)
def begin_streams(w: World, e: int, now: int) -> None:
    """A step begins: what it computes of prompts that are sent per layer goes on its way, but for the last layer."""
    s, out, layers = w.s, w.out, w.g[LAYERS]
    r = w.eng[e, HEAD]
    while r >= 0:
        if s[r, FLAGS] & STREAMED and s[r, SHARE] > 0:
            begin = max(out[r, _CACHED], s[r, COMPUTED] if s[r, FLAGS] & STARTED else 0)
            s[r, FLAGS] |= STARTED
            s[r, REST] = -1
            tokens = s[r, COMPUTED] + s[r, SHARE] - begin
            if tokens > 0:
                out[r, _TOKENS] = max(0, out[r, _TOKENS]) + tokens
                if out[r, _START] < 0:
                    out[r, _START] = now
                size, block = tokens * w.g[TOKEN_BYTES], w.eng[out[r, _DECODE_ENGINE], BLOCK]
                first = size * (layers - 1) // layers
                s[r, REST] = size - first
                _stream(w, e, r, first, (tokens + block - 1) // block, now)
        r = s[r, AFTER]


@lean(columns, moves, transfers)
def end_stream(w: World, e: int, r: int, now: int) -> None:
    """A step has ended: the last layer of what it computed of ``r`` goes."""
    if w.s[r, FLAGS] & STREAMED and w.s[r, REST] >= 0:
        _stream(w, e, r, w.s[r, REST], 0, now)
    w.s[r, REST] = -1
