"""Series over the trace clock for the Time page: steps, requests by state, token and arrival rates, counters, each in a bounded
number of bins whatever the length of the trace, so that a chart holds at most a few thousand rows and zooming in shows more.

The SQL beside this file says exactly how each bin's value comes about. All times are ns on the trace clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import duckdb
import polars as pl

from hoptrace.errors import UsageError
from hoptrace.metrics import reads
from hoptrace.reader import Trace

__all__ = ["BINS", "STATES", "Series", "Timeline", "counter_bins", "counter_series", "extent", "timeline"]

BINS = 240
"""Bins of a window: more cannot be told apart on a screen, and ten series of them stay under 5,000 rows."""

STATES = ("waiting", "running", "not told apart")
"""Waiting: from arrival to the engine's first work. Running: from there to the end. Where nobody saw the first work, the whole
stay counts as *not told apart*."""

Series = tuple[str, str, str]
"""A counter: entity, name, direction (empty where it has none)."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The series of one window. Every frame has ``from_ns`` and ``to_ns`` of the bin; a frame without rows was not recorded.

    ``steps``: steps, prefill_tokens, decode_tokens, kv_used_tokens (means over step time), step_ns, longest_ns; ``exact`` says
    that each row is one step. ``occupancy``: state, requests. ``tokens``: tokens_per_s, over the reads of known size (see
    :func:`hoptrace.metrics.reads`), each at the time of its last emission. ``arrivals``: requests_per_s, prompt_tokens_per_s.

    ``emitting``: requests with a read in the window. ``unsized``: those of them with reads of unknown size in it; these reads are
    in no rate, so with any of them the rates are lower bounds.
    """

    from_ns: int
    to_ns: int
    width_ns: int
    steps: pl.DataFrame
    exact: bool
    occupancy: pl.DataFrame
    tokens: pl.DataFrame
    arrivals: pl.DataFrame
    emitting: int
    unsized: int


def extent(trace: Trace) -> tuple[int, int] | None:
    """First and last instant that requests, tokens or steps name (else counters); null for a trace without any.

    Half open: the end lies 1 ns behind the last instant.
    """
    first: list[int] = []
    last: list[int] = []
    for name, begin, ends in (
        ("requests", "arrival_ns", ("arrival_ns", "last_token_ns", "finish_ns")),
        ("tokens", "time_ns", ("time_ns",)),
        ("steps", "start_ns", ("end_ns",)),
        ("counters", "time_ns", ("time_ns",)),
    ):
        if name == "counters" and first:
            break
        wanted = [pl.col(begin).min().alias("low"), *(pl.col(c).max().alias(f"end_{c}") for c in ends)]
        low, *high = trace.table(name).select(wanted).collect().row(0)
        known = [h for h in high if h is not None]
        if low is not None and known:
            first.append(low)
            last.append(max(known))
    if not first:
        return None
    return min(first), max(last) + 1


def timeline(trace: Trace, from_ns: int, to_ns: int, bins: int = BINS) -> Timeline:
    """The series between ``from_ns`` and ``to_ns`` in at most ``bins`` bins.

    Raises:
        UsageError: the window is empty.
    """
    window = _window(from_ns, to_ns, bins)
    in_window = (pl.col("end_ns") > from_ns) & (pl.col("start_ns") < to_ns)
    steps = trace.table("steps").filter(in_window).collect()
    exact = 0 < steps.height <= bins
    any_tokens, emitted = _reads(trace, from_ns, to_ns)
    with duckdb.connect(":memory:") as con:

        def run(sql: str, **relations: pl.DataFrame) -> pl.DataFrame:
            for name, frame in relations.items():
                con.register(name, frame.to_arrow())
            return _run(con, sql, window)

        return Timeline(
            from_ns,
            to_ns,
            window["width_ns"],
            steps=_each_step(steps) if exact else run("timeline_steps", steps=steps),
            exact=exact,
            occupancy=run("timeline_occupancy", stays=_stays(trace)),
            tokens=run("timeline_tokens", reads=emitted) if any_tokens else _NO_TOKENS,
            arrivals=run("timeline_arrivals", requests=trace.table("requests").select("arrival_ns", "prompt_tokens").collect()),
            emitting=emitted["request"].n_unique(),
            unsized=emitted.filter(pl.col("count").is_null())["request"].n_unique(),
        )


def counter_series(trace: Trace) -> list[Series]:
    """The counters that have a value at least once, by entity and name."""
    frame = (
        trace.table("counters")
        .filter(pl.coalesce(pl.col("value_int").cast(pl.Float64), "value_float").is_not_null())
        .select("entity", "name", pl.col("direction").fill_null(""))
        .unique()
        .sort("entity", "name", "direction")
        .collect()
    )
    return [(str(e), str(n), str(d)) for e, n, d in frame.rows()]


def counter_bins(trace: Trace, series: Sequence[Series], from_ns: int, to_ns: int, bins: int = BINS) -> pl.DataFrame:
    """Counters by bin: entity, name, direction, unit, per_second, from_ns, to_ns, value; at most ``bins`` rows per series.

    Cumulative counters come as rates per second. Raises UsageError: the window is empty.
    """
    window = _window(from_ns, to_ns, bins)
    wanted = pl.DataFrame(list(series), schema=dict.fromkeys(("entity", "name", "direction"), pl.String), orient="row")
    rows = (
        trace.table("counters")
        .with_columns(pl.col("direction").fill_null(""))
        .join(wanted.lazy(), on=["entity", "name", "direction"], how="semi")
        .collect()
    )
    with duckdb.connect(":memory:") as con:
        con.register("counters", rows.to_arrow())
        return _run(con, "timeline_counters", window)


def _window(from_ns: int, to_ns: int, bins: int) -> dict[str, int]:
    if to_ns <= from_ns or bins < 1:
        raise UsageError("The window is empty.", hint="Its end must lie behind its start.")
    return {"from_ns": from_ns, "to_ns": to_ns, "width_ns": max(1, -(-(to_ns - from_ns) // bins))}


def _reads(trace: Trace, from_ns: int, to_ns: int) -> tuple[bool, pl.DataFrame]:
    """Whether the trace has tokens at all, and the reads of the window: request, time_ns, count (null where unknown)."""
    tokens = trace.table("tokens")
    inside = pl.col("time_ns").is_between(from_ns, to_ns, closed="left")
    # Whether a count is to be believed shows only in all tokens of its request.
    beside = tokens.join(tokens.filter(inside).select("request").unique(), on="request", how="semi")
    found = reads(beside, trace.table("requests")).filter(inside).select("request", "time_ns", "count").collect()
    return not found.is_empty() or not tokens.head(1).collect().is_empty(), found


_NO_TOKENS = pl.DataFrame(schema={"from_ns": pl.Int64, "to_ns": pl.Int64, "tokens_per_s": pl.Float64})


def _run(con: duckdb.DuckDBPyConnection, sql: str, parameters: dict[str, Any]) -> pl.DataFrame:
    text = (files("hoptrace.analysis.sql") / f"{sql}.sql").read_text(encoding="utf-8")
    return pl.from_arrow(con.sql(text, params=parameters).to_arrow_table())  # type: ignore[return-value]


def _each_step(steps: pl.DataFrame) -> pl.DataFrame:
    """One row a step, in the columns of the binned form."""
    length = pl.col("end_ns") - pl.col("start_ns")
    return steps.sort("start_ns").select(
        pl.col("start_ns").alias("from_ns"),
        pl.col("end_ns").alias("to_ns"),
        pl.lit(1, pl.Int64).alias("steps"),
        *(pl.col(c).cast(pl.Float64) for c in ("prefill_tokens", "decode_tokens", "kv_used_tokens")),
        length.cast(pl.Float64).alias("step_ns"),
        length.alias("longest_ns"),
    )


def _stays(trace: Trace) -> pl.DataFrame:
    """state, start_ns, end_ns of each request. One that never ended runs to the trace's end; of one that failed the end must be
    known."""
    whole = extent(trace)
    end = whole[1] if whole else 0
    first_work = trace.table("stages").group_by("request").agg(pl.col("scheduled_ns").min().alias("stay_ns"))
    frame = (
        trace.table("requests")
        .join(first_work, on="request", how="left")
        .select(
            "arrival_ns",
            pl.coalesce("scheduled_ns", "stay_ns").alias("work_ns"),
            pl.coalesce("finish_ns", "last_token_ns").alias("seen_ns"),
            pl.col("error").is_not_null().alias("failed"),
            pl.col("finish_ns").is_null().alias("unfinished"),
        )
        .filter(~(pl.col("failed") & pl.col("seen_ns").is_null()))
        .with_columns(pl.when(pl.col("unfinished") & ~pl.col("failed")).then(pl.lit(end)).otherwise("seen_ns").alias("gone_ns"))
        .collect()
    )
    # Where no request of the trace has any time but its arrival (a request log), "running to the end" would be an invention.
    if frame.height and frame["work_ns"].null_count() == frame.height and frame["seen_ns"].null_count() == frame.height:
        frame = frame.clear()
    known = frame.filter(pl.col("work_ns").is_not_null())
    parts = [
        known.select(pl.lit(STATES[0]).alias("state"), pl.col("arrival_ns").alias("start_ns"), pl.col("work_ns").alias("end_ns")),
        known.select(pl.lit(STATES[1]).alias("state"), pl.col("work_ns").alias("start_ns"), pl.col("gone_ns").alias("end_ns")),
        frame.filter(pl.col("work_ns").is_null()).select(
            pl.lit(STATES[2]).alias("state"), pl.col("arrival_ns").alias("start_ns"), pl.col("gone_ns").alias("end_ns")
        ),
    ]
    return pl.concat(parts).filter(pl.col("end_ns") > pl.col("start_ns"))
