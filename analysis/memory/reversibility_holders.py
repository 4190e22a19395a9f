"""Who holds how much of a KV space at some moments, and when each lets go of it: only rows that are alive at a moment are
kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from hoptrace.analysis.memory.stranding_exact import MOST_TOKENS, Ints
from hoptrace.analysis.memory.stranding_rank import Rank
from hoptrace.analysis.memory.stranding_stays import NEVER

__all__ = ["Holding", "Moments", "holdings"]

ROWS = 500_000
"""Rows of `residency` that are held at once."""

_PAIRS = 1_000_000  # (run, moment) pairs that are held at once


@dataclass(frozen=True)
class Moments:
    """What is known of one KV space at each moment. ``step``: the step at work or the last one before; ``inside``: 1 while at
    work. −1: not known. Tokens."""

    time: Ints
    step: Ints
    inside: Ints
    used: Ints
    capacity: Ints
    empty: Ints


@dataclass(frozen=True)
class Holding:
    """By moment: ``held`` (tokens of those there, whole blocks), ``remaining``: [moment, horizon] of those who are still there
    after each horizon, ``growth``: what those there will still take before they leave; ``unsure``: somebody's share is not
    told."""

    held: Ints
    remaining: np.ndarray[tuple[int, int], np.dtype[np.int64]]
    growth: Ints
    unsure: np.ndarray[tuple[int], np.dtype[np.bool_]]


def holdings(
    ranks: list[Rank],
    moments: list[Moments],
    residency: pl.LazyFrame,
    stays: pl.DataFrame,
    horizons_ns: list[int],
    rows: int = ROWS,
) -> list[Holding]:
    """For each rank and its moments. ``stays``: of :func:`hoptrace.analysis.memory.stranding_stays.stays`."""
    out = []
    for m in moments:
        n = len(m.time)
        out.append(
            Holding(
                np.zeros(n, dtype=np.int64), np.zeros((n, len(horizons_ns)), dtype=np.int64), np.zeros(n, dtype=np.int64),
                np.zeros(n, dtype=np.bool_),
            )
        )  # fmt: skip
    for batch in _batches(residency, rows):
        for rank, m, h in zip(ranks, moments, out, strict=True):
            mine = batch.filter((pl.col("server") == rank.server) & (pl.col("dp_rank") == rank.dp_rank))
            if mine.height:
                _add(rank, m, h, mine, stays, horizons_ns)
    return out


def _batches(residency: pl.LazyFrame, rows: int) -> Iterator[pl.DataFrame]:
    """Runs by ranges of requests, each request whole, with ``leaves``: the last step of the request on the rank."""
    low, high, n = (
        residency.select(pl.col("request").min(), pl.col("request").max().alias("h"), pl.len()).collect(engine="streaming").row(0)
    )
    if low is None:
        return
    batches = -(-n // rows)
    width = -(-(high - low + 1) // batches)
    keys = ["request", "sequence", "server", "dp_rank"]
    for k in range(batches):
        own = pl.col("request").is_between(low + k * width, low + (k + 1) * width - 1)
        length = pl.col("last_step") - pl.col("first_step") + 1
        reach = pl.col("context_at_start") + pl.col("tokens_per_step") * length
        yield (
            residency.filter(own)
            .with_columns(pl.col("sequence").fill_null(0), pl.col("dp_rank").fill_null(0))
            .select(
                *keys, "first_step", "last_step", "phase", "tokens_per_step", "context_at_start",
                pl.col("last_step").max().over(keys).alias("leaves"),
                pl.when(reach.is_between(0, MOST_TOKENS)).then(reach).max().over(keys).alias("reach"),
            )
            .collect()
        )  # fmt: skip


def _add(rank: Rank, m: Moments, h: Holding, runs: pl.DataFrame, stays: pl.DataFrame, horizons_ns: list[int]) -> None:
    runs = runs.filter(pl.col("phase") != "preempted")
    order = np.argsort(m.step, kind="stable")
    steps = m.step[order]
    low = np.searchsorted(steps, np.maximum(runs["first_step"].to_numpy(), 0), side="left")
    count = np.maximum(np.searchsorted(steps, runs["last_step"].to_numpy(), side="right") - low, 0)
    alive = np.flatnonzero(count)
    runs, low, count = runs[alive], low[alive], count[alive]
    ends = np.cumsum(count)
    begin = 0
    while begin < len(ends):
        before = int(ends[begin - 1]) if begin else 0
        end = max(int(np.searchsorted(ends, before + _PAIRS, side="right")), begin + 1)
        part = slice(begin, end)
        which = np.repeat(np.arange(begin, end), count[part])
        nth = np.arange(len(which)) - np.repeat(ends[part] - count[part] - before, count[part])
        _add_pairs(rank, m, h, runs[which], order[np.repeat(low[part], count[part]) + nth], stays, horizons_ns)
        begin = end


def _add_pairs(
    rank: Rank, m: Moments, h: Holding, runs: pl.DataFrame, moment: Ints, stays: pl.DataFrame, horizons_ns: list[int]
) -> None:
    """``runs``: each with a moment at which it is under way."""
    pairs = runs.with_columns(
        pl.Series("moment", moment),
        pl.Series("step", m.step[moment]),
        pl.Series("inside", m.inside[moment]),
        pl.Series("time_ns", m.time[moment]),
    )
    # Between two steps only those are there who take part in a later one, too.
    pairs = pairs.filter((pl.col("inside") == 1) | (pl.col("leaves") > pl.col("step")))
    if pairs.is_empty():
        return
    block = rank.block_tokens
    context = pl.col("context_at_start") + pl.col("tokens_per_step") * (pl.col("step") - pl.col("first_step") + 1)
    sure = context.is_between(0, MOST_TOKENS).fill_null(False)

    def whole(tokens: pl.Expr) -> pl.Expr:
        return (tokens + block - 1) // block * block

    pairs = pairs.with_columns(sure.alias("sure"), pl.when(sure).then(whole(context)).otherwise(0).alias("held"))
    pairs = pairs.with_columns((whole(pl.col("reach").fill_null(0)) - pl.col("held")).clip(0).alias("growth"))
    at, held = pairs["moment"].to_numpy(), pairs["held"].to_numpy()
    np.add.at(h.held, at, held)
    np.add.at(h.growth, at, pairs["growth"].to_numpy())
    h.unsure[at[~pairs["sure"].to_numpy()]] = True
    stay = _ends(rank, pairs, stays).to_numpy() - pairs["time_ns"].to_numpy()
    for k, horizon in enumerate(horizons_ns):
        later = stay > horizon
        np.add.at(h.remaining[:, k], at[later], held[later])


def _ends(rank: Rank, pairs: pl.DataFrame, stays: pl.DataFrame) -> pl.Series:
    """When each leaves: the end of the stay that the moment lies in; never where nobody saw it. A stay that ends before the
    moment, as other clocks have it, ends at it."""
    mine = stays.lazy().filter(pl.col("server") == rank.server).select("request", "sequence", "end_ns")
    keyed = pairs.lazy().select("request", "sequence", "time_ns").with_row_index("row")
    found = (
        keyed.join(mine, on=["request", "sequence"], how="left")
        .group_by("row")
        .agg(
            pl.col("end_ns").filter(pl.col("end_ns") > pl.col("time_ns")).min().alias("next"),
            pl.col("end_ns").max().alias("last"),
        )
        .sort("row")
        .select(pl.coalesce("next", "last", pl.lit(NEVER, pl.Int64)).alias("until_ns"))
        .collect()
    )
    return found.to_series()
