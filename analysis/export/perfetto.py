"""A trace as a Perfetto timeline (https://ui.perfetto.dev), with the official protobufs, written in pieces.

Requests lie in as many lanes as ran at once, each a slice with its parts of latency as slices inside; steps lie on a track per
server and rank; counters are counter tracks, those of many links or threads in one group; events are instants. A .pftrace is a
row of packets, so memory does not grow with it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import polars as pl
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import CounterDescriptor, TracePacket, TrackEvent

from hoptrace.analysis.export.perfetto_counters import grouped, kept
from hoptrace.analysis.export.whole_file import whole_file
from hoptrace.analysis.latency.accounting import account
from hoptrace.analysis.latency.parts import PARTS
from hoptrace.reader import Trace

__all__ = ["Export", "export", "lanes"]

_SEQUENCE = 1
_PIECE = 1 << 20
_LABELS = {p.name: p.label for p in PARTS}
_STEP_COUNTERS = ("running", "waiting", "kv_used_tokens")
_STEP_NOTES = (
    "step", "prefill_requests", "prefill_tokens", "prefill_context_tokens", "decode_requests", "decode_context_tokens", "origin",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Export:
    """What was written. ``skipped``: rows that a timeline cannot hold (before 1970, or ending before they start), by table;
    ``still``: counters without a track, since they never change and there are many of their kind."""

    path: Path
    packets: int
    slices: int
    samples: int
    skipped: dict[str, int]
    still: int = 0


def export(trace: Trace, path: Path, *, force: bool = False, progress: Callable[[str, int], None] | None = None) -> Export:
    """Write ``trace`` to ``path``. Timestamps are the trace clock's ns (UTC), unchanged.

    Args:
        force: replace a file that is there.
        progress: called with the table's name and the packets written so far.

    Raises:
        UsageError: ``path`` is already there.
        EnvironmentProblem: it cannot be written.
        InputError: a table is damaged.
    """
    with whole_file(path, force=force) as file:
        return _Writer(file, path, progress).write(trace)


def lanes(intervals: Iterable[tuple[int, int | None]]) -> list[int]:
    """Lane of each interval (ascending by start): the lowest free one, so that none in a lane overlap. A null end never frees."""
    free: list[int] = []
    taken: list[tuple[int, int]] = []
    count = 0
    out: list[int] = []
    for start, end in intervals:
        while taken and taken[0][0] <= start:
            heapq.heappush(free, heapq.heappop(taken)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, count = count, count + 1
        out.append(lane)
        if end is not None:
            heapq.heappush(taken, (end, lane))
    return out


class _Writer:
    def __init__(self, file: BinaryIO, path: Path, progress: Callable[[str, int], None] | None) -> None:
        self._file, self._path, self._progress = file, path, progress
        self._buffer = bytearray()
        self._packets = self._slices = self._samples = 0
        self._skipped: dict[str, int] = {}
        self._still = 0
        self._uuid = 0
        # One packet object of each kind is filled again and again: making them anew costs three times as much.
        self._event = TracePacket()
        self._event.trusted_packet_sequence_id = _SEQUENCE

    def write(self, trace: Trace) -> Export:
        for name, part in (
            ("requests", self._requests),
            ("steps", self._steps),
            ("counters", self._counters),
            ("events", self._events),
        ):
            part(trace)
            if self._progress is not None:
                self._progress(name, self._packets)
        self._file.write(self._buffer)
        return Export(self._path, self._packets, self._slices, self._samples, self._skipped, self._still)

    # -- what is written ----------------------------------------------------------------------------------------------

    def _requests(self, trace: Trace) -> None:
        frame = trace.table("requests").sort("arrival_ns", "request").collect()
        if not frame.height:
            return
        spans = {
            int(key[0]): list(zip(g["start_ns"].to_list(), g["end_ns"].to_list(), g["label"].to_list(), strict=True))
            for key, g in account(trace).spans.group_by("request", maintain_order=True)
        }
        good = frame.filter(
            (pl.col("arrival_ns") >= 0) & (pl.col("finish_ns").is_null() | (pl.col("finish_ns") >= pl.col("arrival_ns")))
        )
        self._skip("requests", frame.height - good.height)
        rows = good.to_dicts()
        group = self._group("requests", 1)
        tracks: dict[int, int] = {}
        for row, lane in zip(rows, lanes((r["arrival_ns"], r["finish_ns"]) for r in rows), strict=True):
            if lane not in tracks:
                tracks[lane] = self._track(f"lane {lane + 1}", group, rank=lane)
            track = tracks[lane]
            state = " (failed)" if row["error"] is not None else " (unfinished)" if row["finish_ns"] is None else ""
            notes = {k: row[k] for k in ("request_id", "model", "prompt_tokens", "output_tokens", "finish_reason", "error")}
            if row["first_token_ns"] is not None:
                notes["ttft_ns"] = row["first_token_ns"] - row["arrival_ns"]
            self._begin(track, row["arrival_ns"], f"request {row['request']}{state}", notes)
            for start, end, label in spans.get(row["request"], ()):
                self._begin(track, start, _LABELS[label], {})
                self._end(track, end)
            if row["finish_ns"] is not None:
                self._end(track, row["finish_ns"])

    def _steps(self, trace: Trace) -> None:
        frame = trace.table("steps").with_columns(pl.col("dp_rank", "pp_rank").fill_null(0)).collect()
        good = frame.filter((pl.col("start_ns") >= 0) & (pl.col("end_ns") >= pl.col("start_ns")))
        self._skip("steps", frame.height - good.height)
        pid = 1
        for (server,), mine in good.sort("server", "dp_rank", "pp_rank", "start_ns", "step").group_by(
            ["server"], maintain_order=True
        ):
            pid += 1
            group = self._group(f"server {server}", pid)
            for (dp, pp), g in mine.group_by(["dp_rank", "pp_rank"], maintain_order=True):
                rank = "".join(f" {n} {v}" for n, v in (("dp", dp), ("pp", pp)) if mine[f"{n}_rank"].n_unique() > 1)
                self._step_rank(g, group, rank)

    def _step_rank(self, g: pl.DataFrame, group: int, rank: str) -> None:
        tracks: dict[int, int] = {}
        rows = g.to_dicts()
        for row, lane in zip(rows, lanes((r["start_ns"], r["end_ns"]) for r in rows), strict=True):
            if lane not in tracks:
                tracks[lane] = self._track(f"steps{rank}" + (f" ({lane + 1})" if lane else ""), group, rank=lane)
            self._begin(tracks[lane], row["start_ns"], _step_name(row), {k: row[k] for k in _STEP_NOTES})
            self._end(tracks[lane], row["end_ns"])
        for name in _STEP_COUNTERS:
            known = g.filter(pl.col(name).is_not_null())
            if known.height:
                track = self._counter_track(f"{name}{rank}", group, "tokens" if name.endswith("tokens") else "requests")
                for time, value in zip(known["start_ns"].to_list(), known[name].to_list(), strict=True):
                    self._sample(track, time, value)

    def _counters(self, trace: Trace) -> None:
        ok = pl.col("status").fill_null("ok") == "ok"
        known = pl.col("value_int").is_not_null() | pl.col("value_float").is_not_null()
        frame = trace.table("counters").filter(ok & known).collect()
        good = frame.filter(pl.col("time_ns") >= 0)
        self._skip("counters", frame.height - good.height)
        good, self._still = kept(good)
        placed = grouped(good.select("host", "entity").unique().rows())
        ranks = {key: i for i, key in enumerate(placed)}
        groups: dict[str, int] = {}
        key = ["host", "entity", "name", "direction", "source"]
        series = good.sort(*key, "time_ns", nulls_last=False).partition_by(key, as_dict=True, maintain_order=True)
        several = Counter((host, entity, name, direction) for host, entity, name, direction, _ in series)
        for (host, entity, name, direction, source), g in sorted(series.items(), key=lambda x: ranks[x[0][0], x[0][1]]):
            title, before = placed[host, entity]
            if title not in groups:
                groups[title] = self._group(title, 1000 + len(groups))
            label = f"{before}{name} {direction}" if direction else f"{before}{name}"
            if several[host, entity, name, direction] > 1:
                label += f" ({source})"
            track = self._counter_track(label, groups[title], next(iter(g["unit"].drop_nulls().to_list()), None))
            for time, whole, real in zip(
                g["time_ns"].to_list(), g["value_int"].to_list(), g["value_float"].to_list(), strict=True
            ):
                self._sample(track, time, whole if whole is not None else real)

    def _events(self, trace: Trace) -> None:
        frame = trace.table("events").sort("time_ns").collect()
        good = frame.filter(pl.col("time_ns") >= 0)
        self._skip("events", frame.height - good.height)
        if not good.height:
            return
        track = self._track("events", self._group("events", 999))
        for row in good.to_dicts():
            self._instant(track, row["time_ns"], row["kind"], {k: row[k] for k in ("detail", "server", "host")})

    # -- packets ------------------------------------------------------------------------------------------------------

    def _skip(self, table: str, n: int) -> None:
        if n:
            self._skipped[table] = self._skipped.get(table, 0) + n

    def _descriptor(self, name: str) -> tuple[TracePacket, int]:
        self._uuid += 1
        packet = TracePacket()
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.track_descriptor.uuid = self._uuid
        packet.track_descriptor.name = name
        return packet, self._uuid

    def _group(self, name: str, pid: int) -> int:
        packet, uuid = self._descriptor(name)
        packet.track_descriptor.process.pid = pid
        packet.track_descriptor.process.process_name = name
        self._put(packet)
        return uuid

    def _track(self, name: str, parent: int, rank: int = 0) -> int:
        packet, uuid = self._descriptor(name)
        packet.track_descriptor.parent_uuid = parent
        packet.track_descriptor.sibling_order_rank = rank
        self._put(packet)
        return uuid

    def _counter_track(self, name: str, parent: int, unit: str | None) -> int:
        packet, uuid = self._descriptor(name)
        packet.track_descriptor.parent_uuid = parent
        counter = packet.track_descriptor.counter
        if unit == "ns":
            counter.unit = CounterDescriptor.UNIT_TIME_NS
        elif unit == "bytes":
            counter.unit = CounterDescriptor.UNIT_SIZE_BYTES
        else:
            counter.unit_name = unit or ""
        self._put(packet)
        return uuid

    def _begin(self, track: int, time_ns: int, name: str, notes: dict[str, Any]) -> None:
        self._slices += 1
        self._track_event(TrackEvent.TYPE_SLICE_BEGIN, track, time_ns, name, notes)

    def _end(self, track: int, time_ns: int) -> None:
        self._track_event(TrackEvent.TYPE_SLICE_END, track, time_ns, None, {})

    def _instant(self, track: int, time_ns: int, name: str, notes: dict[str, Any]) -> None:
        self._track_event(TrackEvent.TYPE_INSTANT, track, time_ns, name, notes)

    def _sample(self, track: int, time_ns: int, value: float) -> None:
        packet = self._event
        packet.timestamp = time_ns
        event = packet.track_event
        event.Clear()
        event.type = TrackEvent.TYPE_COUNTER
        event.track_uuid = track
        if isinstance(value, int):
            event.counter_value = value
        else:
            event.double_counter_value = value
        self._samples += 1
        self._put(packet)

    def _track_event(self, kind: int, track: int, time_ns: int, name: str | None, notes: dict[str, Any]) -> None:
        packet = self._event
        packet.timestamp = time_ns
        event = packet.track_event
        event.Clear()
        event.type = kind
        event.track_uuid = track
        if name is not None:
            event.name = name
        for key, value in notes.items():
            if value is None:
                continue
            note = event.debug_annotations.add()
            note.name = key
            if isinstance(value, int):
                note.int_value = value
            else:
                note.string_value = str(value)
        self._put(packet)

    def _put(self, packet: TracePacket) -> None:
        """Append one packet as field 1 of `Trace`, which is all that a trace file is."""
        data = packet.SerializeToString()
        self._buffer += b"\x0a" + bytes(_varint(len(data))) + data
        self._packets += 1
        if len(self._buffer) >= _PIECE:
            self._file.write(self._buffer)
            self._buffer.clear()


def _varint(n: int) -> Iterator[int]:
    while n > 127:
        yield n & 127 | 128
        n >>= 7
    yield n


def _step_name(row: dict[str, Any]) -> str:
    prefill, decode = row["prefill_tokens"], row["decode_requests"]
    if prefill is None and decode is None:
        return "step"
    named = [f"prefill {prefill}"] if prefill else []
    named += [f"decode ×{decode}"] if decode else []
    return ", ".join(named) or "empty step"
