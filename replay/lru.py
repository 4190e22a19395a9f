"""A least-recently-used list over small integers in two int64 arrays, compiled: the prefix caches' order of eviction.

``prev`` and ``next`` have one entry per item and a last one, the sentinel; an item that is in no list is simply not linked.
The oldest item is ``next[sentinel]``.
"""

from __future__ import annotations

import numpy as np

from hoptrace.compiling import cached_njit

__all__ = ["append", "empty", "prefix_hits", "remove"]


@cached_njit
def empty(items: int) -> tuple[np.ndarray, np.ndarray]:
    """An empty list for ``items`` items: (prev, next)."""
    prev = np.full(items + 1, items, dtype=np.int64)
    following = np.full(items + 1, items, dtype=np.int64)
    return prev, following


@cached_njit
def append(prev: np.ndarray, following: np.ndarray, item: int) -> None:
    """Link ``item`` as the most recently used. It must not be linked."""
    end = prev.size - 1
    last = prev[end]
    following[last] = item
    prev[item] = last
    following[item] = end
    prev[end] = item


@cached_njit
def remove(prev: np.ndarray, following: np.ndarray, item: int) -> None:
    """Unlink ``item``. It must be linked."""
    p, n = prev[item], following[item]
    following[p] = n
    prev[n] = p


@cached_njit
def prefix_hits(block_ptr: np.ndarray, block_id: np.ndarray, distinct: int, capacity: int) -> np.ndarray:
    """Leading blocks of each request that an LRU cache of ``capacity`` blocks holds when the request comes.

    One shared cache, requests in order, no time: each request first looks up its blocks (a hit counts only while the prefix is
    unbroken), then all its blocks are touched or inserted in order. ``block_ptr`` int64[n+1] and ``block_id`` int64[…] are the
    requests' blocks in CSR form, ids below ``distinct``; ``capacity`` < 0 is unlimited. Returns int64[n].
    """
    n = block_ptr.size - 1
    hits = np.zeros(n, dtype=np.int64)
    resident = np.zeros(distinct, dtype=np.bool_)
    prev, following = empty(distinct)
    held = 0
    for r in range(n):
        j = block_ptr[r]
        while j < block_ptr[r + 1] and resident[block_id[j]]:
            j += 1
        hits[r] = j - block_ptr[r]
        for k in range(block_ptr[r], block_ptr[r + 1]):
            b = block_id[k]
            if resident[b]:
                remove(prev, following, b)
            else:
                if capacity == 0:
                    continue
                if held == capacity:
                    oldest = following[distinct]
                    remove(prev, following, oldest)
                    resident[oldest] = False
                else:
                    held += 1
                resident[b] = True
            append(prev, following, b)
    return hits
