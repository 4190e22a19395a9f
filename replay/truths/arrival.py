"""Arrival as recorded: each request is ready for the engine, and sent to the one, that the recording tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from hoptrace.replay.overheads import Overheads
from hoptrace.replay.plain.parts import Draw, EngineView, RequestView
from hoptrace.replay.truths.recorded import Recorded
from hoptrace.replay.workload import Workload

__all__ = ["Assigned", "put_back", "ready_ns", "timed"]

_Ints = np.ndarray[Any, np.dtype[np.int64]]
_STAMPS = ("arrival_ns", "intended_ns", "sent_ns", "received_ns", "queued_ns")


def ready_ns(recorded: Recorded, work: Workload, measured: Overheads) -> _Ints:
    """When the engine could begin with each request of ``work``, by position.

    The engine's own stamp (``queued_ns``) plus the measured time from there until it could begin; where there is none, the last
    stamp before the engine plus the measured times of the rest of the way. An engine that takes requests between two steps stamps
    those then that came during a step. All that is told of them is that they came after that step's start and before the stamp:
    there the measured way in stands, within those bounds, and their order is that of the stamps. Never later than the start of
    the first step that had the request: by then it was there.
    """
    told = pl.DataFrame({"request": work.request}).join(recorded.times, on="request", how="left", maintain_order="left")
    rest = {
        "engine": measured.enqueued_to_ready_ns,
        "enqueued": measured.enqueued_to_ready_ns,
        "received": measured.received_to_enqueued_ns + measured.enqueued_to_ready_ns,
        "sent": measured.sent_to_received_ns + measured.received_to_enqueued_ns + measured.enqueued_to_ready_ns,
        "arrival": measured.before_ns,
    }
    added = told["told_by"].replace_strict(rest, default=0, return_dtype=pl.Int64)
    there = pl.Series("there_ns", _within_steps(recorded, told, measured))
    came = pl.col("there_ns") + added
    latest = pl.max_horizontal("first_ns", "arrival_ns")
    # Where no step shows a request, nothing bounds its way in.
    found = told.with_columns(there).select(
        pl.when(pl.col("first_ns").is_null()).then(came).otherwise(pl.min_horizontal(came, latest))
    )
    ready: _Ints = found.to_series().to_numpy().copy()
    return ready


def _within_steps(recorded: Recorded, told: pl.DataFrame, measured: Overheads) -> _Ints:
    """``there_ns``, of those that came during a step and were stamped after it: when they came, as far as it is told."""
    there: _Ints = told["there_ns"].to_numpy().copy()
    way = (
        pl.when(pl.col("received_ns").is_not_null()).then(pl.col("received_ns") + measured.received_to_enqueued_ns)
        .when(pl.col("sent_ns").is_not_null())
        .then(pl.col("sent_ns") + measured.sent_to_received_ns + measured.received_to_enqueued_ns)
        .otherwise(pl.col("arrival_ns") + measured.arrival_to_received_ns + measured.received_to_enqueued_ns)
    )  # fmt: skip
    seen = pl.coalesce("received_ns", "sent_ns", "arrival_ns")
    by_way, came = (told.select(x).to_series().to_numpy() for x in (way, seen))
    mine = (told["told_by"] == "engine").to_numpy()
    on = _engine_of(recorded, told["request"].to_list())
    for e, steps in enumerate(recorded.engines):
        at = np.flatnonzero(mine & (on == e))
        if not len(at) or not len(steps.number) or recorded.inferred:
            continue
        before = np.searchsorted(steps.end_ns, there[at], side="right") - 1  # the last step that had ended at the stamp
        start, end = steps.start_ns[np.maximum(before, 0)], steps.end_ns[np.maximum(before, 0)]
        following = np.searchsorted(steps.start_ns, there[at], side="left") - 1 == before  # stamped in no step
        during = following & (before >= 0) & (came[at] < end)
        guess = np.clip(by_way[at], start + 1, there[at])
        there[at] = np.where(during, guess, there[at])
        # Those stamped first stay first.
        order = at[np.lexsort((at, told["there_ns"].to_numpy()[at]))]
        there[order] = np.maximum.accumulate(there[order])
    return there


def _engine_of(recorded: Recorded, requests: list[int]) -> _Ints:
    """The engine of each request's first stay; −1: not told."""
    first = recorded.trace.table("stages").sort("request", "attempt", "stage").group_by("request").first()
    place = {r: (s, d or 0) for r, s, d in first.select("request", "server", "dp_rank").collect().iter_rows()}
    names = {(e.name, e.dp_rank): i for i, e in enumerate(recorded.plan.engines)}
    found = [place.get(r) for r in requests]
    only = 0 if len(recorded.plan.engines) == 1 else -1
    engines = [only if p is None else recorded.places.get(p, names.get((str(p[0]), p[1]), only)) for p in found]
    return np.array(engines, dtype=np.int64)


def timed(work: Workload, ready: _Ints, before_ns: int) -> Workload:
    """The work so that a router has each request when it was ready: arrivals are shifted, waiting for others is over. In the
    order of these times (an engine's queue is one of those who have come to it)."""
    order = np.argsort(ready, kind="stable")
    shifted = replace(work, arrival_ns=ready - before_ns, after=None, think_ns=None, floor=None)
    return shifted.take(order)


def put_back(frames: dict[str, pl.DataFrame], recorded: Recorded) -> dict[str, pl.DataFrame]:
    """The tables with the recorded stamps of the way in, instead of those that were simulated."""
    seen = recorded.trace.table("requests").select("request", *_STAMPS).collect()
    done = frames["requests"]
    stamped = done.drop(_STAMPS).join(seen, on="request", how="left", maintain_order="left").select(done.columns)
    stays = frames["stages"]
    there = recorded.times.select("request", pl.coalesce("queued_ns", "enqueued_ns").alias("came_ns"))
    # A second stay's (hand-over) is simulated: only the first is that of the arrival.
    first = (pl.col("stage") == 0) & pl.col("came_ns").is_not_null()
    moved = stays.join(there, on="request", how="left", maintain_order="left").with_columns(
        pl.when(first).then("came_ns").otherwise("enqueued_ns").alias("enqueued_ns")
    )
    return frames | {"requests": stamped, "stages": moved.select(stays.columns)}


class Assigned:
    """A router that sends each request where the recording sent it; others to the first engine."""

    def __init__(self, recorded: Recorded, work: Workload) -> None:
        engines = _engine_of(recorded, work.request.tolist()).tolist()
        self._engine = {position: e for position, e in enumerate(engines) if e >= 0}

    def choose(self, request: RequestView, engines: Sequence[EngineView], draw: Draw) -> int:
        """See :class:`hoptrace.replay.plain.parts.Router`."""
        at: int = self._engine.get(request.number, 0)
        return min(at, len(engines) - 1)
