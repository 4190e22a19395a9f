"""Where a replay's steps leave what its step cost was measured on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from hoptrace.stepcost import FEATURES, StepCost, composition_of, features_array

__all__ = ["BESIDE", "Beyond", "Domain"]

_Ints = np.ndarray[Any, np.dtype[np.int64]]
_ASKED = tuple(f for f in FEATURES if f not in ("step", "any_prefill", "any_decode", "batched"))
"""The others are 0 or 1: what was never seen of them was dropped from the fit, with a note."""
BESIDE = "prompts beside decoders"
"""Steps of both phases, where the fit saw only steps of one: each was seen as far as it goes, but never together."""


@dataclass(frozen=True)
class Beyond:
    """One quantity that left what was seen.

    Attributes:
        name: of :data:`hoptrace.stepcost.FEATURES`, of a looked-up piece (``piece: variable``), or :data:`BESIDE`.
        asked, seen: least and most of it; of BESIDE decoders in such steps, and (0, 0).
        steps, ns: how many steps left it, and how long they take together.
    """

    name: str
    asked: tuple[int, int]
    seen: tuple[int, int]
    steps: int
    ns: int


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
        self._each_ns: dict[str, int] = {}
        self._outside_ns = 0
        kinds = cost.error.get("by_kind") if cost.error else None
        self._never_beside = cost.origin == "fitted" and isinstance(kinds, dict) and "mixed" not in kinds

    @property
    def known(self) -> bool:
        """Whether it is known what the cost was measured on; else nothing ever lies outside."""
        return self._known

    @property
    def step_ns(self) -> tuple[int, int]:
        """Step time of all steps, and of those that lie outside, in ns."""
        return self._ns, self._outside_ns

    @property
    def steps(self) -> int:
        """Steps that were added."""
        return self._steps

    def beyond(self) -> list[Beyond]:
        """The quantities that left what was seen, in the order of :meth:`sentences`."""
        return [
            Beyond(name, self._asked[name], self._seen[name], n, self._each_ns[name]) for name, n in self._outside.items() if n
        ]

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
            self._each_ns[name] = self._each_ns.get(name, 0) + int(took[beyond].sum())
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
            if self._never_beside:
                decoders = features[:, FEATURES.index("decode_requests")]
                both = (decoders > 0) & (features[:, FEATURES.index("prefill_tokens")] > 0)
                found.append((BESIDE, decoders, both, (0, 0)))
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
        for b in self.beyond():
            far = f"extrapolated in {b.steps:,} of {self._steps:,} steps."
            if b.name == BESIDE:
                said.append(f"Steps of prompts beside decoders were asked for, none was seen: {far}")
            else:
                said.append(f"{b.name} of {_range(*b.asked)} was asked for, {_range(*b.seen)} was seen: {far}")
        if said and self._ns:
            said.append(f"{100 * self._outside_ns / self._ns:.0f} % of the replay's step time rests on extrapolated step costs.")
        return said


def _range(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
