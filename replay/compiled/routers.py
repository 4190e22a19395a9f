"""Which engine a request goes to, compiled: docs/replay-engine.md, "Routing".

A router knows its engines by position 0 … n − 1. Its state is one row of int64, ``router``; beside it stand int64[n] arrays by
position: ``load``, requests in flight, which the caller counts, and ``value``, which kv_use and prefix_aware read::

    router = new_router(kind, n, seed, shift, age_ns, load_tokens)   # KINDS; shift: 0, of decode_routing 2
    see(router, value, capacity, caches, engines, now)    # kv_use: at the begin of every instant, before its events
    use(router, value, capacity, caches, engines)         # kv_use: just before choose
    prefixes(value, scratch, table, entries, head, engines, block_id, block_end, first, last)   # prefix_aware: just before choose
    position = choose(router, load, value, number, session, now)
    load[position] += 1

``engines``: int64[n], the caches (of :mod:`hoptrace.replay.compiled.store`) of the positions, ``capacity``: their room in all.
"""

from __future__ import annotations

import numpy as np

from hoptrace.compiling import cached_njit
from hoptrace.replay import draws
from hoptrace.replay.compiled import blocktable, store
from hoptrace.replay.compiled.blocktable import BITS, COLUMNS, INDEX, WORD
from hoptrace.replay.compiled.store import EVICTABLE, FREE, find
from hoptrace.replay.draws import draw
from hoptrace.replay.jit import lean

__all__ = ["COUNT", "KIND", "KINDS", "N", "choose", "new_router", "prefixes", "see", "use"]

KINDS = ("round_robin", "random", "least_load", "power_of_two", "prefix_aware", "kv_use", "session")
"""Of ``hoptrace.replay.plan.Routing.kind``, by number."""

_ROUND_ROBIN, _RANDOM, _LEAST_LOAD, _POWER_OF_TWO, _PREFIX_AWARE, _KV_USE, _SESSION = range(7)

KIND, N, COUNT, _SEED, _SHIFT, _AGE, _WEIGHT, _UNSESSIONED, _FIRST, _NEXT = range(10)
"""Columns of a router: kind, engines, requests routed so far, seed, added to draws' last argument, age of what it knows, tokens
that a request in flight weighs, requests without a session so far, its first routing (-1: none yet), next time that it looks."""


@cached_njit
def new_router(kind: int, n: int, seed: int, shift: int, age_ns: int, load_tokens: int) -> np.ndarray:
    """A router that has routed nothing yet."""
    router = np.zeros(16, dtype=np.int64)
    router[KIND], router[N], router[_SEED], router[_SHIFT], router[_AGE], router[_WEIGHT] = (
        kind,
        n,
        seed,
        shift,
        age_ns,
        load_tokens,
    )
    router[_FIRST] = -1
    return router


@lean(store)
def _held(value: np.ndarray, capacity: np.ndarray, caches: np.ndarray, engines: np.ndarray) -> None:
    for p in range(engines.size):
        e = engines[p]
        value[p] = capacity[p] - caches[e, FREE] - caches[e, EVICTABLE]


@lean(store)
def see(router: np.ndarray, value: np.ndarray, capacity: np.ndarray, caches: np.ndarray, engines: np.ndarray, now: int) -> None:
    """A kv_use router with an ``age_ns`` looks at its engines, if a multiple of it has come since it looked last."""
    if router[KIND] != _KV_USE or router[_AGE] == 0:
        return
    first = router[_FIRST]
    if first < 0:
        # Its first routing may be at this instant; then it knows this.
        _held(value, capacity, caches, engines)
    elif now >= router[_NEXT]:
        _held(value, capacity, caches, engines)
        router[_NEXT] = first + ((now - first) // router[_AGE] + 1) * router[_AGE]


@lean(store)
def use(router: np.ndarray, value: np.ndarray, capacity: np.ndarray, caches: np.ndarray, engines: np.ndarray) -> None:
    """A kv_use router without an ``age_ns`` looks at its engines."""
    if router[KIND] == _KV_USE and router[_AGE] == 0:
        _held(value, capacity, caches, engines)


@lean(blocktable, store)
def prefixes(
    value: np.ndarray, scratch: np.ndarray, table: np.ndarray, entries: np.ndarray, head: np.ndarray, engines: np.ndarray,
    block_id: np.ndarray, block_end: np.ndarray, first: int, last: int,
) -> None:  # fmt: skip
    """How many tokens of the leading blocks ``[first, last)`` each engine has in its cache.

    Goes along the prompt once, by the store's index, which must cover the engines. ``scratch``: int64[2 n] at least.
    """
    n, words = engines.size, entries.shape[1] - COLUMNS
    alive = scratch[:n]  # positions that have all so far
    have = scratch[n : n + words]
    have[:] = 0
    for p in range(n):
        alive[p] = p
        value[p] = 0
        have[engines[p] // WORD] |= 1 << engines[p] % WORD
    left, j = n, first
    while left > 0 and j < last:
        e = find(table, entries, head[INDEX], block_id[j])
        fewer = e < 0
        for c in range(words):
            if not fewer and have[c] & entries[e, BITS + c] != have[c]:
                fewer = True
        if fewer:
            kept = 0
            for k in range(left):
                i = engines[alive[k]]
                if e >= 0 and entries[e, BITS + i // WORD] >> i % WORD & 1 == 1:
                    alive[kept] = alive[k]
                    kept += 1
                else:
                    value[alive[k]] = block_end[j - 1] if j > first else 0
                    have[i // WORD] &= ~(1 << i % WORD)
            left = kept
        j += 1
    for k in range(left):
        value[alive[k]] = block_end[j - 1] if j > first else 0


@lean(draws)
def choose(router: np.ndarray, load: np.ndarray, value: np.ndarray, number: int, session: int, now: int) -> int:
    """The position of the engine that request ``number`` (of session ``session``, -1 without one) goes to at ``now``."""
    kind, n, seed, shift = router[KIND], router[N], router[_SEED], router[_SHIFT]
    count = router[COUNT]
    router[COUNT] = count + 1
    if router[_FIRST] < 0:
        router[_FIRST], router[_NEXT] = now, now + router[_AGE]
    if kind == _ROUND_ROBIN:
        return count % n
    if kind == _RANDOM:
        return draw(seed, 1, number, shift) % n
    if kind == _SESSION:
        if session >= 0:
            return draw(seed, 3, session, shift) % n
        router[_UNSESSIONED] += 1
        return (router[_UNSESSIONED] - 1) % n
    if kind == _POWER_OF_TWO:
        if n == 1:
            return 0
        a = draw(seed, 2, number, shift) % n
        b = draw(seed, 2, number, shift + 1) % (n - 1)
        b += 1 if b >= a else 0
        return b if load[b] < load[a] else a
    best = 0
    if kind == _LEAST_LOAD:
        for p in range(1, n):
            if load[p] < load[best]:
                best = p
    elif kind == _KV_USE:
        for p in range(1, n):
            if value[p] < value[best]:
                best = p
    else:
        weight = router[_WEIGHT]
        most = value[0] - weight * load[0]
        for p in range(1, n):
            score = value[p] - weight * load[p]
            if score > most or (score == most and load[p] < load[best]):
                best, most = p, score
    return best
