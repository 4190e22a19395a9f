"""Steps of one (server, rank) as functions of time: how much step time, interference or "server full" lies before a moment.

A request's share of any interval is a difference of two values, so no request × step join is ever made.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from hoptrace.analysis.latency.axis import Ints, distinct
from hoptrace.analysis.latency.interference import COMPOSITION, Interference, Model, interference_of

__all__ = ["Busy", "StepLine", "lines"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Busy:
    """Disjoint ascending intervals; ``before(t)`` is how much of them lies before t, in ns."""

    start: Ints
    end: Ints
    total: Ints  # ns before each interval

    @classmethod
    def of(cls, start: Ints, end: Ints) -> Busy:
        """From intervals in ascending order of start; where one overlaps those before it, only the rest of it counts."""
        if len(start):
            seen = np.concatenate([[np.iinfo(np.int64).min], np.maximum.accumulate(end)[:-1]])
            start = np.maximum(start, seen)
            end = np.maximum(start, end)
        total = np.zeros(len(start), dtype=np.int64)
        if len(start):
            np.cumsum((end - start)[:-1], out=total[1:])
        return cls(start, end, total)

    def before(self, t: Ints) -> Ints:
        if not len(self.start):
            return np.zeros(len(t), dtype=np.int64)
        i = np.searchsorted(self.start, t, side="right") - 1
        j = np.maximum(i, 0)
        value = self.total[j] + np.clip(t, self.start[j], self.end[j]) - self.start[j]
        return np.where(i >= 0, value, 0).astype(np.int64)


@dataclass(frozen=True)
class StepLine:
    """Steps of one (server, rank). ``number`` ascends with time; ``busy`` are their intervals; ``covered`` is when steps were
    recorded (null: nobody says, so always). ``missing``: where numbers are left out between two steps and nobody recorded."""

    server: str
    dp_rank: int
    number: Ints
    busy: Busy
    felt: dict[str, Interference]
    covered: Busy | None = None
    missing: Busy | None = None

    def interference(self, phase: str, t: Ints) -> tuple[Ints, Floats]:
        """Interference before t (ns) in steps as `phase` ("prefill", "decode") feels it, and what its error is made of."""
        x = self.felt[phase]
        if not len(self.number):
            return np.zeros(len(t), dtype=np.int64), np.zeros((len(t), x.sums.shape[1]))
        i = np.searchsorted(self.busy.start, t, side="right") - 1
        j = np.maximum(i, 0)
        length = (self.busy.end - self.busy.start)[j]
        done = np.clip(t, self.busy.start[j], self.busy.end[j]) - self.busy.start[j]
        fraction = np.where(length > 0, done / np.maximum(length, 1), 1.0)
        ns, sums = x.before(j, fraction)
        seen = i >= 0
        return np.where(seen, ns, 0).astype(np.int64), np.where(seen[:, None], sums, 0.0)

    def position(self, number: Ints) -> Ints:
        """Index of the first step whose number is at least ``number`` (may be one past the end)."""
        return np.searchsorted(self.number, number, side="left").astype(np.int64)


def lines(steps: pl.DataFrame, model: Model | None, coverage: pl.DataFrame | None = None) -> dict[tuple[str, int], StepLine]:
    """One line per (server, rank). Pipeline ranks of one step are joined: a request is in it while any of them works on it."""
    if not steps.height:
        return {}
    frame = steps.select(
        "server", pl.col("dp_rank").fill_null(0), pl.col("pp_rank").fill_null(0), "step", "start_ns", "end_ns", *COMPOSITION,
        "prefill_requests",
    )  # fmt: skip
    out: dict[tuple[str, int], StepLine] = {}
    for (server, rank), own in sorted(frame.partition_by("server", "dp_rank", as_dict=True).items()):
        group = _joined(own).filter(pl.col("end_ns") >= pl.col("start_ns"))
        if not group.height:
            continue
        # Numbers ascend within (server, rank); a hostile trace may number against time: then time decides.
        g = group.sort("start_ns", "step")
        number = np.maximum.accumulate(g["step"].to_numpy().astype(np.int64))
        busy = Busy.of(g["start_ns"].to_numpy(), g["end_ns"].to_numpy())
        felt = {} if model is None else interference_of(g, busy.end - busy.start, model)
        covered = None if coverage is None else _covered(coverage, str(server), busy)
        missing = None if covered is None else _missing(number, busy, covered)
        out[(str(server), int(rank))] = StepLine(str(server), int(rank), number, busy, felt, covered, missing)
    return out


def _joined(own: pl.DataFrame) -> pl.DataFrame:
    """Steps of one (server, rank), those of several pipeline ranks as one."""
    step = own["step"].to_numpy()
    if (step[1:] > step[:-1]).all():
        return own
    return (
        own.sort("step", "pp_rank")
        .group_by("step", maintain_order=True)
        .agg(pl.col("start_ns").min(), pl.col("end_ns").max(), *(pl.col(c).first() for c in (*COMPOSITION, "prefill_requests")))
    )


def _covered(coverage: pl.DataFrame, server: str, busy: Busy) -> Busy | None:
    """When the server's steps were recorded in full: rows of `coverage` for `steps`, and the steps themselves."""
    rows = coverage.filter((pl.col("table") == "steps") & (pl.col("server").is_null() | (pl.col("server") == server)))
    if not rows.height:
        return None
    whole = rows.filter(pl.col("to_ns").is_not_null() & (pl.col("fraction").fill_null(1.0) >= 1.0))
    start = np.concatenate([whole["from_ns"].to_numpy(), busy.start])
    end = np.concatenate([whole["to_ns"].to_numpy(), busy.end])
    order = np.lexsort((end, start))
    return Busy.of(start[order], end[order])


def _missing(number: Ints, busy: Busy, covered: Busy) -> Busy | None:
    """The gaps between steps whose numbers do not follow on each other, as far as they are not covered; null: there are none."""
    jump = (number[1:] > number[:-1] + 1) & (busy.start[1:] > busy.end[:-1])
    if not jump.any():
        return None
    gaps = Busy.of(busy.end[:-1][jump], busy.start[1:][jump])
    edges = distinct(np.concatenate([gaps.start, gaps.end, covered.start, covered.end]))
    start, end = edges[:-1], edges[1:]
    blank = (gaps.before(end) > gaps.before(start)) & (covered.before(end) == covered.before(start))
    return Busy.of(start[blank], end[blank])
