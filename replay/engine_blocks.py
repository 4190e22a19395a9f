"""Prompts' blocks as an engine's prefix cache has them: a trace's ids may be of shorter blocks than the engine keeps."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

import numpy as np

from hoptrace.replay.plan import Plan
from hoptrace.replay.workload import Workload

__all__ = ["in_engine_blocks"]


def in_engine_blocks(work: Workload, plan: Plan) -> Workload:
    """The work with ids of whole engine blocks, where the trace's blocks are a whole part of one.

    An engine finds a block only if all of it is the same. Ids are chained (equal ids: equal text from the prompt's start), so of
    the blocks that make up one of the engine's, the last one's id says all. Requests whose blocks are not a whole part of the
    engine's (longer, or blocks of characters, whose ends are uneven) keep theirs. With engines of several block sizes: their
    greatest common divisor.
    """
    size = gcd(*(e.block_size_tokens for e in plan.engines if e.cache == "pool"))
    if size <= 1 or not len(work.block_id):
        return work
    counts = np.diff(work.block_ptr)
    owner = np.repeat(np.arange(work.n), counts)
    nth = np.arange(1, len(owner) + 1) - np.repeat(work.block_ptr[:-1], counts)
    first = work.block_end[np.minimum(work.block_ptr[:-1], len(work.block_end) - 1)]
    # Even blocks, all of them whole: those of tokens. A block that ends with its prompt, short, is never a whole one.
    even = np.ones(work.n, dtype=np.bool_)
    np.logical_and.at(even, owner, work.block_end == nth * np.repeat(first, counts))
    parts = np.where(even & (first > 0) & (counts > 0) & (size % np.maximum(first, 1) == 0), size // np.maximum(first, 1), 1)
    if (parts == 1).all():
        return work
    keep = nth % np.repeat(parts, counts) == 0
    kept = np.bincount(owner[keep], minlength=work.n)
    ptr = np.concatenate([[0], np.cumsum(kept)]).astype(np.int64)
    block_id, block_end = work.block_id[keep], work.block_end[keep]
    length = block_end - np.where(nth[keep] == np.repeat(parts, counts)[keep], 0, np.concatenate([[0], block_end[:-1]]))
    tokens = work.block_tokens.copy()
    used = np.unique(block_id)
    tokens[used] = np.iinfo(np.int64).max
    np.minimum.at(tokens, block_id, length)
    return replace(work, block_ptr=ptr, block_id=block_id, block_end=block_end, block_tokens=tokens)
