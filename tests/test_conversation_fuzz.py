"""Whatever two sides send, lose and end with: the recorder never fails, and every request that began has ended."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from test_dialects import Kept, ask, chunk, event, head
from test_record import all_work

from hoptrace.collectors.engines.streams.conversation import Conversation
from hoptrace.collectors.engines.streams.hashing import HashKey
from hoptrace.collectors.engines.streams.heads import Heads
from hoptrace.collectors.engines.streams.record import Recorder

PIECES = [
    ask({"prompt": "x" * 70}, "/v1/completions"),
    ask({"messages": [{"role": "user", "content": "x"}]}, "/v1/chat/completions"),
    b"GET / HTTP/1.1\r\n\r\n",
    b"HEAD / HTTP/1.1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\n\r\n",
    b"\r\n",
    b"\n\n",
    b"{}",
    head(),
    chunk(event({"id": "c", "choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]})),
    b"0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"HTTP/1.1 204 No\r\n\r\n",
    b"HTTP/1.1 101 Yes\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n\r\n",
    b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Type: text/event-stream\r\nContent-Length: 3\r\n\r\nabc",
]
_data = (
    st.sampled_from(PIECES)
    | st.binary(max_size=30)
    | st.tuples(st.sampled_from(PIECES), st.integers(1, 40)).map(lambda p: p[0][: p[1]])
)
_step = st.one_of(
    st.tuples(st.just("from_client"), _data),
    st.tuples(st.just("from_server"), _data),
    st.tuples(st.just("lost"), st.sampled_from(["client", "server"])),
    st.tuples(st.just("client_closed"), st.none()),
)


@given(st.lists(_step, max_size=25), st.sampled_from(["closed", "reset", "ended", "failed"]))
def test_anything(steps: list[tuple[str, Any]], last: str) -> None:
    writer = Kept()
    recorder = Recorder(writer, "toy", HashKey("t", b"k" * 32))  # type: ignore[arg-type]
    talk = Conversation(recorder)
    for i, (name, value) in enumerate(steps):
        at = 1000 * (i + 1)
        if name == "client_closed":
            talk.client_closed(at)
        elif name == "lost":
            talk.lost(at, value)
        else:
            getattr(talk, name)(value, at)
    at = 1000 * (len(steps) + 1)
    if last == "ended":
        talk.ended(at)
    elif last == "failed":
        talk.failed(at, "why")
    else:
        talk.server_closed(at, last == "reset")
    all_work(recorder)
    assert (recorder.stats.faults, recorder.stats.in_flight) == (0, 0), recorder.stats.last_fault
    assert talk.idle
    merged: dict[int, dict[str, Any]] = {}
    for row in writer.rows.get("requests", []):
        merged.setdefault(row["request"], {}).update({k: v for k, v in row.items() if v is not None})
    for row in merged.values():
        assert row["arrival_ns"] <= row["finish_ns"]
        assert row.get("last_token_ns", 0) <= row["finish_ns"]


@given(st.lists(_data, max_size=20))
def test_heads_never_hold_what_they_should_pass(pieces: list[bytes]) -> None:
    heads = Heads("srv:1", "/p")
    out = b"".join(heads.feed(p) for p in pieces)
    assert len(out) + heads.held <= sum(map(len, pieces)) + 100 * max(1, heads.begun)
