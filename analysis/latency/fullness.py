"""When a server is full: its slots are taken, its KV has no space for the head of the queue, or the token budget is used up."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import polars as pl

from hoptrace.analysis.latency.axis import Ints, distinct
from hoptrace.analysis.latency.serverstate import FAR, Samples, ServerState
from hoptrace.analysis.latency.stepline import Busy
from hoptrace.manifest import Server

__all__ = ["Fullness", "fullness"]

Bools = npt.NDArray[np.bool_]
Spans = tuple[Ints, Ints]  # starts and ends
_NEVER: Spans = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


@dataclass(frozen=True)
class Fullness:
    """``by``: when the server is known to be full, by what was full (:data:`parts.FULL`); disjoint: where
    several were, the first in that order. ``known``: when it is known whether it is full (a superset of them all).

    ``certain``: whether there is any time with room known, so whether slots are known at all. ``told``: causes that the trace
    could tell if they were there."""

    by: dict[str, Busy]
    known: Busy
    certain: bool
    told: frozenset[str]


def fullness(
    stays: pl.DataFrame,
    steps: pl.DataFrame,
    server: Server | None,
    state: ServerState | None = None,
    lost: pl.DataFrame | None = None,
) -> Fullness:
    """For one (server, rank).

    ``stays``: enqueued_ns, waits_from_ns, scheduled_ns, end_ns, end_reason, finish_ns, failed, prompt_tokens (less what was
    cached), of all requests, finished or not. ``steps``: start_ns, end_ns, prefill_tokens, decode_tokens, kv_used_tokens,
    kv_capacity_tokens, preempted, queued_decode_requests, queued_decode_context_tokens, ascending.
    ``state``: slots over time, absences and counters; without it the manifest's number of slots (``max-num-seqs``,
    ``--parallel``; per rank) holds always. ``lost``: start_ns, end_ns of the times in which a stay had lost its slot (preempted).
    """
    state = state if state is not None else ServerState.constant(server.max_sequences if server is not None else None)
    gone = _NEVER if lost is None else (lost["start_ns"].to_numpy(), lost["end_ns"].to_numpy())
    kv = _kv(steps, stays, server, gone) if steps.height else None
    budget = _budget(steps, server.max_batched_tokens if server is not None else None) if steps.height else None
    if state.queued and steps.height:
        seen = kv is not None and budget is not None
        state = replace(state, deferred=_unexplained(state.deferred, stays, steps["start_ns"].to_numpy(), seen=seen))
    sure, maybe = _holders(stays, state)
    taken, deferred, known = _slots(sure, maybe, gone, state)
    found = {"slots": taken, "kv": _NEVER, "budget": _NEVER, "full": deferred}
    told = {name for name, there in (("slots", (state.slots > 0).any()), ("full", len(state.deferred.time))) if there}
    until = _until(steps, _merged(sure, maybe)) if kv is not None or budget is not None else None
    if kv is not None and until is not None and (blind := _head_unknown(steps, stays) & ~kv).any():
        # Nobody knows whether what is free would have done for a head of unknown length.
        known = _both(known, _outside((steps["start_ns"].to_numpy()[blind], until[blind])))
    for name, full in (("kv", kv), ("budget", budget)):
        if full is not None and until is not None:
            found[name] = steps["start_ns"].to_numpy()[full], until[full]
            told.add(name)
    if kv is None and (sampled := _sampled_kv(state.kv_used, stays, server)) is not None:
        found["kv"] = sampled
        told.add("kv")
    if kv is None and server is not None and server.block_size_tokens and not server.config.get("kv_unlimited"):
        # A pool of blocks may be full while slots are free: where nobody says how much of it is used, nobody knows of room.
        known = _both(known, _NEVER if state.kv_used is None else (state.kv_used.start, state.kv_used.end))
    union = _union([known, *found.values()])
    return Fullness(_first(found), union, bool((state.slots > 0).any()), frozenset(told))


def _unexplained(waiting: Samples, stays: pl.DataFrame, starts: Ints, *, seen: bool) -> Samples:
    """Samples of all who wait, less those that the stamps explain.

    Who came after the last step began waits for the next one, whatever room there is. Where the steps tell KV and budget
    (``seen``), they say what the others wait for. What is left over is load that no stamp shows. An engine writes its figures
    once a step, so a sample may speak of the step before the last.
    """
    came = stays.filter(pl.col("enqueued_ns").is_not_null())
    begin = came["enqueued_ns"].to_numpy()
    until = came.select(pl.coalesce("scheduled_ns", "end_ns", pl.lit(FAR))).to_series().to_numpy()
    if not seen:
        until = np.minimum(until, np.append(starts, FAR)[np.searchsorted(starts, begin, side="left")])
    until = np.maximum(until, begin)
    low, high = waiting.time - waiting.uncertainty, waiting.time + waiting.uncertainty
    last = np.searchsorted(starts, low, side="right") - 2
    low = np.where(last >= 0, starts[np.maximum(last, 0)], low)
    own = np.searchsorted(np.sort(begin), high, side="right") - np.searchsorted(np.sort(until), low, side="left")
    return replace(waiting, value=np.maximum(waiting.value - own, 0))


def _both(a: Spans, b: Spans) -> Spans:
    """When both are."""
    first, second = _union([a]), _union([b])
    edges = distinct(np.concatenate([first.start, first.end, second.start, second.end]))
    start, end = edges[:-1], edges[1:]
    inside = (first.before(end) > first.before(start)) & (second.before(end) > second.before(start))
    return start[inside], end[inside]


def _outside(spans: Spans) -> Spans:
    """When none of them is."""
    all_ = _union([spans])
    return np.append(-FAR, all_.end), np.append(all_.start, FAR)


def _union(found: list[Spans]) -> Busy:
    start, end = (np.concatenate([f[i] for f in found]) for i in (0, 1))
    order = np.lexsort((end, start))
    return Busy.of(start[order], end[order])


def _first(found: dict[str, Spans]) -> dict[str, Busy]:
    """Each moment to the first of the causes that hold it."""
    causes = {name: _union([x]) for name, x in found.items()}
    edges = distinct(np.concatenate([np.concatenate([c.start, c.end]) for c in causes.values()]))
    start, end = edges[:-1], edges[1:]
    left = np.ones(len(start), dtype=bool)
    out = {}
    for name, cause in causes.items():
        mine = left & (cause.before(end) > cause.before(start))
        out[name] = Busy.of(start[mine], end[mine])
        left &= ~mine
    return out


def _slots(sure: Spans, maybe: Spans, lost: Spans, state: ServerState) -> tuple[Spans, Spans, Spans]:
    """Intervals (no slot free, full of what nobody says, known to be full or not).

    By the stamps where they decide, else by the counters, else unknown.

    Stamps decide where those that surely hold a slot fill all, or where all that may hold one do not. Requests that a sample
    saw deferred speak against room: the server did work that no stamp shows.
    """
    edges = (*sure, *maybe, *lost, state.away_start, state.away_end, state.slots_from, np.array([-FAR, FAR]))
    read = (state.processing, state.deferred)
    at = distinct(np.concatenate([*edges, *(x for r in read for x in (r.start, r.end))]))

    def stamps(t: Ints) -> tuple[Bools, Bools]:
        slots = _slots_at(state, t)
        taken = _count(sure, t) - _count(lost, t)
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


def _until(steps: pl.DataFrame, held: Spans) -> Ints:
    """How long what each step says holds: until the next one begins, since only then the queue is looked at again; but no longer
    than anyone is on the server (``held``): who leaves frees his KV, and an idle server takes who comes."""
    start, end = steps["start_ns"].to_numpy(), steps["end_ns"].to_numpy()
    following = np.append(start[1:], FAR)
    if not len(held[0]):
        return np.asarray(np.maximum(np.minimum(following, end), start), dtype=np.int64)
    i = np.searchsorted(held[0], end, side="right") - 1
    leaves = held[1][np.maximum(i, 0)]
    there = (i >= 0) & (end < leaves)
    return np.asarray(np.maximum(np.minimum(following, np.where(there, leaves, end)), start), dtype=np.int64)


def _budget(steps: pl.DataFrame, tokens: int | None) -> Bools | None:
    """Which steps took all tokens that a step may; null where nobody tells."""
    if not tokens or steps["prefill_tokens"].null_count() == steps.height:
        return None
    spent = pl.col("prefill_tokens") + pl.coalesce("decode_tokens", "decode_requests", pl.lit(0)) >= tokens
    found: Bools = steps.select(spent.fill_null(False)).to_series().to_numpy()
    return found


def _kv(steps: pl.DataFrame, stays: pl.DataFrame, server: Server | None, lost: Spans) -> Bools | None:
    """In which steps the free KV is less than the first in the queue needs; null where nobody tells."""
    capacity = pl.coalesce(
        "kv_capacity_tokens", pl.lit(server.kv_capacity_tokens if server is not None else None, dtype=pl.Int64)
    )
    free = steps.select(capacity - pl.col("kv_used_tokens")).to_series()
    if free.null_count() == len(free):
        return None
    at, left = steps["start_ns"].to_numpy(), free.fill_null(0).to_numpy()
    little = _preempted(steps, left, _too_little(at, left, stays, server), _count(lost, at) > 0, _block(server))
    return free.is_not_null().to_numpy() & little


def _preempted(steps: pl.DataFrame, free: Ints, little: Bools, lost: Bools, block: int) -> Bools:
    """``little`` where nobody was preempted. Who was stands at the head of the queue (vLLM puts him before all others, and admits
    nobody in a step that preempts), and needs what he had; where nobody tells how much that was, it is more than there is."""
    count, context = (steps[c].fill_null(0).to_numpy() for c in ("queued_decode_requests", "queued_decode_context_tokens"))
    need = np.maximum(context // np.maximum(count, 1), block)
    now = (steps["preempted"].fill_null(0) > 0).to_numpy()
    # Those that wait to decode may have come from a prefill server too: only while somebody has lost his place are they he.
    told = (count > 0) & (context > 0) & lost
    found: Bools = np.where(told, free < need, little | lost) | now
    return found


def _sampled_kv(used: Samples | None, stays: pl.DataFrame, server: Server | None) -> Spans | None:
    """The same from samples of the KV in use, where no step tells; coarser, since a sample speaks for some time."""
    if used is None or not len(used.time) or server is None or not server.kv_capacity_tokens:
        return None
    free = server.kv_capacity_tokens - server.kv_capacity_tokens * used.value // 1_000_000
    little = _too_little(used.time, free, stays, server)
    return used.start[little], used.end[little]


def _too_little(at: Ints, free: Ints, stays: pl.DataFrame, server: Server | None) -> Bools:
    """At which moments the free KV (tokens) is less than the first in the queue needs, or than a block where nobody waits."""
    block = _block(server)
    need = np.full(len(at), block, dtype=np.int64)
    queue, head, waits = _head(at, stays)
    if queue.height:
        prompt = queue["prompt_tokens"].fill_null(0).to_numpy()
        need = np.where(waits, np.maximum(prompt[head], block), block)
    return np.asarray(free < need)


def _head_unknown(steps: pl.DataFrame, stays: pl.DataFrame) -> Bools:
    """At the begin of which steps somebody heads the queue whose prompt's length nobody knows."""
    queue, head, waits = _head(steps["start_ns"].to_numpy(), stays)
    found: Bools = waits & queue["prompt_tokens"].is_null().to_numpy()[head] if queue.height else waits
    return found


def _head(at: Ints, stays: pl.DataFrame) -> tuple[pl.DataFrame, Ints, Bools]:
    """(those who waited, which of them heads the queue at each moment, whether he does): first come, first served, so it is the
    first that came of those that are scheduled after it."""
    queue = stays.filter(pl.col("waits_from_ns").is_not_null() & pl.col("scheduled_ns").is_not_null()).sort(
        "waits_from_ns", maintain_order=True
    )
    if not queue.height:
        return queue, np.zeros(len(at), dtype=np.int64), np.zeros(len(at), dtype=bool)
    came = queue["waits_from_ns"].to_numpy()
    reach = np.maximum.accumulate(queue["scheduled_ns"].to_numpy())
    head = np.minimum(np.searchsorted(reach, at, side="right"), len(reach) - 1)
    return queue, head, (reach[head] > at) & (came[head] <= at)


def _block(server: Server | None) -> int:
    return (server.block_size_tokens if server is not None else None) or 1
