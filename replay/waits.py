"""The waits of a replay: what a request waited for before and between its steps, each nanosecond at most once."""

from __future__ import annotations

import numpy as np
import polars as pl

from hoptrace.manifest import Server
from hoptrace.reader import Trace
from hoptrace.replay import kernel
from hoptrace.replay.engine import Served
from hoptrace.replay.overheads import Overheads

__all__ = ["waits"]

_ON = {kernel.SLOTS: "slot", kernel.KV: "kv", kernel.BUDGET: "budget"}


def waits(parent: Trace, served: Served, server: Server, oh: Overheads) -> pl.DataFrame:
    """Rows of the table `waits`.

    *message*: received → enqueued, where the parent has such waits, as long as the parent's median. *queue*: on the server,
    enqueued → ready, as long as the parent's median (a recording shows that time as queueing too: the request holds no place
    yet); on the running step, ready → start of the first step that could have held the request.
    *capacity*: from there until it was scheduled, on what was full for most of that time, and while it was preempted; ``count``
    is the steps waited.
    """
    w = served.work
    received = w.arrival_ns + oh.arrival_to_received_ns
    enqueued = received + oh.received_to_enqueued_ns
    first_seen, scheduled = (served.of_request[c].to_numpy() for c in ("first_seen_ns", "scheduled_ns"))
    message = parent.table("waits").filter(pl.col("kind") == "message").select(pl.col("on").drop_nulls().first()).collect()
    parts = [
        _rows(w.request, enqueued, served.ready_ns, "queue", "server", "assumed"),
        _rows(w.request, served.ready_ns, first_seen, "queue", "step", "derived"),
        _full(served, first_seen, scheduled),
        _preempted(served),
    ]
    if message.height and message["on"][0] is not None:
        parts.append(_rows(w.request, received, enqueued, "message", message["on"][0], "assumed"))
    return pl.concat(parts, how="diagonal").with_columns(pl.lit(server.name).alias("server")).sort("start_ns", "request", "kind")


def _rows(request: np.ndarray, start: np.ndarray, end: np.ndarray, kind: str, on: str, basis: str) -> pl.DataFrame:
    frame = pl.DataFrame({"request": request, "start_ns": start, "end_ns": end})
    return frame.filter(pl.col("end_ns") > pl.col("start_ns")).with_columns(
        pl.lit(kind).alias("kind"), pl.lit(on).alias("on"), pl.lit(1).cast(pl.Int64).alias("count"), pl.lit(basis).alias("basis")
    )


def _full(served: Served, first_seen: np.ndarray, scheduled: np.ndarray) -> pl.DataFrame:
    """Waiting though the engine looked: on slots, KV or the token budget, whichever was full for most of the time."""
    start = served.steps["start_ns"].to_numpy()
    reason = served.steps["blocked_by"].to_numpy()
    lasted = np.diff(start, append=served.steps["end_ns"].to_numpy()[-1:])
    a, b = np.searchsorted(start, first_seen), np.searchsorted(start, scheduled)
    times = []
    for code in _ON:
        total = np.concatenate([[0], np.cumsum(np.where(reason == code, lasted, 0))])
        times.append(total[b] - total[a])
    most = np.argmax(np.stack(times), axis=0)
    frame = pl.DataFrame(
        {
            "request": served.work.request,
            "start_ns": first_seen,
            "end_ns": scheduled,
            "on": pl.Series(np.array(list(_ON.values()))[most], dtype=pl.String),
            "count": b - a,
        }
    )
    return frame.filter(pl.col("end_ns") > pl.col("start_ns")).with_columns(
        pl.lit("capacity").alias("kind"), pl.lit("derived").alias("basis")
    )


def _preempted(served: Served) -> pl.DataFrame:
    start = served.steps["start_ns"].to_numpy()
    runs = served.runs.filter(pl.col("phase") == 3)
    first, last = runs["first_step"].to_numpy(), runs["last_step"].to_numpy()
    return pl.DataFrame(
        {
            "request": served.work.request[runs["request"].to_numpy()],
            "start_ns": start[first],
            "end_ns": start[last + 1],
            "count": last - first + 1,
        },
        schema_overrides={"request": pl.Int64, "start_ns": pl.Int64, "end_ns": pl.Int64, "count": pl.Int64},
    ).with_columns(pl.lit("capacity").alias("kind"), pl.lit("kv").alias("on"), pl.lit("derived").alias("basis"))
