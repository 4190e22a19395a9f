"""Runs of steps and recorded waits of each request, as intervals of time."""

from __future__ import annotations

import numpy as np
import polars as pl

from hoptrace.analysis.latency.stepline import StepLine
from hoptrace.reader import Trace
from hoptrace.schema import WAIT_KINDS

__all__ = ["read_runs", "read_waits"]


def read_runs(residency: pl.DataFrame, lines: dict[tuple[str, int], StepLine], stays: pl.DataFrame | None = None) -> pl.DataFrame:
    """Each row of `residency` with its time: request, sequence, server, dp_rank, phase, start_ns, end_ns, tokens, repeated.

    ``tokens`` is what the request computed in the run and ``repeated`` how many of them had been computed before, by this server
    or another one (0 where tokens or contexts are unknown). ``stays`` (as :func:`marks.read_stays` gives them):
    what one found in caches had been computed too; a decoder that is sent a whole prompt still computes its last token. Rows
    whose steps are not in `steps` are left out.
    """
    frame = residency.with_columns(pl.col("dp_rank").fill_null(0), pl.col("sequence").fill_null(0)).sort(
        "request", "sequence", "first_step", "server", "dp_rank"
    )
    start = np.zeros(frame.height, dtype=np.int64)
    end = np.zeros(frame.height, dtype=np.int64)
    steps = np.zeros(frame.height, dtype=np.int64)
    first, last = frame["first_step"].to_numpy(), frame["last_step"].to_numpy()
    server, rank = frame["server"].to_numpy(), frame["dp_rank"].to_numpy()
    for key, line in lines.items():
        of = (server == key[0]) & (rank == key[1])
        if not of.any() or not len(line.number):
            continue
        p = line.position(first[of])
        q = np.searchsorted(line.number, last[of], side="right") - 1
        there = p <= q
        p, q = np.minimum(p, len(line.number) - 1), np.maximum(q, 0)
        start[of] = np.where(there, line.busy.start[p], 0)
        end[of] = np.where(there, line.busy.end[q], 0)
        steps[of] = np.where(there, q - p + 1, 0)
    frame = frame.with_columns(pl.Series("start_ns", start), pl.Series("end_ns", end), pl.Series("steps", steps)).filter(
        (pl.col("steps") > 0) & (pl.col("end_ns") > pl.col("start_ns"))
    )
    works = pl.col("phase").is_in(["chunk", "decode"])
    reach = pl.col("context_at_start") + pl.col("tokens")
    own = ["request", "sequence"]
    lost = pl.col("phase") == "preempted"
    frame = frame.sort(*own, "start_ns", "first_step").with_columns(
        # A place that was lost is lost until the step that takes the request up again.
        pl.when(lost & ~lost.shift(-1).over(own))
        .then(pl.max_horizontal("end_ns", pl.col("start_ns").shift(-1).over(own)))
        .otherwise("end_ns")
        .alias("end_ns")
    )
    return (
        frame.with_columns(pl.when(works).then(pl.col("tokens_per_step") * pl.col("steps")).otherwise(0).alias("tokens"))
        .with_columns(pl.when(works).then(reach).alias("_reach"))
        .with_columns(pl.col("_reach").cum_max().forward_fill().shift(1).over(own).alias("_before"))
        .join(_found(stays, frame), on=["request", "sequence", "server", "dp_rank"], how="left", maintain_order="left")
        .with_columns(pl.max_horizontal("_before", "_cached").alias("_before"))
        .with_columns(
            pl.when((pl.col("phase") == "chunk") & pl.col("_reach").is_not_null() & pl.col("_before").is_not_null())
            .then((pl.min_horizontal("_before", "_reach") - pl.col("context_at_start")).clip(0, pl.col("tokens")))
            .otherwise(0)
            .alias("repeated")
        )
        .select("request", "sequence", "server", "dp_rank", "phase", "start_ns", "end_ns", "tokens", "repeated")
    )


def _found(stays: pl.DataFrame | None, runs: pl.DataFrame) -> pl.DataFrame:
    """What each stay found in caches. Of several sequences a server may tell one's count as another's: those are left out."""
    on = {"request": pl.Int64, "sequence": pl.Int64, "server": pl.String, "dp_rank": pl.Int64}
    if stays is None or not runs.height:
        return pl.DataFrame(schema=on | {"_cached": pl.Int64})
    one = runs.group_by("request").agg(pl.col("sequence").n_unique().alias("_n")).filter(pl.col("_n") == 1).select("request")
    # Its prompt is what was not cached: less than nothing is a count gone wrong.
    found = stays.filter((pl.col("cached_tokens") > 0) & (pl.col("prompt_tokens").fill_null(0) >= 0))
    return found.join(one, on="request", how="semi").group_by(list(on)).agg(pl.col("cached_tokens").min().alias("_cached"))


def read_waits(trace: Trace, within: tuple[int, int] | None = None) -> pl.DataFrame:
    """Recorded waits of requests (of those ``low ≤ request < high``, where ``within`` says them): request, kind, on, start_ns,
    end_ns, rank (its place in the design's order, for ties).

    Where no wait of a request says that it waited for a transfer, its moves of KV stand in.
    """
    columns = ["request", "kind", "on", "start_ns", "end_ns"]
    rows = trace.table if within is None else lambda table: trace.of_requests(table, *within)
    waits = rows("waits").filter(pl.col("request").is_not_null() & (pl.col("end_ns") > pl.col("start_ns"))).select(columns)
    frame = waits.collect()
    told = frame.filter(pl.col("kind") == "transfer").select("request").unique()
    if trace.has("moves"):
        moves = (
            rows("moves")
            .filter(pl.col("request").is_not_null() & (pl.col("object") == "kv") & (pl.col("end_ns") > pl.col("start_ns")))
            .join(told.lazy(), on="request", how="anti")
            .select("request", pl.lit("transfer").alias("kind"), pl.lit(None, dtype=pl.String).alias("on"), "start_ns", "end_ns")
            .collect()
        )
        frame = pl.concat([frame, moves])
    # The design's order of classes settles ties: coordination, carrying, repeated work, (sharing,) capacity.
    order = [k for k in WAIT_KINDS if k not in ("queue", "transfer", "recompute", "capacity")]
    order += ["queue", "transfer", "recompute", "capacity"]
    return (
        frame.filter(pl.col("kind").is_in(order))
        .with_columns(pl.col("kind").replace_strict({k: i for i, k in enumerate(order)}, return_dtype=pl.Int64).alias("rank"))
        .sort("request", "start_ns", "end_ns", "rank")
    )
