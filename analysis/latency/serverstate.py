"""What was recorded about one server besides requests: when it was away, how many slots it had, and what its counters said."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import polars as pl

from hoptrace.analysis.latency.axis import Ints
from hoptrace.reader import Trace

__all__ = ["FAR", "Samples", "ServerState", "changes", "server_state"]

FAR = int(np.iinfo(np.int64).max // 4)
_UNKNOWN = -1
# The session looks once a second: a metric that fell may tell of a restart before it does, a process that ended of a stop.
_SAME_NS = 5_000_000_000
_SLOTS = re.compile(r"(?:^|; )max_sequences: (\S+) -> ([^\s;]+)")
# Gauges by the names that engines give them, labels left out; the first that was sampled is taken.
_PROCESSING = (
    "slots_processing", "llamacpp:requests_processing", "vllm:num_requests_running", "sglang:num_running_reqs",
    "sglang_num_running_reqs", "tgi_batch_current_size",
)  # fmt: skip
_DEFERRED = ("llamacpp:requests_deferred", "requests_deferred")
# All who wait, those too who came after the last step began: no want of room is behind that. vLLM's reason "deferred" is a wait
# for KV from elsewhere.
_QUEUED = (
    "vllm:num_requests_waiting_by_reason/capacity", "vllm:num_requests_waiting", "sglang:num_queue_reqs", "sglang_num_queue_reqs",
    "tgi_queue_size",
)  # fmt: skip
_KV_USED = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage", "llamacpp:kv_cache_usage_ratio")
_MILLION = 1_000_000
_NAME = pl.concat_str(
    pl.col("name").str.extract(r"^([^{]+)", 1),
    (pl.lit("/") + pl.col("name").str.extract(r'[{,]reason="([^"]*)"', 1)).fill_null(""),
)


@dataclass(frozen=True)
class Samples:
    """A sampled gauge: ``value`` was read within ``time`` ± ``uncertainty`` and speaks for ``start`` to ``end``, ascending.

    A sample reaches half-way to its neighbours, at most 3/4 of the median distance: nobody speaks for a gap. Between two equal
    neighbours the value stood: of a large page only changes are written, and where a value stood until then.
    """

    time: Ints
    uncertainty: Ints
    start: Ints
    end: Ints
    value: Ints

    @classmethod
    def of(cls, time: Ints, uncertainty: Ints, value: Ints) -> Samples:
        """From readings in ascending order of time."""
        if not len(time):
            return cls(time, time, time, time, time)
        gap = np.diff(time)
        reach = int(np.median(gap)) * 3 // 4 if len(gap) else 0
        half = np.where(value[1:] == value[:-1], gap // 2, np.minimum(gap // 2, reach))
        start = time - np.maximum(np.append(reach, half), uncertainty)
        end = np.maximum(time + np.maximum(np.append(half, reach), uncertainty), start)
        start[1:] = np.maximum(start[1:], time[:-1] + half)
        end[:-1] = np.minimum(end[:-1], start[1:])
        return cls(time, uncertainty, start, end, value)

    def at(self, t: Ints) -> tuple[Ints, Ints]:
        """(index of the sample that speaks for t or −1, its value or −1)."""
        if not len(self.time):
            nothing = np.full(len(t), _UNKNOWN, dtype=np.int64)
            return nothing, nothing
        i = np.searchsorted(self.start, t, side="right") - 1
        i = np.where((i >= 0) & (t < self.end[np.maximum(i, 0)]), i, -1)
        return i, np.where(i >= 0, self.value[np.maximum(i, 0)], _UNKNOWN)


@dataclass(frozen=True)
class ServerState:
    """``away_start``/``away_end``: the server was not there. ``slots_from``/``slots``: slots from then on (−1: unknown).

    ``processing``: requests that hold a slot. ``deferred``: requests that found none; ``queued``: whether it counts all who wait.
    ``kv_used``: millionths of the KV space in use.
    """

    away_start: Ints
    away_end: Ints
    slots_from: Ints
    slots: Ints
    processing: Samples
    deferred: Samples
    queued: bool = False
    kv_used: Samples | None = None

    @classmethod
    def constant(cls, slots: int | None) -> ServerState:
        """Always there, never changed, no counters."""
        none = np.zeros(0, dtype=np.int64)
        nothing = Samples(none, none, none, none, none)
        return cls(none, none, np.array([-FAR]), np.array([slots or _UNKNOWN]), nothing, nothing)


def server_state(trace: Trace, server: str, *, alone: bool = True) -> ServerState:
    """Of the server of that name. ``alone``: it has one rank, so that its counters are those of the rank.

    The manifest says the slots at the beginning, events of kind "configuration change" (``max_sequences: A -> B``) say them
    after. A server takes another number only by starting again, so a change holds from the restart before it.
    """
    described = trace.manifest.server(server)
    state = ServerState.constant(described.max_sequences if described is not None else None)
    away, slots_from, slots = _history(_events(trace, server), int(state.slots[0]))
    processing, deferred, queued, kv_used = state.processing, state.deferred, False, None
    if alone:
        read = (
            trace.table("counters")
            .filter(pl.col("entity") == f"server:{server}")
            .with_columns(_NAME.alias("name"))
            .filter(pl.col("name").is_in([*_PROCESSING, *_DEFERRED, *_QUEUED, *_KV_USED]))
            .filter(pl.col("status").fill_null("ok") == "ok")
            .select("name", "time_ns", pl.col("uncertainty_ns").fill_null(0),
                    pl.when(pl.col("name").is_in(_KV_USED)).then(pl.coalesce("value_float", "value_int") * _MILLION)
                    .otherwise(pl.coalesce("value_int", "value_float")).cast(pl.Int64, strict=False).alias("value"))
            .drop_nulls()
            .sort("time_ns", "value")
            .collect()
        )  # fmt: skip
        processing, deferred = _named(read, _PROCESSING), _named(read, _DEFERRED)
        if queued := not len(deferred.time):
            deferred = _named(read, _QUEUED)
        kv_used = _named(read, _KV_USED)
    starts, ends = (np.array([a[i] for a in away], dtype=np.int64) for i in (0, 1))
    return ServerState(starts, ends, np.array(slots_from), np.array(slots), processing, deferred, queued, kv_used)


def changes(trace: Trace) -> list[str]:
    """Warnings about servers that stopped, restarted or came back with another configuration during the capture."""
    said = []
    for server in trace.manifest.servers:
        events = _events(trace, server.name)
        away = _history(events, _UNKNOWN)[0]
        back = sum(end < FAR for _, end in away)
        named = [
            e for e in events if e["server"] is not None and e["kind"] != "configuration change" and e["detail"] != "detached"
        ]
        died = bool(named) and named[-1]["kind"] == "stop"
        if back:
            times = "once" if back == 1 else f"{back} times"
            said.append(
                f"{server.name} was restarted {times} during the capture: while it was away, queueing for room and for capacity "
                "cannot be told apart, and figures over the whole capture mix what was before with what was after."
            )
        if died:
            said.append(f"{server.name} stopped during the capture and did not come back.")
        for detail in dict.fromkeys(e["detail"] for e in events if e["kind"] == "configuration change"):
            said.append(f"{server.name} changed its configuration during the capture ({detail}): the manifest has the first one.")
    return said


def _events(trace: Trace, server: str) -> list[dict[str, str | int | None]]:
    """Of this server, in order; with one server, those that name none too (its process was seen to end)."""
    own = pl.col("server") == server
    if len(trace.manifest.servers) <= 1:
        own = own | pl.col("server").is_null()
    kinds = ["start", "stop", "restart", "configuration change"]
    frame = trace.table("events").filter(own & pl.col("kind").is_in(kinds)).select("time_ns", "server", "kind", "detail")
    return frame.collect().sort("time_ns", maintain_order=True).to_dicts()


def _history(events: list[dict[str, str | int | None]], slots: int) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """(intervals away, times from which a number of slots holds, those numbers)."""
    away: list[tuple[int, int]] = []
    since, values = [-FAR], [slots]
    gone: int | None = None
    ended: int | None = None  # a process, of no named server
    fresh = False  # restarted, and no change told since
    for e in events:
        t, kind = int(e["time_ns"] or 0), e["kind"]
        if kind == "stop" and e["server"] is None:
            ended = t
        elif kind == "stop" and gone is None:
            gone = ended if ended is not None and t - ended <= _SAME_NS else t
        elif kind in ("restart", "start") and e["server"] is not None:
            if gone is not None:
                away.append((gone, t))
            elif kind == "restart" and not (away and t - away[-1][1] <= _SAME_NS):
                # Nobody saw it go, nor asked for its configuration since.
                away.append((ended if ended is not None and t - ended <= _SAME_NS else t, t))
                since.append(t)
                values.append(_UNKNOWN)
            fresh = fresh or gone is not None or bool(away and away[-1][1] == t)
            gone = ended = None
        elif kind == "configuration change" and (found := _SLOTS.search(str(e["detail"] or ""))):
            since.append(away[-1][1] if fresh else t)
            fresh = False
            values.append(int(found[2]) if found[2].isdecimal() and int(found[2]) < FAR else _UNKNOWN)
    if gone is not None:
        away.append((gone, FAR))
    return away, since, values


def _named(read: pl.DataFrame, names: tuple[str, ...]) -> Samples:
    """The first of the names that was sampled."""
    for name in names:
        found = read.filter(pl.col("name") == name).unique("time_ns", keep="last", maintain_order=True)
        if found.height:
            return Samples.of(*(found[c].to_numpy().copy() for c in ("time_ns", "uncertainty_ns", "value")))
    return Samples.of(*(np.zeros(0, dtype=np.int64),) * 3)
