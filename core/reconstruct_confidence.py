"""How sure a reconstructed step is of its members: from how clearly its tokens stand apart from its neighbours', and whether the
law of one token per step was kept."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["confidence", "signs"]

_Ints = np.ndarray[Any, np.dtype[np.int64]]
_Floats = np.ndarray[Any, np.dtype[np.float64]]

_NEIGHBOURS = 2
# Share of steps with exact members by [a sequence broke the law][a single read tells the step][lateness: under 0.5, 1, 2, or 2],
# measured on eight recorded vLLM runs as they were and with delays added to half of the tokens, exponential, mean 5 to 50 % of a
# step: 132,000 steps (docs/steps.md).
_LATENESS = (0.5, 1.0, 2.0)
_EXACT = np.array(
    [
        [[0.999, 0.999, 0.998, 0.974], [0.998, 0.986, 0.908, 0.893]],
        [[0.895, 0.834, 0.728, 0.274], [0.388, 0.082, 0.056, 0.008]],
    ]
)
# Where tokens came with those of later steps, so many in a hundred of the steps that would else have been exact were not. Of the
# steps that put out nothing, so many of those inferred were there.
_HIDDEN = 0.985
_SILENT = 0.97


def signs(unit: _Ints, step: _Ints, time: _Ints, made: _Ints, first: _Ints, seen: _Ints) -> _Floats:
    """What the confidence is made of, float64[steps, 4], each the worst of the step and of the two on either side.

    Args:
        unit, step, time, made: of each read, sorted by unit and time; ``made``: the steps that it stands for.
        first, seen: of each step, the time of its first token, and 0 if no read is its own.

    Returns:
        lateness: how long after the step's first token its last one came, as a share of the time to the next step's first, at
        most 2; broken: sequences that did not emit in the step after the one before, at most 2; hidden: 1 if its tokens came with
        those of later steps; alone: 1 if a single sequence tells the step.
    """
    n = len(first)
    gap = np.diff(first, append=first[-1] if n else 0)
    usual = int(np.median(gap[gap > 0])) if (gap > 0).any() else 1
    # The time to the next step is at most three usual steps: after a break it says nothing.
    room = np.clip(np.append(gap[:-1], usual) if n else gap, 1, 3 * usual)
    late = np.zeros(n)
    np.maximum.at(late, step, np.clip((time - first[step]) / room[step], 0.0, 2.0))
    same = unit[1:] == unit[:-1]
    off = np.zeros(len(unit), dtype=bool)
    off[1:] = same & (np.diff(step) != made[1:])
    broken = np.minimum(np.bincount(step[off], minlength=n), 2).astype(np.float64)
    alone = (np.bincount(step, minlength=n) == 1).astype(np.float64)
    return np.stack([_worst(late), _worst(broken), _worst((seen == 0).astype(np.float64)), alone], axis=1)


def _worst(values: _Floats) -> _Floats:
    out = values.copy()
    for k in range(1, _NEIGHBOURS + 1):
        out[k:] = np.maximum(out[k:], values[:-k])
        out[:-k] = np.maximum(out[:-k], values[k:])
    return out


def confidence(given: _Floats, number: _Ints, steps: int) -> _Floats:
    """Confidence of each of the final ``steps``, 0 to 1. ``given``: :func:`signs` of the steps with tokens; ``number``: the final
    number of each. The steps before one that put out nothing are as sure as it, and at most 0.97."""
    late = np.searchsorted(_LATENESS, given[:, 0], side="right")
    sure = _EXACT[(given[:, 1] > 0).astype(np.int64), given[:, 3].astype(np.int64), late]
    sure = np.where(given[:, 2] > 0, sure * _HIDDEN, sure)
    owner = np.searchsorted(number, np.arange(steps))
    out: _Floats = np.minimum(sure[owner], _SILENT)
    out[number] = sure
    return out
