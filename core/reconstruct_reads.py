"""The reads of one server's tokens, and which step each came from: what reconstructed steps and observed ones without residency
both start from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from hoptrace import metrics
from hoptrace.reconstruct_cluster import cluster, hides_steps, mixes, typical_step_ns
from hoptrace.reconstruct_ends import step_ends
from hoptrace.reconstruct_rows import decode_shares

if TYPE_CHECKING:
    from hoptrace.reader import Trace

__all__ = ["Numbered", "number_reads", "reads_of", "tells_steps", "units_of"]

_Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Numbered:
    """Steps told by tokens, numbered from 0. By read, sorted by sequence and index: ``unit`` (sequence), ``step``, ``time``,
    ``stands_for`` (steps). By step: ``first`` (first token, ns), ``end``, ``seen`` (0: no read of its own), ``decoding``
    (sequences that decode in it), ``taken`` (tokens that these take of the engine's budget: with a speculator each takes its
    drafts too, accepted or not). By unit: ``last`` (the step of its first token) and ``with_first`` (tokens that came with it).
    ``shares``: see :func:`hoptrace.reconstruct_rows.decode_shares`."""

    unit: _Ints
    step: _Ints
    time: _Ints
    stands_for: _Ints
    first: _Ints
    end: _Ints
    seen: _Ints
    decoding: _Ints
    taken: _Ints
    last: _Ints
    with_first: _Ints
    shares: dict[str, _Ints]


def reads_of(trace: Trace, units: pl.DataFrame) -> pl.DataFrame:
    """:func:`hoptrace.metrics.reads` with unit, server, and ``tokens``: the count or, where it is unknown, one for each chunk."""
    return (
        metrics.reads(trace.table("tokens"), trace.table("requests"))
        .collect()
        .join(units.select("request", "sequence", "unit", "server"), on=["request", "sequence"])
        .with_columns(pl.coalesce("count", "emissions").alias("tokens"))
        .sort("server", "unit", "index")
    )


def tells_steps(reads: pl.DataFrame) -> bool:
    """Whether a server's reads can tell its steps: see :func:`hoptrace.reconstruct_cluster.mixes`."""
    unit, time, count = (reads[c].to_numpy() for c in ("unit", "time_ns", "tokens"))
    return mixes(unit, time, typical_step_ns(unit, time, count))


def units_of(trace: Trace) -> pl.DataFrame:
    """One row per sequence that emitted, sorted: unit, request, sequence, server, prompt_tokens, cached_tokens, scheduled_ns,
    available_ns."""
    stays = (
        trace.table("stages")
        .filter(~pl.col("role").is_in(["route", "encode", "prefill"]).fill_null(False))
        .sort("request", "attempt", "stage", nulls_last=False)
        .group_by("request")
        .agg(pl.col("server", "scheduled_ns", "enqueued_ns", "cached_tokens").last())
        .rename({"scheduled_ns": "stay_scheduled_ns"})
    )
    only = trace.manifest.server(None)
    return (
        trace.table("tokens")
        .select("request", pl.col("sequence").fill_null(0))
        .unique()
        .join(
            trace.table("requests").select("request", "prompt_tokens", "scheduled_ns", "queued_ns", "received_ns", "arrival_ns"),
            on="request",
            how="left",
        )
        .join(stays, on="request", how="left")
        .select(
            "request",
            "sequence",
            pl.col("server").fill_null(only.name if only else "server"),
            "prompt_tokens",
            "cached_tokens",
            pl.coalesce("stay_scheduled_ns", "scheduled_ns").alias("scheduled_ns"),
            pl.coalesce("enqueued_ns", "queued_ns", "received_ns", "arrival_ns").alias("available_ns"),
        )
        .sort("server", "request", "sequence")
        .with_columns(pl.int_range(pl.len()).over("server").alias("unit"))
        .collect()
    )


def number_reads(units: pl.DataFrame, reads: pl.DataFrame) -> Numbered:
    """Number the steps of one server from its reads, sorted by unit and index."""
    unit, time, count = (reads[c].to_numpy() for c in ("unit", "time_ns", "tokens"))
    hidden = hides_steps(unit, time, count)
    order = np.lexsort((unit, time))
    step_by_time, first, latest, seen = cluster(
        unit[order], time[order], count[order], units.height, hidden=hidden, step_ns=typical_step_ns(unit, time, count)
    )
    end = step_ends(first, latest, np.bincount(step_by_time, minlength=len(first)))
    step = np.empty_like(step_by_time)
    step[order] = step_by_time
    opening = np.concatenate(([True], unit[1:] != unit[:-1]))
    came = count[opening]
    last = step[opening]  # by unit: the step of the first token
    if hidden:
        last = _first_of_many(last, came, end, units["available_ns"])
    with_first = came - (step[opening] - last)

    shares = decode_shares(
        unit, step, count, reads["index"].to_numpy(), opening, units["prompt_tokens"], with_first, hidden=hidden
    )
    decoding = np.bincount(shares["step"], minlength=len(end)).astype(np.int64)
    stands_for = count if hidden else np.ones_like(count)
    taken = decoding * (1 if hidden else _with_drafts(count[~opening]))
    return Numbered(unit, step, time, stands_for, first, end, seen, decoding, taken, last, with_first, shares)


def _with_drafts(count: _Ints) -> int:
    """Tokens of a decoder in a step: the most that at least 2 % of the reads hold. More come of steps that were seen together."""
    # A damaged count may be negative or beyond all memory: the counts are looked at, not counted through.
    values, times = np.unique(count, return_counts=True)
    often = values[times >= 0.02 * len(count)]
    return max(int(often[-1]), 1) if len(often) else 1


def _first_of_many(step: _Ints, came: _Ints, end: _Ints, available_ns: pl.Series) -> _Ints:
    """Step of each unit's first token, where its first read, of ``came`` tokens, was held up and stands for several steps:
    ``came`` − 1 before the read's own, but none that ended before the request had come (if that is known)."""
    low = np.searchsorted(end, available_ns.fill_null(0).to_numpy(), side="right")
    low = np.where(available_ns.is_null().to_numpy(), step, np.minimum(low, step))
    first: _Ints = np.maximum(step - (came - 1), low)
    return first
