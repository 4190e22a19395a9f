"""The whole way from packets to rows under random loss, repetition and disorder: no wrong number, whatever happens.

A request that bears no error has all its tokens; tokens stand only in the request that they were sent for; totals are right or
unknown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from support.frames import ACK, FIN, Peers, parsed

from hoptrace.collectors.engines.streams.conversation import Conversation
from hoptrace.collectors.engines.streams.place import WIRE
from hoptrace.collectors.engines.streams.record import Recorder
from hoptrace.collectors.engines.streams.wire import Wire

MS = 1_000_000
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Rows:
    """A writer that keeps rows in memory."""

    def __init__(self) -> None:
        self.tables: dict[str, list[dict[str, Any]]] = {}
        self.dropped: dict[str, int] = {}

    def append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self.tables.setdefault(name, []).extend(dict(r) for r in rows)

    def append_arrow(self, name: str, data: pa.RecordBatch) -> None:
        self.append(name, data.to_pylist())

    def drop(self, reason: str, rows: int = 1) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + rows

    @property
    def requests(self) -> dict[int, dict[str, Any]]:
        """By number, merged as a reader does it: the last value that is not null."""
        out: dict[int, dict[str, Any]] = {}
        for row in self.tables.get("requests", []):
            out.setdefault(row["request"], {}).update({k: v for k, v in row.items() if v is not None})
        return out


def asked(number: int) -> bytes:
    body = json.dumps({"prompt": "x" * 70, "stream": True, "max_tokens": 9}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: r{number}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(text: str, finish: str | None, tokens: int | None = None) -> bytes:
    told: dict[str, Any] = {"id": "c", "choices": [{"index": 0, "text": text, "finish_reason": finish}]}
    if tokens is not None:
        told["usage"] = {"prompt_tokens": 7, "completion_tokens": tokens}
    return chunk(b"data: " + json.dumps(told).encode() + b"\n\n")


@st.composite
def run(draw: st.DrawFn, loss: bool) -> tuple[list[int], list[tuple[int, bytes]], dict[int, list[tuple[int, int]]], bool]:
    """Tokens of each request on one connection; captured packets with their times in ms; the times of each request's tokens."""
    peers = Peers(client_seq=draw(st.integers(0, 2**32 - 1)), server_seq=draw(st.integers(0, 2**32 - 1)))
    peers.open()
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    times: dict[int, list[tuple[int, int]]] = {}
    for number, tokens in enumerate(lengths):
        ask = asked(number)
        cut = draw(st.sampled_from([len(ask), 40, len(ask) - 5]))
        for part in (ask[:cut], ask[cut:]):
            if part:
                peers.up(part)
        peers.down(HEAD)
        times[number] = []
        for i in range(tokens):
            last = i == tokens - 1
            data = event("t", "length" if last else None, tokens if last else None)
            if last:
                data += chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
            first = len(peers.packets)
            if draw(st.booleans()):
                middle = draw(st.integers(1, len(data) - 1))
                peers.down(data[:middle])
                data = data[middle:]
            times[number].append((first, len(peers.packets)))
            peers.down(data)
            if draw(st.booleans()):
                peers.up()
    closed = draw(st.booleans())
    if closed:
        peers.close()
    packets = list(enumerate(peers.packets))
    dropped = draw(st.sets(st.integers(0, len(packets) - 1), max_size=6)) if loss else set()
    twice = draw(st.sets(st.integers(0, len(packets) - 1), max_size=4))
    captured = [(i, p) for i, p in packets if i not in dropped for _ in range(1 + (i in twice))]
    for at in draw(st.lists(st.integers(3, max(3, len(captured) - 2)), max_size=3)):
        a, b = captured[at : at + 2] if at + 1 < len(captured) else (None, None)
        if a and b and parsed(a[1]).to_server == parsed(b[1]).to_server and parsed(b[1]).flags != (FIN | ACK):
            captured[at : at + 2] = [b, a]
    return lengths, captured, times, closed


def played(packets: list[tuple[int, bytes]]) -> tuple[Rows, Recorder, Wire]:
    rows = Rows()
    recorder = Recorder(rows, "s", None, place=WIRE)  # type: ignore[arg-type]
    wire = Wire(lambda: Conversation(recorder))
    now = 0
    for at, packet in packets:
        now = max(now, at)
        if not packet:
            wire.tick(now * MS)
            wire.tick((now + 500) * MS)
            continue
        wire.feed(parsed(packet), now * MS)
    wire.tick(now * MS)
    wire.tick((now + 20_000) * MS)
    wire.close((now + 20_000) * MS)
    while recorder.work():
        pass
    recorder.flush()
    return rows, recorder, wire


@given(run(loss=False))
def test_without_loss_all_is_there(
    case: tuple[list[int], list[tuple[int, bytes]], dict[int, list[tuple[int, int]]], bool],
) -> None:
    lengths, packets, times, _ = case
    rows, recorder, wire = played(packets)
    assert [r.get("request_id") for r in rows.requests.values()] == [f"r{i}" for i in range(len(lengths))]
    for number, row in rows.requests.items():
        assert (row["output_tokens"], row.get("error"), row["prompt_chars"], row["max_tokens"]) == (lengths[number], None, 70, 9)
        mine = [t for t in rows.tables["tokens"] if t["request"] == number]
        assert [t["index"] for t in mine] == list(range(lengths[number]))
        # In one of its packets; one that changed places with later ones (three times at most) is read with those.
        assert all(a <= t["time_ns"] // MS <= b + 3 for t, (a, b) in zip(mine, times[number], strict=True))
    assert recorder.stats.finished == len(lengths) and recorder.stats.faults == 0 and rows.dropped == {}
    assert (wire.gaps, wire.joined, wire.connections) == (0, 0, 0)


@given(run(loss=True))
def test_with_loss_nothing_is_wrong(
    case: tuple[list[int], list[tuple[int, bytes]], dict[int, list[tuple[int, int]]], bool],
) -> None:
    lengths, packets, times, _ = case
    rows, recorder, wire = played(packets)
    assert recorder.stats.faults == 0 and wire.connections == 0
    seen = [int(r["request_id"][1:]) for r in rows.requests.values()]
    assert seen == sorted(set(seen)), "each at most once, in order"
    for number, row in rows.requests.items():
        true = int(row["request_id"][1:])
        mine = sorted((t for t in rows.tables.get("tokens", []) if t["request"] == number), key=lambda t: t["index"])
        assert [t["index"] for t in mine] == list(range(len(mine))) and len(mine) <= lengths[true]
        for t, (first, _) in zip(mine, times[true], strict=False):
            assert first <= t["time_ns"] // MS <= times[true][-1][1] + 3, "a token of its own, in its own time"
        assert row.get("output_tokens") in (None, lengths[true])
        if row.get("error") is None:
            assert len(mine) == row["output_tokens"] == lengths[true], "what bears no mark is whole"
        if len(mine) < lengths[true]:
            assert row["error"] == "the capture ended" or (row["error"] and "last_token_ns" not in row)


def scripted(*steps: tuple[str, bytes | None]) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
    """Requests and tokens of a connection on which this was said: ``>`` by the client, ``<`` by the server; what has ``!`` is not
    captured, ``R`` is a reset by the server, ``~`` some time without a packet."""
    peers = Peers()
    captured = list(enumerate(peers.open()))
    for how, data in steps:
        if how == "~":
            captured.append((len(peers.packets), b""))
            continue
        packet = peers.reset(up=False) if data is None else (peers.up if how[0] == ">" else peers.down)(data)
        if "!" not in how:
            captured.append((len(peers.packets), packet))
    rows, recorder, _ = played(captured)
    assert recorder.stats.faults == 0
    return {int(r["request_id"][1:]): r for r in rows.requests.values()}, rows.tables.get("tokens", [])


ANSWER = event("t", None) + event("t", "length", 2) + b"0\r\n\r\n"
MISSED = "some of its bytes were not captured"


def test_the_head_of_an_answer_and_the_next_request_are_missing() -> None:
    requests, tokens = scripted((">", asked(0)), ("<!", HEAD), ("<", ANSWER), (">!", asked(1)), ("<", HEAD), ("<", ANSWER))
    assert [(n, r["error"], r.get("output_tokens")) for n, r in requests.items()] == [(0, MISSED, None)] and tokens == []


def test_a_whole_answer_and_the_next_request_are_missing() -> None:
    requests, tokens = scripted((">", asked(0)), ("<!", HEAD + ANSWER), (">!", asked(1)), ("<", HEAD), ("<", ANSWER))
    assert [(n, r["error"], r.get("output_tokens")) for n, r in requests.items()] == [(0, MISSED, None)] and tokens == []


def test_the_end_of_a_request_its_answer_and_the_next_request_are_missing() -> None:
    ask = asked(0)
    steps = [(">", ask[:-9]), (">!", ask[-9:]), ("<!", HEAD + ANSWER), (">!", asked(1)), ("<", HEAD), ("<", ANSWER)]
    requests, tokens = scripted(*steps)
    assert [(n, r["error"], r.get("output_tokens")) for n, r in requests.items()] == [(0, MISSED, None)] and tokens == []


def test_a_request_whose_end_is_missing_has_its_answer() -> None:
    ask = asked(0)
    requests, tokens = scripted((">", ask[:-9]), (">!", ask[-9:]), ("<", HEAD), ("<", ANSWER))
    assert requests[0].get("error") is None and requests[0]["output_tokens"] == 2 and len(tokens) == 2
    assert "max_tokens" not in requests[0], "what it asked for was not seen"


def test_an_answer_with_a_gap_is_missed_however_the_connection_ends() -> None:
    begun = [(">", asked(0)), ("<", HEAD), ("<", event("t", None)), ("<!", event("t", None)), ("<", event("t", None))]
    for end in ([("R", None)], []):
        requests, tokens = scripted(*begun, *end)
        assert requests[0]["error"] == MISSED and len(tokens) == 1


def test_a_gap_that_was_given_up_before_the_next_request_went_missing() -> None:
    steps = [(">", asked(0)), ("<!", HEAD + ANSWER), (">", b""), ("~", b""), (">!", asked(1)), ("<", HEAD), ("<", ANSWER)]
    requests, tokens = scripted(*steps)
    assert [(n, r["error"], r.get("output_tokens")) for n, r in requests.items()] == [(0, MISSED, None)] and tokens == []


def test_requests_sent_together_have_their_own_answers_where_a_head_is_missing() -> None:
    requests, tokens = scripted((">", asked(0) + asked(1)), ("<!", HEAD), ("<", ANSWER), ("<", HEAD), ("<", ANSWER))
    assert [(n, r.get("error"), r.get("output_tokens")) for n, r in requests.items()] == [(0, MISSED, None), (1, None, 2)]
    assert [t["request"] for t in tokens] == [1, 1]
