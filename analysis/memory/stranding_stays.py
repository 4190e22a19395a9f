"""Stays of requests on servers, as arrays: who waited, who ran, and when each left. One row a stay, whatever the trace's
length."""

from __future__ import annotations

import polars as pl

from hoptrace.analysis.memory.stranding_exact import MOST_NS
from hoptrace.reader import Trace

__all__ = ["NEVER", "stays"]

NEVER = MOST_NS
"""End of a stay whose end nobody saw."""

_COLUMNS = (
    "request", "sequence", "server", "dp_rank", "role", "enqueued_ns", "scheduled_ns", "end_ns", "ended", "need_tokens",
)  # fmt: skip


def stays(trace: Trace) -> pl.DataFrame:
    """request, sequence, server, dp_rank (null: not told), role, enqueued_ns, scheduled_ns (null: never, or nobody saw it),
    end_ns (:data:`NEVER` where ``ended`` is false), need_tokens (the prompt less what a cache gave; null: not known).

    What was refused, or failed at a moment that nobody saw, is left out. Without `stages` a request is one stay on the only
    server.
    """
    requests = trace.table("requests").select(
        "request",
        pl.coalesce("queued_ns", "received_ns", "sent_ns", "arrival_ns").alias("came_ns"),
        pl.col("scheduled_ns").alias("first_ns"),
        pl.coalesce("finish_ns", "last_token_ns").alias("gone_ns"),
        pl.col("error").is_not_null().alias("failed"),
        pl.col("prompt_tokens").alias("prompt"),
    )
    if trace.has("stages"):
        found = (
            trace.table("stages")
            .select(
                "request", "sequence", "server", "dp_rank", "role", "enqueued_ns", "scheduled_ns", "end_ns", "end_reason",
                "cached_tokens", "prompt_tokens", pl.len().over("request").alias("among"),
            )
            .join(requests, on="request", how="left")
        )  # fmt: skip
        found = found.filter(pl.col("end_reason").is_null() | (pl.col("end_reason") != "refused"))
        alone = pl.col("among") == 1  # only of the only stay the request's own times are the stay's
        begin = pl.coalesce("enqueued_ns", pl.when(alone).then("came_ns"), "scheduled_ns")
        first = pl.coalesce("scheduled_ns", pl.when(alone).then("first_ns"))
        end = pl.coalesce("end_ns", pl.when(alone).then("gone_ns"))
        need = pl.coalesce("prompt_tokens", "prompt") - pl.col("cached_tokens").fill_null(0)
    else:
        only = trace.manifest.servers[0].name if len(trace.manifest.servers) == 1 else None
        found = requests.with_columns(
            pl.lit(0, pl.Int64).alias("sequence"),
            pl.lit(only, pl.String).alias("server"),
            pl.lit(None, pl.Int64).alias("dp_rank"),
            pl.lit(None, pl.String).alias("role"),
            # A log of arrivals alone tells of no stay.
        ).filter(pl.col("gone_ns").is_not_null() | pl.col("first_ns").is_not_null())
        begin, first, end, need = pl.col("came_ns"), pl.col("first_ns"), pl.col("gone_ns"), pl.col("prompt")
    sane = pl.col("enqueued_ns").is_between(-MOST_NS, MOST_NS - 1)
    return (
        found.with_columns(
            begin.alias("enqueued_ns"),
            first.alias("scheduled_ns"),
            end.alias("end_ns"),
            end.is_not_null().alias("ended"),
            need.clip(0).alias("need_tokens"),
        )
        .filter(sane & (pl.col("ended") | ~pl.col("failed").fill_null(False)))
        .with_columns(
            pl.max_horizontal(pl.col("end_ns").fill_null(NEVER), "enqueued_ns").clip(upper_bound=NEVER).alias("end_ns"),
            pl.max_horizontal("scheduled_ns", "enqueued_ns").alias("later_ns"),
        )
        .with_columns(pl.when(pl.col("scheduled_ns").is_not_null()).then("later_ns").alias("scheduled_ns"))
        .with_columns(pl.col("server").fill_null(""), pl.col("sequence").fill_null(0))
        .select(_COLUMNS)
        .collect()
    )
