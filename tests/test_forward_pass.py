"""Forward-pass metrics: both encodings, versions, where steps are put in time, and rows from a fake publisher.

The publisher's structures have the field names, order and defaults of sglang/srt/observability/forward_pass_metrics.py and
dynamo/common/forward_pass_metrics.py (schema version 1). No SGLang or Dynamo runs here: this is not tested against one.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.context import context, events, rows, until
from support.publisher import Publisher

import hoptrace
from hoptrace.collectors.engines.published.forward_pass import ForwardPass, endpoints_at
from hoptrace.collectors.engines.published.fpm_messages import Metrics, Queued, Scheduled, UnknownVersion, decode_metrics
from hoptrace.collectors.engines.published.step_times import StepTimes
from hoptrace.validate import validate

MS = 1_000_000


class ScheduledRequestMetrics(msgspec.Struct, frozen=True, gc=False):
    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    var_prefill_length: float = 0.0
    sum_prefill_kv_tokens: int = 0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    var_decode_kv_tokens: float = 0.0


class QueuedRequestMetrics(msgspec.Struct, frozen=True, gc=False):
    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    var_prefill_length: float = 0.0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    var_decode_kv_tokens: float = 0.0


class ForwardPassMetrics(msgspec.Struct, frozen=True, gc=False):
    version: int = 1
    worker_id: str = ""
    dp_rank: int = 0
    counter_id: int = 0
    wall_time: float = 0.0
    scheduled_requests: ScheduledRequestMetrics = ScheduledRequestMetrics()
    queued_requests: QueuedRequestMetrics = QueuedRequestMetrics()


class Unversioned(msgspec.Struct, frozen=True, gc=False):
    """SGLang's first release of it."""

    worker_id: str = ""
    dp_rank: int = 0
    wall_time: float = 0.0
    scheduled_requests: ScheduledRequestMetrics = ScheduledRequestMetrics()
    queued_requests: QueuedRequestMetrics = QueuedRequestMetrics()


BUSY = ScheduledRequestMetrics(2, 300, 12.5, 64, 3, 900, 6.25)
WAITING = QueuedRequestMetrics(4, 1000, 2.5, 1, 77, 0.5)
pack = msgspec.msgpack.encode


def _positional(m: Any) -> Any:
    return [_positional(getattr(m, f)) for f in m.__struct_fields__] if isinstance(m, msgspec.Struct) else m


def test_maps_and_arrays_read_alike() -> None:
    m = ForwardPassMetrics(1, "w7", 3, 41, 0.0625, BUSY, WAITING)
    expected = Metrics("w7", 3, 41, 0.0625, Scheduled(2, 300, 12.5, 64, 3, 900, 6.25), Queued(4, 1000, 2.5, 1, 77, 0.5))
    assert pack(m)[0] == 0x87, "msgspec writes such a structure as a map of seven fields"
    assert decode_metrics(pack(m)) == decode_metrics(pack(_positional(m))) == expected
    grown = msgspec.to_builtins(m) | {"brand_new": {"x": 1}}
    assert decode_metrics(pack(grown)) == expected
    assert decode_metrics(pack([*_positional(m), "more"])) == expected
    old = Unversioned("w7", 3, 0.0625, BUSY, WAITING)
    assert (
        decode_metrics(pack(old))
        == decode_metrics(pack(_positional(old)))
        == Metrics("w7", 3, None, 0.0625, expected.scheduled, expected.queued)
    )


def test_other_versions_are_named_and_nonsense_is_none() -> None:
    assert decode_metrics(pack(ForwardPassMetrics(version=2))) == UnknownVersion(2)
    assert decode_metrics(pack({"version": 2, "scheduled_requests": "other"})) == UnknownVersion(2)
    for bad in (
        b"", b"\xc1", pack([]), pack({}), pack("x"), pack({"version": 1}), pack({"scheduled_requests": 3}),
        pack({"scheduled_requests": {"num_prefill_requests": -1}}), pack({"scheduled_requests": {"num_prefill_requests": True}}),
        pack(ForwardPassMetrics(wall_time=float("nan"))), pack(ForwardPassMetrics(wall_time=-1.0)),
        pack({"scheduled_requests": {"var_prefill_length": float("inf")}}), b"\x91" * 100_000,
    ):  # fmt: skip
        assert decode_metrics(bad) is None


_plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=9) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.sampled_from(
        ["version", "worker_id", "dp_rank", "counter_id", "wall_time", "scheduled_requests", "queued_requests",
         "num_prefill_requests", "sum_prefill_tokens"]), inner, max_size=8),
    max_leaves=20,
)  # fmt: skip


@given(st.binary(max_size=100) | _plain.map(pack))
def test_decoding_never_raises(payload: bytes) -> None:
    found = decode_metrics(payload)
    assert found is None or isinstance(found, Metrics | UnknownVersion)


# -- when steps were --------------------------------------------------------------------------------------------------


def _placed(heard: list[tuple[int, int]], beat: int = 100 * MS) -> list[Any]:
    """(heard at, length) in order, taken every beat as a session does."""
    times: StepTimes[int] = StepTimes()
    out, due = [], beat
    for i, (at, length) in enumerate(heard):
        while due <= at:
            out += times.take(due)
            due += beat
        times.add(i, at, length)
    return [*out, *times.take(None)]


@given(
    st.lists(st.tuples(st.integers(1, 60 * MS), st.integers(0, 30 * MS), st.integers(0, 20 * MS)), min_size=1, max_size=80)
)  # fmt: skip
def test_steps_never_overlap_and_keep_their_lengths(steps: list[tuple[int, int, int]]) -> None:
    """True steps: one after another with pauses; each heard of after a delay, in order. Lengths are told exactly."""
    clock, heard, truth, last = 0, [], [], 0
    for length, pause, delay in steps:
        clock += pause
        truth.append((clock, clock + length))
        clock += length
        last = max(last, clock + delay)
        heard.append((last, length))
    placed = _placed(heard)
    assert [p.what for p in placed] == list(range(len(steps)))
    before = None
    for p in placed:
        assert p.end_ns - p.start_ns == heard[p.what][1] and not p.cut
        assert p.end_ns <= heard[p.what][0]
        assert p.end_ns >= truth[p.what][1], "a step that was heard of late is never put too early"
        assert before is None or p.start_ns >= before
        before = p.end_ns


def test_a_busy_stretch_finds_the_smallest_delay() -> None:
    """Back to back, 10 ms each, heard of 9 ms late but for one step that is heard of 1 ms late."""
    heard = [((i + 1) * 10 * MS + (1 if i == 20 else 9) * MS, 10 * MS) for i in range(40)]
    placed = _placed(heard)
    assert {p.end_ns - (p.what + 1) * 10 * MS for p in placed[:21]} == {1 * MS}
    assert all(p.end_ns - p.start_ns == 10 * MS for p in placed)


@given(st.lists(st.tuples(st.integers(1, 60 * MS), st.integers(0, 30 * MS)), min_size=1, max_size=80))
def test_lengths_that_overlap_are_cut_and_say_so(steps: list[tuple[int, int]]) -> None:
    """Asynchronous scheduling, measured from schedule to result: the sum of lengths is more than the time there was."""
    clock, heard = 10**9, []
    for length, after in steps:
        clock += after
        heard.append((clock, length))
    times: StepTimes[int] = StepTimes()
    for i, (at, length) in enumerate(heard):
        times.add(i, at, length)
    placed, before = times.take(None), None
    assert len(placed) + times.unplaced == len(steps)
    for p in placed:
        assert p.start_ns < p.end_ns <= heard[p.what][0]
        assert p.cut == (p.end_ns - p.start_ns != heard[p.what][1])
        assert before is None or p.start_ns >= before
        before = p.end_ns


# -- rows -------------------------------------------------------------------------------------------------------------


def _capture(folder: Path, messages: list[Any], count: int, *, frames: int = 3, **server: Any) -> tuple[Any, Any, dict[str, int]]:
    async def go(ctx: Any, publisher: Publisher) -> tuple[Any, dict[str, int]]:
        source = ForwardPass(ctx, publisher.events)
        assert (await source.probe()).available
        await source.start()
        await asyncio.to_thread(publisher.wait)
        for m in messages:
            payload = m if isinstance(m, bytes) else pack(m)
            if frames == 3:
                publisher.send(payload)
            else:
                publisher.raw(payload)
            await asyncio.sleep(0.03)
        rank = source._listeners[0]
        seen = lambda: len(rank.times._waiting) + sum(source.counts.values())  # noqa: E731
        await asyncio.to_thread(until, lambda: seen() >= count)
        await source.sample()
        await source.close()
        return source, dict(ctx.writer.manifest.rows_dropped)

    with context(folder, **server) as ctx, Publisher(replay=False) as publisher:
        source, dropped = asyncio.run(go(ctx, publisher))
    return rows(folder, "steps"), source, dropped


def test_every_figure_has_its_column(tmp_path: Path) -> None:
    step = ForwardPassMetrics(1, "w", 2, 5, 0.0125, BUSY, WAITING)
    frame, source, dropped = _capture(tmp_path / "t.trace", [step], 1)
    (row,) = frame.rows(named=True)
    assert row["end_ns"] - row["start_ns"] == 12_500_000
    expected = {
        "server": "s", "dp_rank": 2, "step": 5, "prefill_requests": 2, "prefill_tokens": 300, "prefill_context_tokens": 64,
        "prefill_length_variance": 12.5, "decode_requests": 3, "decode_context_tokens": 900, "decode_context_variance": 6.25,
        "queued_prefill_requests": 4, "queued_prefill_tokens": 1000, "queued_prefill_length_variance": 2.5,
        "queued_decode_requests": 1, "queued_decode_context_tokens": 77, "queued_decode_context_variance": 0.5, "waiting": 5,
        "origin": "observed", "source": "forward-pass", "decode_tokens": None, "running": None, "device_ns": None,
    }  # fmt: skip
    assert {n: row[n] for n in expected} == expected
    assert dropped == {}
    assert any("do not tell the tokens" in n for n in source.notes())


@pytest.mark.parametrize(("config", "tokens"), [({"speculative_config": None}, 3), ({"speculative_algorithm": "EAGLE"}, None)])
def test_decode_tokens_only_where_nobody_speculates(tmp_path: Path, config: dict[str, Any], tokens: int | None) -> None:
    frame, _, _ = _capture(
        tmp_path / "t.trace", [ForwardPassMetrics(wall_time=0.01, scheduled_requests=BUSY)], 1, config=config
    )  # fmt: skip
    assert frame["decode_tokens"].to_list() == [tokens]


def test_heartbeats_gaps_restarts_versions_and_the_first_step_after_idling(tmp_path: Path) -> None:
    def step(n: int, wall: float = 0.01, worker: str = "w", **more: Any) -> ForwardPassMetrics:
        return ForwardPassMetrics(1, worker, 0, n, wall, more.pop("scheduled_requests", BUSY), **more)

    idle = ScheduledRequestMetrics()
    frame, source, dropped = _capture(
        tmp_path / "t.trace",
        [
            step(0), step(1, 0.0, scheduled_requests=idle), step(2, 0.0), step(3), step(7),  # 4, 5, 6 missed
            ForwardPassMetrics(version=9), ForwardPassMetrics(version=9), b"\xc1",
            step(0), step(1, worker="x"), step(2, worker="w"), step(2, worker="x"),
        ],
        1 + 1 + 1 + 3 + 1 + 2 + 1 + 1 + 1 + 1 + 1,
    )  # fmt: skip
    # After a restart the publisher begins at 0 again; the trace's numbers go on.
    assert frame["step"].to_list() == [0, 3, 7, 8, 10, 11]
    assert dropped == {
        "forward-pass: step whose length the server does not tell (the first after idling)": 1,
        "forward-pass: forward-pass messages that were missed": 3,
        "forward-pass: forward-pass metrics of version 9 (known: 1)": 2,
        "forward-pass: message that is no forward-pass metrics": 1,
        "forward-pass: message of a second worker at the same address": 1,
    }
    told = events(tmp_path / "t.trace", "gap")
    assert told == [
        "3 forward-pass messages of rank 0 were missed", "forward-pass metrics of version 9 (known: 1) are not read",
    ]  # fmt: skip
    assert len(events(tmp_path / "t.trace", "restart")) == 2
    assert source._listeners[0].lost == 3
    assert not [f for f in validate(hoptrace.open(tmp_path / "t.trace")) if f.level == "error"]


def test_without_a_counter_the_frame_s_number_is_used(tmp_path: Path) -> None:
    old = Unversioned("w", 0, 0.01, BUSY)
    frame, _, _ = _capture(tmp_path / "1.trace", [old, old, old], 3)
    assert frame["step"].to_list() == [0, 1, 2]
    relayed = [ForwardPassMetrics(1, "w", 0, n, 0.01, BUSY) for n in (4, 5)]
    frame, _, _ = _capture(tmp_path / "2.trace", relayed, 2, frames=1)
    assert frame["step"].to_list() == [4, 5]


def test_endpoints_of_ranks() -> None:
    assert [e.events for e in endpoints_at("ipc:///tmp/fpm", ranks=2)] == ["ipc:///tmp/fpm.0", "ipc:///tmp/fpm.1"]
    assert [e.events for e in endpoints_at("ipc:///tmp/fpm.3")] == ["ipc:///tmp/fpm.3"]
    assert [e.events for e in endpoints_at("tcp://*:20380", "10.0.0.2", 2)] == ["tcp://10.0.0.2:20380", "tcp://10.0.0.2:20381"]


def test_a_probe_says_why_not(tmp_path: Path) -> None:
    async def go(ctx: Any) -> list[Any]:
        return [await ForwardPass(ctx, None).probe(), await ForwardPass(ctx, "ipc:///nowhere/fpm").probe()]

    with context(tmp_path / "t.trace") as ctx:
        found = asyncio.run(go(ctx))
    assert not any(f.available for f in found)
    assert "--enable-forward-pass-metrics" in (found[0].reason or "")
    assert "there is no socket /nowhere/fpm.0" in (found[1].reason or "")


def test_over_ipc(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/fpm"

    async def go(ctx: Any) -> int:
        with Publisher(events=f"{address}.0", replay=False) as publisher:
            source = ForwardPass(ctx, address)
            assert (await source.probe()).available
            await source.start()
            await asyncio.to_thread(publisher.wait)
            publisher.send(pack(ForwardPassMetrics(wall_time=0.01, scheduled_requests=BUSY)))
            await asyncio.to_thread(until, lambda: bool(source._listeners[0].times._waiting))
            await source.close()
        return 0

    with context(tmp_path / "t.trace") as ctx:
        asyncio.run(go(ctx))
    assert rows(tmp_path / "t.trace", "steps").height == 1
