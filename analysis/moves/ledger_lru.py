"""Hits of a shared cache of limited capacity that drops what was least recently used, over the prompts' block hashes.

One pass over the blocks for all capacities together, in batches; memory is that of the caches themselves, whatever the trace's
length. The rule is the published one (see ``published-checks`` X1 in the tests): a request is looked up before its blocks are put
in, its hits end at its first miss, then all its blocks are put in or renewed in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hoptrace.compiling import cached_njit

__all__ = ["LruCache", "lru_hits"]

_Ints = npt.NDArray[np.int64]


def _mix(key: np.int64) -> np.uint64:
    """splitmix64's finaliser (Steele, Lea, Flood 2014): spreads the bits of a key over the table."""
    x = np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


_mix = cached_njit(_mix)


def _find(table: _Ints, keys: _Ints, key: np.int64) -> np.int64:
    """Place of ``key`` in the open-addressing ``table`` of slots, or of the empty place where it would go."""
    mask = table.size - 1
    i = np.int64(_mix(key) & np.uint64(mask))
    while table[i] >= 0 and keys[table[i]] != key:
        i = (i + 1) & mask
    return i


_find = cached_njit(_find)


def _remove(table: _Ints, keys: _Ints, key: np.int64) -> None:
    """Take ``key`` out, closing the gap behind it (Knuth, The Art of Computer Programming 3, 6.4, algorithm R)."""
    mask = table.size - 1
    i = _find(table, keys, key)
    if table[i] < 0:
        return
    j = i
    while True:
        j = (j + 1) & mask
        if table[j] < 0:
            break
        home = np.int64(_mix(keys[table[j]]) & np.uint64(mask))
        if (j > i and (home <= i or home > j)) or (j < i and home <= i and home > j):
            table[i] = table[j]
            i = j
    table[i] = -1


_remove = cached_njit(_remove)


def _requests(
    keys_in: _Ints, ends: _Ints, table: _Ints, keys: _Ints, before: _Ints, after: _Ints, state: _Ints, hits: _Ints
) -> None:
    """Each request's hits, and its blocks put in. ``state``: used slots, least and most recently used slot."""
    capacity = keys.size
    begin = 0
    for r in range(ends.size):
        end = ends[r]
        n = 0
        for k in range(begin, end):
            if table[_find(table, keys, keys_in[k])] < 0:
                break
            n += 1
        hits[r] = n
        for k in range(begin, end):
            key = keys_in[k]
            place = _find(table, keys, key)
            slot = table[place]
            if slot >= 0:
                if slot == state[2]:
                    continue
                # out of the chain
                if before[slot] >= 0:
                    after[before[slot]] = after[slot]
                else:
                    state[1] = after[slot]
                before[after[slot]] = before[slot]
            elif state[0] < capacity:
                slot = state[0]
                state[0] += 1
                keys[slot] = key
                table[place] = slot
            else:
                slot = state[1]
                _remove(table, keys, keys[slot])
                state[1] = after[slot]
                if after[slot] >= 0:
                    before[after[slot]] = -1
                else:
                    state[2] = -1
                keys[slot] = key
                table[_find(table, keys, key)] = slot
            # to the end of the chain
            before[slot] = state[2]
            after[slot] = -1
            if state[2] >= 0:
                after[state[2]] = slot
            else:
                state[1] = slot
            state[2] = slot
        begin = end


_requests = cached_njit(_requests)


class LruCache:
    """One cache of ``capacity`` blocks: a hash table of slots, and a chain of them from the least to the most recently used."""

    def __init__(self, capacity: int) -> None:
        size = 1 << max(4, (2 * capacity - 1).bit_length())
        self.capacity = capacity
        self._table = np.full(size, -1, dtype=np.int64)
        self._keys = np.zeros(capacity, dtype=np.int64)
        self._before = np.full(capacity, -1, dtype=np.int64)
        self._after = np.full(capacity, -1, dtype=np.int64)
        self._state = np.array([0, -1, -1], dtype=np.int64)

    def requests(self, keys: _Ints, ends: _Ints) -> _Ints:
        """Leading blocks of each request that the cache had. ``keys``: blocks of all of them, ``ends``: where each one's end."""
        hits = np.zeros(ends.size, dtype=np.int64)
        _requests(keys, ends, self._table, self._keys, self._before, self._after, self._state, hits)
        return hits


@dataclass(frozen=True, slots=True)
class Batch:
    """Some requests in order: ``keys`` of their blocks, ``ends``, and per request ``tokens`` (its prompt, -1 unknown) and
    ``block`` (tokens of a block; a fraction for character blocks)."""

    keys: _Ints
    ends: _Ints
    tokens: _Ints
    block: npt.NDArray[np.float64]


def lru_hits(batches: Iterator[Batch], capacities: Sequence[int]) -> list[dict[str, Any]]:
    """Per capacity: blocks, hit_blocks, prompt_tokens and hit_tokens (over the requests whose tokens are known)."""
    caches = [LruCache(c) for c in capacities]
    sums = [dict.fromkeys(("hit_blocks", "hit_tokens"), 0) for _ in capacities]
    blocks = prompt = 0
    for batch in batches:
        blocks += batch.keys.size
        known = (batch.tokens >= 0) & np.isfinite(batch.block)
        prompt += int(batch.tokens[known].sum())
        for cache, total in zip(caches, sums, strict=True):
            hits = cache.requests(batch.keys, batch.ends)
            total["hit_blocks"] += int(hits.sum())
            given = np.minimum(np.rint(hits[known] * batch.block[known]), batch.tokens[known])
            total["hit_tokens"] += int(given.sum())
    return [{"capacity_blocks": c, "blocks": blocks, "prompt_tokens": prompt, **s} for c, s in zip(capacities, sums, strict=True)]
