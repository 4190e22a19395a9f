"""In which steps the prompts were computed: between the moment a request was picked up and the step of its first token, at most
the server's batch in each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

__all__ = ["Placed", "Prompt", "first_steps", "place", "step_starts"]

_Ints = np.ndarray[Any, np.dtype[np.int64]]
_NO_LIMIT = 1 << 40  # of many steps it still adds up within 64 bits


@dataclass(slots=True)
class Prompt:
    """A prompt to place. ``last`` is the step of its first token, ``available_ns`` when it reached the server (null: unknown),
    ``tokens`` those to compute (null: unknown), ``context`` those that the cache gave."""

    unit: int
    last: int
    available_ns: int | None
    tokens: int | None
    context: int


@dataclass(slots=True)
class Placed:
    """``chunks``: (unit, step, tokens, context before). ``extra``: steps to be put in before a step, since its prompts exceed
    the batch. ``begin``: by unit, the first step that worked on its prompt. ``over``: prompts that did not fit where they must
    have been."""

    chunks: list[tuple[int, int, int | None, int]] = field(default_factory=list)
    extra: dict[int, int] = field(default_factory=dict)
    begin: dict[int, int] = field(default_factory=dict)
    over: int = 0


def step_starts(end: _Ints, decoding: _Ints, last: _Ints, picked_up_ns: _Ints) -> _Ints:
    """Start of each step: the end of the one before where anyone decodes in it, else when the first of its prompts was picked up.

    ``last`` and ``picked_up_ns`` are of the prompts: step of the first token, and pick-up time, or the best that is known for it.
    """
    before = np.concatenate(([np.iinfo(np.int64).min], end[:-1])) if len(end) else end
    earliest = np.full(len(end), np.iinfo(np.int64).max)
    np.minimum.at(earliest, last, picked_up_ns)
    idle = decoding == 0
    start = np.where(idle, np.maximum(before, np.minimum(earliest, end)), before)
    return np.where(start == np.iinfo(np.int64).min, end, start)  # the first step, if nobody knows when its prompt was picked up


def first_steps(start: _Ints, last: _Ints, told_ns: pl.Series, available_ns: pl.Series) -> _Ints:
    """By unit, the step that its prompt was picked up in, at most ``last``. A server picks up between steps: it is the step whose
    start is nearest to the moment that the server told or, where it told none, the first that began after the request came (a
    prompt that had to wait began later: :func:`place`); −1 where neither is known."""
    told = told_ns.fill_null(0).to_numpy()
    right = np.clip(np.searchsorted(start, told, side="right"), 1, None)
    left = right - 1
    right = np.minimum(right, len(start) - 1)
    nearest = np.where(np.abs(start[right] - told) < np.abs(told - start[left]), right, left)
    earliest = np.searchsorted(start, available_ns.fill_null(0).to_numpy(), side="left")
    first = np.where(told_ns.is_null().to_numpy(), np.where(available_ns.is_null().to_numpy(), -1, earliest), nearest)
    return np.minimum(first, last)


def place(prompts: Sequence[Prompt], start: _Ints, duration: _Ints, decoding: _Ints, batch: int | None, first: _Ints) -> Placed:
    """Place each prompt's tokens. ``prompts`` in the order of their first token, then of their pick-up.

    A prompt fills what the batch leaves free from the step it was picked up in (``first``, by unit; −1: unknown); if it would be
    done before its first token was seen, it began later. Where it does not fit, steps are put in before one that has no decoder
    (a decoder would have shown them).
    """
    out = Placed()
    free = np.full(len(start), _NO_LIMIT) if batch is None else np.maximum(batch - decoding, 1)
    for p in prompts:
        if p.tokens is None:
            out.chunks.append((p.unit, p.last, None, p.context))
            out.begin[p.unit] = p.last
            continue
        begin = int(first[p.unit])
        if begin < 0:
            # Not known when it had come: as late as the batch allows.
            begin = p.last
            need = p.tokens - int(free[p.last])
            while need > 0 and begin > 0:
                begin -= 1
                need -= int(free[begin])
        while begin < p.last and int(free[begin : p.last].sum()) >= p.tokens:
            begin += 1
        short = p.tokens - int(free[begin : p.last + 1].sum())
        if short > 0 and batch is not None:
            silent = [k for k in range(begin, p.last + 1) if decoding[k] == 0]
            if silent:
                k = max(silent, key=lambda k: int(duration[k]))
                more = -(-short // batch)
                out.extra[k] = out.extra.get(k, 0) + more
                free[k] += more * batch
            else:
                out.over += 1
                free[p.last] += short
        left, context = p.tokens, p.context
        for k in range(begin, p.last + 1):
            n = min(left, int(free[k]))
            if n <= 0:
                continue
            out.chunks.append((p.unit, k, n, context))
            out.begin.setdefault(p.unit, k)
            free[k] -= n
            left -= n
            context += n
        out.begin.setdefault(p.unit, p.last)
    return out
