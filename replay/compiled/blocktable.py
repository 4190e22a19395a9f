"""Where a KV block's entry is, compiled: one hash table for all caches, as large as what is cached.

Used through :mod:`hoptrace.replay.compiled.store`. The key is the cache's number and the block's id in one word. ``table`` holds
31 bits of hash and the entry's number in each word, -1 where there is none; a deleted one's place is filled by those behind it,
so that nothing slows down with age. Entries keep their numbers when the arrays grow.

**Index**: for the first ``head[INDEXED]`` caches (engines whose router wants to know who has a block) an entry of cache
``head[INDEX]`` says for each block that any of them has which ones do: from column ``BITS`` on, ``WORD`` caches a word.
"""

from __future__ import annotations

import numpy as np

from hoptrace.compiling import cached_njit
from hoptrace.replay.jit import lean

__all__ = [
    "BITS", "BLOCK", "BLOCKS", "COLUMNS", "EVICTED", "FORGOTTEN", "HOLDERS", "INDEX", "INDEXED", "KEY", "LEVELS", "LIVE", "LOGS",
    "MARK", "NEXT", "PREV", "RUNS", "SHIFT", "SIZE", "WORD", "delete", "empty", "insert", "lookup", "new", "room",
]  # fmt: skip

KEY, PREV, NEXT, HOLDERS, SIZE, MARK = 0, 1, 2, 3, 4, 5
"""Columns of ``entries``. ``KEY``: cache and block in one; ``SIZE``: tokens; ``MARK``: the caller's."""

BITS, COLUMNS, WORD = 6, 6, 62

LIVE, EVICTED, _UNUSED, _TOP, LOGS, RUNS, INDEX, INDEXED = 0, 1, 2, 3, 4, 5, 6, 7
"""``head``: entries in use, evictions in the log, first of the unused, first never used, whether to log, runs so far, index."""

BLOCKS = 1 << 39
"""Block ids are below this; caches' numbers below 2^23."""

BLOCK = (1 << 40) - 1
"""``entries[e, KEY] & BLOCK`` is the block's id; runs have ids of ``BLOCKS`` and more."""

FORGOTTEN = BLOCKS | 1 << 38
"""Set in the key of a run that is not in the table."""

SHIFT = 40
LEVELS = 5
"""Caches that a block may fall through before the log is read, at most: an engine and four tiers."""

_ENTRY = (1 << 32) - 1


@lean()
def _tag(key: int) -> int:
    """31 bits of hash. Eight blocks with ids that follow one another are neighbours: prompts' ids mostly do."""
    # Unsigned: a signed product that overflows is undefined, and LLVM makes something else of it wherever it knows a sign.
    x = np.uint64(key >> 3)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0x3F58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(29))) * np.uint64(0x14D049BB133111EB)
    return int((np.int64((x >> np.uint64(35)) & np.uint64(0xFFFFFFF)) << 3) | (key & 7))


@cached_njit
def room(
    table: np.ndarray, entries: np.ndarray, head: np.ndarray, log: np.ndarray, more: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arrays, larger if there was no place for ``more`` entries (in the log: for the eviction of all)."""
    want = head[LIVE] + (2 * more if head[INDEXED] > 0 else more)
    if want > entries.shape[0]:
        bigger = np.empty((max(want, 2 * entries.shape[0]), entries.shape[1]), dtype=np.int64)
        bigger[: entries.shape[0]] = entries
        entries = bigger
    if 2 * want > table.size:
        size = table.size
        while 2 * want > size:
            size *= 2
        longer = np.full(size, -1, dtype=np.int64)
        for word in table:
            if word >= 0:
                at = (word >> 32) & (size - 1)
                while longer[at] >= 0:
                    at = (at + 1) & (size - 1)
                longer[at] = word
        table = longer
    if head[LOGS] != 0 and head[EVICTED] + LEVELS * want > log.size:
        more_log = np.empty(head[EVICTED] + LEVELS * max(want, entries.shape[0]), dtype=np.int64)
        more_log[: log.size] = log
        log = more_log
    return table, entries, log


@lean()
def lookup(table: np.ndarray, entries: np.ndarray, key: int) -> int:
    """The entry of a key, -1 if there is none."""
    tag, mask = _tag(key), table.size - 1
    at = tag & mask
    while True:
        word = table[at]
        if word < 0:
            return -1
        if word >> 32 == tag and entries[word & _ENTRY, KEY] == key:
            return word & _ENTRY
        at = (at + 1) & mask


@lean()
def new(entries: np.ndarray, head: np.ndarray, key: int, size: int, holders: int) -> int:
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


@lean()
def _add(table: np.ndarray, entries: np.ndarray, head: np.ndarray, key: int, size: int, holders: int) -> int:
    """A new entry in the table."""
    e = new(entries, head, key, size, holders)
    tag, mask = _tag(key), table.size - 1
    at = tag & mask
    while table[at] >= 0:
        at = (at + 1) & mask
    table[at] = (tag << 32) | e
    return e


@lean()
def _drop(table: np.ndarray, entries: np.ndarray, head: np.ndarray, e: int) -> None:
    """Take an entry out of the table; what stands behind it there moves up."""
    entries[e, NEXT] = head[_UNUSED]
    head[_UNUSED] = e
    head[LIVE] -= 1
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


@lean()
def insert(table: np.ndarray, entries: np.ndarray, head: np.ndarray, key: int, size: int, holders: int) -> int:
    """A new entry under ``key``, which has none, in no list."""
    e = _add(table, entries, head, key, size, holders)
    cache = key >> SHIFT
    if cache < head[INDEXED] and key & BLOCKS == 0:
        where = head[INDEX] << SHIFT | key & BLOCK
        at = lookup(table, entries, where)
        if at < 0:
            at = _add(table, entries, head, where, 0, 0)
            for c in range(BITS, entries.shape[1]):
                entries[at, c] = 0
        entries[at, BITS + cache // WORD] |= 1 << cache % WORD
        entries[at, HOLDERS] += 1
    return e


@lean()
def delete(table: np.ndarray, entries: np.ndarray, head: np.ndarray, e: int) -> None:
    """Drop an entry that is in no list any more."""
    key = entries[e, KEY]
    if key & FORGOTTEN == FORGOTTEN:
        entries[e, NEXT] = head[_UNUSED]
        head[_UNUSED] = e
        head[LIVE] -= 1
        return
    _drop(table, entries, head, e)
    cache = key >> SHIFT
    if cache < head[INDEXED] and key & BLOCKS == 0:
        at = lookup(table, entries, head[INDEX] << SHIFT | key & BLOCK)
        entries[at, BITS + cache // WORD] &= ~(1 << cache % WORD)
        entries[at, HOLDERS] -= 1
        if entries[at, HOLDERS] == 0:
            _drop(table, entries, head, at)


@cached_njit
def empty(caches: int, logs: bool, indexed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """An empty table, entries, head and log for so many caches, the first ``indexed`` of them with an index."""
    head = np.zeros(8, dtype=np.int64)
    head[_UNUSED], head[LOGS], head[INDEX], head[INDEXED] = -1, 1 if logs else 0, caches, indexed
    columns = COLUMNS + (indexed + WORD - 1) // WORD
    log = np.empty(1024 if logs else 0, dtype=np.int64)
    return np.full(4096, -1, dtype=np.int64), np.empty((1024, columns), dtype=np.int64), head, log
