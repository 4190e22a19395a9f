"""Tokens as they were seen, and the messages that carry prompts and tokens."""

from __future__ import annotations

import numpy as np
import polars as pl
import pyarrow as pa

from hoptrace.replay.rows.requests import times
from hoptrace.replay.rows.runlog import RunLog
from hoptrace.replay.setting import Ints, Setting, as_table

__all__ = ["messages", "token_table"]


def token_table(s: Setting, runs: RunLog, low: int, high: int) -> pa.Table:
    """One row per emission of the requests ``s.order[low:high]``. They stand where the parent's tokens were seen: the time until
    then is in them."""
    whose, index, count, end = runs.emissions(low, high, s.steps)
    number = s.work.request[s.order[low:high]]
    vantage: object = s.parent.vantages[0] if s.parent.vantages else "engine"
    each = s.parent.vantage(int(number[0]), int(number[-1]) + 1) if len(number) else None
    if each is not None:
        told = pl.DataFrame({"request": number}).join(each, on="request", how="left", maintain_order="left")
        vantage = told["vantage"].fill_null("engine").gather(whose)
    columns = {
        "request": number[whose], "sequence": 0, "index": index, "time_ns": end + s.overheads.step_to_token_ns,
        "count": count, "coalesced": False, "vantage": vantage,
    }  # fmt: skip
    return as_table("tokens", columns, len(whose))


def messages(s: Setting, at: Ints) -> pl.DataFrame:
    """The messages of prompt and tokens as the parent had them: as many bytes and transfers, over the same way, at new times.

    Where the replay has other servers than the parent, their places are named after those that served the request.
    """
    t = times(s.work, s.outcome, s.overheads, at).drop_nulls("first_token_ns")
    way = ["request", "server", "object", "src", "dst", "path", "mechanism", "payload_hops", "control_ops"]
    schema = {"request": pl.Int64, "object": pl.String, "start_ns": pl.Int64}
    if not t.height:
        return pl.DataFrame(schema=schema)
    low, high = int(t["request"].min()), int(t["request"].max()) + 1  # type: ignore[arg-type]
    carried = (
        s.parent.trace.of_requests("moves", low, high)
        .filter(pl.col("object").is_in(["prompt", "tokens"]))
        .group_by(way)
        .agg(pl.when(pl.col(c).is_null().any()).then(None).otherwise(pl.col(c).sum()).alias(c) for c in ("bytes", "transfers"))
        .collect()
    )
    names = {e.name for e in s.plan.engines}
    engine = s.column("engine", at)
    last = np.where(s.column("decode_engine", at) >= 0, s.column("decode_engine", at), engine)
    own = pl.DataFrame({"request": s.work.request[at], "_in": s.servers_of(engine), "_out": s.servers_of(last)})
    stamps = t.select("request", "arrival_ns", "received_ns", "first_token_ns", "last_token_ns")
    inward = pl.col("object") == "prompt"
    here = pl.when(inward).then("_in").otherwise("_out")
    known = pl.col("server").is_in(list(names)).fill_null(False)
    node = pl.concat_str(pl.lit("server:"), here)
    was = pl.concat_str(pl.lit("server:"), pl.col("server"))
    return (
        carried.join(stamps, on="request")
        .join(own, on="request")
        .with_columns(
            *(pl.when(~known & (pl.col(c) == was)).then(node).otherwise(pl.col(c)).alias(c) for c in ("src", "dst")),
            pl.when(known).then("server").otherwise(here).alias("server"),
            pl.when(inward).then("arrival_ns").otherwise("first_token_ns").alias("start_ns"),
            pl.when(inward).then("received_ns").otherwise("last_token_ns").alias("end_ns"),
            pl.lit("assumed").alias("basis"),
        )
        .sort("start_ns", "request", "object", "src", "dst")
    )
