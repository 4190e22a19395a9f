"""The KV space of one engine, compiled: room in tokens, and the prompt blocks that are kept in it for reuse (as in vLLM).

Each token of room is free, private to a request, or in a cached block; a cached block is held by requests or evictable.
"""

from __future__ import annotations

import numpy as np

from hoptrace.replay import lru
from hoptrace.replay.jit import compiled
from hoptrace.replay.lru import append, remove

__all__ = ["EVICTABLE", "FREE", "NEXT", "PRIVATE", "RESIDENT", "SHARED", "allocate", "enter_cache", "evict", "leave"]

FREE, EVICTABLE, RESIDENT = 0, 1, 2
"""Columns of ``pool``, in tokens: free, cached and held by nobody, cached."""
PRIVATE, SHARED, NEXT = 0, 1, 2
"""Columns of ``kv``, per request: tokens of room of its own, tokens in cached blocks, its next block to enter the cache."""


@compiled(lru)
def evict(pool: np.ndarray, resident: np.ndarray, block_tokens: np.ndarray, prev: np.ndarray, following: np.ndarray) -> None:
    """Drop the least recently used block that nobody holds. There must be one."""
    oldest = following[prev.size - 1]
    remove(prev, following, oldest)
    resident[oldest] = False
    pool[FREE] += block_tokens[oldest]
    pool[EVICTABLE] -= block_tokens[oldest]
    pool[RESIDENT] -= block_tokens[oldest]


@compiled(lru)
def allocate(
    want: int, pool: np.ndarray, resident: np.ndarray, block_tokens: np.ndarray, prev: np.ndarray, following: np.ndarray
) -> bool:
    """Take ``want`` tokens of KV room, evicting what nobody holds if need be. False, and nothing done, if there is not enough."""
    if want > pool[FREE] + pool[EVICTABLE]:
        return False
    while pool[FREE] < want:
        evict(pool, resident, block_tokens, prev, following)
    pool[FREE] -= want
    return True


@compiled(lru)
def leave(
    r: int, kv: np.ndarray, block_ptr: np.ndarray, block_id: np.ndarray, block_tokens: np.ndarray, held: np.ndarray,
    holders: np.ndarray, pool: np.ndarray, prev: np.ndarray, following: np.ndarray,
) -> None:  # fmt: skip
    """Give back what request ``r`` holds. Its last block becomes the oldest of them, as in vLLM: tails are evicted first."""
    pool[FREE] += kv[r, PRIVATE]
    kv[r, PRIVATE], kv[r, SHARED] = 0, 0
    for j in range(block_ptr[r + 1] - 1, block_ptr[r] - 1, -1):
        if held[j]:
            b = block_id[j]
            held[j] = False
            holders[b] -= 1
            if holders[b] == 0:
                append(prev, following, b)
                pool[EVICTABLE] += block_tokens[b]


@compiled(lru)
def enter_cache(
    r: int, computed: int, cache_capacity: int, kv: np.ndarray, block_ptr: np.ndarray, block_id: np.ndarray,
    block_end: np.ndarray, block_tokens: np.ndarray, held: np.ndarray, holders: np.ndarray, resident: np.ndarray,
    pool: np.ndarray, prev: np.ndarray, following: np.ndarray,
) -> None:  # fmt: skip
    """Put request ``r``'s prompt blocks that are computed now into the cache; it holds them until it leaves.

    A block that another request put there meanwhile stays its own copy, outside the cache.
    """
    while kv[r, NEXT] < block_ptr[r + 1] and block_end[kv[r, NEXT]] <= computed:
        j = kv[r, NEXT]
        kv[r, NEXT] += 1
        b = block_id[j]
        size = block_tokens[b]
        if resident[b] or kv[r, PRIVATE] < size:
            continue
        while pool[RESIDENT] + size > cache_capacity and pool[EVICTABLE] > 0:
            evict(pool, resident, block_tokens, prev, following)
        if pool[RESIDENT] + size > cache_capacity:
            continue
        resident[b], held[j], holders[b] = True, True, 1
        pool[RESIDENT] += size
        kv[r, PRIVATE] -= size
        kv[r, SHARED] += size
