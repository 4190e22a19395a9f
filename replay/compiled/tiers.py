"""Tiers of KV blocks, compiled: what is put there, what falls out, and who is young. docs/replay-engine.md, "Tiers"."""

from __future__ import annotations

import numpy as np

from hoptrace.replay.compiled import blocktable, columns, moves, store, transfers
from hoptrace.replay.compiled.blocktable import FORGOTTEN, delete, new
from hoptrace.replay.compiled.columns import (
    AGGREGATED,
    BACK,
    BLOCK,
    CACHE,
    COMPUTED,
    DECODE_ROLE,
    DECODING,
    DEMOTE_WAY,
    DISTINCT,
    ENDED_FIRST,
    ENDED_LAST,
    ENDED_NEXT,
    ENDED_NEXT_DECODE,
    HERE,
    INSTANCE,
    NONE,
    OFFER_FIRST,
    OFFER_LAST,
    OFFER_NEXT,
    OFFERED,
    OFFERS,
    PASSES,
    POOL,
    PROMPTED,
    ROLE,
    SHARE,
    STASH_FIRST,
    STASH_LAST,
    STATE,
    STEPS,
    TIERS_N,
    TOKEN_BYTES,
    TOOK_DECODERS,
    WRITE_FIRST,
    WRITE_LAST,
    WRITE_TOKENS,
    WRITE_WAY,
    World,
)  # fmt: skip
from hoptrace.replay.compiled.moves import begin_move
from hoptrace.replay.compiled.store import EVICTABLE, EVICTED, FREE, MARK, NEXT, find
from hoptrace.replay.jit import lean
from hoptrace.replay.outcome import MOVE_DEMOTE, MOVE_WRITE

__all__ = ["USED", "end_pass", "has_ended", "offers_no_more", "stash", "will_offer", "write_through"]

USED = 4
"""Bit of ``held``: the request has used its block in a tier: loaded, or offered it."""


@lean(columns)
def will_offer(w: World, e: int, r: int) -> None:
    """``r`` runs on engine ``e`` from now on: it has blocks to offer to the first tier, if it has not offered all."""
    s, eng = w.s, w.eng
    if w.g[TIERS_N] == 0 or s[r, OFFERS] or s[r, OFFERED] >= w.ptr[r + 1] - w.ptr[r]:
        return
    s[r, OFFERS], s[r, OFFER_NEXT] = 1, NONE
    if eng[e, OFFER_FIRST] < 0:
        eng[e, OFFER_FIRST] = r
    else:
        s[eng[e, OFFER_LAST], OFFER_NEXT] = r
    eng[e, OFFER_LAST] = r


@lean(columns)
def offers_no_more(w: World, e: int, r: int) -> None:
    """``r`` does not run on engine ``e`` any more."""
    s, eng = w.s, w.eng
    if s[r, OFFERS] == 0:
        return
    p, x = NONE, eng[e, OFFER_FIRST]
    while x != r:
        p, x = x, s[x, OFFER_NEXT]
    if p < 0:
        eng[e, OFFER_FIRST] = s[r, OFFER_NEXT]
    else:
        s[p, OFFER_NEXT] = s[r, OFFER_NEXT]
    if eng[e, OFFER_LAST] == r:
        eng[e, OFFER_LAST] = p
    s[r, OFFERS] = 0


@lean(columns)
def has_ended(w: World, e: int, r: int) -> None:
    """``r`` is done, or handed over, on engine ``e``: what it used becomes young at the end of the next pass."""
    s, eng = w.s, w.eng
    if w.g[TIERS_N] == 0:
        return
    offers_no_more(w, e, r)
    column = ENDED_NEXT_DECODE if eng[e, ROLE] == DECODE_ROLE else ENDED_NEXT
    s[r, column] = NONE
    if eng[e, ENDED_FIRST] < 0:
        eng[e, ENDED_FIRST] = r
    else:
        s[eng[e, ENDED_LAST], column] = r
    eng[e, ENDED_LAST] = r
    eng[e, HERE] += 2 * (w.ptr[r + 1] - w.ptr[r])


@lean(blocktable)
def _note(entries: np.ndarray, head: np.ndarray, what: int) -> int:
    """An entry in no cache, with ``what`` as its MARK, for a chain by NEXT."""
    x = new(entries, head, FORGOTTEN, 0, 0)
    entries[x, MARK], entries[x, NEXT] = what, NONE
    return x


@lean(blocktable, columns, store)
def stash(w: World, table: np.ndarray, entries: np.ndarray, log: np.ndarray, e: int) -> None:
    """What engine ``e`` has just evicted outside a pass is written back at its next one."""
    n, eng = w.head[EVICTED], w.eng
    if n == 0:
        return
    if w.g[BACK]:
        for k in range(n):
            if log[k] >= w.g[DISTINCT]:
                continue
            x = _note(entries, w.head, log[k])
            if eng[e, STASH_FIRST] < 0:
                eng[e, STASH_FIRST] = x
            else:
                entries[eng[e, STASH_LAST], NEXT] = x
            eng[e, STASH_LAST] = x
    w.head[EVICTED] = 0
    return


@lean(columns)
def _upto(w: World, r: int, tokens: int) -> int:
    """The first of ``r``'s blocks, from those that it has not offered, that does not end within ``tokens``."""
    j = w.ptr[r] + w.s[r, OFFERED]
    while j < w.ptr[r + 1] and w.bend[j] <= tokens:
        j += 1
    return j


@lean(blocktable, columns, store)
def _offer(w: World, table: np.ndarray, entries: np.ndarray, log: np.ndarray, e: int, r: int, upto: int) -> None:
    """``r`` offers its blocks before ``upto`` to the first tier: all that it has not are put there and pinned, or none."""
    i, s, eng, caches, head = w.tier[e, INSTANCE], w.s, w.eng, w.caches, w.head
    first = w.ptr[r] + s[r, OFFERED]
    missing, tokens = 0, 0
    for j in range(first, upto):
        at = find(table, entries, i, w.bid[j])
        if at < 0:
            missing += 1
            tokens += w.btok[w.bid[j]]
        if at < 0 or entries[at, MARK] != w.g[PASSES]:
            w.held[j] |= USED
    if missing > 0:
        for j in range(first, upto):
            at = find(table, entries, i, w.bid[j])
            if at >= 0:
                store.pin(caches, entries, i, at)
        fits = tokens <= caches[i, FREE] + caches[i, EVICTABLE]
        if fits:
            store.take(caches, table, entries, head, log, i, tokens)
            store.give(caches, i, tokens)
        for j in range(first, upto):
            at = find(table, entries, i, w.bid[j])
            if at >= 0:
                store.unpin(caches, entries, i, at)
        if not fits:
            return
        for j in range(first, upto):
            if find(table, entries, i, w.bid[j]) < 0:
                store.put(caches, table, entries, head, log, i, w.bid[j], w.btok[w.bid[j]])
                at = find(table, entries, i, w.bid[j])
                entries[at, MARK] = w.g[PASSES]
                store.pin(caches, entries, i, at)
                x = _note(entries, head, at)
                if eng[e, WRITE_FIRST] < 0:
                    eng[e, WRITE_FIRST], eng[e, WRITE_TOKENS] = x, 0
                else:
                    entries[eng[e, WRITE_LAST], NEXT] = x
                eng[e, WRITE_LAST] = x
                eng[e, WRITE_TOKENS] += w.btok[w.bid[j]]
    s[r, OFFERED] = max(s[r, OFFERED], upto - w.ptr[r])
    return


@lean(blocktable, columns, moves, store, transfers)
def write_through(w: World, table: np.ndarray, entries: np.ndarray, e: int, step: int, now: int) -> None:
    """What engine ``e``'s step (or a pass without one) has put into the first tier is written now."""
    eng, i = w.eng, w.tier[e, INSTANCE]
    x = eng[e, WRITE_FIRST]
    if x < 0:
        return
    while x >= 0:
        following = entries[x, NEXT]
        store.unpin(w.caches, entries, i, entries[x, MARK])
        delete(table, entries, w.head, x)
        x = following
    eng[e, WRITE_FIRST] = NONE
    _send(w, e, w.tier[e, WRITE_WAY], eng[e, WRITE_TOKENS], MOVE_WRITE, step, 0, now)


@lean(columns, moves, transfers)
def _send(w: World, e: int, way: int, tokens: int, kind: int, step: int, tier: int, now: int) -> None:
    block = w.eng[e, BLOCK]
    begin_move(w, now, way, (tokens + block - 1) // block, tokens * w.g[TOKEN_BYTES], NONE, e, kind, step, tier)


@lean(blocktable, columns, store)
def _put(w: World, table: np.ndarray, entries: np.ndarray, log: np.ndarray, i: int, block: int) -> int:
    """Put one block that was evicted above into cache ``i``: its tokens, 0 if it is there or finds no room."""
    size = w.btok[block]
    if store.put(w.caches, table, entries, w.head, log, i, block, size):
        entries[find(table, entries, i, block), MARK] = w.g[PASSES]
        return size
    return 0


@lean(blocktable, columns, moves, store, transfers)
def _demote(w: World, table: np.ndarray, entries: np.ndarray, log: np.ndarray, e: int, first: int, now: int) -> None:
    """What the first tier evicted (``log[first:]``) goes to the next, what that evicted to the one after, one transfer each."""
    engines, head = w.eng.shape[0], w.head
    for level in range(1, w.g[TIERS_N]):
        last = head[EVICTED]
        way = w.tier[(level - 1) * engines + e, DEMOTE_WAY]
        if way < 0 or first == last:
            break
        tokens = 0
        for k in range(first, last):
            tokens += _put(w, table, entries, log, w.tier[level * engines + e, INSTANCE], log[k])
        if tokens > 0:
            _send(w, e, way, tokens, MOVE_DEMOTE, w.eng[e, STEPS], level, now)
        first = last
    return


@lean(blocktable, columns, moves, store, transfers)
def _write_back(w: World, table: np.ndarray, entries: np.ndarray, log: np.ndarray, e: int, now: int) -> None:
    """What engine ``e`` has evicted since its last pass goes to the first tier."""
    eng, head, i = w.eng, w.head, w.tier[e, INSTANCE]
    evicted = head[EVICTED]
    tokens = 0
    x = eng[e, STASH_FIRST]
    while x >= 0:
        following, block = entries[x, NEXT], entries[x, MARK]
        delete(table, entries, head, x)  # its place is enough for the block
        tokens += _put(w, table, entries, log, i, block)
        x = following
    eng[e, STASH_FIRST] = NONE
    for k in range(evicted):
        if log[k] < w.g[DISTINCT]:  # own copies have ids above, and nobody could find them there
            tokens += _put(w, table, entries, log, i, log[k])
    if tokens > 0:
        _send(w, e, w.tier[e, WRITE_WAY], tokens, MOVE_WRITE, eng[e, STEPS], 0, now)
    _demote(w, table, entries, log, e, evicted, now)


@lean(blocktable, columns, store)
def _renew(w: World, table: np.ndarray, entries: np.ndarray, e: int, r: int) -> None:
    """``r`` has ended: the blocks that it used become the youngest of each tier, its first one the very youngest."""
    for level in range(w.g[TIERS_N]):
        i = w.tier[level * w.eng.shape[0] + e, INSTANCE]
        for j in range(w.ptr[r + 1] - 1, w.ptr[r] - 1, -1):
            if w.held[j] & USED:
                at = find(table, entries, i, w.bid[j])
                if at >= 0:
                    store.renew(w.caches, entries, i, at)


@lean(blocktable, columns, moves, store, transfers)
def end_pass(w: World, table: np.ndarray, entries: np.ndarray, log: np.ndarray, e: int, now: int, scheduled: bool) -> None:
    """The tiers' part of a scheduling pass of engine ``e``, at its end. There must be places for entries and transfers."""
    s, eng, g, head = w.s, w.eng, w.g, w.head
    g[PASSES] += 1
    column = ENDED_NEXT_DECODE if eng[e, ROLE] == DECODE_ROLE else ENDED_NEXT
    evicted = head[EVICTED]
    back = g[BACK] != 0
    if back or eng[e, CACHE] == POOL:
        r = eng[e, OFFER_FIRST]
        while r >= 0:
            following = s[r, OFFER_NEXT]
            upto = -1
            if s[r, STATE] == AGGREGATED:
                if eng[e, TOOK_DECODERS]:
                    upto = w.ptr[r + 1]
            elif (s[r, STATE] == PROMPTED or s[r, STATE] == DECODING) and s[r, SHARE] > 0:
                upto = _upto(w, r, s[r, COMPUTED] + s[r, SHARE])
            if upto >= 0:
                if back:
                    for j in range(w.ptr[r] + s[r, OFFERED], upto):
                        w.held[j] |= USED
                    s[r, OFFERED] = max(s[r, OFFERED], upto - w.ptr[r])
                else:
                    _offer(w, table, entries, log, e, r, upto)
                if s[r, OFFERED] >= w.ptr[r + 1] - w.ptr[r]:
                    offers_no_more(w, e, r)
            r = following
    if back:
        _write_back(w, table, entries, log, e, now)
    else:
        r = eng[e, ENDED_FIRST] if eng[e, CACHE] == POOL else NONE
        while r >= 0:
            _offer(w, table, entries, log, e, r, w.ptr[r + 1])
            r = s[r, column]
        if not scheduled:
            write_through(w, table, entries, e, eng[e, STEPS], now)
        _demote(w, table, entries, log, e, evicted, now)
    r = eng[e, ENDED_FIRST]
    while r >= 0:
        _renew(w, table, entries, e, r)
        eng[e, HERE] -= 2 * (w.ptr[r + 1] - w.ptr[r])
        r = s[r, column]
    eng[e, ENDED_FIRST] = NONE
    head[EVICTED] = 0
    return
