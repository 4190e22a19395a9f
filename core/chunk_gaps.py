"""Gaps between the pieces of an answer: ITL per chunk over a whole trace, and statistics of ITL per request (for limits on
it)."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from hoptrace.metrics import Stat, reads, stat
from hoptrace.reader import Trace

__all__ = ["chunk_gaps", "request_itl"]

_ROWS = 4_000_000  # token rows held at a time


def chunk_gaps(trace: Trace) -> Stat:
    """The time between the reads of finished requests, one value per read after a sequence's first, in ns. What one read holds
    need not be known for it: doubted counts are in."""
    gaps = [_gaps(batch, requests)["gap_ns"].drop_nulls() for batch, requests in _batches(trace)]
    return stat(pl.concat(gaps) if gaps else pl.Series([], dtype=pl.Int64))


def request_itl(trace: Trace) -> pl.DataFrame:
    """request, itl_mean, itl_p50, itl_p95, itl_p99, itl_max (ns, Int64): over each finished request's own ITLs per token; null
    where the tokens of some chunk are unknown or doubted. Requests of one read have no row: see :func:`hoptrace.slo.goodput`."""
    out = []
    for batch, requests in _batches(trace):
        gaps = _gaps(batch, requests).filter(pl.col("gap_ns").is_not_null())
        out.append(
            gaps.with_columns(
                (pl.col("count").is_null() | (pl.col("count") <= 0)).any().over("request").alias("unknown"),
                pl.col("count").clip(0, 1 << 20),
            )
            .with_columns(pl.int_ranges(0, pl.col("count")).alias("j"))
            .explode("j")
            .select(
                "request",
                "unknown",
                (
                    pl.col("gap_ns") * (pl.col("j") + 1) // pl.col("count") - pl.col("gap_ns") * pl.col("j") // pl.col("count")
                ).alias("itl"),
            )
            .group_by("request")
            .agg(
                pl.when(~pl.col("unknown").any()).then((x + 0.5).floor().cast(pl.Int64)).alias(name)
                for name, x in (
                    ("itl_mean", pl.col("itl").mean()),
                    ("itl_p50", pl.col("itl").quantile(0.50, "linear")),
                    ("itl_p95", pl.col("itl").quantile(0.95, "linear")),
                    ("itl_p99", pl.col("itl").quantile(0.99, "linear")),
                    ("itl_max", pl.col("itl").max()),
                )
            )
        )
    schema = {"request": pl.Int64, **dict.fromkeys(("itl_mean", "itl_p50", "itl_p95", "itl_p99", "itl_max"), pl.Int64)}
    return pl.concat([pl.DataFrame(schema=schema), *out])


def _gaps(tokens: pl.LazyFrame, requests: pl.LazyFrame) -> pl.DataFrame:
    """request, sequence, count, gap_ns: one row per read, the gap null for a sequence's first."""
    key = ["request", "sequence"]
    first = pl.int_range(pl.len()).over(key) == 0
    return (
        reads(tokens, requests)
        .with_columns(pl.when(first).then("begin_ns").otherwise("time_ns").alias("time_ns"))
        .select(*key, "count", (pl.col("time_ns") - pl.col("time_ns").shift(1).over(key)).alias("gap_ns"))
        .collect()
    )


def _batches(trace: Trace) -> Iterator[tuple[pl.LazyFrame, pl.LazyFrame]]:
    """Tokens and requests of some finished requests at a time: parts are sorted by request, so a range of them reads little."""
    done = (
        trace.table("requests")
        .filter(pl.col("finish_ns").is_not_null() & pl.col("error").is_null())
        .select("request", "output_tokens")
        .sort("request")
        .collect(engine="streaming")
    )
    tokens = trace.table("tokens")
    rows = int(tokens.select(pl.len()).collect(engine="streaming").item())
    if not rows or not done.height:
        return
    size = max(1, done.height // max(1, -(-rows // _ROWS)))
    for start in range(0, done.height, size):
        some = done.slice(start, size)
        low, high = some["request"][0], some["request"][-1]
        kept = tokens.filter(pl.col("request").is_between(low, high)).join(
            some.lazy().select("request"), on="request", how="semi"
        )
        yield kept, some.lazy()
