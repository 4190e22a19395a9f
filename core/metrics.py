"""What the latency and throughput metrics mean: formula, unit, words and SQL in one place, and the same figures by Polars.

Four rules hold for all of them.

* A *finished* request has ``finish_ns`` and no ``error``. Failed and unfinished ones are counted, never averaged in.
* Percentiles interpolate linearly between the two closest ranks (Hyndman and Fan's type 7: numpy's default, DuckDB's
  ``quantile_cont``); results are rounded to whole nanoseconds, halves up.
* Tokens are those that the reader gives: one vantage per request (:mod:`hoptrace.vantage`), so nothing is counted twice.
* A proxy takes a chunk as one token where the server tells nothing. If a request's counts then do not add up to the server's own
  ``output_tokens``, some chunks held more, and nobody knows which: all counts of this request are *doubted* and read as unknown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import polars as pl

from hoptrace import vantage
from hoptrace.itl import itl
from hoptrace.metrics_sql import METRICS, Metric
from hoptrace.reader import Trace

__all__ = [
    "METRICS",
    "Metric",
    "Stat",
    "Summary",
    "arrivals_known",
    "emissions",
    "itl_ns",
    "one_vantage",
    "reads",
    "request_metrics",
    "stat",
    "summary",
]


@dataclass(frozen=True, slots=True)
class Stat:
    """A distribution in five figures, in ns; all but ``n`` are null where there is no value at all."""

    n: int
    mean_ns: int | None
    p50_ns: int | None
    p95_ns: int | None
    p99_ns: int | None

    def as_dict(self) -> dict[str, int | None]:
        return {"n": self.n, "mean_ns": self.mean_ns, "p50_ns": self.p50_ns, "p95_ns": self.p95_ns, "p99_ns": self.p99_ns}


class Summary(dict[str, Stat]):
    """``Stat`` by name (ttft, visible_ttft, itl, tpot, e2e, queue), and the counts and rates of the whole trace as attributes.

    ``duration_ns`` runs from the first arrival to the last finish among finished requests; rates are null where it is not
    positive. All three are null where nobody knows when requests arrived (an import of durations: `coverage` of `requests`
    without `arrival_ns`).

    ``itl_left_out``: finished requests whose gaps are in no ITL because their counts are doubted (see the module).
    """

    finished: int = 0
    failed: int = 0
    unfinished: int = 0
    itl_left_out: int = 0
    duration_ns: int | None = None
    output_tokens: int | None = None
    output_tokens_per_s: float | None = None
    requests_per_s: float | None = None

    @property
    def requests(self) -> int:
        """All requests, whatever became of them."""
        return self.finished + self.failed + self.unfinished

    def as_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return {
            "requests": self.requests,
            "finished": self.finished,
            "failed": self.failed,
            "unfinished": self.unfinished,
            "itl_left_out": self.itl_left_out,
            "duration_ns": self.duration_ns,
            "output_tokens": self.output_tokens,
            "output_tokens_per_s": self.output_tokens_per_s,
            "requests_per_s": self.requests_per_s,
            **{name: s.as_dict() for name, s in self.items()},
        }


def request_metrics(trace: Trace) -> pl.DataFrame:
    """One row per finished request, sorted by ``request``; a column is null where a time it needs is unknown.

    Columns (ns and tokens): request, arrival_ns, finish_ns, ttft_ns, visible_ttft_ns, e2e_ns, tpot_ns, queue_ns,
    prompt_tokens, output_tokens, cached_tokens.

    ``scheduled_ns`` is the request's own or, where null, its first stay's; ``cached_tokens`` is what the first stay that knows
    it found. Of several sequences in one request each has a first token: TPOT is Σ of their spans ÷ the tokens after those, null
    where the tokens of one were not seen.
    """
    several = _spans(trace)
    stays = (
        trace.table("stages")
        .sort("request", "attempt", "stage", "sequence", nulls_last=False)
        .group_by("request")
        .agg(pl.col("scheduled_ns").min().alias("stay_scheduled_ns"), pl.col("cached_tokens").drop_nulls().first())
    )
    scheduled = pl.coalesce("scheduled_ns", "stay_scheduled_ns")
    gaps = pl.col("output_tokens") - pl.col("sequences").fill_null(1)
    whole = pl.col("last_token_ns") - pl.col("first_token_ns")
    # Seen from outside, as the whole is: where that is unknown, so are they.
    tpot = pl.when(pl.col("sequences").is_null()).then(whole).otherwise(pl.col("span_ns") + 0 * whole) / gaps
    return (
        _finished(trace.table("requests"))
        .join(stays, on="request", how="left")
        .join(several.lazy(), on="request", how="left")
        .select(
            "request",
            "arrival_ns",
            "finish_ns",
            (pl.col("first_token_ns") - pl.col("arrival_ns")).alias("ttft_ns"),
            (pl.col("first_visible_ns") - pl.col("arrival_ns")).alias("visible_ttft_ns"),
            (pl.col("finish_ns") - pl.col("arrival_ns")).alias("e2e_ns"),
            pl.when(gaps > 0).then((tpot + 0.5).floor()).cast(pl.Int64).alias("tpot_ns"),
            (scheduled - pl.coalesce("queued_ns", "received_ns", "arrival_ns")).alias("queue_ns"),
            "prompt_tokens",
            "output_tokens",
            "cached_tokens",
        )
        .sort("request")
        .collect()
    )


def _spans(trace: Trace) -> pl.DataFrame:
    """Requests with several sequences: request, sequences, span_ns (Σ over them of last − first token, null where not all of them
    were seen)."""
    several = trace.several()
    if not several.height:
        return several.with_columns(pl.lit(None, dtype=pl.Int64).alias("span_ns"))
    low, high = int(several["request"][0]), int(several["request"][-1])
    seen = (
        trace.of_requests("tokens", low, high + 1)
        .join(several.lazy().select("request"), on="request", how="semi")
        .group_by("request", pl.col("sequence").fill_null(0))
        .agg((pl.col("time_ns").max() - pl.col("time_ns").min()).alias("span_ns"))
        .group_by("request")
        .agg(pl.len().cast(pl.Int64).alias("seen"), pl.col("span_ns").sum())
        .collect(engine="streaming")
    )
    span = pl.when(pl.col("seen") == pl.col("sequences")).then("span_ns").alias("span_ns")
    return several.join(seen, on="request", how="left").select("request", "sequences", span)


def one_vantage(tokens: pl.LazyFrame) -> pl.LazyFrame:
    """The rows of ``tokens`` of one vantage per request. ``Trace.table("tokens")`` gives just those; this is for frames from
    elsewhere."""
    return vantage.one_vantage(tokens, [None])


def reads(tokens: pl.LazyFrame, requests: pl.LazyFrame) -> pl.LazyFrame:
    """What arrived in one read, sorted by request, sequence and index.

    Emissions marked ``coalesced`` came in one read with the one before: they are joined to it, since the gap between them is the
    network's and not the server's. Columns: request, sequence, index, begin_ns, time_ns (first and last emission of the read),
    count (null where it is neither given nor told by the next emission's index, or is doubted), emissions, doubted (the counts of
    the request do not add up to the ``output_tokens`` that ``requests`` tell of it).
    """
    key = ["request", "sequence"]
    joined = pl.col("coalesced").fill_null(False)
    count = pl.col("count")
    total = pl.when(count.is_null().any()).then(None).otherwise(count.sum()).over("request")
    return (
        tokens.join(requests.select("request", "output_tokens"), on="request", how="left")
        .with_columns(pl.col("sequence").fill_null(0))
        .sort(*key, "index")
        .with_columns(
            pl.coalesce("count", pl.col("index").shift(-1).over(key) - pl.col("index")).alias("count"),
            (~joined).cast(pl.Int64).cum_sum().over(key).alias("read"),
        )
        .with_columns((total != pl.col("output_tokens")).fill_null(False).alias("doubted"))
        .group_by(*key, "read", maintain_order=True)
        .agg(
            pl.col("index").first(),
            pl.col("time_ns").min().alias("begin_ns"),
            pl.col("time_ns").max(),
            pl.when(count.is_null().any() | pl.col("doubted").any()).then(None).otherwise(count.sum()).alias("count"),
            pl.len().cast(pl.Int64).alias("emissions"),
            pl.col("doubted").any(),
        )
        .drop("read")
    )


def emissions(trace: Trace) -> pl.DataFrame:
    """The reads of finished requests: request, sequence, index, time_ns, count, gap_ns, coalesced (more than one emission),
    doubted (see :func:`reads`).

    ``gap_ns`` is the time since the read before, null for the first; over a request the gaps add up to its decode time, last
    token − first token. The first read is timed by its first emission (that is TTFT), the others by their last.
    """
    key = ["request", "sequence"]
    requests = trace.table("requests")
    finished = _finished(requests).select("request")
    first = pl.int_range(pl.len()).over(key) == 0
    return (
        reads(trace.table("tokens").join(finished, on="request", how="semi"), requests)
        .with_columns(pl.when(first).then("begin_ns").otherwise("time_ns").alias("time_ns"))
        .with_columns((pl.col("time_ns") - pl.col("time_ns").shift(1).over(key)).alias("gap_ns"))
        .select(*key, "index", "time_ns", "count", "gap_ns", (pl.col("emissions") > 1).alias("coalesced"), "doubted")
        .collect()
    )


def itl_ns(trace: Trace) -> pl.DataFrame:
    """Inter-token latency, one row per token after the first read: request, sequence, index, itl_ns, coalesced.

    A token's ITL is the gap of its emission ÷ the emission's count, in whole ns such that they add up to the gap exactly:
    chunks of 1, 4, 2 and 5 tokens give 11 values whose sum is the decode time. Tokens of the first read have no gap, emissions
    of unknown or doubted count no ITL; neither is in the result.
    """
    return _itl(emissions(trace))


def _itl(seen: pl.DataFrame) -> pl.DataFrame:
    timed = seen.lazy().filter(pl.col("gap_ns").is_not_null() & (pl.col("count") > 0))
    return (
        timed.with_columns(pl.int_ranges(0, pl.col("count")).alias("j"))
        .explode("j")
        .select(
            "request",
            "sequence",
            (pl.col("index") + pl.col("j")).alias("index"),
            (pl.col("gap_ns") * (pl.col("j") + 1) // pl.col("count") - pl.col("gap_ns") * pl.col("j") // pl.col("count")).alias(
                "itl_ns"
            ),
            "coalesced",
        )
        .collect()
    )


def stat(values: pl.Series) -> Stat:
    """The five figures of a series of ns; nulls are left out."""
    x = values.drop_nulls()
    n = x.len()
    if n == 0:
        return Stat(0, None, None, None, None)
    total = int(x.cast(pl.Int128).sum())  # a mean in floating point would lose nanoseconds of large sums
    x = x.sort()
    return Stat(n, (2 * total + n) // (2 * n), *(_ns(x.quantile(q, interpolation="linear")) for q in (0.5, 0.95, 0.99)))


def summary(trace: Trace) -> Summary:
    """The trace's latency distributions, counts and rates; see :class:`Summary`. Of the tokens only batches are in memory."""
    per_request = request_metrics(trace)
    result = Summary()
    result["ttft"] = stat(per_request["ttft_ns"])
    result["visible_ttft"] = stat(per_request["visible_ttft_ns"])
    between = itl(trace)
    result["itl"] = Stat(between.n, between.mean_ns, between.p50_ns, between.p95_ns, between.p99_ns)
    result.itl_left_out = between.left_out
    result["tpot"] = stat(per_request["tpot_ns"])
    result["e2e"] = stat(per_request["e2e_ns"])
    result["queue"] = stat(per_request["queue_ns"])
    states = trace.table("requests").select("finish_ns", "error").collect()
    result.failed = int(states["error"].is_not_null().sum())
    result.finished = per_request.height
    result.unfinished = states.height - result.failed - result.finished
    if per_request.height and per_request["output_tokens"].null_count() == 0:
        result.output_tokens = int(per_request["output_tokens"].sum())
    if per_request.height and arrivals_known(trace):
        first, last = per_request["arrival_ns"].min(), per_request["finish_ns"].max()
        assert isinstance(first, int) and isinstance(last, int)
        result.duration_ns = last - first
        if result.duration_ns > 0:
            result.requests_per_s = per_request.height * 1e9 / result.duration_ns
            if result.output_tokens is not None:
                result.output_tokens_per_s = result.output_tokens * 1e9 / result.duration_ns
    return result


def arrivals_known(trace: Trace) -> bool:
    """Whether anyone covers arrivals: an import of durations sets `arrival_ns` to 0 and leaves it out of `coverage`."""
    rows = trace.table("coverage").filter(pl.col("table") == "requests").select("columns").collect()
    return not rows.height or bool((rows["columns"].is_null() | rows["columns"].list.contains("arrival_ns")).any())


def _finished(requests: pl.LazyFrame) -> pl.LazyFrame:
    return requests.filter(pl.col("finish_ns").is_not_null() & pl.col("error").is_null())


def _ns(value: object) -> int:
    assert isinstance(value, int | float)
    return math.floor(value + 0.5)
