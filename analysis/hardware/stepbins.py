"""How slow the steps of a server were over time, beyond what they held: sums over bins of the clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from hoptrace.errors import InputError
from hoptrace.stepcost import StepCost, fit

__all__ = ["MOST_BINS", "Grid", "StepBins", "cost_of", "grid_of", "step_bins"]

MOST_BINS = 600
_BIN_NS = 1_000_000_000
_FEWEST_BINS = 20  # a short trace is divided into as many, as far as its counters were read often enough
_SHORTEST_NS = 250_000_000
_STEPS_A_BIN = 5
_PIECE = 500_000
_SAMPLE = 20_000
_COLUMNS = (
    "start_ns", "end_ns", "prefill_requests", "prefill_tokens", "prefill_context_tokens", "decode_requests",
    "decode_context_tokens",
)  # fmt: skip

_Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Grid:
    """Bins of ``width_ns`` from ``from_ns`` on."""

    from_ns: int
    width_ns: int
    bins: int

    def frame(self) -> pl.DataFrame:
        return pl.DataFrame({"from_ns": [self.from_ns], "width_ns": [self.width_ns], "bins": [self.bins]})


@dataclass(frozen=True)
class StepBins:
    """Arrays by bin: ``steps``, what they ``took_ns`` and what their composition predicts (``cost_ns``)."""

    grid: Grid
    steps: _Ints
    took_ns: _Ints
    cost_ns: _Ints


def own_steps(steps: pl.LazyFrame, server: str) -> pl.LazyFrame:
    """The server's steps that say what was in them, of the first rank."""
    return steps.filter(
        (pl.col("server") == server) & (pl.col("pp_rank").fill_null(0) == 0) & (pl.col("end_ns") > pl.col("start_ns"))
        & (pl.col("prefill_tokens").fill_null(0) + pl.col("decode_requests").fill_null(0) > 0)
    ).select(_COLUMNS)  # fmt: skip


def grid_of(steps: pl.LazyFrame, low: int, high: int, every_ns: int) -> Grid | None:
    """Bins over the time that steps and counters (``low`` … ``high``, read each ``every_ns``) share: of a second, shorter in a
    short trace, longer in one of over ten minutes and where steps are long. Null where they share none."""
    told = steps.select(
        pl.col("start_ns").min().alias("a"), pl.col("end_ns").max().alias("z"),
        (pl.col("end_ns") - pl.col("start_ns")).cast(pl.Float64).mean().alias("mean"),
    ).collect(engine="streaming").row(0)  # fmt: skip
    if told[0] is None:
        return None
    low, high = max(low, told[0]), min(high, told[1])
    length = high - low
    if length <= 0:
        return None
    width = min(_BIN_NS, max(_SHORTEST_NS, length // _FEWEST_BINS))
    width = max(width, -(-length // MOST_BINS), every_ns, round(_STEPS_A_BIN * told[2]))
    return Grid(low, width, max(1, length // width))


def cost_of(steps: pl.LazyFrame, known: StepCost | None) -> StepCost | str:
    """The cost that says what a step should take: the one that is ``known``, else one fitted to evenly spaced steps; or why there
    is none."""
    if known is not None:
        return known
    n = int(steps.select(pl.len()).collect(engine="streaming").item())
    some = steps.gather_every(max(1, -(-n // _SAMPLE))).collect(engine="streaming")
    try:
        return fit(some)
    except InputError as e:
        return e.message


def step_bins(steps: pl.LazyFrame, grid: Grid, cost: StepCost) -> StepBins:
    """The sums. A step counts whole in the bin that its middle lies in."""
    sums = [np.zeros(grid.bins, dtype=np.int64) for _ in range(3)]
    known = steps.drop_nulls([c for c in _COLUMNS if c != "prefill_requests"])
    for piece in known.collect_batches(chunk_size=_PIECE, maintain_order=False):
        took = (piece["end_ns"] - piece["start_ns"]).to_numpy()
        bins = (piece["start_ns"].to_numpy() + took // 2 - grid.from_ns) // grid.width_ns
        inside = (bins >= 0) & (bins < grid.bins)
        kept = piece.filter(pl.Series(inside))
        for total, value in zip(sums, (1, took[inside], cost.cost_ns_array(kept)), strict=True):
            np.add.at(total, bins[inside], value)
    return StepBins(grid, *sums)
