"""Step costs as one vector of integers, as the replay's engines read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hoptrace.stepcost import StepCost
from hoptrace.stepcost_kernel import HEAD

__all__ = ["pack"]

_Ints = np.ndarray[Any, np.dtype[np.int64]]


def pack(costs: Sequence[StepCost]) -> tuple[_Ints, _Ints]:
    """(all costs one after another, where each begins), int64. :func:`hoptrace.stepcost_kernel.step_ns` reads them."""
    parts, starts, at = [], [], 0
    for cost in costs:
        vector = cost.as_vector()
        head = np.array([cost.kind, 0, HEAD + len(vector)], dtype=np.int64)
        parts += [head, vector]
        starts.append(at)
        at += HEAD + len(vector)
    return np.concatenate(parts), np.array(starts, dtype=np.int64)
