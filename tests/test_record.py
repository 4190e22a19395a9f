"""The recorder's share: what is noted at once, what is looked into later, and how much work a token is."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hoptrace
from hoptrace.collectors.engines.streams import record
from hoptrace.collectors.engines.streams.conversation import Conversation
from hoptrace.collectors.engines.streams.exchange import Exchange
from hoptrace.collectors.engines.streams.record import Recorder
from hoptrace.manifest import Manifest
from hoptrace.writer import TraceWriter

EVENT = b'data: {"choices":[{"index":0,"text":" token","finish_reason":null}]}\n\n'
ASK = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
END = b"0\r\n\r\n"


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    with TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded")) as writer:
        yield Recorder(writer, "toy", None)


def begun(recorder: Recorder, now_ns: int = 1) -> Conversation:
    talk = Conversation(recorder)
    talk.from_client(ASK, now_ns)
    talk.from_server(HEAD, now_ns)
    return talk


def rows(recorder: Recorder, table: str = "tokens", *by: str) -> list[dict[str, Any]]:
    recorder.flush()
    recorder.writer.flush()
    return hoptrace.open(recorder.writer.path).table(table).collect().sort(by or ("request", "index")).to_dicts()


def all_work(recorder: Recorder) -> None:
    while recorder.work():
        pass


def test_reads_are_looked_into_later_with_the_times_of_their_own(recorder: Recorder) -> None:
    a, b = begun(recorder), begun(recorder)
    for i in range(3):
        a.from_server(CHUNK, 100 + i)
        b.from_server(CHUNK, 200 + i, i == 1)
    assert recorder.stats.tokens == 0 and rows(recorder) == []
    all_work(recorder)
    assert recorder.stats.tokens == 6
    told = [(r["request"], r["index"], r["time_ns"], r["coalesced"]) for r in rows(recorder)]
    assert told == [
        (0, 0, 100, False), (0, 1, 101, False), (0, 2, 102, False), (1, 0, 200, False), (1, 1, 201, True), (1, 2, 202, False),
    ]  # fmt: skip
    assert {(r["vantage"], r["source"], r["count"]) for r in rows(recorder)} == {("proxy", "proxy", 1)}


def test_a_little_at_a_time(recorder: Recorder) -> None:
    talk = begun(recorder)
    all_work(recorder)
    for i in range(30):
        talk.from_server(CHUNK, i)
    assert recorder.work(15) is True and recorder.stats.tokens == 15
    assert recorder.work(15) is False and recorder.stats.tokens == 30


@pytest.mark.parametrize(
    ("end", "finish_ns", "error"),
    [
        (lambda t: t.from_server(END, 200), 200, None),
        (lambda t: t.server_closed(200), 200, "the server broke off in the middle of its answer"),
        (lambda t: (t.client_closed(150), t.server_closed(200)), 150, "the client closed the connection"),
        (lambda t: t.ended(200), 200, "the capture ended"),
        (lambda t: t.failed(200, "it broke"), 200, "it broke"),
    ],
)
def test_whatever_ends_a_request_its_reads_come_first(recorder: Recorder, end: Any, finish_ns: int, error: str | None) -> None:
    talk = begun(recorder)
    talk.from_server(CHUNK, 100)
    end(talk)
    all_work(recorder)
    assert [r["time_ns"] for r in rows(recorder)] == [100]
    (row,) = rows(recorder, "requests", "request")
    assert (row["first_token_ns"], row["last_token_ns"], row["finish_ns"]) == (100, 100, finish_ns)
    assert row["error"] == error
    assert talk.idle and recorder.stats.in_flight == 0


def test_what_is_held_is_bounded(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_NOTED_BYTES", 3 * len(CHUNK))
    talk = begun(recorder)
    for i in range(9):
        talk.from_server(CHUNK, i)
    assert recorder.stats.tokens == 6


def test_a_fault_ends_the_recording_of_its_own_request_only(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, good = begun(recorder), begun(recorder)
    read = Exchange.read

    def fails(self: Exchange, data: bytes, now_ns: int, late: bool) -> None:
        if self.number == 0 and now_ns == 2:
            raise ZeroDivisionError
        read(self, data, now_ns, late)

    monkeypatch.setattr(Exchange, "read", fails)
    for i in range(1, 4):
        bad.from_server(CHUNK, i)
        good.from_server(CHUNK, i)
    bad.from_server(END, 9)
    good.from_server(END, 9)
    all_work(recorder)
    assert recorder.stats.faults == 1
    assert [(r["request"], r["time_ns"]) for r in rows(recorder)] == [(0, 1), (1, 1), (1, 2), (1, 3)]
    assert recorder.stats.finished == 1


def test_the_work_that_a_token_makes(recorder: Recorder) -> None:
    """Calls of functions, which no busy machine changes, HTTP and the noting included."""
    talk = begun(recorder)
    all_work(recorder)
    profile = cProfile.Profile()
    profile.enable()
    for i in range(500):
        talk.from_server(CHUNK, i)
        if i % 10 == 0:
            all_work(recorder)
    all_work(recorder)
    profile.disable()
    assert recorder.stats.tokens == 500
    assert pstats.Stats(profile).total_calls / 500 < 110  # type: ignore[attr-defined]
