"""The waits of a replay: what a request waited for before and between its steps, each nanosecond at most once."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from hoptrace.replay.outcome import REFUSED
from hoptrace.replay.rows.runlog import RunLog
from hoptrace.replay.rows.steplog import REASONS
from hoptrace.replay.setting import Ints, Setting

__all__ = ["waits"]

_HAND_OVER = "hand-over"


def waits(s: Setting, runs: RunLog, low: int, high: int) -> pl.DataFrame:
    """Rows of the table `waits`, of the requests ``s.order[low:high]``.

    *message*: received → enqueued, where the parent has such waits, as long as the parent's median; and from the end of the
    prompt until the decode engine's queue has the request. *queue*: on the server, enqueued → ready, as long as the parent's
    median (a recording shows that time as queueing too: the request holds no place yet); on the running step, ready → the first
    pass that could have taken the request. *transfer*: while it is loaded or handed over and can do nothing else. *capacity*:
    from there until it was scheduled, on what was full for most of that time, and while it was preempted; ``count`` is the steps
    waited. Those who still wait at the end wait until then.
    """
    at = s.order[low:high]
    at = at[(s.column("status", at) != REFUSED) & (s.column("routed_ns", at) >= 0)]
    oh = s.overheads
    arrival, engine = s.column("arrival_ns", at), s.column("engine", at)
    received = arrival + oh.arrival_to_received_ns
    enqueued = received + oh.received_to_enqueued_ns
    ready = s.column("routed_ns", at)
    number = s.work.request[at]
    here = engine >= 0
    parts = [
        _rows(s, number, engine, enqueued, ready, "queue", "server", "assumed"),
        *_stay(s, at[here], "engine", ready[here], "first_seen_ns", "scheduled_ns", "load_start_ns", "load_end_ns"),
        *_handed_over(s, at),
        _preempted(s, runs, low, high),
    ]
    if s.parent.message_on is not None:
        parts.append(_rows(s, number, engine, received, enqueued, "message", s.parent.message_on, "assumed"))
    return pl.concat([p for p in parts if p.height], how="diagonal") if any(p.height for p in parts) else parts[0]


def _handed_over(s: Setting, at: Ints) -> list[pl.DataFrame]:
    """From the end of the prompt on the prefill engine until the decode engine takes the request up."""
    at = at[(s.column("decode_engine", at) >= 0) & (s.column("prefill_end_ns", at) >= 0)]
    if not len(at):
        return []
    number, engine = s.work.request[at], s.column("decode_engine", at)
    over, queued = s.column("prefill_end_ns", at), s.column("decode_queued_ns", at)
    begin, end = s.column("handover_start_ns", at), s.column("handover_end_ns", at)
    until = np.where(queued >= 0, queued, s.outcome.end_ns)
    # Arranging and sending may overlap (push): what ends later is what it waits for.
    sent_later = (begin >= 0) & (end > until)
    arranged = np.where(sent_later, np.clip(begin, over, until), until)
    parts = [_rows(s, number, engine, over, arranged, "message", _HAND_OVER, "derived")]
    there = queued >= 0
    early = there & sent_later & (begin < queued)
    late = np.minimum(end, queued)
    parts.append(_rows(s, number[early], engine[early], arranged[early], late[early], "transfer", "kv", "derived"))
    rest = at[there]
    parts += _stay(
        s, rest, "decode_engine", queued[there], "decode_seen_ns", "decode_scheduled_ns", "handover_start_ns", "handover_end_ns"
    )  # fmt: skip
    return parts


def _stay(s: Setting, at: Ints, engine: str, ready: Ints, seen: str, scheduled: str, begin: str, end: str) -> list[pl.DataFrame]:
    """In a queue from ``ready``: on the running step until it was seen, then on capacity; a transfer between ``begin`` and
    ``end`` splits that in two."""
    if not len(at):
        return []
    number, e = s.work.request[at], s.column(engine, at)
    goes = s.column(scheduled, at)
    goes = np.where(goes >= 0, goes, s.outcome.end_ns)
    looked = s.column(seen, at)
    looked = np.clip(np.where(looked >= 0, looked, goes), ready, goes)
    t0, t1 = s.column(begin, at), s.column(end, at)
    moved = (t0 >= 0) & (np.where(t1 >= 0, t1, s.outcome.end_ns) > ready)
    t0 = np.where(moved, np.clip(t0, ready, goes), goes)
    t1 = np.where(moved, np.clip(np.where(t1 >= 0, t1, goes), t0, goes), goes)
    looked = np.minimum(looked, t0)
    parts = [
        _rows(s, number, e, ready, looked, "queue", "step", "derived"),
        *_full(s, number, e, looked, t0),
        _rows(s, number, e, t0, t1, "transfer", "kv", "derived"),
    ]
    if moved.any():
        number, e, t1, goes = (x[moved] for x in (number, e, t1, goes))
        next_step = s.steps.first_from(e, t1)
        again = np.minimum(np.maximum(s.steps.start_of(e, next_step), t1), goes)
        parts += [_rows(s, number, e, t1, again, "queue", "step", "derived"), *_full(s, number, e, again, goes)]
    return parts


def _rows(
    s: Setting, number: Ints, engine: Ints, start: Ints, end: Ints, kind: str, on: str, basis: str, count: Ints | None = None
) -> pl.DataFrame:
    keep = end > start
    columns: dict[str, Any] = {
        "request": number[keep], "start_ns": start[keep], "end_ns": end[keep], "server": s.servers_of(engine[keep]),
        "count": np.ones(int(keep.sum()), dtype=np.int64) if count is None else count[keep],
    }  # fmt: skip
    frame = pl.DataFrame(columns, schema_overrides=dict.fromkeys(("request", "start_ns", "end_ns", "count"), pl.Int64))
    return frame.with_columns(pl.lit(kind).alias("kind"), pl.lit(on).alias("on"), pl.lit(basis).alias("basis"))


def _full(s: Setting, number: Ints, engine: Ints, start: Ints, end: Ints) -> list[pl.DataFrame]:
    """Waiting though the engine looked: on slots, KV or the token budget, whichever was full for most of the time; on nothing,
    where none was."""
    keep = end > start
    if not keep.any():
        return []
    number, engine, start, end = (x[keep] for x in (number, engine, start, end))
    first, last = s.steps.first_from(engine, start), s.steps.first_from(engine, end)
    why, _ = s.steps.stood(engine, first, last)
    parts = []
    for code, on in (*REASONS.items(), (0, "step")):
        of = why == code
        if of.any():
            kind = "capacity" if code else "queue"
            n = np.maximum(last - first, 1)[of]
            parts.append(_rows(s, number[of], engine[of], start[of], end[of], kind, on, "derived", n))
    return parts


def _preempted(s: Setting, runs: RunLog, low: int, high: int) -> pl.DataFrame:
    whose, engine, first, last = runs.lost(low, high)
    start, end = s.steps.start_of(engine, first), s.steps.start_of(engine, last + 1)
    number = s.work.request[s.order[low:high]][whose]
    return _rows(s, number, engine, start, end, "capacity", "kv", "derived", last - first + 1)
