"""What a recording tells of the truths: its steps engine by engine, who was in them, when each request was ready."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl

from hoptrace.reader import Trace
from hoptrace.reconstruct import steps_of
from hoptrace.replay.plan import Plan
from hoptrace.replay.workload import Workload, workload

__all__ = ["EngineSteps", "Recorded"]

_Ints = np.ndarray[Any, np.dtype[np.int64]]
_PLACE = ("server", "dp_rank")
COMPOSITION = (
    "prefill_requests", "prefill_tokens", "prefill_context_tokens", "decode_requests", "decode_tokens", "decode_context_tokens",
)  # fmt: skip


@dataclass(frozen=True)
class EngineSteps:
    """The steps of one engine, by start.

    Attributes:
        rows: of `steps`. start_ns, end_ns: int64[n]; where two overlap (a step scheduled before the one before has ended) the
            later one begins at the end of the other: an engine that does one after another has no other way.
        number: their ``step``. overlapping: how many were so moved.
        opens: bool[n], whether the engine was idle before: nobody in it was there before, or was ready when the one before ended.
    """

    rows: pl.DataFrame
    number: _Ints
    start_ns: _Ints
    end_ns: _Ints
    opens: np.ndarray[Any, np.dtype[np.bool_]]
    overlapping: int


class Recorded:
    """A recording, read once. Engines are those of ``plan``, by position."""

    def __init__(self, trace: Trace, plan: Plan) -> None:
        self.trace = trace
        self.plan = plan
        self._steps = steps_of(trace)

    @cached_property
    def work(self) -> Workload:
        """Its requests."""
        return workload(self.trace)

    @property
    def inferred(self) -> bool:
        """Whether its steps were made from token times rather than recorded."""
        return self._steps.origin == "reconstructed"

    @cached_property
    def steps(self) -> pl.DataFrame:
        """Its steps, those of the first pipeline rank, with ``engine``: theirs among the plan's, by position; null: none."""
        found = self._steps.steps
        if found is None or not found.height:
            return pl.DataFrame()
        first = found.filter(pl.col("pp_rank").fill_null(0) == 0).drop_nulls(["start_ns", "end_ns", "step"])
        return self._placed(first).sort("engine", "start_ns", "step")

    @cached_property
    def residency(self) -> pl.DataFrame:
        """Who was in them, with ``engine``."""
        found = self._steps.residency
        return self._placed(found) if found is not None and found.height else pl.DataFrame()

    def _placed(self, rows: pl.DataFrame) -> pl.DataFrame:
        places = pl.DataFrame(
            [(server, rank, e) for (server, rank), e in self.places.items()],
            schema={"server": pl.String, "dp_rank": pl.Int64, "engine": pl.Int64}, orient="row",
        )  # fmt: skip
        return rows.with_columns(pl.col("dp_rank").fill_null(0)).join(places, on=list(_PLACE), how="left", nulls_equal=True)

    @cached_property
    def places(self) -> dict[tuple[str | None, int], int]:
        """(server, rank) → engine of the plan: by name where they have the same, else in the order of the manifest's servers."""
        found = self._steps.steps
        if found is None or not found.height:
            return {}
        seen = found.select("server", pl.col("dp_rank").fill_null(0)).unique().sort(_PLACE, nulls_last=False).rows()
        names = {(e.name, e.dp_rank): i for i, e in enumerate(self.plan.engines)}
        if all(place in names for place in seen):
            return {place: names[place] for place in seen}
        order = {s.name: i for i, s in enumerate(self.trace.manifest.servers)}
        seen.sort(key=lambda p: (order.get(p[0], len(order)), p[1]))
        return {place: i for i, place in enumerate(seen)}

    @cached_property
    def engines(self) -> tuple[EngineSteps, ...]:
        """The steps of each engine of the plan."""
        return tuple(self._engine(i) for i in range(len(self.plan.engines)))

    def _engine(self, at: int) -> EngineSteps:
        rows = self.steps.filter(pl.col("engine") == at) if self.steps.height else self.steps
        if not rows.height:
            none = np.zeros(0, dtype=np.int64)
            return EngineSteps(rows, none, none, none, np.zeros(0, dtype=np.bool_), 0)
        number, start, end = (rows[c].cast(pl.Int64).to_numpy().copy() for c in ("step", "start_ns", "end_ns"))
        overlapping, before = 0, int(start[0])
        for i in range(len(start)):
            overlapping += int(start[i] < before)
            start[i] = max(start[i], before)
            end[i] = before = max(int(end[i]), int(start[i]) + 1)
        return EngineSteps(rows, number, start, end, self._opens(at, number, end), overlapping)

    def _opens(self, at: int, number: _Ints, end: _Ints) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """See :class:`EngineSteps`; the first step opens, and none where nobody knows who was in them."""
        opens = np.zeros(len(number), dtype=np.bool_)
        opens[:1] = True
        if not self.residency.height:
            return opens
        mine = self.residency.filter(pl.col("engine") == at).group_by("request").agg(
            pl.col("first_step").min().alias("first"), pl.col("last_step").max().alias("last")
        ).join(self.times.select("request", "there_ns"), on="request", how="left")  # fmt: skip
        place = {int(n): i for i, n in enumerate(number)}
        going_on = np.zeros(len(number) + 1, dtype=np.int64)
        earliest = np.full(len(number), np.iinfo(np.int64).max, dtype=np.int64)
        for first, last, there in mine.select("first", "last", "there_ns").iter_rows():
            a, b = place.get(first), place.get(last)
            if a is None or b is None:
                continue
            going_on[a + 1] += 1
            going_on[b + 1] -= 1
            # One whose time nobody knows could have been there before.
            earliest[a] = min(earliest[a], np.iinfo(np.int64).min if there is None else there)
        busy = np.cumsum(going_on)[:-1] > 0
        opens[1:] = ~busy[1:] & (earliest[1:] > end[:-1]) & (earliest[1:] < np.iinfo(np.int64).max)
        return opens

    @cached_property
    def times(self) -> pl.DataFrame:
        """Of each request: what of its times before the engine was recorded, and ``there_ns``: the last of them, ``told_by``:
        which one it is (``engine``: the engine's own stamp), and ``first_ns``: the start of its first step."""
        r = self.trace.table("requests").select("request", "arrival_ns", "sent_ns", "received_ns", "queued_ns").collect()
        stays = (
            self.trace.table("stages").filter(pl.col("sequence").fill_null(0) == 0).sort("request", "attempt", "stage")
            .group_by("request", maintain_order=True).agg(pl.col("enqueued_ns").first()).collect()
        )  # fmt: skip
        found = r.join(stays, on="request", how="left").with_columns(
            pl.coalesce("queued_ns", "enqueued_ns", "received_ns", "sent_ns", "arrival_ns").alias("there_ns"),
            pl.when(pl.col("queued_ns").is_not_null()).then(pl.lit("engine"))
            .when(pl.col("enqueued_ns").is_not_null()).then(pl.lit("enqueued"))
            .when(pl.col("received_ns").is_not_null()).then(pl.lit("received"))
            .when(pl.col("sent_ns").is_not_null()).then(pl.lit("sent"))
            .otherwise(pl.lit("arrival")).alias("told_by"),
        )  # fmt: skip
        return found.join(self._first_steps(), on="request", how="left")

    def _first_steps(self) -> pl.DataFrame:
        if not self.residency.height or not self.steps.height:
            return pl.DataFrame(schema={"request": pl.Int64, "first_ns": pl.Int64})
        starts = self.steps.select("engine", pl.col("step").alias("first_step"), "start_ns")
        joined = self.residency.select("request", "engine", "first_step").join(starts, on=["engine", "first_step"])
        return joined.group_by("request").agg(pl.col("start_ns").min().alias("first_ns"))
