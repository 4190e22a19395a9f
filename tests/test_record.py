"""The recorder's share in the proxy: what is noted at once, what is looked into later, and how much work a token is."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.toy_server import Toy, serve, token
from test_proxy import post, running

import hoptrace
from hoptrace.collectors.engines import record
from hoptrace.collectors.engines.record import Exchange, Recorder
from hoptrace.manifest import Manifest
from hoptrace.writer import TraceWriter

CHUNK = b'data: {"choices":[{"index":0,"text":" token","finish_reason":null}]}\n\n'


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    with TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded")) as writer:
        yield Recorder(writer, "toy", None)


def begun(recorder: Recorder) -> Exchange:
    exchange = recorder.begin(1, {})
    assert exchange is not None
    exchange.answered(200, "text/event-stream", "")
    return exchange


def tokens(recorder: Recorder) -> list[dict[str, Any]]:
    recorder.writer.flush()
    return hoptrace.open(recorder.writer.path).table("tokens").collect().sort("request", "index").to_dicts()


def test_reads_are_looked_into_later_with_the_times_of_their_own(recorder: Recorder) -> None:
    a, b = begun(recorder), begun(recorder)
    for i in range(3):
        a.read(CHUNK, 100 + i, False)
        b.read(CHUNK, 200 + i, i == 1)
    assert recorder.stats.tokens == 0 and tokens(recorder) == []
    assert recorder.work() is False
    assert recorder.stats.tokens == 6
    told = [(r["request"], r["index"], r["time_ns"], r["coalesced"]) for r in tokens(recorder)]
    assert told == [
        (0, 0, 100, False), (0, 1, 101, False), (0, 2, 102, False), (1, 0, 200, False), (1, 1, 201, True), (1, 2, 202, False),
    ]  # fmt: skip
    assert {(r["vantage"], r["source"], r["count"]) for r in tokens(recorder)} == {("proxy", "proxy", 1)}


def test_a_little_at_a_time(recorder: Recorder) -> None:
    for exchange in [begun(recorder) for _ in range(3)]:
        for i in range(10):
            exchange.read(CHUNK, i, False)
    assert recorder.work(15) is True and recorder.stats.tokens == 20
    assert recorder.work(15) is False and recorder.stats.tokens == 30
    assert recorder.work(15) is False


@pytest.mark.parametrize("end", ["finished", "cancelled", "failed"])
def test_whatever_ends_a_request_its_reads_come_first(recorder: Recorder, end: str) -> None:
    exchange = begun(recorder)
    exchange.read(CHUNK, 100, False)
    getattr(exchange, end)(*((200, "it broke") if end == "failed" else (200,)))
    assert [r["time_ns"] for r in tokens(recorder)] == [100]
    (row,) = hoptrace.open(recorder.writer.path).table("requests").collect().to_dicts()
    assert (row["first_token_ns"], row["last_token_ns"], row["finish_ns"]) == (100, 100, 200)
    assert recorder.work() is False and len(tokens(recorder)) == 1


def test_what_is_held_is_bounded(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_HELD_BYTES", 3 * len(CHUNK))
    exchange = begun(recorder)
    for i in range(4):
        exchange.read(CHUNK, i, False)
    assert recorder.stats.tokens == 4


def test_a_fault_ends_the_recording_of_its_own_request_only(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, good = begun(recorder), begun(recorder)
    read = bad._answer.read

    def fails(data: bytes, now_ns: int, late: bool) -> int:
        if now_ns == 2:
            raise ZeroDivisionError
        return read(data, now_ns, late)

    monkeypatch.setattr(bad._answer, "read", fails)
    for i in range(1, 4):
        bad.read(CHUNK, i, False)
        good.read(CHUNK, i, False)
    assert recorder.work() is False
    assert recorder.stats.faults == 1 and bad.broken and not good.broken
    assert [(r["request"], r["time_ns"]) for r in tokens(recorder)] == [(0, 1), (1, 1), (1, 2), (1, 3)]
    bad.finished(9)
    assert recorder.stats.finished == 0


async def test_a_stream_that_goes_on_is_in_the_trace_meanwhile(tmp_path: Path) -> None:
    import asyncio

    async with serve(Toy([token("a"), "hang"])) as toy, running(toy, tmp_path) as run:
        asking = asyncio.create_task(post(run.url))
        for _ in range(500):
            if run.rows("tokens"):
                break
            await asyncio.sleep(0.01)
        assert len(run.rows("tokens")) == 1 and run.recorder.stats.in_flight == 1
        asking.cancel()


def test_the_work_that_a_token_makes(recorder: Recorder) -> None:
    """Calls of functions, which no busy machine changes: 160 before the hot path was cut, some 80 after."""
    exchange = begun(recorder)
    profile = cProfile.Profile()
    profile.enable()
    for i in range(500):
        exchange.read(CHUNK, i, False)
        if i % 10 == 0:
            recorder.work()
    recorder.work()
    profile.disable()
    assert recorder.stats.tokens == 500
    assert pstats.Stats(profile).total_calls / 500 < 100  # type: ignore[attr-defined]
