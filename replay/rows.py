"""What the kernel gave, as the rows of a trace: the same tables and columns that a capture has."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from hoptrace.kv import step_bytes
from hoptrace.manifest import Server
from hoptrace.reader import Trace
from hoptrace.replay.engine import Served
from hoptrace.replay.overheads import Overheads
from hoptrace.replay.waits import waits
from hoptrace.schema import PHASES, TABLES

__all__ = ["frames", "times"]

_CARRIED = (
    "request", "request_id", "session", "parent_request", "think_ns", "client_slot", "tenant", "model", "adapter", "arrival_of",
    "prompt_tokens", "output_tokens", "max_tokens", "prefix_blocks", "hash_space", "block_size", "block_unit", "prompt_chars",
    "priority", "finish_reason",
)  # fmt: skip


def frames(parent: Trace, served: Served, server: Server, oh: Overheads) -> dict[str, pl.DataFrame]:
    """All tables of the replay, with exactly the columns of the schema, sorted.

    Args:
        parent: the trace that was replayed, with the arrivals of the replay in ``served``.
        server: the server as the policy made it.
    """
    table = {
        "requests": _requests(parent, served, oh),
        "stages": _stages(parent, served, server, oh),
        "tokens": _tokens(parent, served, oh),
        "steps": _steps(served, server),
        "residency": _residency(served, server),
        "waits": waits(parent, served, server, oh),
    }
    table["moves"] = _moves(parent, table["requests"])
    table["coverage"] = _coverage(table, server)
    return {name: _fit(frame, name) for name, frame in table.items()}


def _fit(frame: pl.DataFrame, name: str) -> pl.DataFrame:
    spec = TABLES[name]
    want = pl.from_arrow(spec.arrow.empty_table())
    assert isinstance(want, pl.DataFrame)
    frame = frame.with_columns(pl.lit("replay").alias("source"))
    return frame.select(
        pl.col(c).cast(t) if c in frame.columns else pl.lit(None, dtype=t).alias(c) for c, t in want.schema.items()
    ).sort(*(spec.sort or spec.names), nulls_last=True, maintain_order=True)


def times(served: Served, oh: Overheads) -> pl.DataFrame:
    """One row per served request: its times, ns on the trace's clock."""
    end = served.steps["end_ns"].to_numpy()
    first = end[served.token_step[served.token_ptr[:-1]]]
    last = end[served.token_step[served.token_ptr[1:] - 1]]
    w = served.work
    received = w.arrival_ns + oh.arrival_to_received_ns
    return pl.DataFrame(
        {
            "request": w.request,
            "arrival_ns": w.arrival_ns,
            "sent_ns": w.arrival_ns + oh.arrival_to_sent_ns,
            "received_ns": received,
            "queued_ns": received + oh.received_to_enqueued_ns,
            "scheduled_ns": served.of_request["scheduled_ns"].to_numpy(),
            "engine_first_token_ns": first,
            "engine_last_token_ns": last,
            "first_token_ns": first + oh.step_to_token_ns,
            "last_token_ns": last + oh.step_to_token_ns,
            "finish_ns": last + oh.step_to_token_ns + oh.last_token_to_finish_ns,
        }
    )


def _requests(parent: Trace, served: Served, oh: Overheads) -> pl.DataFrame:
    recorded = parent.table("requests").select(
        *_CARRIED,
        (pl.col("first_visible_ns") == pl.col("first_token_ns")).alias("visible_first"),
        *(pl.col(f"{c}_ns").is_not_null().any().alias(f"has_{c}") for c in ("sent", "received", "queued")),
    )
    everybody = recorded.collect()
    done = everybody.join(times(served, oh), on="request").with_columns(
        # A column that the parent does not fill stays empty, so that both traces' figures are made of the same times.
        pl.when("has_queued").then("queued_ns").alias("queued_ns"),
        pl.when("has_sent").then("sent_ns").alias("sent_ns"),
        pl.when("has_received").then("received_ns").alias("received_ns"),
        pl.when("visible_first").then("first_token_ns").alias("first_visible_ns"),
    )
    parts = [done]
    if served.refused.height:
        back = pl.col("arrival_ns") + oh.arrival_to_received_ns
        parts.append(
            everybody.drop("finish_reason", "output_tokens")
            .join(served.refused, on="request")
            .with_columns(
                pl.when("has_received").then(back).alias("received_ns"), (back + oh.received_to_enqueued_ns).alias("finish_ns")
            )
        )
    return pl.concat(parts, how="diagonal").with_columns(
        pl.when(pl.col("arrival_of") == "intended").then("arrival_ns").alias("intended_ns"),
    )


def _enqueued_known(parent: Trace) -> bool:
    return any(
        parent.table(name).select(pl.col(column).is_not_null().any()).collect().item()
        for name, column in (("stages", "enqueued_ns"), ("requests", "queued_ns"))
    )


def _stages(parent: Trace, served: Served, server: Server, oh: Overheads) -> pl.DataFrame:
    t = times(served, oh).rename({"queued_ns": "enqueued_ns", "engine_last_token_ns": "end_ns"})
    done = t.select("request", "enqueued_ns", "scheduled_ns", "end_ns").with_columns(
        pl.lit("done").alias("end_reason"),
        served.of_request["cached_tokens"],
        served.of_request["cached_tokens"].alias("cached_device_tokens"),
        served.of_request["resumed_tokens"],
        served.of_request["recomputed_tokens"],
    )
    if served.refused.height:
        at = pl.col("arrival_ns") + oh.arrival_to_received_ns + oh.received_to_enqueued_ns
        refused = served.refused.select(
            "request", at.alias("enqueued_ns"), at.alias("end_ns"), pl.lit("refused").alias("end_reason")
        )
        done = pl.concat([done, refused], how="diagonal")
    if not _enqueued_known(parent):
        # Equal stamps would say that the way from arrival to the engine took no time; nobody knows.
        done = done.with_columns(pl.lit(None, dtype=pl.Int64).alias("enqueued_ns"))
    return done.with_columns(
        pl.lit(0).alias("sequence"),
        pl.lit(0).alias("attempt"),
        pl.lit(0).alias("stage"),
        pl.lit(server.name).alias("server"),
        pl.lit(0).alias("dp_rank"),
        pl.lit("both").alias("role"),
    )


def _tokens(parent: Trace, served: Served, oh: Overheads) -> pl.DataFrame:
    """One row per token. They stand where the parent's tokens were seen: the time until then is in them."""
    seen = parent.table("tokens").select(pl.col("vantage").drop_nulls().unique()).collect()["vantage"].to_list()
    n = served.work.output_tokens
    index = np.arange(served.token_ptr[-1]) - np.repeat(served.token_ptr[:-1], n)
    time = served.steps["end_ns"].to_numpy()[served.token_step] + oh.step_to_token_ns
    return pl.DataFrame({"request": np.repeat(served.work.request, n), "index": index, "time_ns": time}).with_columns(
        pl.lit(0).alias("sequence"),
        pl.lit(1).alias("count"),
        pl.lit(False).alias("coalesced"),
        _vantage(parent, seen),
    )


def _vantage(parent: Trace, seen: list[str]) -> pl.Expr:
    """Where the parent's tokens of each request were seen: a comparison with the parent is then of like with like."""
    if len(seen) <= 1:
        return pl.lit(seen[0] if seen else "engine").alias("vantage")
    each = parent.table("tokens").group_by("request").agg(pl.col("vantage").drop_nulls().first()).drop_nulls().collect()
    return pl.col("request").replace_strict(dict(each.rows()), default="engine", return_dtype=pl.String).alias("vantage")


def _steps(served: Served, server: Server) -> pl.DataFrame:
    steps = served.steps.with_columns(
        pl.lit(server.name).alias("server"),
        pl.lit(0).alias("dp_rank"),
        pl.lit(0).alias("pp_rank"),
        pl.col("decode_requests").alias("decode_tokens"),
        pl.lit(server.kv_capacity_tokens, dtype=pl.Int64).alias("kv_capacity_tokens"),
        pl.lit("replayed").alias("origin"),
        *(pl.lit(None, dtype=pl.Int64).alias(c) for c in ("weight_bytes", "kv_read_bytes", "kv_write_bytes")),
    )
    return step_bytes(steps, server)


def _residency(served: Served, server: Server) -> pl.DataFrame:
    numbers = pl.Series(served.work.request)
    return served.runs.with_columns(
        numbers.gather(served.runs["request"]).alias("request"),
        pl.col("phase").replace_strict(dict(enumerate(PHASES)), return_dtype=pl.String),
        pl.lit(0).alias("sequence"),
        pl.lit(server.name).alias("server"),
        pl.lit(0).alias("dp_rank"),
    )


def _moves(parent: Trace, requests: pl.DataFrame) -> pl.DataFrame:
    """The messages of prompt and tokens as the parent had them: as many bytes and transfers, over the same way, at new times."""
    way = ["request", "server", "object", "src", "dst", "path", "mechanism", "payload_hops", "control_ops"]
    carried = (
        parent.table("moves")
        .filter(pl.col("object").is_in(["prompt", "tokens"]) & pl.col("request").is_not_null())
        .group_by(way)
        .agg(pl.when(pl.col(c).is_null().any()).then(None).otherwise(pl.col(c).sum()).alias(c) for c in ("bytes", "transfers"))
        .collect()
    )
    times = requests.drop_nulls("first_token_ns").select(
        "request", "arrival_ns", "received_ns", "first_token_ns", "last_token_ns"
    )
    inward = pl.col("object") == "prompt"
    return (
        carried.join(times, on="request")
        .with_columns(
            pl.when(inward).then("arrival_ns").otherwise("first_token_ns").alias("start_ns"),
            pl.when(inward).then("received_ns").otherwise("last_token_ns").alias("end_ns"),
            pl.lit("assumed").alias("basis"),
        )
        .sort("start_ns", "request", "object", "src", "dst")
    )


def _coverage(table: dict[str, pl.DataFrame], server: Server) -> pl.DataFrame:
    r = table["requests"]
    first, last = r["arrival_ns"].min(), r["finish_ns"].max()
    names = [
        n for n in ("requests", "stages", "tokens", "steps", "residency", "waits", "moves") if n != "moves" or table[n].height
    ]
    rows: list[dict[str, Any]] = [
        {"table": n, "server": server.name, "from_ns": first, "to_ns": last, "fraction": 1.0} for n in names
    ]
    return pl.DataFrame(rows)
