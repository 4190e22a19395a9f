"""Gaps between the pieces of an answer: ITL per chunk over a whole trace, and statistics of ITL per request (for limits on it).

Batch by batch, so that memory does not grow with the trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import polars as pl

from hoptrace.exact_quantiles import Zones, brackets, order_statistics, type7
from hoptrace.metrics import Stat, reads
from hoptrace.reader import Trace
from hoptrace.token_batches import TokenBatch, TokenSource, each_batch

__all__ = ["chunk_gaps", "request_itl"]

Ints = npt.NDArray[np.int64]

_QUANTILES = (0.5, 0.95, 0.99)
_FEW_ROWS = 4_000_000  # up to here all values are kept: one pass
_PLACES, _PLACE_ROWS = 48, 1 << 16  # sampled to guess where the percentiles lie


def chunk_gaps(trace: Trace, *, few: int = _FEW_ROWS, batch_rows: int | None = None) -> Stat:
    """The time between the reads of finished requests, one value per read after a sequence's first, in ns. What one read holds
    need not be known for it: doubted counts are in. ``few``, ``batch_rows``: sizes, for tests."""
    source = TokenSource(trace)
    done = _finished(trace)["request"].to_numpy()
    total = 0
    first = True

    def scan(work) -> Iterable[Zones]:  # type: ignore[no-untyped-def]
        nonlocal first, total

        def one(batch: TokenBatch) -> tuple[Zones, int]:
            gaps = _gaps(batch, done)
            # Python's integers: a sum of hostile gaps may be beyond 64 bits.
            return work(gaps, np.ones(len(gaps), dtype=np.int64)), sum(int(s) for s in _sums(gaps))

        for zones, added in each_batch(source, one, ranges=source.ranges(batch_rows) if batch_rows else None):
            total += added if first else 0
            yield zones
        first = False

    edges = None
    if source.rows > few:
        places = source.sample(_PLACES, min(_PLACE_ROWS, batch_rows or _PLACE_ROWS))
        samples = [_gaps(source.read(*place), done) for place in places]
        edges = brackets([(g, np.ones(len(g), dtype=np.int64)) for g in samples], _QUANTILES)
    n, at = order_statistics(scan, lambda n: [r for q in _QUANTILES for r in type7(n, q)[:2]] if n else [], edges)
    if not n:
        return Stat(0, None, None, None, None)
    figures = []
    for i, q in enumerate(_QUANTILES):
        low, high = float(at[2 * i]), float(at[2 * i + 1])
        figures.append(math.floor(low + (high - low) * type7(n, q)[2] + 0.5))
    return Stat(n, (2 * total + n) // (2 * n), *figures)


def request_itl(trace: Trace, *, batch_rows: int | None = None) -> pl.DataFrame:
    """request, itl_mean, itl_p50, itl_p95, itl_p99, itl_max (ns, Int64): over each finished request's own ITLs per token; null
    where the tokens of some chunk are unknown or doubted. Requests without a gap have no row."""
    source = TokenSource(trace)
    done = _finished(trace)
    ranges = source.ranges(batch_rows) if batch_rows else None
    found = list(each_batch(source, lambda b: _request_itl(b, done), ranges=ranges))
    names = ("itl_mean", "itl_p50", "itl_p95", "itl_p99", "itl_max")
    return pl.concat([pl.DataFrame(schema={"request": pl.Int64, **dict.fromkeys(names, pl.Int64)}), *found])


def _finished(trace: Trace) -> pl.DataFrame:
    """request, output_tokens of the finished requests, ascending."""
    done = pl.col("finish_ns").is_not_null() & pl.col("error").is_null()
    return trace.table("requests").filter(done).select("request", "output_tokens").sort("request").collect(engine="streaming")


def _gaps(b: TokenBatch, done: Ints) -> Ints:
    """The gaps of a batch's finished requests, in ns."""
    if not len(b.request) or not len(done):
        return np.zeros(0, dtype=np.int64)
    new = np.ones(len(b.request), dtype=bool)  # the first emission of a sequence
    new[1:] = (b.request[1:] != b.request[:-1]) | (b.sequence[1:] != b.sequence[:-1])
    start = np.flatnonzero(new | ~b.coalesced)
    first = new[start]
    at = np.where(first, np.minimum.reduceat(b.time_ns, start), np.maximum.reduceat(b.time_ns, start))
    request = b.request[start]
    ended = done[np.minimum(np.searchsorted(done, request), len(done) - 1)] == request
    gap: Ints = (at[1:] - at[:-1])[~first[1:] & ended[1:]]
    return gap


def _sums(gaps: Ints) -> tuple[int, int]:
    """Σ as high and low 32 bits, so that neither overflows."""
    return int((gaps >> 32).sum()) << 32, int((gaps & 0xFFFFFFFF).sum())


def _request_itl(b: TokenBatch, done: pl.DataFrame) -> pl.DataFrame:
    """:func:`request_itl` of one batch. The ITLs of a read of n tokens with gap g are g mod n times ⌊g ÷ n⌋ + 1, else ⌊g ÷ n⌋."""
    key = ["request", "sequence"]
    tokens = pl.DataFrame(
        {
            "request": b.request,
            "sequence": b.sequence,
            "index": b.index,
            "time_ns": b.time_ns,
            "count": pl.Series(b.count).set(pl.Series(~b.counted), None),
            "coalesced": b.coalesced,
        }
    )
    first = pl.int_range(pl.len()).over(key) == 0
    seen = (
        reads(tokens.lazy().join(done.lazy().select("request"), on="request", how="semi"), done.lazy())
        .with_columns(pl.when(first).then("begin_ns").otherwise("time_ns").alias("time_ns"))
        .with_columns((pl.col("time_ns") - pl.col("time_ns").shift(1).over(key)).alias("gap"))
        .filter(pl.col("gap").is_not_null())
        .select("request", "gap", pl.when(pl.col("count") > 0).then("count").alias("n"))
        .with_columns(pl.col("n").is_null().any().over("request").alias("unknown"))
    )
    more = pl.col("gap") - pl.col("gap") // pl.col("n") * pl.col("n")
    each = pl.concat(
        [
            seen.select("request", "unknown", (pl.col("gap") // pl.col("n")).alias("itl"), (pl.col("n") - more).alias("times")),
            seen.select("request", "unknown", (pl.col("gap") // pl.col("n") + 1).alias("itl"), more.alias("times")),
        ]
    ).filter(pl.col("unknown") | (pl.col("times") > 0))
    running = each.sort("request", "itl").with_columns(pl.col("times").cum_sum().over("request").alias("upto"))
    total = pl.col("times").sum()
    figures = [
        ((pl.col("itl").cast(pl.Float64) * pl.col("times")).sum() / total).alias("itl_mean"),
        *(_quantile(q).alias(f"itl_p{round(q * 100)}") for q in _QUANTILES),
        pl.col("itl").max().cast(pl.Float64).alias("itl_max"),
    ]
    names = ("itl_mean", "itl_p50", "itl_p95", "itl_p99", "itl_max")
    whole = [pl.when(~pl.col("unknown")).then((pl.col(x) + 0.5).floor()).cast(pl.Int64).alias(x) for x in names]
    grouped = running.group_by("request", maintain_order=True).agg(pl.col("unknown").any(), *figures)
    return grouped.select("request", *whole).collect()


def _quantile(q: float) -> pl.Expr:
    """Type 7 over values that count ``times``, sorted, with their running sum ``upto``."""
    at = (pl.col("times").sum() - 1) * q
    low = pl.col("itl").filter(pl.col("upto") > at.floor()).first()
    high = pl.col("itl").filter(pl.col("upto") > at.ceil()).first()
    return low + (high - low) * (at - at.floor())
