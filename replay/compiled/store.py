"""Many LRU caches of KV blocks in one hashed store, compiled: the prefix caches of all engines, and the tiers.

A cache is numbered (``i``); a block is in it or not, found by hash. Memory is bounded by what is cached, not by the number
of caches nor of different blocks. A cached block is held by so many requests, or by nobody: then it is *evictable*, and
stands in its cache's list from the oldest to the youngest. Room is counted in tokens::

    caches, table, entries, head, log = store(n, logs)   # int64 arrays; ``log``: see below
    open_cache(caches, i, capacity_tokens, block_tokens)
    table, entries, log = room(table, entries, head, log, more)   # before anything that may add up to ``more`` entries
    e = find(table, entries, i, block)             # the block's entry, -1 if it is not there
    hits, tokens, evictable = leading(table, entries, i, block_id, first, last, found)    # and found[:hits]
    take(caches, table, entries, head, log, i, tokens)   # room for a request: free, then the oldest evictable; False: not enough
    give(caches, i, tokens)                        # back to free
    e = enter(caches, table, entries, head, i, block, tokens)   # a block of room taken before; held by one
    hold(caches, entries, i, e); release(caches, entries, i, e)
    keep(caches, table, entries, head, i, tokens, mark, found) -> e   # room taken before becomes evictable, without an id
    put(caches, table, entries, head, log, i, block, tokens)    # tiers: takes room itself, held by nobody: the youngest
    touch(caches, entries, i, e)                   # an evictable one becomes the youngest
    evict(caches, table, entries, head, log, i)    # the oldest evictable one; there must be one

**Without an id** (full blocks of output, own copies of blocks): one entry for a run of blocks, evicted from its end,
block by block of ``block_tokens``, and found again by its number alone: ``run = entries[e, KEY]`` when it is kept, later
``kept(table, entries, i, run)``, which is -1 when all of it is gone, and ``entries[e, SIZE]`` says what is left. ``reclaim``
takes it out: its tokens are room taken again.

**The log** of evictions since ``head[EVICTED]`` was set to 0: ``log[k]``, ids only. A store whose evictions nobody reads is made
with ``logs=False``.

**Fresh**: while an entry is held, its ``NEXT`` is free for use: ``mark_fresh(caches, entries, i, e)`` chains what a step entered,
``caches[i, FRESH]``, ``entries[e, NEXT]`` …, -1 at the end, until ``caches[i, FRESH]`` is set to -1. No fresh one may be
released.
"""

from __future__ import annotations

import numpy as np

from hoptrace.compiling import cached_njit

__all__ = [
    "BLOCK", "BLOCKS", "EVICTABLE", "EVICTED", "FREE", "FRESH", "HOLDERS", "KEY", "LIVE", "MARK", "NEXT", "OLDEST", "PREV",
    "RESIDENT", "SIZE", "UNIT", "YOUNGEST", "enter", "evict", "find", "give", "hold", "keep", "kept", "leading", "mark_fresh",
    "open_cache", "put", "reclaim", "release", "room", "store", "take", "touch",
]  # fmt: skip

FREE, EVICTABLE, RESIDENT, OLDEST, YOUNGEST, UNIT, FRESH, _FRESH_LAST = 0, 1, 2, 3, 4, 5, 6, 7
"""Columns of ``caches``: tokens free, held by nobody, cached in all; ends of the list (-1: empty); tokens of a block without an
id; first fresh entry."""

KEY, PREV, NEXT, HOLDERS, SIZE, MARK = 0, 1, 2, 3, 4, 5
"""Columns of ``entries``. ``KEY``: cache and block in one; ``SIZE``: tokens; ``MARK``: the caller's."""

LIVE, EVICTED, _UNUSED, _TOP, _LOGS, _RUNS = 0, 1, 2, 3, 4, 5
"""``head``: entries in use, evictions in the log, first of the unused, first never used, whether to log, runs so far."""

BLOCKS = 1 << 39
"""Block ids are below this; caches' numbers below 2^23."""

BLOCK = (1 << 40) - 1
"""``entries[e, KEY] & BLOCK`` is the block's id; runs have ids of ``BLOCKS`` and more."""

_FORGOTTEN = BLOCKS | 1 << 38
_SHIFT = 40
_ENTRY = (1 << 32) - 1


@cached_njit
def store(n: int, logs: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """An empty store of ``n`` caches without room: caches [n, 8], table, entries [·, 6], head, log."""
    caches = np.zeros((n, 8), dtype=np.int64)
    for i in range(n):
        open_cache(caches, i, 0, 1)
    head = np.zeros(8, dtype=np.int64)
    head[_UNUSED] = -1
    head[_LOGS] = 1 if logs else 0
    log = np.empty(1024 if logs else 0, dtype=np.int64)
    return caches, np.full(4096, -1, dtype=np.int64), np.empty((1024, 6), dtype=np.int64), head, log


@cached_njit
def open_cache(caches: np.ndarray, i: int, capacity_tokens: int, block_tokens: int) -> None:
    """An empty cache with so many tokens of room, in blocks of so many where they have no id."""
    caches[i, FREE], caches[i, EVICTABLE], caches[i, RESIDENT], caches[i, UNIT] = capacity_tokens, 0, 0, block_tokens
    caches[i, OLDEST], caches[i, YOUNGEST], caches[i, FRESH], caches[i, _FRESH_LAST] = -1, -1, -1, -1


@cached_njit
def _tag(key: int) -> int:
    """31 bits of hash. Eight blocks with ids that follow one another are neighbours: prompts' ids mostly do."""
    # Constants below 2^63: a larger one would be unsigned, and numba makes floats of signed and unsigned together.
    x = key >> 3
    x = (x ^ (x >> 30)) * 0x3F58476D1CE4E5B9
    x = (x ^ (x >> 29)) * 0x14D049BB133111EB
    return (((x >> 35) & 0xFFFFFFF) << 3) | (key & 7)


@cached_njit
def room(
    table: np.ndarray, entries: np.ndarray, head: np.ndarray, log: np.ndarray, more: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arrays, larger if there was no place for ``more`` entries (and, in the log, for their eviction and that of all others).

    Entries keep their numbers.
    """
    want = head[LIVE] + more
    if want > entries.shape[0]:
        bigger = np.empty((max(want, 2 * entries.shape[0]), entries.shape[1]), dtype=np.int64)
        bigger[: entries.shape[0]] = entries
        entries = bigger
    if 2 * want > table.size:
        size = table.size
        while 2 * want > size:
            size *= 2
        new = np.full(size, -1, dtype=np.int64)
        for word in table:
            if word >= 0:
                at = (word >> 32) & (size - 1)
                while new[at] >= 0:
                    at = (at + 1) & (size - 1)
                new[at] = word
        table = new
    if head[_LOGS] != 0 and head[EVICTED] + want > log.size:
        longer = np.empty(2 * (head[EVICTED] + want), dtype=np.int64)
        longer[: log.size] = log
        log = longer
    return table, entries, log


@cached_njit
def _find(table: np.ndarray, entries: np.ndarray, key: int) -> int:
    tag, mask = _tag(key), table.size - 1
    at = tag & mask
    while True:
        word = table[at]
        if word < 0:
            return -1
        if word >> 32 == tag and entries[word & _ENTRY, KEY] == key:
            return word & _ENTRY
        at = (at + 1) & mask


@cached_njit
def find(table: np.ndarray, entries: np.ndarray, i: int, block: int) -> int:
    """The entry of a block in cache ``i``, -1 if it is not there."""
    return _find(table, entries, (i << _SHIFT) | block)


@cached_njit
def kept(table: np.ndarray, entries: np.ndarray, run: int) -> int:
    """The entry of a run (the ``KEY`` that it had when it was kept), -1 if all of it is gone."""
    return _find(table, entries, run)


@cached_njit
def leading(
    table: np.ndarray, entries: np.ndarray, i: int, block_id: np.ndarray, first: int, last: int, found: np.ndarray
) -> tuple[int, int, int]:
    """How many of the blocks ``block_id[first:last]`` are in cache ``i``, up to the first that is not.

    ``found[: hits]``, which must be long enough, become their entries. Returns hits, their tokens, and those of them that
    are evictable.
    """
    tokens, evictable = 0, 0
    for j in range(first, last):
        e = _find(table, entries, (i << _SHIFT) | block_id[j])
        if e < 0:
            return j - first, tokens, evictable
        found[j - first] = e
        tokens += entries[e, SIZE]
        if entries[e, HOLDERS] == 0:
            evictable += entries[e, SIZE]
    return last - first, tokens, evictable


@cached_njit
def _append(caches: np.ndarray, entries: np.ndarray, i: int, e: int) -> None:
    """Make ``e``, which is not in the list, the youngest."""
    last = caches[i, YOUNGEST]
    entries[e, PREV], entries[e, NEXT] = last, -1
    if last < 0:
        caches[i, OLDEST] = e
    else:
        entries[last, NEXT] = e
    caches[i, YOUNGEST] = e


@cached_njit
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


@cached_njit
def _new(entries: np.ndarray, head: np.ndarray, key: int, size: int, holders: int) -> int:
    """A new entry, in no list and not in the table."""
    e = head[_UNUSED]
    if e < 0:
        e = head[_TOP]
        head[_TOP] = e + 1
    else:
        head[_UNUSED] = entries[e, NEXT]
    head[LIVE] += 1
    entries[e, KEY], entries[e, HOLDERS], entries[e, SIZE], entries[e, MARK] = key, holders, size, 0
    return e


@cached_njit
def _insert(table: np.ndarray, entries: np.ndarray, head: np.ndarray, key: int, size: int, holders: int) -> int:
    """A new entry under ``key``, in no list."""
    e = _new(entries, head, key, size, holders)
    tag, mask = _tag(key), table.size - 1
    at = tag & mask
    while table[at] >= 0:
        at = (at + 1) & mask
    table[at] = (tag << 32) | e
    return e
    return e


@cached_njit
def _delete(table: np.ndarray, entries: np.ndarray, head: np.ndarray, e: int) -> None:
    """Drop an entry that is in no list any more; what stands behind it in the table moves up."""
    entries[e, NEXT] = head[_UNUSED]
    head[_UNUSED] = e
    head[LIVE] -= 1
    if entries[e, KEY] & _FORGOTTEN == _FORGOTTEN:
        return
    tag, mask = _tag(entries[e, KEY]), table.size - 1
    word, at = (tag << 32) | e, tag & mask
    while table[at] != word:
        at = (at + 1) & mask
    ahead = at
    while True:
        ahead = (ahead + 1) & mask
        w = table[ahead]
        if w < 0:
            break
        # How far that one stands behind its own place: it may move into the hole if that is not before it.
        if (ahead - (w >> 32)) & mask >= (ahead - at) & mask:
            table[at] = w
            at = ahead
    table[at] = -1


@cached_njit
def hold(caches: np.ndarray, entries: np.ndarray, i: int, e: int) -> None:
    """One more request holds the block."""
    if entries[e, HOLDERS] == 0:
        _unlink(caches, entries, i, e)
        caches[i, EVICTABLE] -= entries[e, SIZE]
    entries[e, HOLDERS] += 1


@cached_njit
def release(caches: np.ndarray, entries: np.ndarray, i: int, e: int) -> None:
    """One request less holds it; the last one leaves it as the youngest evictable."""
    entries[e, HOLDERS] -= 1
    if entries[e, HOLDERS] == 0:
        _append(caches, entries, i, e)
        caches[i, EVICTABLE] += entries[e, SIZE]


@cached_njit
def touch(caches: np.ndarray, entries: np.ndarray, i: int, e: int) -> None:
    """Make it the youngest, if nobody holds it."""
    if entries[e, HOLDERS] == 0 and caches[i, YOUNGEST] != e:
        _unlink(caches, entries, i, e)
        _append(caches, entries, i, e)


@cached_njit
def evict(caches: np.ndarray, table: np.ndarray, entries: np.ndarray, head: np.ndarray, log: np.ndarray, i: int) -> None:
    """Make room of the oldest evictable block; there must be one. Of a run, of its last block."""
    e = caches[i, OLDEST]
    size, block = entries[e, SIZE], entries[e, KEY] & BLOCK
    gone = size
    if block >= BLOCKS:
        gone = min(size, caches[i, UNIT])
    elif head[_LOGS] != 0:
        log[head[EVICTED]] = block
        head[EVICTED] += 1
    caches[i, FREE] += gone
    caches[i, EVICTABLE] -= gone
    caches[i, RESIDENT] -= gone
    if gone == size:
        _unlink(caches, entries, i, e)
        _delete(table, entries, head, e)
    else:
        entries[e, SIZE] = size - gone


@cached_njit
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


@cached_njit
def give(caches: np.ndarray, i: int, tokens: int) -> None:
    """Give room back that was taken."""
    caches[i, FREE] += tokens


@cached_njit
def enter(caches: np.ndarray, table: np.ndarray, entries: np.ndarray, head: np.ndarray, i: int, block: int, tokens: int) -> int:
    """Room taken before becomes a cached block, which is not there yet, held by one: its entry."""
    caches[i, RESIDENT] += tokens
    return _insert(table, entries, head, (i << _SHIFT) | block, tokens, 1)


@cached_njit
def keep(
    caches: np.ndarray, table: np.ndarray, entries: np.ndarray, head: np.ndarray, i: int, tokens: int, mark: int, found: bool
) -> int:
    """Room taken before (more than 0 tokens) becomes a run of evictable blocks without ids, the youngest: its entry.

    ``mark``: the caller's, in the entry's ``MARK`` (which block of its request is the run's first). ``found``: whether
    anybody will look for it; what is only there to be evicted is not put into the table, which is quicker.
    """
    key = (i << _SHIFT) | BLOCKS | (head[_RUNS] & ((1 << 38) - 1))
    head[_RUNS] += 1
    e = _insert(table, entries, head, key, tokens, 0) if found else _new(entries, head, key | _FORGOTTEN, tokens, 0)
    entries[e, MARK] = mark
    _append(caches, entries, i, e)
    caches[i, RESIDENT] += tokens
    caches[i, EVICTABLE] += tokens
    return e


@cached_njit
def reclaim(caches: np.ndarray, table: np.ndarray, entries: np.ndarray, head: np.ndarray, i: int, e: int) -> int:
    """Take a run out of the cache; what is left of it is room taken again: so many tokens."""
    tokens = entries[e, SIZE]
    _unlink(caches, entries, i, e)
    caches[i, RESIDENT] -= tokens
    caches[i, EVICTABLE] -= tokens
    _delete(table, entries, head, e)
    return tokens


@cached_njit
def put(
    caches: np.ndarray, table: np.ndarray, entries: np.ndarray, head: np.ndarray, log: np.ndarray, i: int, block: int, tokens: int
) -> bool:
    """Put a block into a tier as its youngest, evicting the oldest if it is full; one that is there becomes the youngest.

    True if it was not there, and is now: it has to be written. A block larger than the tier is not taken.
    """
    e = find(table, entries, i, block)
    if e >= 0:
        touch(caches, entries, i, e)
        return False
    if not take(caches, table, entries, head, log, i, tokens):
        return False
    e = _insert(table, entries, head, (i << _SHIFT) | block, tokens, 0)
    _append(caches, entries, i, e)
    caches[i, RESIDENT] += tokens
    caches[i, EVICTABLE] += tokens
    return True


@cached_njit
def mark_fresh(caches: np.ndarray, entries: np.ndarray, i: int, e: int) -> None:
    """Add a held entry to the end of its cache's chain of fresh ones."""
    entries[e, NEXT] = -1
    if caches[i, FRESH] < 0:
        caches[i, FRESH] = e
    else:
        entries[caches[i, _FRESH_LAST], NEXT] = e
    caches[i, _FRESH_LAST] = e
