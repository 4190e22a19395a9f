"""Heads of requests on their way through the proxy: what changes, and that nothing else does, however the bytes are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoptrace.collectors.engines.streams.heads import HEAD_LIMIT_BYTES, Heads


def through(*pieces: bytes, prefix: str = "") -> bytes:
    heads = Heads("srv:1", prefix)
    return b"".join(heads.feed(p) for p in pieces)


def head(start: str, *lines: str) -> bytes:
    return "\r\n".join([start, *lines, "", ""]).encode()


@pytest.mark.parametrize(
    ("asked", "gone_on"),
    [
        (["Host: proxy:9", "A: b"], ["Host: srv:1", "A: b"]),
        (["HOST:proxy", "A:b"], ["HOST: srv:1", "A:b"]),
        (["X-Hoptrace-Sent-Ns: 5", "A: b"], ["A: b"]),
        (["Proxy-Authorization: Basic x", "Proxy-Connection: close", "Authorization: y"], ["Authorization: y"]),
        (["Connection: x-mine, keep-alive", "X-Mine: 1"], ["Connection: keep-alive"]),
        (["Connection: x-mine", "X-Mine: 1"], []),
        (["Connection: close", "Accept-Encoding: gzip", "Expect: 100-continue"],
         ["Connection: close", "Accept-Encoding: gzip", "Expect: 100-continue"]),
        (["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAM"], []),
        (["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: x"],
         ["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: x"]),
        ([], []),
    ],
)  # fmt: skip
def test_headers(asked: list[str], gone_on: list[str]) -> None:
    assert through(head("GET /a?b=c HTTP/1.1", *asked)) == head("GET /a?b=c HTTP/1.1", *gone_on)


@pytest.mark.parametrize(
    ("target", "prefix", "gone_on"),
    [
        ("/v1/x", "/e", "/e/v1/x"),
        ("/e/v1/x", "/e", "/e/v1/x"),
        ("/ex/v1", "/e", "/e/ex/v1"),
        ("http://other:1/v1/x?q", "", "/v1/x?q"),
        ("http://other", "/e", "/e/"),
        ("*", "/e", "*"),
        ("/a%2Fb/é", "", "/a%2Fb/é"),
    ],
)
def test_targets(target: str, prefix: str, gone_on: str) -> None:
    assert through(head(f"POST {target} HTTP/1.0"), prefix=prefix) == head(f"POST {gone_on} HTTP/1.0")


@pytest.mark.parametrize(
    "odd",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /\r\n\r\nHost: x",
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : x\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"A" * (HEAD_LIMIT_BYTES + 1),
    ],
)
def test_what_is_no_request_goes_to_the_server_as_it_is(odd: bytes) -> None:
    assert through(odd, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") == odd + b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def test_lines_that_end_in_a_bare_line_feed() -> None:
    assert through(b"GET / HTTP/1.1\nHost: x\n\n") == b"GET / HTTP/1.1\nHost: srv:1\n\n"


def test_a_chunk_size_that_is_none_is_the_servers_business() -> None:
    sent = head("POST / HTTP/1.1", "Transfer-Encoding: chunked") + b"5\r\nhello\r\nzz\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n"
    assert through(sent) == sent


def test_another_protocol_waits_for_the_servers_word() -> None:
    ask = head("GET /v1/realtime HTTP/1.1", "Connection: Upgrade", "Upgrade: websocket")
    heads = Heads("srv:1")
    assert heads.feed(ask) == ask and heads.switching
    assert heads.feed(b"\x81\x05hello") == b""
    assert heads.answered(b"HTTP/1.1 101 Switching Protocols\r\n\r\n") == b"\x81\x05hello"
    assert heads.feed(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") == b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "no longer HTTP"
    heads = Heads("srv:1")
    heads.feed(ask)
    assert heads.feed(head("GET / HTTP/1.1", "Host: x")) == b""
    assert heads.answered(b"HTTP/1.1 404 Not Found\r\n\r\n") == head("GET / HTTP/1.1", "Host: srv:1")


_bodies = st.one_of(
    st.just(None),
    st.binary(max_size=60),
    st.lists(
        st.binary(min_size=1, max_size=30) | st.sampled_from([b"\r\n\r\n", b"0\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"]), max_size=4
    ),
)
_trailers = st.sampled_from([b"", b"X-T: 1\r\n", b"X-T: 1\r\nX-U: 2\r\n"])


@st.composite
def conversations(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Pipelined requests as sent, and as they must go on."""
    sent, due = b"", b""
    for _ in range(draw(st.integers(1, 4))):
        body = draw(_bodies)
        lines = [f"X-N: {draw(st.integers(0, 9))}"] * draw(st.integers(0, 2))
        tail = b""
        if isinstance(body, bytes):
            lines.append(f"Content-Length: {len(body)}")
            tail = body
        elif body is not None:
            lines.append("Transfer-Encoding: chunked")
            tail = b"".join(b"%x;q=1\r\n%s\r\n" % (len(c), c) for c in body) + b"0\r\n" + draw(_trailers) + b"\r\n"
        sent += head("POST /p HTTP/1.1", "Host: me", *lines, "X-Hoptrace-Sent-Ns: 1") + tail
        due += head("POST /p HTTP/1.1", "Host: srv:1", *lines) + tail
    return sent, due


@given(conversations(), st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_any_cut_gives_the_same_bytes(talk: tuple[bytes, bytes], cuts: list[int]) -> None:
    sent, due = talk
    heads, out, at, turn = Heads("srv:1"), b"", 0, 0
    while at < len(sent):
        n = cuts[turn % len(cuts)]
        out += heads.feed(sent[at : at + n])
        at, turn = at + n, turn + 1
    assert out == due and heads.held == 0 and heads.begun == heads.ended and not heads.raw
