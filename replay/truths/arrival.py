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
    stamp before the engine plus the measured times of the rest of the way. Never later than the start of the first step that had
    the request: by then it was there.
    """
    told = pl.DataFrame({"request": work.request}).join(recorded.times, on="request", how="left", maintain_order="left")
    rest = {
        "engine": measured.enqueued_to_ready_ns,
        "enqueued": measured.enqueued_to_ready_ns,
        "received": measured.received_to_enqueued_ns + measured.enqueued_to_ready_ns,
        "arrival": measured.before_ns,
    }
    added = told["told_by"].replace_strict(rest, default=0, return_dtype=pl.Int64)
    found = told.select(pl.min_horizontal(pl.col("there_ns") + added, pl.max_horizontal("first_ns", "arrival_ns")))
    ready: _Ints = found.to_series().to_numpy().copy()
    return ready


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
        names = {(e.name, e.dp_rank): i for i, e in enumerate(recorded.plan.engines)}
        first = recorded.trace.table("stages").sort("request", "attempt", "stage").group_by("request").first()
        self._engine: dict[int, int] = {}
        told = {r: (s, d or 0) for r, s, d in first.select("request", "server", "dp_rank").collect().iter_rows()}
        for position, request in enumerate(work.request.tolist()):
            place = told.get(request)
            if place is not None:
                self._engine[position] = recorded.places.get(place, names.get((str(place[0]), place[1]), 0))

    def choose(self, request: RequestView, engines: Sequence[EngineView], draw: Draw) -> int:
        """See :class:`hoptrace.replay.plain.parts.Router`."""
        return min(self._engine.get(request.number, 0), len(engines) - 1)
