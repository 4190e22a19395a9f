"""The plain outline of a request's time, from the stamps of `requests` and `stages`: which interval ends with which stamp."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from hoptrace.analysis.latency.axis import Axis, Cover, Ints, flatten
from hoptrace.reader import Trace

__all__ = ["LABELS", "Outline", "outline", "read_requests", "read_stays"]

# What an interval of the outline, a run of steps or a recorded wait can be. The last seven are evaluated further:
# `arranging` is queueing after a hand-over, where time with room is the hand-over's.
LABELS = (
    "client", "network_in", "proxy", "transfer", "delivery", "unexplained", "prefill", "decode", "preempted", "recompute",
    "host_gap", "skipped", "handover", "queue_slots", "queue_kv", "queue_budget", "queue_full", "queue_room", "queue_unknown",
    "queue", "arranging", "between_prefill", "between_decode", "between", "prefill_steps", "decode_steps",
)  # fmt: skip
L = {name: i for i, name in enumerate(LABELS)}

_STAGE = (
    "request", "sequence", "attempt", "stage", "server", "dp_rank", "role", "prompt_tokens", "enqueued_ns", "scheduled_ns",
    "end_ns", "end_reason", "cached_tokens",
)  # fmt: skip
_NO_RUNS = pl.DataFrame(schema={"request": pl.Int64, "start_ns": pl.Int64, "server": pl.String, "dp_rank": pl.Int64})
_ARRIVAL, _SENT, _RECEIVED, _ENQUEUED, _SCHEDULED, _STAY_END, _RUN_END, _FIRST, _LAST, _FINISH = range(10)
_LATE = 1 << 40


@dataclass(frozen=True)
class Outline:
    """``cover`` partitions the line; ``label`` (index into LABELS) and ``line`` (server) by the cover's rows."""

    cover: Cover
    label: Ints
    line: Ints


_REQUEST = (
    "request", "intended_ns", "sent_ns", "received_ns", "queued_ns", "scheduled_ns", "engine_first_token_ns", "first_token_ns",
    "last_token_ns", "finish_ns", "arrival_ns", "prompt_tokens", "output_tokens", "error",
)  # fmt: skip


def read_requests(trace: Trace, within: tuple[int, int] | None = None) -> pl.DataFrame:
    """The requests' stamps and lengths, ascending, with first and last token taken from `tokens`, else the first from the engine,
    where the row does not say them; ``ttft_token_ns`` is the row's own, of which TTFT is told. ``within``: only of requests
    ``low ≤ request < high``."""
    own = pl.col("first_token_ns").alias("ttft_token_ns")
    requests = _rows(trace, "requests", within).select(*_REQUEST, own).sort("request").collect()
    unknown = requests.filter(pl.col("first_token_ns").is_null() | pl.col("last_token_ns").is_null())["request"]
    if unknown.len():
        low, high = int(unknown[0]), int(unknown[-1]) + 1
        seen = (
            _rows(trace, "tokens", (low, high) if within is not None else None)
            .group_by("request")
            .agg(pl.col("time_ns").min().alias("_first"), pl.col("time_ns").max().alias("_last"))
            .collect(engine="streaming")
        )
        requests = (
            requests.join(seen, on="request", how="left")
            .with_columns(pl.coalesce("first_token_ns", "_first").alias("first_token_ns"))
            .with_columns(pl.coalesce("last_token_ns", "_last").alias("last_token_ns"))
            .drop("_first", "_last")
            .sort("request")
        )
    # Of an answer that came in one piece only the engine saw the first token; of one token the first is the last.
    first = pl.coalesce("first_token_ns", "engine_first_token_ns")
    return requests.with_columns(
        first.alias("first_token_ns"),
        pl.coalesce("last_token_ns", pl.when(pl.col("output_tokens") <= 1).then(first)).alias("last_token_ns"),
    )


def _rows(trace: Trace, table: str, within: tuple[int, int] | None) -> pl.LazyFrame:
    return trace.table(table) if within is None else trace.of_requests(table, *within)


def read_stays(
    trace: Trace,
    requests: pl.DataFrame,
    runs: pl.DataFrame | Callable[[], pl.DataFrame],
    within: tuple[int, int] | None = None,
) -> pl.DataFrame:
    """One row per stay, in order within each request; a request without a row in `stages` gets one from its own stamps.

    Columns: request, order, sequence, server (may be null), dp_rank, role, enqueued_ns, scheduled_ns, end_ns, end_reason,
    finish_ns and failed (of the request), prompt_tokens (less what a cache held), cached_tokens, waits_from_ns (when it was
    enqueued; of the first stay, where nobody saw that, the last that was seen of it before). What the first stay does not know is
    taken from the request, then from its first run of steps. ``runs``: of these requests; where it is a function, it
    is only called if a stay needs them. ``within``: as for :func:`read_requests`.
    """
    own = pl.col("_stages").is_null()
    stages = (
        _rows(trace, "stages", within)
        .select(_STAGE)
        .with_columns(pl.col("sequence").fill_null(0), pl.col("attempt").fill_null(0), pl.lit(1).alias("_stages"))
        .rename({"prompt_tokens": "_own_prompt"})
        .collect()
    )
    if callable(runs):
        runs = runs() if _needs_runs(requests, stages) else _NO_RUNS
    first_run = runs.group_by("request").agg(
        pl.col("start_ns").min().alias("_run_ns"), pl.col("server").sort_by("start_ns").first().alias("_run_server"),
        pl.col("dp_rank").sort_by("start_ns").first().alias("_run_rank"),
    )  # fmt: skip
    base = requests.select(
        "request", "queued_ns", pl.col("scheduled_ns").alias("_scheduled"), "last_token_ns", "finish_ns", "prompt_tokens",
        pl.col("error").is_not_null().alias("failed"), pl.coalesce("received_ns", "sent_ns", "arrival_ns").alias("_came"),
    )  # fmt: skip
    frame = base.join(stages, on="request", how="left").join(first_run, on="request", how="left")
    frame = frame.sort("request", "attempt", "stage", "sequence", nulls_last=False).with_columns(
        pl.int_range(pl.len()).over("request").alias("order")
    )
    first = pl.col("order") == 0
    return frame.select(
        "request",
        "order",
        pl.col("sequence").fill_null(0),
        pl.coalesce("server", pl.when(own).then("_run_server")).alias("server"),
        pl.coalesce("dp_rank", pl.when(own).then("_run_rank"), pl.lit(0)).alias("dp_rank"),
        "role",
        pl.coalesce("enqueued_ns", pl.when(first).then("queued_ns")).alias("enqueued_ns"),
        pl.coalesce("scheduled_ns", pl.when(first).then("_scheduled"), pl.when(first).then("_run_ns")).alias("scheduled_ns"),
        pl.coalesce("end_ns", pl.when(own).then(pl.coalesce("last_token_ns", "finish_ns"))).alias("end_ns"),
        "end_reason",
        "finish_ns",
        "failed",
        (pl.coalesce("_own_prompt", "prompt_tokens") - pl.col("cached_tokens").fill_null(0)).alias("prompt_tokens"),
        "cached_tokens",
        pl.coalesce("enqueued_ns", pl.when(first).then(pl.coalesce("queued_ns", "_came"))).alias("waits_from_ns"),
    )


def _needs_runs(requests: pl.DataFrame, stages: pl.DataFrame) -> bool:
    """Whether a stay's server or first work may have to come from the request's steps."""
    told = stages.group_by("request").agg(pl.col("scheduled_ns").is_null().any().alias("blank"))
    known = requests.select("request", "scheduled_ns").join(told, on="request", how="left")
    return bool((known["blank"].is_null() | (known["blank"] & known["scheduled_ns"].is_null())).any())


def outline(
    axis: Axis, requests: pl.DataFrame, stays: pl.DataFrame, stay_line: Ints, run_end: Ints, complete: npt.NDArray[np.bool_]
) -> Outline:
    """Partition the line by the stamps.

    ``requests``: those on the axis, in its order. ``stays``: theirs. ``stay_line``: server index of each stay.
    ``run_end``: end of the last run of steps of each request, −1 where it has none. ``complete``: whether those steps account
    for all of its output.
    """
    n = len(axis.request)
    every = np.arange(n)
    has_runs = run_end >= 0
    at_stay = axis.find(stays["request"].to_numpy())
    order = stays["order"].to_numpy() * 3 + 10
    main = stays["sequence"].to_numpy() == 0
    # A router's stay lasts as long as those that it hands the request on to: of it only the beginning is a mark.
    routes = (stays["role"] == "route").fill_null(False).to_numpy()
    works = main & ~routes
    several = np.bincount(at_stay[works], minlength=n) > 1 if n else np.zeros(0, dtype=bool)
    last_order = np.zeros(n, dtype=np.int64)
    np.maximum.at(last_order, at_stay[works], order[works])

    position: list[Ints] = []
    rank: list[Ints] = []
    kind: list[Ints] = []
    time: list[Ints] = []
    stay: list[Ints] = []

    def add(
        k: int, at: Ints, o: Ints | int, values: pl.Series, which: npt.NDArray[np.bool_] | None = None, row: Ints | None = None
    ) -> None:
        known = values.is_not_null().to_numpy()
        if which is not None:
            known = known & which
        position.append(at[known])
        rank.append(np.broadcast_to(np.asarray(o, dtype=np.int64), at.shape)[known])
        kind.append(np.full(int(known.sum()), k, dtype=np.int64))
        time.append(values.fill_null(0).to_numpy()[known])
        stay.append((row if row is not None else np.full(len(at), -1, dtype=np.int64))[known])

    rows = np.arange(stays.height)
    add(_ARRIVAL, every, 0, requests["arrival_ns"])
    add(_SENT, every, 1, requests["sent_ns"])
    add(_RECEIVED, every, 2, requests["received_ns"])
    add(_ENQUEUED, at_stay, order, stays["enqueued_ns"], main, rows)
    add(_SCHEDULED, at_stay, order + 1, stays["scheduled_ns"], works, rows)
    add(_STAY_END, at_stay, order + 2, stays["end_ns"], works & (order < last_order[at_stay]), rows)
    add(_RUN_END, every, _LATE, pl.Series(run_end, dtype=pl.Int64), has_runs)
    first = requests["first_token_ns"]
    # Of several stays (a retry) it is that of the one that began last before it; after a hand-over roles tell more.
    over = _handed_over(stays)
    passed = np.bincount(at_stay[works & over], minlength=n) > 0 if n else np.zeros(0, dtype=bool)
    add(_FIRST, every, _of_stay(at_stay, order, stays, first, works & several[at_stay]), first, ~has_runs & ~(several & passed))
    add(_LAST, every, _LATE + 2, requests["last_token_ns"])
    add(_FINISH, every, _LATE + 3, requests["finish_ns"])

    pos, ordering = np.concatenate(position), np.concatenate(rank)
    sort = np.lexsort((ordering, pos))
    pos, kinds, stay_row = pos[sort], np.concatenate(kind)[sort], np.concatenate(stay)[sort]
    # A stamp out of order is taken as the one before it: never a negative part.
    x = np.maximum.accumulate(axis.place(pos, np.concatenate(time)[sort])) if len(pos) else pos
    same = pos[1:] == pos[:-1]
    left, right = kinds[:-1][same], kinds[1:][same]
    # The server of an interval: that of the stay that it leads to, else of the stay that it follows.
    left_stay = stay_row[:-1][same]
    recent = np.maximum.accumulate(np.where(stay_row >= 0, np.arange(len(pos)), -1)) if len(pos) else pos
    near = stay_row[np.maximum(recent, 0)]
    near = np.where((recent >= 0) & (pos[np.maximum(recent, 0)] == pos), near, -1)[:-1][same]
    right_stay = stay_row[1:][same]
    chosen = np.where(right_stay >= 0, right_stay, near)
    line = np.where(chosen >= 0, stay_line[chosen], -1) if len(stay_line) else np.full(len(left), -1, dtype=np.int64)
    roles = stays["role"].fill_null("").to_numpy()
    role = np.where(left_stay >= 0, roles[left_stay], "") if len(roles) else np.full(len(left), "")
    owner = pos[:-1][same]
    last = _last_end(pos, kinds, stay_row)[:-1][same]
    lost = (stays["end_reason"] == "preempted").fill_null(False).to_numpy()
    after, lost_place = (np.where(last >= 0, x[last], False) if len(x) else np.zeros(len(left), dtype=bool) for x in (over, lost))
    label = _label(left, right, role, has_runs[owner], complete[owner], after)
    label[lost_place & ((right == _ENQUEUED) | (right == _SCHEDULED))] = L["preempted"]
    return Outline(flatten(x[:-1][same], x[1:][same]), label, line.astype(np.int64))


def _of_stay(at: Ints, order: Ints, stays: pl.DataFrame, first: pl.Series, which: npt.NDArray[np.bool_]) -> Ints:
    """The rank of each request's first token: after the begin of the last of its stays (``which``) that began before it, else
    after all of them."""
    found = np.full(first.len(), _LATE + 1, dtype=np.int64)
    begin = stays["scheduled_ns"]
    known = which & begin.is_not_null().to_numpy()
    time = first.fill_null(np.iinfo(np.int64).min).to_numpy()
    before = known & (begin.fill_null(0).to_numpy() <= time[at])
    latest = np.full(first.len(), -1, dtype=np.int64)
    np.maximum.at(latest, at[before], order[before] + 1)
    found[latest >= 0] = latest[latest >= 0]
    return found


def _last_end(pos: Ints, kinds: Ints, stay_row: Ints) -> Ints:
    """For each stamp, the stay of its request that ended last, at it or before it; −1 where none has."""
    ended = np.maximum.accumulate(np.where(kinds == _STAY_END, np.arange(len(pos)), -1)) if len(pos) else pos
    at = np.maximum(ended, 0)
    return np.where((ended >= 0) & (pos[at] == pos), stay_row[at], -1) if len(pos) else pos


def _handed_over(stays: pl.DataFrame) -> npt.NDArray[np.bool_]:
    """Whether each stay ended with a hand-over: it says so, or it only computed the prompt (or the encoder's part of it) and says
    nothing else. What failed or was refused is tried again: that is the router's time."""
    reason = pl.col("end_reason")
    over = (reason == "handed over") | (pl.col("role").is_in(["encode", "prefill"]) & (reason.is_null() | (reason == "done")))
    found: npt.NDArray[np.bool_] = stays.select(over.fill_null(False)).to_series().to_numpy()
    return found


def _label(
    left: Ints,
    right: Ints,
    role: npt.NDArray[np.object_],
    steps: npt.NDArray[np.bool_],
    complete: npt.NDArray[np.bool_],
    after_handover: npt.NDArray[np.bool_],
) -> Ints:
    """The label of the interval between two consecutive stamps."""
    unexplained = L["unexplained"]
    label = np.full(len(left), unexplained, dtype=np.int64)
    label[right == _SENT] = L["client"]
    label[right == _RECEIVED] = L["network_in"]
    label[right == _ENQUEUED] = L["proxy"]
    label[right == _SCHEDULED] = L["queue"]
    label[(right == _ENQUEUED) & after_handover] = L["handover"]
    label[(right == _SCHEDULED) & after_handover] = L["arranging"]
    running = left == _SCHEDULED
    label[running & ((right == _STAY_END) | (right == _LAST)) & np.isin(role, ("encode", "prefill"))] = L["prefill"]
    label[running & ((right == _STAY_END) | (right == _LAST)) & (role == "decode")] = L["decode"]
    # Between steps; of a server whose steps nobody knows, its role says what it did.
    between = running & steps & ((right == _STAY_END) | (right == _RUN_END))
    label[between] = L["between"]
    label[between & np.isin(role, ("encode", "prefill"))] = L["between_prefill"]
    label[between & (role == "decode")] = L["between_decode"]
    label[running & (right == _FIRST)] = L["prefill"]
    label[(left == _FIRST) & ((right == _STAY_END) | (right == _LAST) | (right == _FINISH))] = L["decode"]
    label[(left == _RUN_END) & complete] = L["delivery"]
    label[(left == _LAST) & (right == _FINISH)] = L["delivery"]
    return label
