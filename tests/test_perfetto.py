"""The timeline, read back with the official protobufs: names, timestamps, durations and counter values are exact."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace as Proto
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent
from support.memory import MemoryTrace

from hoptrace.analysis.export.perfetto import export, lanes
from hoptrace.errors import EnvironmentProblem, UsageError

BASE = 1_796_030_984_230_643_531
ROWS: dict[str, list[dict[str, Any]]] = {
    "requests": [
        {"request": 1, "arrival_ns": BASE, "arrival_of": "received", "received_ns": BASE, "first_token_ns": BASE + 200,
         "last_token_ns": BASE + 400, "finish_ns": BASE + 420, "output_tokens": 3, "model": "m"},
        {"request": 2, "arrival_ns": BASE + 100, "received_ns": BASE + 100, "finish_ns": BASE + 300, "error": "Broken."},
        {"request": 3, "arrival_ns": BASE + 420, "received_ns": BASE + 420},
    ],
    "stages": [
        {"request": 1, "stage": 0, "server": "s", "enqueued_ns": BASE + 7, "scheduled_ns": BASE + 100, "end_ns": BASE + 400},
    ],
    "steps": [
        {"server": "s", "step": 0, "start_ns": BASE + 110, "end_ns": BASE + 200, "prefill_tokens": 10, "decode_requests": 0,
         "running": 1},
        {"server": "s", "step": 1, "start_ns": BASE + 200, "end_ns": BASE + 400, "prefill_tokens": 0, "decode_requests": 2,
         "running": 2},
        {"server": "s", "step": 2, "start_ns": BASE + 500, "end_ns": BASE + 450},
    ],
    "residency": [
        {"request": 1, "server": "s", "first_step": 0, "last_step": 0, "phase": "chunk"},
        {"request": 1, "server": "s", "first_step": 1, "last_step": 1, "phase": "decode", "tokens_per_step": 2},
    ],
    "counters": [
        {"time_ns": BASE + 50, "host": "h", "entity": "cpu", "name": "user_ns", "value_int": (1 << 62) + 1, "unit": "ns"},
        {"time_ns": BASE + 60, "host": "h", "entity": "cpu", "name": "user_ns", "value_int": (1 << 62) + 3, "unit": "ns"},
        {"time_ns": BASE + 55, "host": "h", "entity": "server:s", "name": "load", "value_float": 0.1, "unit": "1"},
        {"time_ns": BASE + 65, "host": "h", "entity": "server:s", "name": "load", "status": "lost"},
    ],
    "events": [{"time_ns": BASE + 70, "kind": "restart", "detail": "It came back."}],
}  # fmt: skip


def read(
    path: Path,
) -> tuple[dict[str, list[tuple[int, int | None, str]]], dict[str, list[tuple[int, float]]], list[tuple[int, str]]]:
    """Slices (start, end, name) by track, samples by counter track, instants. Nesting is checked on the way."""
    proto = Proto()
    proto.ParseFromString(path.read_bytes())
    names: dict[int, str] = {}
    parents: dict[int, int] = {}
    open_slices: dict[int, list[int]] = defaultdict(list)
    slices: dict[str, list[tuple[int, int | None, str]]] = defaultdict(list)
    samples: dict[str, list[tuple[int, float]]] = defaultdict(list)
    instants: list[tuple[int, str]] = []

    def title(uuid: int) -> str:
        return f"{title(parents[uuid])}/{names[uuid]}" if uuid in parents else names[uuid]

    for packet in proto.packet:
        assert packet.trusted_packet_sequence_id == 1
        if packet.HasField("track_descriptor"):
            d = packet.track_descriptor
            assert d.uuid not in names
            names[d.uuid] = d.name
            if d.HasField("parent_uuid"):
                parents[d.uuid] = d.parent_uuid
            continue
        event = packet.track_event
        track = title(event.track_uuid)
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            open_slices[event.track_uuid].append(len(slices[track]))
            slices[track].append((packet.timestamp, None, event.name))
        elif event.type == TrackEvent.TYPE_SLICE_END:
            i = open_slices[event.track_uuid].pop()
            slices[track][i] = (slices[track][i][0], packet.timestamp, slices[track][i][2])
        elif event.type == TrackEvent.TYPE_COUNTER:
            value = event.counter_value if event.HasField("counter_value") else event.double_counter_value
            samples[track].append((packet.timestamp, value))
        else:
            instants.append((packet.timestamp, event.name))
    return dict(slices), dict(samples), instants


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    result = export(MemoryTrace(ROWS), tmp_path / "x.pftrace")
    slices, samples, instants = read(result.path)
    b = BASE
    assert slices == {
        "requests/lane 1": [
            (b, b + 420, "request 1"),
            (b, b + 7, "proxy, router"),
            (b + 7, b + 100, "queue, with room"),
            (b + 100, b + 110, "between steps"),
            (b + 110, b + 200, "prefill"),
            (b + 200, b + 400, "decode"),
            (b + 400, b + 420, "delivery"),
            (b + 420, None, "request 3 (unfinished)"),
        ],
        "requests/lane 2": [(b + 100, b + 300, "request 2 (failed)")],
        "server s/steps": [(b + 110, b + 200, "prefill 10"), (b + 200, b + 400, "decode ×2")],
    }
    assert samples == {
        "server s/running": [(b + 110, 1), (b + 200, 2)],
        "cpu on h/user_ns": [(b + 50, (1 << 62) + 1), (b + 60, (1 << 62) + 3)],
        "server:s on h/load": [(b + 55, 0.1)],
    }
    assert instants == [(b + 70, "restart")]
    assert result.skipped == {"steps": 1}
    assert (result.slices, result.samples) == (11, 5)


def test_the_timestamp_is_field_8(tmp_path: Path) -> None:
    """Protobuf rereads a wrong field number without complaint, so look at the bytes."""
    raw = export(MemoryTrace({"events": [{"time_ns": 5, "kind": "x"}]}), tmp_path / "x.pftrace").path.read_bytes()
    assert b"\x40\x05" in raw.split(b"events")[-1]


def test_annotations_tell_the_request(tmp_path: Path) -> None:
    path = export(MemoryTrace(ROWS), tmp_path / "x.pftrace").path
    proto = Proto()
    proto.ParseFromString(path.read_bytes())
    first = next(p.track_event for p in proto.packet if p.track_event.name == "request 1")
    notes = {a.name: a.string_value or a.int_value for a in first.debug_annotations}
    assert notes == {"model": "m", "output_tokens": 3, "ttft_ns": 200}


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.pftrace"
    path.write_bytes(b"mine")
    with pytest.raises(UsageError, match="already there"):
        export(MemoryTrace(ROWS), path)
    assert path.read_bytes() == b"mine"
    export(MemoryTrace(ROWS), path, force=True)
    assert path.read_bytes() != b"mine" and list(tmp_path.iterdir()) == [path]


def test_many_links_and_threads_lie_in_one_group_without_those_that_never_change(tmp_path: Path) -> None:
    def two(entity: str, name: str, first: int, last: int, **more: Any) -> list[dict[str, Any]]:
        return [
            {"time_ns": t, "host": "h", "entity": entity, "name": name, "value_int": v} | more for t, v in ((1, first), (2, last))
        ]

    links = [r for n in range(18) for r in two(f"nvlink:GPU-1/{n}", "data_bytes", 5, 5 + n // 9, direction="tx")]
    threads = [r for n in (8, 10, 9) for r in two(f"thread:7/{n}", "on_cpu_ns", 0, n)]
    twice = two("gpu:GPU-1", "power_mw", 1, 2) + two("gpu:GPU-1", "power_mw", 3, 4, source="dcgm")
    rows = {"counters": links + threads + twice + two("collector:nvml", "cpu_ns", 0, 9) + two("cpu", "cpus", 2, 2)}
    result = export(MemoryTrace(rows), tmp_path / "x.pftrace")
    _, samples, _ = read(result.path)
    assert result.still == 9
    assert list(samples) == [
        "threads of process 7 on h/8 on_cpu_ns", "threads of process 7 on h/9 on_cpu_ns",
        "threads of process 7 on h/10 on_cpu_ns",
        "cpu on h/cpus", "gpu:GPU-1 on h/power_mw (dcgm)", "gpu:GPU-1 on h/power_mw (test)",
        *(f"nvlink, all on h/GPU-1/{n} data_bytes tx" for n in range(9, 18)), "collector:nvml on h/cpu_ns",
    ]  # fmt: skip


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="cannot be written"):
        export(MemoryTrace(ROWS), tmp_path / "no" / "x.pftrace")


def test_pieces_join_without_a_seam(tmp_path: Path) -> None:
    """More than one piece of 1 MiB."""
    counters = [{"time_ns": i, "entity": "cpu", "name": "n", "value_int": i} for i in range(60_000)]
    path = export(MemoryTrace({"counters": counters}), tmp_path / "x.pftrace").path
    assert path.stat().st_size > 1 << 20
    _, samples, _ = read(path)
    assert samples["cpu/n"] == [(i, i) for i in range(60_000)]


@given(st.lists(st.tuples(st.integers(0, 50), st.none() | st.integers(0, 20))))
def test_lanes_never_overlap_and_are_as_few_as_can_be(drawn: list[tuple[int, int | None]]) -> None:
    intervals = sorted(((s, None if n is None else s + n) for s, n in drawn), key=lambda x: (x[0], x[1] is None, x[1] or 0))
    found = lanes(intervals)
    far = 1000
    used: dict[int, int] = {}
    for (start, end), lane in zip(intervals, found, strict=True):
        assert used.get(lane, 0) <= start
        used[lane] = far if end is None else end
    together = max((sum(s <= t < (far if e is None else e) or s == t for s, e in intervals) for t in range(51)), default=0)
    assert len(used) <= together


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hoptrace
    from hoptrace.cli.export import command

    monkeypatch.setattr(hoptrace, "open", lambda _: MemoryTrace(ROWS))
    target = tmp_path / "x.pftrace"
    done = CliRunner().invoke(command, ["some.trace", "-o", str(target)])
    assert done.exit_code == 0 and target.exists()
    assert done.stdout == "" and "11 slices, 5 counter samples" in done.stderr and "1 rows of steps were left out" in done.stderr
    assert CliRunner().invoke(command, ["some.trace", "-o", str(target), "--force", "-q"]).output == ""
