"""In which steps the prompts were computed: between the moment a request was picked up and the step of its first token, at most
the server's batch in each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Placed", "Prompt", "first_steps", "place", "step_starts"]

_Ints = np.ndarray[Any, np.dtype[np.int64]]
_NO_LIMIT = 1 << 60


@dataclass(slots=True)
class Prompt:
    """A prompt to place. ``last`` is the step of its first token, ``first`` the step it was picked up in (null: unknown),
    ``available_ns`` when it reached the server, ``tokens`` those to compute (null: unknown), ``context`` those that the cache
    gave."""

    unit: int
    last: int
    first: int | None
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


def first_steps(start: _Ints, last: _Ints, scheduled_ns: _Ints) -> _Ints:
    """The step whose start is nearest to the moment a prompt was picked up, at most ``last``: a server picks up between
    iterations."""
    right = np.clip(np.searchsorted(start, scheduled_ns, side="right"), 1, None)
    left = right - 1
    right = np.minimum(right, len(start) - 1)
    nearer = np.where(np.abs(start[right] - scheduled_ns) < np.abs(scheduled_ns - start[left]), right, left)
    return np.minimum(nearer, last)


def place(prompts: Sequence[Prompt], start: _Ints, duration: _Ints, decoding: _Ints, batch: int | None) -> Placed:
    """Place each prompt's tokens. ``prompts`` in the order of their first token, then of their pick-up.

    A prompt fills what the batch leaves free from the step it was picked up in; if it would be done before its first token was
    seen, it began later. Where it does not fit, steps are put in before one that has no decoder (a decoder would have shown
    them).
    """
    out = Placed()
    free = np.full(len(start), _NO_LIMIT) if batch is None else np.maximum(batch - decoding, 1)
    for p in prompts:
        if p.tokens is None:
            out.chunks.append((p.unit, p.last, None, p.context))
            out.begin[p.unit] = p.last
            continue
        begin = p.last if p.first is None else p.first
        if p.first is None:
            # Not known when it was picked up: as late as the batch allows, but not before it had come.
            need = p.tokens - int(free[p.last])
            while need > 0 and begin > 0 and (p.available_ns is None or start[begin - 1] >= p.available_ns):
                begin -= 1
                need -= int(free[begin])
        else:
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
