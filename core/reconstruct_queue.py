"""What the first tokens tell of the server's queue: how long a request takes from its arrival to the engine's queue, and how many
tokens the engine takes in a step, where nobody says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hoptrace.reconstruct_prefill import Prompt

__all__ = ["entry_delay_ns", "guess_batch"]

_Ints = np.ndarray[Any, np.dtype[np.int64]]

_ENOUGH = 20
_AGREE_ON_DELAY = 0.5
_AGREE_ON_BATCH = 0.3
_NEARLY = 0.9
_ROUND = 16


def entry_delay_ns(prompts: Sequence[Prompt], end: _Ints, decoding: _Ints) -> int:
    """Time from a request's arrival until the engine can take it up, plus the time that tokens take on their way back: seen from
    outside the two cannot be told apart, and need not be, since steps are timed by their tokens.

    A short prompt that is ready when a step begins is computed in it; one that comes later is in the next. So of a prompt whose
    first token came out of step k, the delay is more than ``end[k − 2] − arrival`` and at most ``end[k − 1] − arrival``. What
    most of the shorter half of the prompts agree on is taken (the middle of the stretch); 0 if fewer than 20 tell, or fewer than
    half agree.
    """
    lengths = [p.tokens for p in prompts if p.tokens is not None]
    middle = float(np.median(lengths)) if lengths else 0
    low, high = [], []
    for p in prompts:
        k = p.last
        if p.available_ns is None or p.tokens is None or p.tokens > middle or k < 2 or not decoding[k] or not decoding[k - 1]:
            continue
        if int(end[k - 1]) >= p.available_ns:
            low.append(max(int(end[k - 2]) - p.available_ns, 0))
            high.append(int(end[k - 1]) - p.available_ns)
    if len(low) < _ENOUGH:
        return 0
    stretches = _agreed(low, high)
    votes, begin, stop = max(stretches, key=lambda s: (s[0], -s[1]))
    return (begin + stop) // 2 if votes >= _AGREE_ON_DELAY * len(low) else 0


def guess_batch(prompts: Sequence[Prompt], start: _Ints, decoding: _Ints, delay_ns: int) -> int | None:
    """The engine's budget of tokens per step, decoders' included, from how many steps prompts took.

    A prompt of n tokens that took m steps did not fit into m − 1 of them: the budget less each step's decoders, added up, is at
    least n over all m, and less than n over the first m − 1. (Prompts that share steps say less than the truth, and disagree.) Of
    the numbers that most agree on, or nearly so, the roundest is taken, the one that the highest power of two divides. Null if
    fewer than 20 prompts took several steps, fewer than 30 % agree, or no multiple of 16 is among the numbers.
    """
    low, high = [], []
    for p in prompts:
        if p.tokens is None or p.available_ns is None:
            continue
        begin = int(np.searchsorted(start, p.available_ns + delay_ns, side="left"))
        m = p.last - begin + 1
        if m < 2:
            continue
        busy = int(decoding[begin : p.last].sum())
        low.append(-(-(p.tokens + busy + int(decoding[p.last])) // m))
        high.append((p.tokens + busy - 1) // (m - 1))
    if len(low) < _ENOUGH:
        return None
    stretches = _agreed(low, high)
    most = max(votes for votes, _, _ in stretches)
    if most < _AGREE_ON_BATCH * len(low):
        return None
    found = [(power, votes, n) for votes, b, e in stretches if votes >= _NEARLY * most for power, n in [_roundest(b, e)]]
    power, _, n = max(found, key=lambda f: (f[0], f[1], -f[2]))
    return n if power >= _ROUND else None


def _agreed(low: Sequence[int], high: Sequence[int]) -> list[tuple[int, int, int]]:
    """How many of the closed intervals share each stretch: (votes, first, last number)."""
    change: dict[int, int] = {}
    for a, b in zip(low, high, strict=True):
        if a <= b:
            change[a] = change.get(a, 0) + 1
            change[b + 1] = change.get(b + 1, 0) - 1
    edges = sorted(change)
    out, votes = [(0, 0, 0)], 0
    for at, after in zip(edges, [*edges[1:], edges[-1] if edges else 0], strict=True):
        votes += change[at]
        if votes:
            out.append((votes, at, after - 1))
    return out


def _roundest(low: int, high: int) -> tuple[int, int]:
    """The number in [low, high] that the highest power of two divides, after that power."""
    power = 1
    while -(-low // (2 * power)) * 2 * power <= high and power < 1 << 30:
        power *= 2
    return power, -(-low // power) * power
