"""How many tokens prompts have in common, where the trace's blocks are of characters: what the recorded server found in its cache
says more than the last whole block that is equal."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["common_tokens"]

_Ints = np.ndarray[Any, np.dtype[np.int64]]


def common_tokens(block_ptr: _Ints, block_id: _Ints, cached: _Ints) -> _Ints:
    """By block, the tokens that prompts which have it, and no further block, in common with an earlier one were seen to share;
    0 where no request shows it.

    Prompts that share three blocks of 64 characters share up to 63 characters more, which may be what fills an engine's block.
    Each request whose server said what it found (``cached``, by request in order of arrival; -1: not told) shows it for the last
    of its blocks that an earlier request has too. The most that any shows is taken: a request may find less than is equal
    (evicted), never more.
    """
    counts = np.diff(block_ptr)
    owner = np.repeat(np.arange(len(counts)), counts)
    found = np.zeros(int(block_id.max()) + 1 if len(block_id) else 0, dtype=np.int64)
    first = np.full(len(found), len(counts), dtype=np.int64)
    np.minimum.at(first, block_id, owner)
    # Ids are chained: all blocks before a shared one are shared.
    shared = np.bincount(owner[first[block_id] < owner], minlength=len(counts))
    some = np.flatnonzero((shared > 0) & (cached > 0))
    np.maximum.at(found, block_id[block_ptr[some] + shared[some] - 1], cached[some])
    return found
