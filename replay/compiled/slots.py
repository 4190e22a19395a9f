"""llama.cpp's slots, compiled: each keeps its last prompt, and a request that begins like it starts behind the common part."""

from __future__ import annotations

import numpy as np

from hoptrace.replay.jit import lean

__all__ = ["BUSY", "PROMPT", "USED", "choose_slot", "common_blocks"]

BUSY, PROMPT, USED = 0, 1, 2
"""Columns of ``slot``: whether taken, the request whose prompt it keeps (-1: none), when it was last used."""


@lean()
def common_blocks(r: int, other: int, block_ptr: np.ndarray, block_id: np.ndarray) -> int:
    """Leading blocks that two requests' prompts have in common."""
    a, b = block_ptr[r], block_ptr[other]
    most = min(block_ptr[r + 1] - a, block_ptr[other + 1] - b)
    k = 0
    while k < most and block_id[a + k] == block_id[b + k]:
        k += 1
    return k


@lean()
def choose_slot(
    r: int, prompt: int, block_ptr: np.ndarray, block_id: np.ndarray, block_end: np.ndarray, slot: np.ndarray
) -> tuple[int, int]:
    """llama.cpp's choice among the free slots (there must be one): (slot, prompt tokens found in it)."""
    best, found = -1, 0
    for s in range(slot.shape[0]):
        if slot[s, BUSY] == 0 and slot[s, PROMPT] >= 0:
            k = common_blocks(r, slot[s, PROMPT], block_ptr, block_id)
            tokens = block_end[block_ptr[r] + k - 1] if k > 0 else 0
            # slot_prompt_similarity, 0.1 by default: a shorter common prefix does not bind a request to a slot.
            if tokens > found and 10 * tokens > prompt:
                best, found = s, tokens
    if best >= 0:
        return best, found
    for s in range(slot.shape[0]):
        if slot[s, BUSY] == 0 and (best < 0 or slot[s, USED] <= slot[best, USED]):
            best = s
    if slot[best, PROMPT] >= 0:
        k = common_blocks(r, slot[best, PROMPT], block_ptr, block_id)
        if k > 0:
            found = block_end[block_ptr[r] + k - 1]
    return best, found
