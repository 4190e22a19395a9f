"""Requests and their stays, as a replay had them."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from hoptrace.replay.outcome import DONE, REFUSED, REQUEST, TIERS, UNFINISHED, Outcome
from hoptrace.replay.overheads import Overheads
from hoptrace.replay.plan import TierSpec
from hoptrace.replay.setting import Ints, Setting, known
from hoptrace.replay.workload import Workload

__all__ = ["requests", "stages", "tier_place", "times"]

_PLACES = ("device", "host", "peer", "pool", "disk")
_C = {name: i for i, name in enumerate(REQUEST)}


def times(work: Workload, outcome: Outcome, oh: Overheads, at: Ints | None = None) -> pl.DataFrame:
    """One row per request of the work (or at these positions of it), in order: its times, ns on the trace's clock, null where
    they did not come to be. Columns: request, status (``outcome.DONE`` …), arrival_ns, sent_ns, received_ns, queued_ns,
    looked_ns (the engine's first pass that could have taken it), scheduled_ns, engine_first_token_ns, engine_last_token_ns,
    first_token_ns, last_token_ns, finish_ns, output_tokens (of those that are done)."""
    o = outcome.requests if at is None else outcome.requests[at]
    request = work.request if at is None else work.request[at]
    output = work.output_tokens if at is None else work.output_tokens[at]
    status = o[:, _C["status"]]
    ns = {c: known(o[:, _C[c]]) for c in ("first_seen_ns", "scheduled_ns", "first_token_ns", "last_token_ns")}
    arrival = o[:, _C["arrival_ns"]]
    came = (arrival >= 0) | (status != UNFINISHED)
    frame = pl.DataFrame(
        {
            "request": request,
            "status": status,
            "arrival_ns": pl.Series(arrival).set(pl.Series(~came), None),
            "looked_ns": ns["first_seen_ns"],
            "scheduled_ns": ns["scheduled_ns"],
            "engine_first_token_ns": ns["first_token_ns"],
            # An unfinished request's last token is still to come.
            "engine_last_token_ns": ns["last_token_ns"].set(pl.Series(status != DONE), None),
            "output_tokens": pl.Series(output).set(pl.Series(status != DONE), None),
        }
    )
    received = pl.col("arrival_ns") + oh.arrival_to_received_ns
    queued = received + oh.received_to_enqueued_ns
    last = pl.col("engine_last_token_ns") + oh.step_to_token_ns
    return frame.with_columns(
        (pl.col("arrival_ns") + oh.arrival_to_sent_ns).alias("sent_ns"),
        received.alias("received_ns"),
        queued.alias("queued_ns"),
        (pl.col("engine_first_token_ns") + oh.step_to_token_ns).alias("first_token_ns"),
        last.alias("last_token_ns"),
        # Who is refused is told so as soon as the server has it.
        pl.when(pl.col("status") == REFUSED).then(queued).otherwise(last + oh.last_token_to_finish_ns).alias("finish_ns"),
    )


def requests(s: Setting, at: Ints, errors: dict[int, str], horizon_ns: int | None) -> pl.DataFrame:
    """Rows of `requests` of these positions of the work, ascending by number. ``errors``: why a position was refused. Requests
    that had not arrived by the horizon have no row."""
    t = times(s.work, s.outcome, s.overheads, at).with_columns(
        pl.Series("error", [errors.get(int(i)) for i in at] if errors else [None] * len(at), dtype=pl.String)
    )
    if horizon_ns is not None:
        t = t.filter(pl.col("arrival_ns") <= horizon_ns)
    t = t.drop_nulls("arrival_ns")
    if not t.height:
        return t.select("request")
    low, high = int(t["request"].min()), int(t["request"].max()) + 1  # type: ignore[arg-type]
    p, done, seen = s.parent, pl.col("status") == DONE, pl.col("arrival_of")
    rows = s.parent.carried(low, high).drop("output_tokens").join(t, on="request", maintain_order="right")
    if s.plan.clients is not None:
        # Its clients are those of the replay; the parent's are in it no more.
        slots = pl.DataFrame({"request": s.work.request[at], "client_slot": known(s.client_slot[at])})
        rows = rows.drop("client_slot").join(slots, on="request", how="left", maintain_order="left")
    return rows.with_columns(
        # A column that the parent does not fill stays empty, so that both traces' figures are made of the same times.
        # Where the engine's own stamp was seen, made when it looks for requests, it is that of the pass.
        _if(p.queued, "queued_ns") if not p.between else pl.max_horizontal("queued_ns", "looked_ns").alias("queued_ns"),
        # An arrival is the earliest of what was seen: where that was the server's, nobody saw it being sent.
        pl.when(pl.lit(p.sent) & (seen == "intended")).then("sent_ns").when(seen == "sent").then("arrival_ns").alias("sent_ns"),
        pl.when(pl.lit(p.received) & seen.is_in(["intended", "sent"]))
        .then("received_ns")
        .when(seen == "received")
        .then("arrival_ns")
        .alias("received_ns"),
        pl.when("visible_first").then("first_token_ns").alias("first_visible_ns"),
        pl.when(seen == "intended").then("arrival_ns").alias("intended_ns"),
        pl.when(done).then("finish_reason").alias("finish_reason"),
        # Think times are those of the parent's own ends, where its arrivals were kept: here they may be others.
        _think(s, rows),
    ).with_columns(pl.when(pl.col("status") == REFUSED).then(None).otherwise("queued_ns").alias("queued_ns"))


def _if(has: bool, name: str) -> pl.Expr:
    return pl.col(name) if has else pl.lit(None, dtype=pl.Int64).alias(name)


def _think(s: Setting, rows: pl.DataFrame) -> pl.Series:
    """From the parent's end here until this arrival, where the trace told one; null where it came before that end."""
    told = rows["think_ns"]
    if told.null_count() == rows.height:
        return told
    numbers = s.work.request[s.order]
    wanted = rows["parent_request"].fill_null(-1).to_numpy()
    place = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
    there = numbers[place] == wanted
    ends = times(s.work, s.outcome, s.overheads, s.order[place])["finish_ns"].set(pl.Series(~there), None)
    pause = rows["arrival_ns"] - ends
    return pause.set((pause < 0).fill_null(False), None).set(told.is_null(), None).alias("think_ns")


def tier_place(tier: TierSpec) -> str:
    """Which of the schema's places (`stages.cached_…_tokens`) a tier is, by its kind."""
    kind = tier.kind.lower()
    if any(w in kind for w in ("nvme", "disk", "ssd", "file")):
        return "disk"
    if "pool" in kind or "remote_dram" in kind:
        return "pool"
    if "peer" in kind or "hbm" in kind:
        return "peer"
    return "pool" if tier.shared else "host"


def stages(s: Setting, at: Ints, horizon_ns: int | None) -> pl.DataFrame:
    """Rows of `stages` of these positions: one for the engine that a request came to, and one for its decode engine."""
    t = times(s.work, s.outcome, s.overheads, at)
    keep = t["arrival_ns"].is_not_null()
    if horizon_ns is not None:
        keep &= (t["arrival_ns"] <= horizon_ns).fill_null(False)
    at, t = at[keep.to_numpy()], t.filter(keep)
    c = {name: s.column(name, at) for name in (
        "engine", "scheduled_ns", "prefill_end_ns", "decode_engine", "decode_queued_ns", "decode_scheduled_ns", "cached_tokens",
        "decode_cached_tokens", "handover_tokens", "resumed_tokens", "recomputed_tokens", "preemptions", "prefill_preemptions",
        "status", *(f"cached_tier{i}_tokens" for i in range(TIERS)),
    )}  # fmt: skip
    over = c["decode_engine"] >= 0
    status = c["status"]
    # A router that knows only one engine has sent a refused request there; else nobody knows.
    only = 0 if len(s.plan.engines) == 1 else -1
    engine = np.where((status == REFUSED) & (c["engine"] < 0), only, c["engine"])
    first = _stay(s, t["request"], 0, engine, c)
    passed = over & (c["prefill_end_ns"] >= 0)
    reason = np.select([passed, status == DONE, status == REFUSED], ["handed over", "done", "refused"], "")
    ends = known(np.where(over, c["prefill_end_ns"], -1))
    ends = ends.zip_with(pl.Series(over), t["engine_last_token_ns"]).zip_with(pl.Series(status != REFUSED), t["queued_ns"])
    enqueued = t["queued_ns"] if s.parent.enqueued else pl.Series([None] * t.height, dtype=pl.Int64)
    first = first.with_columns(
        enqueued.alias("enqueued_ns"), t["scheduled_ns"].alias("scheduled_ns"), ends.alias("end_ns"),
        pl.Series("end_reason", reason, dtype=pl.String).replace("", None),
    )  # fmt: skip
    if not over.any():
        return first
    second = _stay(s, t["request"], 1, c["decode_engine"], c).with_columns(
        known(c["decode_queued_ns"]).alias("enqueued_ns"),
        known(c["decode_scheduled_ns"]).alias("scheduled_ns"),
        t["engine_last_token_ns"].alias("end_ns"),
        pl.Series("end_reason", np.where(status == DONE, "done", ""), dtype=pl.String).replace("", None),
    )
    second = second.filter(pl.Series(over & (c["decode_queued_ns"] >= 0)))
    return pl.concat([first, second]).sort("request", "stage")


def _stay(s: Setting, request: pl.Series, stage: int, engine: Ints, c: dict[str, Ints]) -> pl.DataFrame:
    """A stay's names and counts; its times are added by the caller."""
    n = len(engine)
    roles = np.array([e.role for e in s.plan.engines], dtype=object)
    entry = np.where(engine >= 0, roles[engine], "both") if n else np.array([], dtype=object)
    # Who computes a prompt and goes on with it does both, whatever the engine is meant for.
    role = np.full(n, "decode", dtype=object) if stage else np.where((entry == "decode"), "both", entry)
    columns: dict[str, Any] = {
        "request": request,
        "sequence": np.zeros(n, dtype=np.int64),
        "attempt": np.zeros(n, dtype=np.int64),
        "stage": np.full(n, stage, dtype=np.int64),
        "server": s.servers_of(engine),
        "dp_rank": s.ranks[np.maximum(engine, 0)],
        "role": pl.Series(list(role), dtype=pl.String),
    }
    ran = c["status"] != REFUSED
    places: dict[str, Ints] = {}
    if stage:
        places["device"] = np.maximum(c["decode_cached_tokens"], 0)
        places["peer"] = np.maximum(c["handover_tokens"], 0)
    else:
        places["device"] = np.maximum(c["cached_tokens"], 0)
        for i, tier in enumerate(s.plan.tiers):
            place = tier_place(tier)
            places[place] = places.get(place, np.zeros(n, dtype=np.int64)) + np.maximum(c[f"cached_tier{i}_tokens"], 0)
    total = np.sum(list(places.values()), axis=0) if n else np.zeros(0, dtype=np.int64)
    columns["cached_tokens"] = known(np.where(ran, total, -1))
    for place in _PLACES:
        got = places.get(place)
        columns[f"cached_{place}_tokens"] = None if got is None else known(np.where(ran, got, -1))
    # The engine counts both stays together; where both lost it, the last one shows it.
    mine = (c["decode_engine"] < 0) | (c["prefill_preemptions"] == c["preemptions"])
    mine = mine if stage == 0 else ~mine
    for name in ("resumed_tokens", "recomputed_tokens"):
        columns[name] = known(np.where(ran, np.where(mine, np.maximum(c[name], 0), 0), -1))
    return pl.DataFrame(columns, schema_overrides={f"cached_{p}_tokens": pl.Int64 for p in _PLACES})
