"""Steps of one (server, rank) as functions of time: how much step time, interference or "server full" lies before a moment.

A request's share of any interval is a difference of two values, so no request × step join is ever made.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from hoptrace.analysis.axis import Ints
from hoptrace.errors import InputError
from hoptrace.stepcost import FEATURES, StepCost, features_array, fit, interference

__all__ = ["Busy", "Interference", "StepLine", "cost_of", "lines", "told_apart", "without_composition"]

Floats = npt.NDArray[np.float64]
_COMPOSITION = ("prefill_tokens", "prefill_context_tokens", "decode_requests", "decode_context_tokens")
_ALONE = 5  # fewest steps of a phase by itself
_GONE = {"prefill": (2, 6, 7), "decode": (1, 3, 4, 5)}  # features that leave when the phase is alone in the step


@dataclass(frozen=True)
class Busy:
    """Disjoint ascending intervals; ``before(t)`` is how much of them lies before t, in ns."""

    start: Ints
    end: Ints
    total: Ints  # ns before each interval

    @classmethod
    def of(cls, start: Ints, end: Ints) -> Busy:
        """From intervals in ascending order of start; where one overlaps those before it, only the rest of it counts."""
        if len(start):
            seen = np.concatenate([[np.iinfo(np.int64).min], np.maximum.accumulate(end)[:-1]])
            start = np.maximum(start, seen)
            end = np.maximum(start, end)
        total = np.zeros(len(start), dtype=np.int64)
        if len(start):
            np.cumsum((end - start)[:-1], out=total[1:])
        return cls(start, end, total)

    def before(self, t: Ints) -> Ints:
        if not len(self.start):
            return np.zeros(len(t), dtype=np.int64)
        i = np.searchsorted(self.start, t, side="right") - 1
        j = np.maximum(i, 0)
        value = self.total[j] + np.clip(t, self.start[j], self.end[j]) - self.start[j]
        return np.where(i >= 0, value, 0).astype(np.int64)


@dataclass(frozen=True)
class Interference:
    """What the other phase took of each step (ns), its running sum, and the running sum of the features behind it."""

    ns: Ints
    total: Ints
    features: Floats  # (steps + 1) × 8, running sum of the features that would have been absent


@dataclass(frozen=True)
class StepLine:
    """Steps of one (server, rank). ``number`` ascends with time; ``busy`` are their intervals; ``covered`` is when steps were
    recorded (null: nobody says, so always)."""

    server: str
    dp_rank: int
    number: Ints
    busy: Busy
    prefill: Interference | None
    decode: Interference | None
    covered: Busy | None = None

    def interference(self, phase: str, t: Ints) -> tuple[Ints, Floats]:
        """Interference before t (ns) in steps as `phase` ("prefill", "decode") feels it, and the features that made it."""
        x = self.prefill if phase == "prefill" else self.decode
        assert x is not None
        if not len(self.number):
            return np.zeros(len(t), dtype=np.int64), np.zeros((len(t), len(FEATURES)))
        i = np.searchsorted(self.busy.start, t, side="right") - 1
        j = np.maximum(i, 0)
        length = (self.busy.end - self.busy.start)[j]
        done = np.clip(t, self.busy.start[j], self.busy.end[j]) - self.busy.start[j]
        fraction = np.where(length > 0, done / np.maximum(length, 1), 1.0)
        ns = x.total[j] + np.floor(x.ns[j] * fraction).astype(np.int64)
        features = x.features[j] + (x.features[j + 1] - x.features[j]) * fraction[:, None]
        seen = i >= 0
        return np.where(seen, ns, 0).astype(np.int64), np.where(seen[:, None], features, 0.0)

    def position(self, number: Ints) -> Ints:
        """Index of the first step whose number is at least ``number`` (may be one past the end)."""
        return np.searchsorted(self.number, number, side="left").astype(np.int64)


def cost_of(steps: pl.DataFrame) -> tuple[StepCost | None, str]:
    """The step cost fitted to the steps, or null with the reason."""
    try:
        cost = fit(steps)
    except InputError as e:
        return None, e.message
    n, p50 = cost.error.get("n"), cost.error.get("p50")
    error = f", median error {p50:.1%}" if isinstance(p50, float) else ""
    return cost, f"split of mixed steps by a step cost fitted to {n} steps{error}"


def told_apart(steps: pl.DataFrame) -> tuple[frozenset[str], list[str]]:
    """Phases ("prefill", "decode") whose interference a fit to the steps can tell, and a sentence for each other one.

    What a mixed step would have cost without the decoders shows only in steps without them, and likewise for prompts: with
    next to none of those, a fit puts the cost of the other phase into its constant, and the split would come out as 0.
    """
    known = steps.drop_nulls(list(_COMPOSITION))
    prefill, decode = known["prefill_tokens"] > 0, known["decode_requests"] > 0
    mixed = int((prefill & decode).sum())
    alone = {"prefill": int((prefill & ~decode).sum()), "decode": int((decode & ~prefill).sum())}
    enough = max(_ALONE, mixed // 1000)
    phases = frozenset(p for p, n in alone.items() if not mixed or n >= enough)
    told = {"prefill": ("prompts", "decoders", "prefill"), "decode": ("decoders", "prompts", "decode")}
    said = []
    for phase in sorted(told.keys() - phases):
        only, other, name = told[phase]
        said.append(
            f"Interference on {name}: {alone[phase]:,} of {known.height:,} steps hold {only} alone, too few to tell what {other} "
            f"add in the {mixed:,} mixed steps, so that time counts as {name}."
        )
    return phases, said


def without_composition(steps: pl.DataFrame) -> int:
    """How many steps do not say what was in them."""
    return steps.height - steps.drop_nulls(list(_COMPOSITION)).height


def lines(
    steps: pl.DataFrame,
    cost: StepCost | None,
    coverage: pl.DataFrame | None = None,
    phases: frozenset[str] = frozenset(("prefill", "decode")),
) -> dict[tuple[str, int], StepLine]:
    """One line per (server, rank). Pipeline ranks of one step are joined: a request is in it while any of them works on it.
    ``phases``: those whose interference the cost can tell; the others feel none."""
    if not steps.height:
        return {}
    keys = ["server", "dp_rank", "step"]
    frame = steps.with_columns(pl.col("dp_rank").fill_null(0), pl.col("pp_rank").fill_null(0))
    frame = (
        frame.sort(*keys, "pp_rank")
        .group_by(keys, maintain_order=True)
        .agg(pl.col("start_ns").min(), pl.col("end_ns").max(), *(pl.col(c).first() for c in (*_COMPOSITION, "prefill_requests")))
        .filter(pl.col("end_ns") >= pl.col("start_ns"))
    )
    out: dict[tuple[str, int], StepLine] = {}
    for (server, rank), group in frame.group_by(["server", "dp_rank"], maintain_order=True):
        # Numbers ascend within (server, rank); a hostile trace may number against time: then time decides.
        g = group.sort("start_ns", "step")
        number = np.maximum.accumulate(g["step"].to_numpy().astype(np.int64))
        busy = Busy.of(g["start_ns"].to_numpy(), g["end_ns"].to_numpy())
        prefill, decode = _interference(g, busy, cost, phases)
        covered = None if coverage is None else _covered(coverage, str(server), busy)
        out[(str(server), int(rank))] = StepLine(str(server), int(rank), number, busy, prefill, decode, covered)
    return out


def _covered(coverage: pl.DataFrame, server: str, busy: Busy) -> Busy | None:
    """When the server's steps were recorded in full: rows of `coverage` for `steps`, and the steps themselves."""
    rows = coverage.filter((pl.col("table") == "steps") & (pl.col("server").is_null() | (pl.col("server") == server)))
    if not rows.height:
        return None
    whole = rows.filter(pl.col("to_ns").is_not_null() & (pl.col("fraction").fill_null(1.0) >= 1.0))
    start = np.concatenate([whole["from_ns"].to_numpy(), busy.start])
    end = np.concatenate([whole["to_ns"].to_numpy(), busy.end])
    order = np.lexsort((end, start))
    return Busy.of(start[order], end[order])


def _interference(
    g: pl.DataFrame, busy: Busy, cost: StepCost | None, phases: frozenset[str]
) -> tuple[Interference | None, Interference | None]:
    if cost is None:
        return None, None
    known = g.select(pl.all_horizontal(pl.col(c).is_not_null() for c in _COMPOSITION)).to_series()
    filled = g.with_columns(pl.when(known).then(pl.col(c)).otherwise(0).alias(c) for c in (*_COMPOSITION, "prefill_requests"))
    model = interference(cost, filled)
    x = features_array(filled).astype(np.float64)
    both = (x[:, 3] > 0) & (x[:, 6] > 0)
    room = busy.end - busy.start
    result = []
    for phase in ("prefill", "decode"):
        mixed = both & (phase in phases)
        ns = np.where(mixed, np.minimum(model[f"on_{phase}_ns"].to_numpy(), room), 0)
        gone = np.zeros((len(x) + 1, len(FEATURES)))
        columns = list(_GONE[phase])
        gone[1:, columns] = np.cumsum(np.where(mixed[:, None], x[:, columns], 0.0), axis=0)
        # Alone, the phase may have left a single token in the step.
        left = x[:, 3 if phase == "prefill" else 6] > 1
        gone[1:, FEATURES.index("batched")] = np.cumsum(np.where(mixed, x[:, FEATURES.index("batched")] - left, 0.0))
        gone[:, FEATURES.index("prefill_attention")] /= 1000  # the unit of its coefficient
        total = np.zeros(len(ns), dtype=np.int64)
        if len(ns):
            np.cumsum(ns[:-1], out=total[1:])
        result.append(Interference(ns.astype(np.int64), total, gone))
    return result[0], result[1]
