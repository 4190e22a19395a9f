"""Prompts' blocks as an engine's prefix cache has them: a trace's ids may be of shorter blocks than the engine keeps."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Any

import numpy as np

from hoptrace.replay.plan import Plan
from hoptrace.replay.workload import Workload

__all__ = ["in_engine_blocks"]

_Ints = np.ndarray[Any, np.dtype[np.int64]]


def in_engine_blocks(work: Workload, plan: Plan) -> Workload:
    """The work with ids of whole engine blocks, where the trace's blocks are shorter.

    An engine finds a block only if all of it is the same. Ids are chained (equal ids: equal text from the prompt's start), so the
    id of the first of the trace's blocks that reaches an engine block's end says all of it. Where the trace's are a whole part
    of the engine's that is exact. Blocks of characters have uneven ends, each prompt its own; so that equal text stays equal,
    all prompts that begin alike count with the mean length of their blocks, and a block goes as far as the recorded server was
    seen to find what shares it. Requests whose blocks are longer than the engine's, or even and no part of them, keep theirs.
    With engines of several block sizes: their greatest common divisor.
    """
    size = gcd(*(e.block_size_tokens for e in plan.engines if e.cache == "pool"))
    if size <= 1 or not len(work.block_id):
        return work
    counts = np.diff(work.block_ptr)
    owner = np.repeat(np.arange(work.n), counts)
    nth = np.arange(1, len(owner) + 1) - np.repeat(work.block_ptr[:-1], counts)
    length = _lengths(work, size)
    joined = (length > 0)[owner]
    if not joined.any():
        return work
    mine = np.repeat(length, counts)
    # How many engine blocks are full with this block of the trace, and with the one before.
    full = np.floor(nth * mine / size + 1e-9).astype(np.int64)
    if work.common is not None and work.in_characters is not None:
        full = _at_least(full, np.where(work.in_characters[owner], work.common[work.block_id] // size, 0), owner)
    before = np.where(nth == 1, 0, np.concatenate([[0], full[:-1]]))
    at = np.where(joined, full * size, work.block_end)
    # What characters say may lie beyond the prompt.
    keep = np.where(joined, (full > before) & (at <= work.prompt_tokens[owner]), True)
    ptr = np.concatenate([[0], np.cumsum(np.bincount(owner[keep], minlength=work.n))]).astype(np.int64)
    block_id, block_end = work.block_id[keep], at[keep].astype(np.int64)
    first = np.zeros(len(block_end), dtype=np.bool_)
    first[ptr[:-1][np.diff(ptr) > 0]] = True
    tokens = work.block_tokens.copy()
    tokens[block_id] = np.iinfo(np.int64).max
    np.minimum.at(tokens, block_id, block_end - np.where(first, 0, np.concatenate([[0], block_end[:-1]])))
    return replace(work, block_ptr=ptr, block_id=block_id, block_end=block_end, block_tokens=tokens)


def _at_least(full: _Ints, seen: _Ints, owner: _Ints) -> _Ints:
    """``full``, not below ``seen`` nor below the block before of the same request."""
    step = int(max(full.max(initial=0), seen.max(initial=0))) + 1
    found: _Ints = np.maximum.accumulate(np.maximum(full, seen) + owner * step) - owner * step
    return found


def _lengths(work: Workload, size: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[n] how many tokens a block of each request counts for; 0 where its blocks are not joined."""
    counts = np.diff(work.block_ptr)
    first = work.block_end[np.minimum(work.block_ptr[:-1], len(work.block_end) - 1)]
    last = work.block_end[np.maximum(work.block_ptr[1:] - 1, 0)]
    has = (counts > 0) & (first > 0)
    found = np.where(has & (first < size) & (size % np.maximum(first, 1) == 0), first, 0).astype(np.float64)
    # A prompt's last block may be a short one: whole ones are as long as the first.
    even = last <= counts * first
    found[~even] = 0
    if work.in_characters is not None:
        uneven = work.in_characters & has
        # Who begins alike is of one kind of text, and has to find one another: one length for all that share a first block.
        alike = np.unique(work.block_id[work.block_ptr[:-1][uneven]], return_inverse=True)[1]
        mean = np.bincount(alike, weights=last[uneven]) / np.bincount(alike, weights=counts[uneven])
        found[uneven] = np.where(mean < size, mean, 0)[alike]
    return found
