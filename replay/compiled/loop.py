"""The event loop, compiled: what is due next happens, until rows have to be taken or nothing is left."""

from __future__ import annotations

import numpy as np

from hoptrace import stepcost_kernel
from hoptrace.replay import draws
from hoptrace.replay.compiled import (
    admission,
    columns,
    decoders,
    heap,
    kv,
    running,
    runs,
    slots,
    store,
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
    ENTRIES_N,
    FLAGS,
    FRESH_FIRST,
    FROM_ARRIVAL,
    GENERATED,
    HANDED,
    HERE,
    HORIZON,
    IN_FLIGHT,
    KEY,
    LINK,
    MIDWAY,
    N_RUNS,
    N_STEPS,
    NEVER,
    NEXT_CLIENT,
    PLACE,
    PROMPT,
    QUEUED_N,
    QUEUED_TOKENS,
    READY,
    ROUTED_N,
    ROUTER_QUEUE,
    RUNNING,
    SINCE,
    STATE,
    STEPS,
    UNSEEN,
    WAITING,
    WHEN,
    World,
)  # fmt: skip
from hoptrace.replay.compiled.finish import finish, successors
from hoptrace.replay.compiled.kv import fits
from hoptrace.replay.compiled.runs import end_run
from hoptrace.replay.compiled.stretch import stretch
from hoptrace.replay.jit import lean
from hoptrace.replay.outcome import REFUSED, REQUEST, UNFINISHED

__all__ = ["FINISHED", "FULL", "SHORT", "advance", "close"]

FINISHED, FULL, SHORT = 0, 1, 2

_ARRIVAL, _ROUTED, _ENGINE, _STATUS = (
    REQUEST.index("arrival_ns"), REQUEST.index("routed_ns"), REQUEST.index("engine"), REQUEST.index("status"),
)  # fmt: skip
_DECODE_ENGINE, _GENERATED = REQUEST.index("decode_engine"), REQUEST.index("generated_tokens")


@lean(columns)
def _sift(order: np.ndarray, eng: np.ndarray, n: int, i: int) -> None:
    """Put the engine at place ``i`` of the heap of ``n``, ordered by (WHEN, engine), where it belongs."""
    e = order[i]
    when = eng[e, WHEN]
    while i > 0:
        p = (i - 1) >> 1
        x = order[p]
        if eng[x, WHEN] < when or (eng[x, WHEN] == when and x < e):
            break
        order[i] = x
        eng[x, PLACE] = i
        i = p
    while True:
        c = 2 * i + 1
        if c >= n:
            break
        x = order[c]
        if c + 1 < n:
            y = order[c + 1]
            if eng[y, WHEN] < eng[x, WHEN] or (eng[y, WHEN] == eng[x, WHEN] and y < x):
                c += 1
                x = y
        if when < eng[x, WHEN] or (when == eng[x, WHEN] and e < x):
            break
        order[i] = x
        eng[x, PLACE] = i
        i = c
    order[i] = e
    eng[e, PLACE] = i


@lean(columns, forceinline=True)
def wake(w: World, e: int, now: int) -> None:
    """Something changed for engine ``e``: if it sleeps it tries to begin a step, now or when it may."""
    eng = w.eng
    eng[e, CALM] = 0
    if eng[e, WHEN] == 2 * NEVER:
        eng[e, WHEN] = 2 * max(now, eng[e, READY]) + 1
        _sift(w.order, eng, w.order.size, eng[e, PLACE])


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
def _arrive(w: World, r: int, now: int) -> None:
    """``r`` reaches the router."""
    out, g = w.out, w.g
    arrival = now - g[BEFORE_NS]
    out[r, _ARRIVAL] = arrival
    if out[r, _STATUS] == REFUSED:
        g[END] = max(g[END], arrival)
        successors(w, r, arrival)
        return
    out[r, _ROUTED] = now
    g[END] = max(g[END], now)
    if g[FROM_ARRIVAL]:
        w.s[r, KEY] += arrival
    if g[ASSIGNED]:
        e = w.s[r, columns.EXPECTED]
    else:
        e = g[ROUTED_N] % g[ENTRIES_N]
    g[ROUTED_N] += 1
    out[r, _ENGINE] = e
    w.eng[e, IN_FLIGHT] += 1
    _queue(w, e, r)
    wake(w, e, now)


@lean(
    admission, begin_module, columns, decoders, draws, finish_module, heap, kv, running, runs, slots, store, stepcost_kernel,
    stretch_module,
)  # fmt: skip
def advance(w: World, table: np.ndarray, entries: np.ndarray, log: np.ndarray) -> int:
    """Go on until there is no room for rows (FULL) or for entries in the store (SHORT), or nothing happens any more (FINISHED)."""
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
        now = min(when >> 1, router, client)
        if now > g[HORIZON] or now >= NEVER:
            return FINISHED
        if when == 2 * now:
            if eng[e, CALM] != 0 and eng[e, FRESH_FIRST] < 0:
                until = min(router, client, g[HORIZON] + 1)
                if engines > 1:
                    until = min(until, eng[order[1], WHEN] >> 1)
                if engines > 2:
                    until = min(until, eng[order[2], WHEN] >> 1)
                if stretch(w, e, until):
                    _sift(order, eng, engines, 0)
                    continue
            if g[N_RUNS] + 3 * eng[e, RUNNING] + 8 > w.runs.shape[0] or g[N_STEPS] >= w.steps.shape[0]:
                return FULL
            if eng[e, HERE] > 0 and not fits(w, table, entries, log, eng[e, HERE]):
                return SHORT
            finish(w, table, entries, e, now)
            _sift(order, eng, engines, 0)
        elif client == now:
            x = heap.dequeue(queues, nodes, g[CLIENT_QUEUE])
            if g[NEXT_CLIENT] < w.s.shape[0]:
                heap.enqueue(queues, nodes, g[ROUTER_QUEUE], g[NEXT_CLIENT], now, 0, g[NEXT_CLIENT])
                g[NEXT_CLIENT] += 1
        elif router == now:
            heap.dequeue(queues, nodes, g[ROUTER_QUEUE])
            _arrive(w, r, now)
        else:
            if g[N_RUNS] + 3 * eng[e, RUNNING] + 8 > w.runs.shape[0] or g[N_STEPS] >= w.steps.shape[0]:
                return FULL
            if eng[e, HERE] > 0 and eng[e, MIDWAY] == 0 and not fits(w, table, entries, log, eng[e, HERE]):
                return SHORT
            if not begin(w, table, entries, log, e, now):
                return SHORT
            _sift(order, eng, engines, eng[e, PLACE])


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
