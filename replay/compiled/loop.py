"""The event loop, compiled: what is due next happens, until rows have to be taken or nothing is left."""

from __future__ import annotations

import numpy as np

from hoptrace import stepcost_kernel
from hoptrace.replay import draws
from hoptrace.replay.compiled import (
    admission,
    blocktable,
    columns,
    decoders,
    handover,
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
)  # fmt: skip
from hoptrace.replay.compiled import begin as begin_module
from hoptrace.replay.compiled import finish as finish_module
from hoptrace.replay.compiled import stretch as stretch_module
from hoptrace.replay.compiled.begin import begin
from hoptrace.replay.compiled.columns import (
    AGGREGATED,
    ASSIGNED,
    BEFORE_NS,
    CALM,
    CLIENT_QUEUE,
    CLOCK,
    END,
    FLAGS,
    FLYING,
    FRESH_FIRST,
    FROM_ARRIVAL,
    GENERATED,
    HANDED,
    HANDOVER,
    HERE,
    HORIZON,
    JOIN_QUEUE,
    KEY,
    LINK,
    LOCAL_BELOW,
    LOOKED,
    LOOKS,
    MIDWAY,
    N_MOVES,
    N_RUNS,
    N_STEPS,
    NEVER,
    NEVER_FITS,
    NEXT_CLIENT,
    NOW,
    PLACE,
    POSITION,
    PROMPT,
    QUEUED_DECODE,
    QUEUED_N,
    QUEUED_TOKENS,
    ROUTER_QUEUE,
    RUNNING,
    SINCE,
    STAGE,
    STATE,
    STEPS,
    SWEEP,
    TIERS_N,
    UNSEEN,
    WAITING,
    WANTED,
    WHEN,
    World,
)  # fmt: skip
from hoptrace.replay.compiled.finish import finish, successors
from hoptrace.replay.compiled.kv import fits
from hoptrace.replay.compiled.routing import ENTRY, TO_DECODE, look, route
from hoptrace.replay.compiled.runs import end_run
from hoptrace.replay.compiled.stretch import stretch
from hoptrace.replay.compiled.waking import sift, wake
from hoptrace.replay.jit import lean
from hoptrace.replay.outcome import MOVE_HANDOVER, MOVE_READ, MOVE_STREAM, REFUSED, REQUEST, UNFINISHED

__all__ = ["CROWDED", "FINISHED", "FULL", "SHORT", "advance", "close"]

FINISHED, FULL, SHORT, CROWDED = 0, 1, 2, 3

_ARRIVAL, _ROUTED, _ENGINE, _STATUS = (
    REQUEST.index("arrival_ns"), REQUEST.index("routed_ns"), REQUEST.index("engine"), REQUEST.index("status"),
)  # fmt: skip
_DECODE_ENGINE, _GENERATED = REQUEST.index("decode_engine"), REQUEST.index("generated_tokens")


@lean(columns, heap, forceinline=True)
def _queue(w: World, e: int, r: int) -> None:
    """``r`` joins the queue of an entry engine."""
    s, eng = w.s, w.eng
    s[r, STATE] = WAITING
    heap.enqueue(w.queues, w.nodes, e, r, s[r, KEY], w.out[r, _ARRIVAL], r)
    eng[e, QUEUED_N] += 1
    eng[e, QUEUED_TOKENS] += s[r, PROMPT]
    s[r, LINK] = eng[e, UNSEEN]
    eng[e, UNSEEN] = r


@lean(columns, finish_module, heap, forceinline=True)
def _arrive(w: World, table: np.ndarray, entries: np.ndarray, r: int, now: int) -> None:
    """``r`` reaches the router."""
    out, g = w.out, w.g
    arrival = now - g[BEFORE_NS]
    out[r, _ARRIVAL] = arrival
    if w.s[r, FLAGS] & NEVER_FITS:
        out[r, _STATUS] = REFUSED
        g[END] = max(g[END], arrival)
        successors(w, r, arrival)
        return
    out[r, _ROUTED] = now
    g[END] = max(g[END], now)
    if g[FROM_ARRIVAL]:
        w.s[r, KEY] += arrival
    if g[ASSIGNED]:
        e = w.s[r, columns.EXPECTED]
        w.load[ENTRY, w.eng[e, POSITION]] += 1
    else:
        e = route(w, table, entries, TO_DECODE if w.s[r, PROMPT] < g[LOCAL_BELOW] else ENTRY, r, now)
    out[r, _ENGINE] = e
    _queue(w, e, r)
    wake(w, e, now)


@lean(columns, moves, transfers)
def _crowded(w: World, more: int) -> bool:
    """Whether there are no places for so many more transfers; the loop has to come back for them."""
    if moves.places(w.under_way, w.thead) >= more:
        return False
    w.g[WANTED] = more
    return True


@lean(blocktable, columns, heap, kv, loading, moves, store, tiers, transfers)
def _transfers_end(w: World, table: np.ndarray, entries: np.ndarray, log: np.ndarray, now: int) -> None:
    """Transfers that are due now end, with what follows from it. There must be places for their rows."""
    t = w.under_way
    n = transfers.due(t, w.left, w.thead, w.ways, w.links, now)
    for k in range(n):
        x = t[k, transfers.ENDED]
        r, e = t[x, moves.REQUEST], t[x, moves.ENGINE]
        moves.end_move(w, x, now)
        if t[x, moves.KIND] == MOVE_READ and loading.read(w, table, entries, log, e, r, t[x, moves.TIER], now):
            tiers.stash(w, table, entries, log, e)
            wake(w, e, now)
        elif t[x, moves.KIND] == MOVE_HANDOVER or t[x, moves.KIND] == MOVE_STREAM:
            handover.sent(w, table, entries, log, r, t[x, moves.OF], now)
        transfers.free(t, w.thead, x)


@lean(
    blocktable, handover, loading, moves, tiers, transfers,
    admission, begin_module, columns, decoders, draws, finish_module, heap, kv, running, runs, slots, store, stepcost_kernel,
    stretch_module,
)  # fmt: skip
def advance(w: World, table: np.ndarray, entries: np.ndarray, log: np.ndarray) -> int:
    """Go on until there is no room for rows (FULL), entries in the store (SHORT) or transfers (CROWDED), or nothing happens any
    more (FINISHED)."""
    eng, g, order, queues, nodes = w.eng, w.g, w.order, w.queues, w.nodes
    engines = order.size
    while True:
        e = order[0]
        when = eng[e, WHEN]
        router, client = NEVER, NEVER
        r = heap.first(queues, nodes, g[ROUTER_QUEUE])
        if r >= 0:
            router = nodes[r, heap.KEY]
        x = heap.first(queues, nodes, g[CLIENT_QUEUE])
        if x >= 0:
            client = nodes[x, heap.KEY]
        joining = NEVER
        y = heap.first(queues, nodes, g[JOIN_QUEUE])
        if y >= 0:
            joining = nodes[y, heap.KEY]
        moving = transfers.next_ns(w.under_way, w.thead)
        now = min(when >> 2, router, client, joining, moving)
        if now > g[HORIZON] or now >= NEVER:
            return FINISHED
        if now != g[NOW]:
            g[NOW], g[STAGE], g[SWEEP] = now, 0, -1
        stage = g[STAGE]
        if g[LOOKS] and now > g[LOOKED]:
            look(w, now)
            g[LOOKED] = now
        if moving == now and stage == 0:
            if g[N_MOVES] + w.under_way.shape[0] > w.moves.shape[0]:
                return FULL
            if g[FLYING] > 0 and not fits(w, table, entries, log, g[FLYING]):
                return SHORT
            _transfers_end(w, table, entries, log, now)
        elif when == 4 * now and stage <= 1:
            g[STAGE] = 1
            if eng[e, CALM] != 0 and eng[e, FRESH_FIRST] < 0:
                until = min(router, client, joining, moving, g[HORIZON] + 1)
                if g[LOOKS]:
                    until = min(until, now + 1)
                if engines > 1:
                    until = min(until, eng[order[1], WHEN] >> 2)
                if engines > 2:
                    until = min(until, eng[order[2], WHEN] >> 2)
                if stretch(w, e, until):
                    sift(order, eng, engines, 0)
                    continue
            if g[N_RUNS] + 3 * eng[e, RUNNING] + 8 > w.runs.shape[0] or g[N_STEPS] >= w.steps.shape[0]:
                return FULL
            if eng[e, HERE] > 0 and not fits(w, table, entries, log, eng[e, HERE]):
                return SHORT
            if g[TIERS_N] + g[HANDOVER] > 0 and _crowded(w, eng[e, RUNNING] + 2):
                return CROWDED
            finish(w, table, entries, e, now)
            sift(order, eng, engines, 0)
        elif client == now and stage <= 3:
            g[STAGE] = 3
            x = heap.dequeue(queues, nodes, g[CLIENT_QUEUE])
            if g[NEXT_CLIENT] < w.s.shape[0]:
                heap.enqueue(queues, nodes, g[ROUTER_QUEUE], g[NEXT_CLIENT], now, 0, g[NEXT_CLIENT])
                g[NEXT_CLIENT] += 1
        elif router == now and stage <= 3:
            g[STAGE] = 3
            heap.dequeue(queues, nodes, g[ROUTER_QUEUE])
            _arrive(w, table, entries, r, now)
        elif joining == now and stage <= 4:
            g[STAGE] = 4
            if g[FLYING] > 0 and not fits(w, table, entries, log, 2 * g[FLYING]):
                return SHORT
            if _crowded(w, 1):
                return CROWDED
            heap.dequeue(queues, nodes, g[JOIN_QUEUE])
            handover.join(w, table, entries, log, y, now)
        elif when == 4 * now + 1:
            g[STAGE], g[SWEEP] = 5, e
            if g[N_RUNS] + 3 * eng[e, RUNNING] + 8 > w.runs.shape[0] or g[N_STEPS] >= w.steps.shape[0]:
                return FULL
            if eng[e, HERE] > 0 and eng[e, MIDWAY] == 0 and not fits(w, table, entries, log, eng[e, HERE]):
                return SHORT
            many = max(1, g[TIERS_N]) * (eng[e, QUEUED_N] + eng[e, QUEUED_DECODE] + eng[e, RUNNING] + 2)
            if g[TIERS_N] + g[HANDOVER] > 0 and _crowded(w, many):
                return CROWDED
            if not begin(w, table, entries, log, e, now):
                return SHORT
            sift(order, eng, engines, eng[e, PLACE])
        else:
            # Another round of this instant.
            g[STAGE], g[SWEEP] = 0, -1
            for k in range(eng.shape[0]):
                if eng[k, WHEN] == 4 * now + 2:
                    eng[k, WHEN] = 4 * now + 1
                    sift(order, eng, engines, eng[k, PLACE])


@lean(columns, runs)
def close(w: World, r: int) -> int:
    """The horizon: open runs of requests from ``r`` on end with the last step that ended, and it is said how far those came.
    Returns the first request that was left for want of room for rows."""
    s, eng, out = w.s, w.eng, w.out
    while r < s.shape[0] and w.g[N_RUNS] < w.runs.shape[0]:
        if out[r, _STATUS] == UNFINISHED and out[r, _ENGINE] >= 0:
            e = out[r, _DECODE_ENGINE] if s[r, FLAGS] & HANDED else out[r, _ENGINE]
            out[r, _GENERATED] = s[r, GENERATED]
            if s[r, STATE] == AGGREGATED:
                out[r, _GENERATED] += eng[e, CLOCK] - s[r, SINCE]
            end_run(s, w.g, w.runs, r, e, eng[e, STEPS] - 1)
        r += 1
    return r
