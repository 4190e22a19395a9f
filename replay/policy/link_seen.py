"""What the hand-overs of a recorded split took: the link's rate and fixed time, and the time to arrange them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from hoptrace.reader import Trace

__all__ = ["Seen", "link_seen"]

_ENOUGH = 8
"""Transfers of unlike sizes from which a fixed time is told apart from a rate."""


@dataclass(frozen=True)
class Seen:
    """``gbytes_per_s``: null where no transfer was recorded. ``latency_us``: fixed time of one. ``arrange_ms``: mean time from
    the end of a prompt until the decode server's engine had the request; null: not told. ``notes``: what they rest on."""

    gbytes_per_s: float | None = None
    latency_us: float | None = None
    arrange_ms: float | None = None
    notes: tuple[str, ...] = ()


def link_seen(trace: Trace, prefill: set[str], decode: set[str]) -> Seen:
    """Measure the recorded hand-overs: time = latency + bytes ÷ rate, by least squares, neither of them below zero. Where sizes
    are too few or too alike to tell both, all of the time is the rate's."""
    moves = (
        trace.table("moves")
        .filter((pl.col("object") == "kv") & pl.col("server").is_in(list(prefill | decode)) & (pl.col("bytes") > 0))
        # Within one server's memory is a tier, not a hand-over.
        .filter(pl.col("src") != pl.col("dst"))
        .select("bytes", (pl.col("end_ns") - pl.col("start_ns")).alias("ns"))
        .drop_nulls()
        .filter(pl.col("ns") > 0)
        .collect()
    )  # fmt: skip
    arrange, said = _arrange(trace, prefill, decode)
    if not moves.height:
        return Seen(arrange_ms=arrange, notes=said)
    size, ns = moves["bytes"].to_numpy().astype(float), moves["ns"].to_numpy().astype(float)
    fixed, each = 0.0, float(ns.sum() / size.sum())
    if len(size) >= _ENOUGH and size.max() > 1.5 * size.min():
        a = np.stack([np.ones(len(size)), size / size.mean()], axis=1)
        found = np.linalg.lstsq(a, ns, rcond=None)[0]
        if found[0] > 0 and found[1] > 0:
            fixed, each = float(found[0]), float(found[1] / size.mean())
    note = f"The link is that of {moves.height:,} recorded transfers: {fixed / 1e6:.3g} ms and {1 / each:.3g} GB/s."
    return Seen(1 / each, fixed / 1e3, arrange, (note, *said))


def _arrange(trace: Trace, prefill: set[str], decode: set[str]) -> tuple[float | None, tuple[str, ...]]:
    stays = trace.table("stages").filter(pl.col("sequence").fill_null(0) == 0)
    ends = stays.filter(pl.col("server").is_in(list(prefill))).group_by("request").agg(pl.col("end_ns").max())
    came = stays.filter(pl.col("server").is_in(list(decode))).group_by("request").agg(
        pl.coalesce("enqueued_ns", "scheduled_ns").min().alias("came_ns")
    )  # fmt: skip
    took = ends.join(came, on="request").select((pl.col("came_ns") - pl.col("end_ns")).alias("ns")).drop_nulls().collect()["ns"]
    took = took.filter(took >= 0)
    if not took.len():
        return None, ("How long a hand-over takes to arrange is not told by this trace: taken as no time.",)
    mean = took.clip(upper_bound=took.quantile(0.95, "higher")).mean()
    assert isinstance(mean, float)
    return mean / 1e6, (f"A hand-over takes {mean / 1e6:.3g} ms to arrange (mean of {took.len():,}).",)
