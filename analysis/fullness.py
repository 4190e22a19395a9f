"""When a server is full: its slots are taken, its KV has no space for the head of the queue, or the token budget is used up."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import polars as pl

from hoptrace.analysis.axis import Ints
from hoptrace.analysis.serverstate import FAR, Samples, ServerState
from hoptrace.analysis.stepline import Busy
from hoptrace.manifest import Server

__all__ = ["Fullness", "fullness"]

Bools = npt.NDArray[np.bool_]
Spans = tuple[Ints, Ints]  # starts and ends
_NEVER: Spans = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


@dataclass(frozen=True)
class Fullness:
    """``by``: when the server is known to be full, by what was full (:data:`hoptrace.analysis.parts.FULL`); disjoint: where
    several were, the first in that order. ``known``: when it is known whether it is full (a superset of them all).

    ``certain``: whether there is any time with room known, so whether slots are known at all. ``told``: causes that the trace
    could tell if they were there."""

    by: dict[str, Busy]
    known: Busy
    certain: bool
    told: frozenset[str]


def fullness(stays: pl.DataFrame, steps: pl.DataFrame, server: Server | None, state: ServerState | None = None) -> Fullness:
    """For one (server, rank).

    ``stays``: enqueued_ns, scheduled_ns, end_ns, end_reason, finish_ns, failed, prompt_tokens (less what was cached), of all
    requests, finished or not. ``steps``: start_ns, end_ns, prefill_tokens, decode_tokens, kv_used_tokens, kv_capacity_tokens,
    ascending.
    ``state``: slots over time, absences and counters; without it the manifest's number of slots (``max-num-seqs``,
    ``--parallel``; per rank) holds always.
    """
    state = state if state is not None else ServerState.constant(server.max_sequences if server is not None else None)
    if state.queued and steps.height:
        state = replace(state, deferred=_passed_over(state.deferred, stays, steps["start_ns"].to_numpy()))
    sure, maybe = _holders(stays, state)
    taken, deferred, known = _slots(sure, maybe, state)
    found = {"slots": taken, "kv": _NEVER, "budget": _NEVER, "full": deferred}
    told = {name for name, there in (("slots", (state.slots > 0).any()), ("full", len(state.deferred.time))) if there}
    if steps.height:
        if (kv := _kv(steps, stays, _merged(sure, maybe), server)) is not None:
            found["kv"] = kv
            told.add("kv")
        if (budget := _budget(steps, server.max_batched_tokens if server is not None else None)) is not None:
            found["budget"] = budget
            told.add("budget")
    union = _union([known, *found.values()])
    return Fullness(_first(found), union, bool((state.slots > 0).any()), frozenset(told))


def _passed_over(waiting: Samples, stays: pl.DataFrame, starts: Ints) -> Samples:
    """Less those who came after the last step began: they wait for the next one, whatever room there is."""
    came = stays.filter(pl.col("enqueued_ns").is_not_null())
    begin = came["enqueued_ns"].to_numpy()
    looked_at = np.append(starts, FAR)[np.searchsorted(starts, begin, side="left")]
    until = np.minimum(looked_at, came.select(pl.coalesce("scheduled_ns", "end_ns", pl.lit(FAR))).to_series().to_numpy())
    until = np.maximum(until, begin)
    low, high = waiting.time - waiting.uncertainty, waiting.time + waiting.uncertainty
    fresh = np.searchsorted(np.sort(begin), high, side="right") - np.searchsorted(np.sort(until), low, side="right")
    return replace(waiting, value=np.maximum(waiting.value - fresh, 0))


def _union(found: list[Spans]) -> Busy:
    start, end = (np.concatenate([f[i] for f in found]) for i in (0, 1))
    order = np.lexsort((end, start))
    return Busy.of(start[order], end[order])


def _first(found: dict[str, Spans]) -> dict[str, Busy]:
    """Each moment to the first of the causes that hold it."""
    causes = {name: _union([x]) for name, x in found.items()}
    edges = np.unique(np.concatenate([np.concatenate([c.start, c.end]) for c in causes.values()]))
    start, end = edges[:-1], edges[1:]
    left = np.ones(len(start), dtype=bool)
    out = {}
    for name, cause in causes.items():
        mine = left & (cause.before(end) > cause.before(start))
        out[name] = Busy.of(start[mine], end[mine])
        left &= ~mine
    return out


def _slots(sure: Spans, maybe: Spans, state: ServerState) -> tuple[Spans, Spans, Spans]:
    """Intervals (no slot free, full of what nobody says, known to be full or not).

    By the stamps where they decide, else by the counters, else unknown.

    Stamps decide where those that surely hold a slot fill all, or where all that may hold one do not. Requests that a sample
    saw deferred speak against room: the server did work that no stamp shows.
    """
    edges = (*sure, *maybe, state.away_start, state.away_end, state.slots_from, np.array([-FAR, FAR]))
    read = (state.processing, state.deferred)
    at = np.unique(np.concatenate([*edges, *(x for r in read for x in (r.start, r.end))]))

    def stamps(t: Ints) -> tuple[Bools, Bools]:
        slots = _slots_at(state, t)
        taken = _count(sure, t)
        return (slots > 0) & (taken >= slots), (slots > 0) & (taken + _count(maybe, t) < slots)

    full, room = stamps(at)
    slots = _slots_at(state, at)
    _, processing = state.processing.at(at)
    which, deferred = state.deferred.at(at)
    d = state.deferred
    against = (d.value > 0) & stamps(d.time - d.uncertainty)[1] & stamps(d.time + d.uncertainty)[1]
    if len(against):
        room &= ~((which >= 0) & against[np.maximum(which, 0)])
    open_ = ~full & ~room
    full |= open_ & (slots > 0) & (processing >= slots)
    some = open_ & ~full & (deferred > 0)
    room |= open_ & ~full & ~some & (processing >= 0) & (processing < slots)
    there = _count((state.away_start, state.away_end), at) == 0
    until = np.append(at[1:], at[-1])
    full, some, known = full & there, some & there, (full | some | room) & there
    return (at[full], until[full]), (at[some], until[some]), (at[known], until[known])


def _holders(stays: pl.DataFrame, state: ServerState) -> tuple[Spans, Spans]:
    """Intervals in which stays hold a slot for sure, and those in which they may.

    May: a request whose client went before the engine's first work was seen (the engine may compute on, for nobody) – until the
    server was seen idle or went away; one whose first work or end is not known. One that has not finished holds its slot.
    """
    c = pl.col
    gone = (c("scheduled_ns").is_null() & (c("end_reason") == "cancelled")).fill_null(False)
    gone = gone | (c("end_ns").is_null() & c("failed"))
    lost = c("end_ns").is_null() & c("finish_ns").is_not_null()  # it finished, but who knows when it left this server
    begin = pl.coalesce("scheduled_ns", "enqueued_ns")
    end = pl.when(gone).then(FAR).otherwise(pl.coalesce("end_ns", pl.when(lost).then("finish_ns"), pl.lit(FAR)))
    unsure = gone | c("scheduled_ns").is_null() | lost
    frame = stays.filter(c("end_reason").fill_null("") != "refused").select(
        begin.alias("begin"),
        pl.max_horizontal(begin, end).alias("end"),
        pl.coalesce("end_ns", begin).alias("left"),
        unsure.alias("unsure"),
        gone.alias("gone"),
    )
    frame = frame.drop_nulls("begin")
    start, stop = frame["begin"].to_numpy(), frame["end"].to_numpy().copy()
    idle = state.processing.value == 0
    if idle.any():
        seen = np.append((state.processing.time - state.processing.uncertainty)[idle], FAR)
        i = np.searchsorted(seen[:-1], frame["left"].to_numpy(), side="right")
        stop = np.where(frame["gone"].to_numpy(), np.minimum(stop, np.maximum(seen[i], start)), stop)
    if len(state.away_start):
        ends = np.append(state.away_start, FAR)
        stop = np.minimum(stop, np.maximum(ends[np.searchsorted(state.away_start, start, side="left")], start))
    unknown = frame["unsure"].to_numpy()
    return (start[~unknown], stop[~unknown]), (start[unknown], stop[unknown])


def _count(intervals: Spans, t: Ints) -> Ints:
    """How many intervals hold t; a place that is freed and taken at once was never both."""
    start, end = (np.sort(x) for x in intervals)
    return (np.searchsorted(start, t, side="right") - np.searchsorted(end, t, side="right")).astype(np.int64)


def _slots_at(state: ServerState, t: Ints) -> Ints:
    found: Ints = state.slots[np.maximum(np.searchsorted(state.slots_from, t, side="right") - 1, 0)]
    return found


def _merged(sure: Spans, maybe: Spans) -> Spans:
    """When anyone holds a slot, or may: disjoint and ascending, those that touch are one."""
    start, end = (np.concatenate([sure[i], maybe[i]]) for i in (0, 1))
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order]) if len(end) else end
    new = np.append(True, start[1:] > end[:-1]) if len(start) else np.zeros(0, dtype=bool)
    return start[new], end[np.append(new[1:], True)] if len(start) else end


def _budget(steps: pl.DataFrame, tokens: int | None) -> Spans | None:
    """Steps that took all tokens that a step may; null where nobody tells."""
    if not tokens or steps["prefill_tokens"].null_count() == steps.height:
        return None
    spent = steps.filter(pl.col("prefill_tokens") + pl.coalesce("decode_tokens", "decode_requests", pl.lit(0)) >= tokens)
    return spent["start_ns"].to_numpy(), spent["end_ns"].to_numpy()


def _kv(steps: pl.DataFrame, stays: pl.DataFrame, held: Spans, server: Server | None) -> Spans | None:
    """Where the free KV is less than the first in the queue needs; null where nobody tells. What a step says holds until the
    next one begins, but no longer than anyone is on the server (``held``): who leaves frees it."""
    capacity = pl.coalesce(
        "kv_capacity_tokens", pl.lit(server.kv_capacity_tokens if server is not None else None, dtype=pl.Int64)
    )
    frame = steps.select("start_ns", "end_ns", "kv_used_tokens", capacity.alias("capacity")).with_columns(
        pl.col("start_ns").shift(-1, fill_value=FAR).alias("until_ns")
    )
    frame = frame.drop_nulls(["kv_used_tokens", "capacity"])
    if not frame.height:
        return None
    block = (server.block_size_tokens if server is not None else None) or 1
    queue = stays.filter(pl.col("enqueued_ns").is_not_null() & pl.col("scheduled_ns").is_not_null()).sort("enqueued_ns")
    start = frame["start_ns"].to_numpy()
    need = np.full(len(start), block, dtype=np.int64)
    if queue.height:
        # First come, first served: the head at a moment is the first by enqueuing that is scheduled after it.
        enqueued, prompt = queue["enqueued_ns"].to_numpy(), queue["prompt_tokens"].fill_null(0).to_numpy()
        reach = np.maximum.accumulate(queue["scheduled_ns"].to_numpy())
        head = np.minimum(np.searchsorted(reach, start, side="right"), len(reach) - 1)
        waits = (reach[head] > start) & (enqueued[head] <= start)
        need = np.where(waits, np.maximum(prompt[head], block), block)
    full = (frame["capacity"] - frame["kv_used_tokens"]).to_numpy() < need
    end, until = frame["end_ns"].to_numpy(), frame["until_ns"].to_numpy()
    i = np.searchsorted(held[0], end, side="right") - 1
    there = (i >= 0) & (end < held[1][np.maximum(i, 0)]) if len(held[0]) else np.zeros(len(end), dtype=bool)
    leaves = held[1][np.maximum(i, 0)] if len(held[0]) else end
    until = np.minimum(until, np.where(there, leaves, end))
    return start[full], np.maximum(until, start)[full]
