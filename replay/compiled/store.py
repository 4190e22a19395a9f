"""Many LRU caches of KV blocks in one hashed store, compiled: the prefix caches of all engines, and the tiers.

A cache is numbered (``i``); a block is in it or not, found by hash. Memory is bounded by what is cached, not by the number
of caches nor of different blocks. A cached block is held by so many requests, or by nobody: then it is *evictable*, and
stands in its cache's list from the oldest to the youngest. Room is counted in tokens::

    caches, table, entries, head, log = store(n, logs, indexed)   # int64 arrays; ``log``, ``indexed``: see below
    open_cache(caches, i, capacity_tokens, block_tokens)
    table, entries, log = room(table, entries, head, log, more)   # before anything that may add up to ``more`` entries
    e = find(table, entries, i, block)             # the block's entry, -1 if it is not there
    hits, tokens, evictable = leading(table, entries, i, block_id, first, last, found)    # and found[:hits]
    take(caches, table, entries, head, log, i, tokens)   # room for a request: free, then the oldest evictable; False: not enough
    give(caches, i, tokens)                        # back to free
    e = enter(caches, table, entries, head, i, block, tokens)   # a block of room taken before; held by one
    hold(caches, entries, i, e); release(caches, entries, i, e)
    keep(caches, table, entries, head, i, tokens, mark, found) -> e   # room taken before becomes evictable, without an id
    withdraw(caches, table, entries, head, i, e)   # the opposite of enter
    touch(caches, entries, i, e)                   # one becomes the youngest, if it is evictable
    evict(caches, table, entries, head, log, i)    # the oldest evictable one; there must be one

**Without an id** (full blocks of output, own copies of blocks): one entry for a run of blocks, evicted from its end,
block by block of ``block_tokens``, and found again by its number alone: ``run = entries[e, KEY]`` when it is kept, later
``kept(table, entries, i, run)``, which is -1 when all of it is gone, and ``entries[e, SIZE]`` says what is left. ``reclaim``
takes it out: its tokens are room taken again.

**Tiers** are caches whose blocks nobody holds; all are in the list::

    put(caches, table, entries, head, log, i, block, tokens)   # takes room itself; the youngest; False: is there, or too large
    renew(caches, entries, i, e)                   # becomes the youngest
    pin(caches, entries, i, e); unpin(caches, entries, i, e)   # while it is read: not evicted, its place in the list kept

**The log** of evictions since ``head[EVICTED]`` was set to 0: ``log[k]``, ids only. A store whose evictions nobody reads is made
with ``logs=False``.

**Fresh**: while an entry is held, its ``NEXT`` is free for use: ``mark_fresh(caches, entries, i, e)`` chains what a step entered,
``caches[i, FRESH]``, ``entries[e, NEXT]`` …, -1 at the end, until ``caches[i, FRESH]`` is set to -1. No fresh one may be
released or withdrawn; ``unmark`` takes one out of the chain.

**Index**: ``indexed`` > 0: which of the first so many caches have a block is known at once; for routers that look at prefixes.
"""

from __future__ import annotations

import numpy as np

from hoptrace.replay.compiled import blocktable
from hoptrace.replay.compiled.blocktable import (
    BLOCK,
    BLOCKS,
    EVICTED,
    FORGOTTEN,
    HOLDERS,
    KEY,
    LEVELS,
    LIVE,
    LOGS,
    MARK,
    NEXT,
    PREV,
    RUNS,
    SHIFT,
    SIZE,
    delete,
    empty,
    insert,
    lookup,
    new,
    room,
)
from hoptrace.replay.jit import compiled, lean

__all__ = [
    "BLOCK", "BLOCKS", "EVICTABLE", "EVICTED", "FREE", "FRESH", "HOLDERS", "KEY", "LEVELS", "LIVE", "LOGS", "MARK", "NEXT",
    "OLDEST", "PREV", "RESIDENT", "SIZE", "UNIT", "YOUNGEST", "enter", "evict", "find", "give", "hold", "keep", "kept",
    "leading", "mark_fresh", "open_cache", "pin", "put", "reclaim", "release", "renew", "room", "store", "take", "touch",
    "unmark", "unpin", "withdraw",
]  # fmt: skip

FREE, EVICTABLE, RESIDENT, OLDEST, YOUNGEST, UNIT, FRESH, _FRESH_LAST = 0, 1, 2, 3, 4, 5, 6, 7
"""Columns of ``caches``: tokens free, held by nobody, cached in all; ends of the list (-1: empty); tokens of a block without an
id; first fresh entry."""


@compiled(blocktable)
def store(n: int, logs: bool, indexed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """An empty store of ``n`` caches without room: caches [n, 8], table, entries [·, 6 + ·], head, log."""
    caches = np.zeros((n, 8), dtype=np.int64)
    for i in range(n):
        open_cache(caches, i, 0, 1)
    table, entries, head, log = empty(n, logs, indexed)
    return caches, table, entries, head, log


@lean(blocktable)
def open_cache(caches: np.ndarray, i: int, capacity_tokens: int, block_tokens: int) -> None:
    """An empty cache with so many tokens of room, in blocks of so many where they have no id."""
    caches[i, FREE], caches[i, EVICTABLE], caches[i, RESIDENT], caches[i, UNIT] = capacity_tokens, 0, 0, block_tokens
    caches[i, OLDEST], caches[i, YOUNGEST], caches[i, FRESH], caches[i, _FRESH_LAST] = -1, -1, -1, -1


@lean(blocktable)
def find(table: np.ndarray, entries: np.ndarray, i: int, block: int) -> int:
    """The entry of a block in cache ``i``, -1 if it is not there."""
    return lookup(table, entries, (i << SHIFT) | block)


@lean(blocktable)
def kept(table: np.ndarray, entries: np.ndarray, run: int) -> int:
    """The entry of a run (the ``KEY`` that it had when it was kept), -1 if all of it is gone."""
    return lookup(table, entries, run)


@lean(blocktable)
def leading(
    table: np.ndarray, entries: np.ndarray, i: int, block_id: np.ndarray, first: int, last: int, found: np.ndarray
) -> tuple[int, int, int]:
    """How many of the blocks ``block_id[first:last]`` are in cache ``i``, up to the first that is not.

    ``found[: hits]``, which must be long enough, become their entries. Returns hits, their tokens, and those of them that
    are evictable.
    """
    tokens, evictable = 0, 0
    for j in range(first, last):
        e = lookup(table, entries, (i << SHIFT) | block_id[j])
        if e < 0:
            return j - first, tokens, evictable
        found[j - first] = e
        tokens += entries[e, SIZE]
        if entries[e, HOLDERS] == 0:
            evictable += entries[e, SIZE]
    return last - first, tokens, evictable


@lean(blocktable)
def _append(caches: np.ndarray, entries: np.ndarray, i: int, e: int) -> None:
    """Make ``e``, which is not in the list, the youngest."""
    last = caches[i, YOUNGEST]
    entries[e, PREV], entries[e, NEXT] = last, -1
    if last < 0:
        caches[i, OLDEST] = e
    else:
        entries[last, NEXT] = e
    caches[i, YOUNGEST] = e


@lean(blocktable)
def _unlink(caches: np.ndarray, entries: np.ndarray, i: int, e: int) -> None:
    p, n = entries[e, PREV], entries[e, NEXT]
    if p < 0:
        caches[i, OLDEST] = n
    else:
        entries[p, NEXT] = n
    if n < 0:
        caches[i, YOUNGEST] = p
    else:
        entries[n, PREV] = p


@lean(blocktable)
def hold(caches: np.ndarray, entries: np.ndarray, i: int, e: int) -> None:
    """One more request holds the block."""
    if entries[e, HOLDERS] == 0:
        _unlink(caches, entries, i, e)
        caches[i, EVICTABLE] -= entries[e, SIZE]
    entries[e, HOLDERS] += 1


@lean(blocktable)
def release(caches: np.ndarray, entries: np.ndarray, i: int, e: int) -> None:
    """One request less holds it; the last one leaves it as the youngest evictable."""
    entries[e, HOLDERS] -= 1
    if entries[e, HOLDERS] == 0:
        _append(caches, entries, i, e)
        caches[i, EVICTABLE] += entries[e, SIZE]


@lean(blocktable)
def touch(caches: np.ndarray, entries: np.ndarray, i: int, e: int) -> None:
    """Make it the youngest, if nobody holds it."""
    if entries[e, HOLDERS] == 0 and caches[i, YOUNGEST] != e:
        _unlink(caches, entries, i, e)
        _append(caches, entries, i, e)


@lean(blocktable)
def evict(caches: np.ndarray, table: np.ndarray, entries: np.ndarray, head: np.ndarray, log: np.ndarray, i: int) -> None:
    """Make room of the oldest evictable block; there must be one. Of a run, of its last block."""
    e = caches[i, OLDEST]
    while entries[e, HOLDERS] > 0:  # pinned
        e = entries[e, NEXT]
    size, block = entries[e, SIZE], entries[e, KEY] & BLOCK
    gone = size
    if block >= BLOCKS:
        gone = min(size, caches[i, UNIT])
    elif head[LOGS] != 0:
        log[head[EVICTED]] = block
        head[EVICTED] += 1
    caches[i, FREE] += gone
    caches[i, EVICTABLE] -= gone
    caches[i, RESIDENT] -= gone
    if gone == size:
        _unlink(caches, entries, i, e)
        delete(table, entries, head, e)
    else:
        entries[e, SIZE] = size - gone


@lean(blocktable)
def take(
    caches: np.ndarray, table: np.ndarray, entries: np.ndarray, head: np.ndarray, log: np.ndarray, i: int, tokens: int
) -> bool:
    """Take room, evicting what nobody holds if need be. False, and nothing done, if there is not enough."""
    if tokens > caches[i, FREE] + caches[i, EVICTABLE]:
        return False
    while caches[i, FREE] < tokens:
        evict(caches, table, entries, head, log, i)
    caches[i, FREE] -= tokens
    return True


@lean(blocktable)
def give(caches: np.ndarray, i: int, tokens: int) -> None:
    """Give room back that was taken."""
    caches[i, FREE] += tokens


@lean(blocktable)
def enter(caches: np.ndarray, table: np.ndarray, entries: np.ndarray, head: np.ndarray, i: int, block: int, tokens: int) -> int:
    """Room taken before becomes a cached block, which is not there yet, held by one: its entry."""
    caches[i, RESIDENT] += tokens
    return insert(table, entries, head, (i << SHIFT) | block, tokens, 1)


@lean(blocktable)
def keep(
    caches: np.ndarray, table: np.ndarray, entries: np.ndarray, head: np.ndarray, i: int, tokens: int, mark: int, found: bool
) -> int:
    """Room taken before (more than 0 tokens) becomes a run of evictable blocks without ids, the youngest: its entry.

    ``mark``: the caller's, in the entry's ``MARK`` (which block of its request is the run's first). ``found``: whether
    anybody will look for it; what is only there to be evicted is not put into the table, which is quicker.
    """
    key = (i << SHIFT) | BLOCKS | (head[RUNS] & ((1 << 38) - 1))
    head[RUNS] += 1
    e = insert(table, entries, head, key, tokens, 0) if found else new(entries, head, key | FORGOTTEN, tokens, 0)
    entries[e, MARK] = mark
    _append(caches, entries, i, e)
    caches[i, RESIDENT] += tokens
    caches[i, EVICTABLE] += tokens
    return e


@lean(blocktable)
def reclaim(caches: np.ndarray, table: np.ndarray, entries: np.ndarray, head: np.ndarray, i: int, e: int) -> int:
    """Take a run out of the cache; what is left of it is room taken again: so many tokens."""
    tokens = entries[e, SIZE]
    _unlink(caches, entries, i, e)
    caches[i, RESIDENT] -= tokens
    caches[i, EVICTABLE] -= tokens
    delete(table, entries, head, e)
    return tokens


@lean(blocktable)
def put(
    caches: np.ndarray, table: np.ndarray, entries: np.ndarray, head: np.ndarray, log: np.ndarray, i: int, block: int, tokens: int
) -> bool:
    """Put a block into a tier as its youngest, evicting the oldest if it is full.

    True if it was not there, and is now: it has to be written. False, and nothing done, if it is there, or finds no room.
    """
    if find(table, entries, i, block) >= 0 or not take(caches, table, entries, head, log, i, tokens):
        return False
    e = insert(table, entries, head, (i << SHIFT) | block, tokens, 0)
    _append(caches, entries, i, e)
    caches[i, RESIDENT] += tokens
    caches[i, EVICTABLE] += tokens
    return True


@lean(blocktable)
def withdraw(caches: np.ndarray, table: np.ndarray, entries: np.ndarray, head: np.ndarray, i: int, e: int) -> int:
    """A block that only its holder holds, and that is not fresh, leaves the cache: so many tokens of room taken again."""
    tokens = entries[e, SIZE]
    caches[i, RESIDENT] -= tokens
    delete(table, entries, head, e)
    return tokens


@lean(blocktable)
def pin(caches: np.ndarray, entries: np.ndarray, i: int, e: int) -> None:
    """A block of a tier is being read: it stays where it is in the list, and is not evicted until it is unpinned as often."""
    if entries[e, HOLDERS] == 0:
        caches[i, EVICTABLE] -= entries[e, SIZE]
    entries[e, HOLDERS] += 1


@lean(blocktable)
def unpin(caches: np.ndarray, entries: np.ndarray, i: int, e: int) -> None:
    """See :func:`pin`."""
    entries[e, HOLDERS] -= 1
    if entries[e, HOLDERS] == 0:
        caches[i, EVICTABLE] += entries[e, SIZE]


@lean(blocktable)
def renew(caches: np.ndarray, entries: np.ndarray, i: int, e: int) -> None:
    """A block of a tier becomes the youngest, pinned or not."""
    if caches[i, YOUNGEST] != e:
        _unlink(caches, entries, i, e)
        _append(caches, entries, i, e)


@lean(blocktable)
def mark_fresh(caches: np.ndarray, entries: np.ndarray, i: int, e: int) -> None:
    """Add a held entry to the end of its cache's chain of fresh ones."""
    entries[e, NEXT] = -1
    if caches[i, FRESH] < 0:
        caches[i, FRESH] = e
    else:
        entries[caches[i, _FRESH_LAST], NEXT] = e
    caches[i, _FRESH_LAST] = e


@lean(blocktable)
def unmark(caches: np.ndarray, entries: np.ndarray, i: int, e: int) -> None:
    """Take an entry out of the chain of fresh ones, where it is."""
    p, x = -1, caches[i, FRESH]
    while x != e:
        p, x = x, entries[x, NEXT]
    if p < 0:
        caches[i, FRESH] = entries[e, NEXT]
    else:
        entries[p, NEXT] = entries[e, NEXT]
    if caches[i, _FRESH_LAST] == e:
        caches[i, _FRESH_LAST] = p
