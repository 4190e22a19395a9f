"""The time that a request spends outside the engine's steps, as the trace shows it: fixed per request, or between steps.

Each figure is the mean over the requests that show it (the gap between steps: over the steps), in whole ns, never negative: a
small delay moves every percentile of a latency that varies more than it does by its mean, not by its median. Values beyond the
99 % quantile count as that quantile, so that a machine that stood still once does not delay all. Where the trace does not tell, a
replay has to take 0; ``n`` is 0 then, and the manifest says null.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import polars as pl

from hoptrace.reader import Trace
from hoptrace.replay.way_in import mean_way_ns

__all__ = ["Overheads", "overheads"]

_LONGEST = 0.99


@dataclass(frozen=True, slots=True)
class Overheads:
    """In ns; ``n`` says from how many requests (gaps: steps) each was taken.

    Attributes:
        arrival_to_sent_ns: the load generator's lateness; 0 where nobody saw the request being sent.
        sent_to_received_ns: network on the way in, from arrival where `sent` is unknown.
        received_to_enqueued_ns: the proxy, or the server's front; from the last stamp before where `received` is unknown. An
            engine that takes requests between steps (vLLM) stamps them then: who came during a step waited for its end, which is
            not the front's time and comes by itself in a replay. Of such a way only bounds are known
            (:mod:`hoptrace.replay.way_in`).
        enqueued_to_ready_ns: from the hand-over to the engine until it could begin, seen where the engine was idle.
        between_steps_ns: host time from a step's end to the next one's start while decoders run; reconstructed steps touch, so
            they do not tell.
        step_to_token_ns: from the end of the step that computed a first token until it was seen.
        last_token_to_finish_ns: from the last token to the end of the request.
    """

    arrival_to_sent_ns: int = 0
    sent_to_received_ns: int = 0
    received_to_enqueued_ns: int = 0
    enqueued_to_ready_ns: int = 0
    between_steps_ns: int = 0
    step_to_token_ns: int = 0
    last_token_to_finish_ns: int = 0
    n: tuple[int, ...] = (0, 0, 0, 0, 0, 0, 0)

    @property
    def arrival_to_received_ns(self) -> int:
        """The whole way in."""
        return self.arrival_to_sent_ns + self.sent_to_received_ns

    @property
    def before_ns(self) -> int:
        """From arrival until the engine may take the request."""
        return self.arrival_to_received_ns + self.received_to_enqueued_ns + self.enqueued_to_ready_ns

    def as_dict(self) -> dict[str, Any]:
        """For the manifest: each figure with the number of values behind it; null, not 0, without any."""
        names = [f.name for f in fields(self) if f.name != "n"]
        return {name: {"ns": getattr(self, name) if n else None, "n": n} for name, n in zip(names, self.n, strict=True)}


def overheads(trace: Trace, steps: pl.DataFrame | None = None, residency: pl.DataFrame | None = None) -> Overheads:
    """Measure a trace. ``steps`` and ``residency``: its steps, stored or reconstructed; null if there are none."""
    requests = (
        trace.table("requests")
        .filter(pl.col("finish_ns").is_not_null() & pl.col("error").is_null())
        .select("request", "arrival_ns", "sent_ns", "received_ns", "queued_ns", "first_token_ns", "last_token_ns", "finish_ns")
        .collect()
    )
    stays = (
        trace.table("stages")
        .sort("request", "attempt", "stage", nulls_last=False)
        .group_by("request", maintain_order=True)
        .agg(pl.col("enqueued_ns").first(), pl.col("scheduled_ns").first(), pl.col("end_ns").last(), pl.col("server").first())
        .collect()
    )
    r = (
        requests.join(stays, on="request", how="left")
        .join(_first_steps(steps, residency), on="request", how="left")
        .with_columns(
            pl.coalesce("queued_ns", "enqueued_ns").alias("enqueued_ns"),
            pl.coalesce("end_ns", "last_token_ns").alias("end_ns"),
            pl.coalesce("scheduled_ns", "first_step_ns").alias("scheduled_ns"),
        )
    )
    values = [
        r["sent_ns"] - r["arrival_ns"],
        r["received_ns"] - r["sent_ns"].fill_null(r["arrival_ns"]),
        _front(r, steps),
        _idle_start(r),
        _gaps(steps, residency),
        _to_token(requests, steps, residency),
        r["finish_ns"] - r["last_token_ns"],
    ]
    said = _said(trace)
    figures, counts = [], []
    for i, v in enumerate(values):
        if i in said:
            figures.append(said[i][0])
            counts.append(said[i][1])
            continue
        v = v.drop_nulls()
        if v.len() and i != 4:
            v = v.clip(upper_bound=v.quantile(_LONGEST, "lower"))
        mean = v.mean() if v.len() else 0
        assert isinstance(mean, int | float)
        figures.append(max(0, round(mean)))
        counts.append(v.len())
    late, network, front, ready, gap, token, end = figures
    return Overheads(late, network, front, ready, gap, token, end, n=tuple(counts))


def _front(r: pl.DataFrame, steps: pl.DataFrame | None) -> pl.Series:
    """enqueued − received, without waits for a step's end: where there are any, the mean of all ways for each."""
    came = r["received_ns"].fill_null(r["sent_ns"]).fill_null(r["arrival_ns"])
    way = (r["enqueued_ns"] - came).rename("way")
    if steps is None or not steps.height:
        return way
    known = pl.DataFrame({"server": r["server"], "came": came, "there": r["enqueued_ns"], "way": way}).drop_nulls(
        ["came", "there"]
    )
    free: list[int] = []
    low: list[int] = []
    high: list[int] = []
    for (server,), mine in known.group_by(["server"], maintain_order=True):
        at = steps.filter((pl.col("server") == server) & (pl.col("pp_rank").fill_null(0) == 0)) if server is not None else steps
        if at["dp_rank"].fill_null(0).n_unique() > 1:
            # Which rank's step a request waits for is not told.
            return way
        at = at.sort("start_ns")
        start, end = at["start_ns"].to_numpy(), at["end_ns"].to_numpy()
        c, t = mine["came"].to_numpy(), mine["there"].to_numpy()
        over = np.searchsorted(end, t, side="right") - 1  # the last step that had ended when it was taken
        # A stamp within a step is not the engine's between two: there the whole way is the front's.
        alone = (over < 0) | (end[np.maximum(over, 0)] <= c)
        free += (t - c)[alone].tolist()
        low += np.maximum(start[np.maximum(over, 0)] - c, 0)[~alone].tolist()
        high += (t - c)[~alone].tolist()
    if not high:
        return pl.Series(free, dtype=pl.Int64)
    mean = mean_way_ns(*(np.array(v, dtype=np.int64) for v in (free, low, high)))
    return pl.Series([0 if mean is None else mean] * (len(free) + len(high)), dtype=pl.Int64)


def _said(trace: Trace) -> dict[int, tuple[int, int]]:
    """What a replay's manifest says that it was made with, by position: (ns, behind how many values). Its rows cannot tell a
    measured 0 from an unknown one, and where a decode server waits for hand-overs they show that wait between steps too."""
    info = trace.manifest.replay
    said = info.cost_model.get("outside_steps") if info is not None else None
    if not isinstance(said, dict):
        return {}
    found = {}
    for i, f in enumerate(f for f in fields(Overheads) if f.name != "n"):
        figure = said.get(f.name)
        if not isinstance(figure, dict):
            continue
        ns, n = figure.get("ns"), figure.get("n")
        if not n:
            found[i] = (0, 0)
        elif type(ns) is int and type(n) is int and ns >= 0 and n > 0:
            found[i] = (ns, n)
    return found


def _first_steps(steps: pl.DataFrame | None, residency: pl.DataFrame | None) -> pl.DataFrame:
    """request, first_step_ns: start of the first step that computed a part of it, where steps are reconstructed: these begin, on
    an idle server, when a request is reckoned to have reached the engine."""
    if steps is None or residency is None or not steps.height or not residency.height:
        return pl.DataFrame(schema={"request": pl.Int64, "first_step_ns": pl.Int64})
    told = steps.filter(pl.col("origin") == "reconstructed").select("server", "step", pl.col("start_ns").alias("first_step_ns"))
    first = (
        residency.filter(pl.col("phase") == "chunk").group_by("request", "server").agg(pl.col("first_step").min().alias("step"))
    )
    return first.join(told, on=["server", "step"]).group_by("request").agg(pl.col("first_step_ns").min())


def _idle_start(r: pl.DataFrame) -> pl.Series:
    """scheduled − enqueued of the requests that came while no other was on their server."""
    # Where nobody saw it reach the engine, the whole way there is in it, as reconstructed steps have it.
    r = r.with_columns(pl.coalesce("enqueued_ns", "received_ns", "sent_ns", "arrival_ns").alias("enqueued_ns"))
    known = r.drop_nulls(["enqueued_ns", "scheduled_ns", "end_ns"]).sort("enqueued_ns", "request")
    before = pl.col("end_ns").cum_max().shift(1).over("server")
    idle = known.filter(before.is_null() | (before < pl.col("enqueued_ns")))
    return idle["scheduled_ns"] - idle["enqueued_ns"]


def _gaps(steps: pl.DataFrame | None, residency: pl.DataFrame | None = None) -> pl.Series:
    """Start − end of the step before, where a decoder shows that the engine was not idle between them: one that did not come to
    this engine with that step (as those that are handed over do, which it may have waited for)."""
    if steps is None or not steps.height:
        return pl.Series([], dtype=pl.Int64)
    told = (pl.col("pp_rank").fill_null(0) == 0) & (pl.col("origin").fill_null("") != "reconstructed")
    s = steps.filter(told).sort("server", "dp_rank", "step")
    gap = (pl.col("start_ns") - pl.col("end_ns").shift(1)).over("server", "dp_rank")
    s = s.with_columns(pl.when(pl.col("decode_requests") > 0).then(gap).alias("gap"))
    if residency is None or not residency.height:
        return s["gap"]
    place = ["server", "dp_rank"]
    came = residency.group_by("request", *place).agg(pl.col("first_step").min())
    new = came.group_by(*place, pl.col("first_step").alias("step")).len("new")
    whole = s.join(new, on=[*place, "step"], how="left", nulls_equal=True, maintain_order="left")
    stayed = pl.col("decode_requests") + pl.col("prefill_requests").fill_null(0) > pl.col("new").fill_null(0)
    return whole.select(pl.when(stayed).then("gap").alias("gap"))["gap"]


def _to_token(requests: pl.DataFrame, steps: pl.DataFrame | None, residency: pl.DataFrame | None) -> pl.Series:
    """First token as it was seen − end of the step that computed the prompt's last part. Where several engines had the request
    (prefill and decode apart): the last such step before the token, or a decoder's first one that had no part of the prompt."""
    if steps is None or residency is None or not steps.height or not residency.height:
        return pl.Series([], dtype=pl.Int64)
    # Chunks before the first decode: those after it belong to a preemption.
    place = ["request", "server", "dp_rank"]
    decode = residency.filter(pl.col("phase") == "decode").group_by(place).agg(pl.col("first_step").min().alias("decode"))
    last = (
        residency.filter(pl.col("phase") == "chunk")
        .join(decode, on=place, how="left", nulls_equal=True)
        .filter(pl.col("decode").is_null() | (pl.col("last_step") < pl.col("decode")))
        .group_by(place)
        .agg(pl.col("last_step").max())
    )
    several = decode.join(last, on=place, how="anti", nulls_equal=True).join(last, on="request", how="semi")
    last = pl.concat([last, several.rename({"decode": "last_step"})])
    ends = steps.filter(pl.col("pp_rank").fill_null(0) == 0).select("server", "dp_rank", "step", "end_ns")
    joined = last.join(
        ends, left_on=["server", "dp_rank", "last_step"], right_on=["server", "dp_rank", "step"], nulls_equal=True
    ).join(requests, on="request")
    took = joined.select("request", (pl.col("first_token_ns") - pl.col("end_ns")).alias("ns"))
    if took["request"].is_unique().all():
        return took["ns"]
    least = pl.coalesce(pl.col("ns").filter(pl.col("ns") >= 0).min(), pl.col("ns").max())
    return took.group_by("request", maintain_order=True).agg(least)["ns"]
