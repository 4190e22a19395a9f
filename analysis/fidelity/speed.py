"""How fast the machine was in one run against another, by equal steps."""

from __future__ import annotations

from hoptrace.comparison import speed
from hoptrace.reader import Trace
from hoptrace.reconstruct import steps_of
from hoptrace.stepcost import StepCost

__all__ = ["machine_speed"]


def machine_speed(a: Trace, b: Trace, cost: StepCost | None) -> float | None:
    """How much longer equal steps took in ``b`` than in ``a``: 1.1 for a tenth longer. ``cost``: fitted to ``a``.

    Both runs' step times ÷ what the cost gives their steps, one ÷ the other, so that what the fit leaves out of ``a`` (outliers)
    is no speed. It holds the machine's drift *and* the fit's error on the steps of ``b``, which one pair of runs cannot tell
    apart: where ``b`` has other steps than ``a``, it is no pure speed. Null without a cost or without steps that it can price.
    """
    if cost is None:
        return None
    here, there = (speed(steps_of(t).steps, cost) for t in (a, b))
    return there / here if here and there else None
