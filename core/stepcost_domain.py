"""Where a replay's steps leave what its step cost was measured on."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from hoptrace.stepcost import FEATURES, StepCost, composition_of, features_array

__all__ = ["Domain"]

_Ints = np.ndarray[Any, np.dtype[np.int64]]
_ASKED = tuple(f for f in FEATURES if f not in ("step", "any_prefill", "any_decode", "batched"))
"""The others are 0 or 1: what was never seen of them was dropped from the fit, with a note."""


class Domain:
    """Counts steps that lie outside, with the values that were asked for. Feed it all steps with :meth:`add`, in any parts."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._known = bool(cost.domain) or any(p.seen is not None for p in cost.pieces)
        self._steps = 0
        self._ns = 0
        self._seen: dict[str, tuple[int, int]] = {}
        self._asked: dict[str, tuple[int, int]] = {}
        self._outside: dict[str, int] = {}
        self._outside_ns = 0

    def add(self, steps: pl.DataFrame) -> None:
        """``steps``: composition as in the table `steps`, and start_ns, end_ns."""
        if not steps.height or not self._known:
            return
        took = (steps["end_ns"] - steps["start_ns"]).to_numpy()
        self._steps += steps.height
        self._ns += int(took.sum())
        ever = np.zeros(steps.height, dtype=bool)
        for name, values, counts, seen in self._axes(steps):
            self._outside.setdefault(name, 0)
            if not counts.any():
                continue
            self._seen[name] = seen
            low, high = int(values[counts].min()), int(values[counts].max())
            before = self._asked.get(name, (low, high))
            self._asked[name] = (min(low, before[0]), max(high, before[1]))
            beyond = counts & ((values < seen[0]) | (values > seen[1]))
            self._outside[name] += int(beyond.sum())
            ever |= beyond
        self._outside_ns += int(took[ever].sum())

    def _axes(self, steps: pl.DataFrame) -> list[tuple[str, _Ints, np.ndarray[Any, np.dtype[np.bool_]], tuple[int, int]]]:
        """(name, value in each step, whether it counts there, what was seen of it)."""
        found = []
        if self._cost.domain:
            features = features_array(steps)
            for name in _ASKED:
                if name in self._cost.domain:
                    values = features[:, FEATURES.index(name)]
                    found.append((name, values, values > 0, self._cost.domain[name]))
        held = composition_of(steps) if self._cost.pieces else None
        for piece in self._cost.pieces:
            if held is None or piece.seen is None:
                continue
            counts = piece.factor(held) > 0
            found.append((f"{piece.name}: {piece.inner}", held.variable(piece.inner), counts, piece.seen[:2]))
            if piece.outer != "none":
                found.append((f"{piece.name}: {piece.outer}", held.variable(piece.outer), counts, piece.seen[2:]))
        return found

    def sentences(self) -> list[str]:
        """One for each quantity that left what was seen, and how much of the steps' time rests on that."""
        said = []
        for name, n in self._outside.items():
            if not n:
                continue
            (low, high), (seen_low, seen_high) = self._asked[name], self._seen[name]
            said.append(
                f"{name} of {_range(low, high)} was asked for, {_range(seen_low, seen_high)} was seen: "
                f"extrapolated in {n:,} of {self._steps:,} steps."
            )
        if said and self._ns:
            said.append(f"{100 * self._outside_ns / self._ns:.0f} % of the replay's step time rests on extrapolated step costs.")
        return said


def _range(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
