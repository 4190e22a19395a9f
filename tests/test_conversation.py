"""HTTP/1.1 on one connection: which bytes belong to which request, however they are cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_record import ASK, CHUNK, END, HEAD, all_work, begun, rows

from hoptrace.collectors.engines.streams.conversation import Conversation
from hoptrace.collectors.engines.streams.place import WIRE
from hoptrace.collectors.engines.streams.record import Recorder
from hoptrace.collectors.links import Links
from hoptrace.manifest import Manifest
from hoptrace.writer import TraceWriter


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    with TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded")) as writer:
        yield Recorder(writer, "toy", None, place=WIRE)


def ask(body: dict[str, Any], *headers: str, path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(data)}", *headers, "", ""]).encode() + data


def test_the_wire_has_no_hop_between(recorder: Recorder) -> None:
    talk = begun(recorder)
    talk.from_server(CHUNK + END, 5)
    all_work(recorder)
    assert [(r["vantage"], r["source"]) for r in rows(recorder)] == [("wire", "sniff")]
    assert rows(recorder, "waits", "start_ns") == []
    assert [(m["path"], m["payload_hops"]) for m in rows(recorder, "moves", "start_ns")] == [(["client-server:toy"], 1)] * 2


def test_pipelined_requests_answers_without_a_body_and_between(recorder: Recorder) -> None:
    talk = Conversation(recorder)
    head = b"HEAD /x HTTP/1.1\r\nHost: x\r\n\r\n"
    get = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    asked = get + head + ASK + head + ASK
    full = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
    empty = b"HTTP/1.1 204 No Content\r\n\r\n"
    told = full + b"hello" + full + HEAD + CHUNK + END + full + b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + CHUNK * 2 + END + empty
    for i in range(len(asked)):
        talk.from_client(asked[i : i + 1], i)
    for i in range(len(told)):
        talk.from_server(told[i : i + 1], 1000 + i)
    all_work(recorder)
    assert [(r["request"], r["index"]) for r in rows(recorder)] == [(0, 0), (1, 0), (1, 1)]
    assert talk.idle and recorder.stats.finished == 2 and recorder.stats.faults == 0


def test_an_answer_that_ends_with_the_connection(recorder: Recorder) -> None:
    talk = Conversation(recorder)
    talk.from_client(ASK, 1)
    talk.from_server(b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + CHUNK.split(b"\r\n", 1)[1], 2)
    talk.server_closed(3)
    all_work(recorder)
    assert recorder.stats.finished == 1 and recorder.stats.tokens == 1


def test_a_client_that_half_closes_still_gets_its_answer(recorder: Recorder) -> None:
    talk = begun(recorder)
    talk.client_closed(2)
    talk.from_server(CHUNK + END, 5)
    talk.server_closed(6)
    all_work(recorder)
    assert (recorder.stats.finished, recorder.stats.cancelled) == (1, 0)


def test_what_is_no_http_is_counted_and_left_alone(recorder: Recorder) -> None:
    Conversation(recorder).from_client(b"\x16\x03\x01\x02\x00\x01", 1)
    Conversation(recorder).from_client(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 1)
    talk = begun(recorder)
    talk.from_server(b"what?\r\n", 4)
    talk.server_closed(5)
    all_work(recorder)
    (row,) = rows(recorder, "requests", "request")
    assert row["error"] == "not read to its end: answer that is no HTTP/1.1" and row["finish_ns"] == 4
    assert recorder.stats.faults == 0
    assert recorder.writer.manifest.rows_dropped == {
        "request that is no HTTP/1.1": 1, "connection in HTTP/2, which is not read": 1, "answer that is no HTTP/1.1": 1,
    }  # fmt: skip


def test_bytes_that_were_not_captured_cost_one_answer(recorder: Recorder) -> None:
    talk = begun(recorder)
    talk.from_server(CHUNK, 10)
    talk.lost(11, "server")
    talk.from_server(CHUNK, 12)
    talk.from_server(END, 13)
    talk.from_client(ASK, 20)
    talk.from_server(HEAD + CHUNK + END, 30)
    all_work(recorder)
    first, second = rows(recorder, "requests", "request")
    assert (first["error"], first["finish_ns"]) == ("some of its bytes were not captured", 13)
    assert (second["error"], second["finish_ns"]) == (None, 30)
    assert [(r["request"], r["time_ns"]) for r in rows(recorder)] == [(0, 10), (1, 30)]
    assert rows(recorder, "stages", "request")[0]["end_reason"] is None
    assert recorder.writer.manifest.rows_dropped == {"answers with bytes that were not captured": 1}


def test_it_comes_in_the_middle_of_a_connection(recorder: Recorder) -> None:
    talk = Conversation(recorder)
    talk.lost(1, "client")
    talk.lost(1, "server")
    talk.from_client(b'p": "x"}', 2)
    talk.from_server(CHUNK, 3)
    talk.from_client(ASK, 4)
    talk.from_server(HEAD + CHUNK + END, 5)
    all_work(recorder)
    assert [(r["request"], r["time_ns"]) for r in rows(recorder)] == [(0, 5)]
    assert recorder.writer.manifest.rows_dropped == {}


class Pair:
    """Two servers of one session, with a router before them that hands the client's identifier on."""

    def __init__(self, writer: TraceWriter, *names: str) -> None:
        self.links = Links(writer)
        self.recorders = [Recorder(writer, name, None, self.links) for name in names]

    def all_work(self) -> None:
        for recorder in self.recorders:
            all_work(recorder)


@pytest.mark.parametrize("late", [False, True])
def test_prefill_here_and_decode_there_is_one_request(recorder: Recorder, late: bool) -> None:
    """``late``: nothing is looked into until both are over, and the decoder's recorder has its turn first (a busy machine)."""
    pair = Pair(recorder.writer, "p", "d")
    p, d = (Conversation(r) for r in pair.recorders)
    x = "X-Request-Id: abc"
    p.from_client(ask({"prompt": [1, 2], "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}, x), 10)
    p.from_server(HEAD + CHUNK + END, 20)
    if not late:
        pair.all_work()
    d.from_client(ask({"prompt": [1, 2], "max_tokens": 9, "kv_transfer_params": {"do_remote_prefill": True}}, x), 30)
    d.from_server(HEAD + CHUNK, 40)
    d.from_server(CHUNK + END, 50)
    all_work(pair.recorders[1])
    pair.all_work()
    assert [(r["request"], r["time_ns"]) for r in rows(pair.recorders[0])] == [(0, 40), (0, 50)]
    (row,) = rows(pair.recorders[1], "requests", "request")
    assert (row["arrival_ns"], row["received_ns"], row["first_token_ns"], row["finish_ns"], row["max_tokens"]) == (
        10,
        10,
        40,
        50,
        9,
    )
    stages = rows(recorder, "stages", "stage")
    assert [(s["server"], s["stage"], s["role"], s["end_reason"]) for s in stages] == [
        ("p", 0, "prefill", "handed over"), ("d", 1, "decode", "done"),
    ]  # fmt: skip


def test_a_router_that_is_recorded_too_tells_the_tokens(recorder: Recorder) -> None:
    pair = Pair(recorder.writer, "r", "a")
    r, a = (Conversation(c) for c in pair.recorders)
    x = "X-Request-Id: abc"
    r.from_client(ask({"prompt": "x"}, x), 10)
    pair.all_work()
    a.from_client(ask({"prompt": "x"}, x), 12)
    a.from_server(HEAD + CHUNK + END, 20)
    pair.all_work()
    r.from_server(HEAD + CHUNK + END, 22)
    pair.all_work()
    assert [(t["request"], t["time_ns"]) for t in rows(recorder)] == [(0, 22)]
    (row,) = rows(recorder, "requests", "request")
    assert (row["arrival_ns"], row["first_token_ns"], row["finish_ns"]) == (10, 22, 22)
    assert [(s["server"], s["role"]) for s in rows(recorder, "stages", "stage")] == [("r", "route"), ("a", "both")]


def test_another_server_after_one_refused(recorder: Recorder) -> None:
    pair = Pair(recorder.writer, "a", "b")
    a, b = (Conversation(c) for c in pair.recorders)
    x = "X-Request-Id: abc"
    a.from_client(ask({"prompt": "x"}, x), 10)
    a.from_server(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", 11)
    pair.all_work()
    b.from_client(ask({"prompt": "x"}, x), 12)
    b.from_server(HEAD + CHUNK + END, 20)
    pair.all_work()
    assert [(t["request"], t["time_ns"]) for t in rows(recorder)] == [(0, 20)]
    assert [s["end_reason"] for s in rows(recorder, "stages", "stage")] == ["refused", "done"]


def test_the_servers_identifier_joins_what_the_engine_says(recorder: Recorder) -> None:
    pair = Pair(recorder.writer, "a")
    told = b'data: {"id":"cmpl-77","choices":[{"index":0,"text":"x"}]}\n\n'
    talk = Conversation(pair.recorders[0])
    talk.from_client(ASK, 1)
    talk.from_server(HEAD + b"%x\r\n%s\r\n" % (len(told), told), 2)
    all_work(pair.recorders[0])
    assert pair.links.find("cmpl-77-0-0123abcd") == 0
    talk = Conversation(pair.recorders[0])
    talk.from_client(ask({}, "x-request-id: me", path="/v1/chat/completions"), 3)
    all_work(pair.recorders[0])
    assert pair.links.find("chatcmpl-me-0123abcd") == 1


@pytest.mark.parametrize("choices", [1, 2])
def test_a_cached_count_of_several_sequences_is_no_sequences_own(recorder: Recorder, choices: int) -> None:
    """vLLM 0.32 tells of n = 2, a prompt of 70 tokens, `cached_tokens: 64`: of the second sequence, the first found nothing."""
    talk = Conversation(recorder)
    talk.from_client(ask({"prompt": [1] * 70, "n": choices, "max_tokens": 9}), 1)
    usage = {"prompt_tokens": 70, "completion_tokens": 9 * choices, "prompt_tokens_details": {"cached_tokens": 64}}
    texts = [{"index": i, "text": "x", "finish_reason": "length"} for i in range(choices)]
    body = json.dumps({"id": "cmpl-a", "choices": texts, "usage": usage}).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    talk.from_server(head.encode() + body, 5)
    all_work(recorder)
    assert rows(recorder, "stages", "request")[0]["cached_tokens"] == (64 if choices == 1 else None)
    assert rows(recorder, "requests", "request")[0]["output_tokens"] == 9 * choices


def test_what_the_engine_found_in_caches_counts_and_not_the_answers_usage(recorder: Recorder) -> None:
    """vLLM 0.32's decode server over NIXL: 70 tokens came from the prefill server, the usage tells none."""
    talk = Conversation(recorder)
    talk.from_client(ask({"prompt": [1] * 70, "max_tokens": 9}, "x-request-id: a"), 1)
    all_work(recorder)
    found = {"server": "toy", "cached_tokens": 70, "cached_peer_tokens": 70}
    recorder.links.add("cmpl-a-0-1a2b3c4d", "stages", found, 3)
    usage = {"prompt_tokens": 70, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}}
    body = json.dumps(
        {"id": "cmpl-a", "choices": [{"index": 0, "text": "x", "finish_reason": "length"}], "usage": usage}
    ).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    talk.from_server(head.encode() + body, 5)
    all_work(recorder)
    (stage,) = rows(recorder, "stages", "request")
    assert (stage["cached_tokens"], stage["cached_peer_tokens"], stage["end_reason"]) == (70, 70, "done")


@pytest.mark.parametrize("named", [True, False])
def test_a_client_that_leaves_before_the_answer_is_told_to_the_links(recorder: Recorder, named: bool) -> None:
    talk = Conversation(recorder)
    talk.from_client(ask({"prompt": [1] * 31, "max_tokens": 9}, *(["x-request-id: a"] if named else [])), 1)
    talk.client_closed(7)
    talk.server_closed(8)
    all_work(recorder)
    (row,) = rows(recorder, "requests", "request")
    told = [(left.number, left.server, left.prompt_tokens, left.max_tokens) for left in recorder.links._left]
    assert row["error"] is not None and told == ([] if named else [(0, "toy", 31, 9)])
