"""A request and its answer within a connection, and the two parsers' callbacks that fill it in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httptools

from hoptrace.collectors.engines.streams.answer import BODY_LIMIT_BYTES

if TYPE_CHECKING:
    from hoptrace.collectors.engines.streams.conversation import Conversation
    from hoptrace.collectors.engines.streams.record import Exchange

__all__ = ["RECORDED_PATHS", "Answers", "Requests", "Turn", "path_of"]

RECORDED_PATHS = frozenset(
    (
        "/v1/completions", "/v1/chat/completions", "/completions", "/chat/completions",  # OpenAI
        "/v1/responses", "/responses", "/v1/messages", "/messages",  # OpenAI Responses, Anthropic
        "/completion", "/infill",  # llama.cpp
        "/generate", "/generate_stream", "/inference/v1/generate",  # SGLang and TGI, TGI, vLLM
    )
)  # fmt: skip
"""Requests to these, by POST, are recorded; all others pass unseen."""


def path_of(target: str, prefix: str) -> str:
    """The path that a request's target names, without query, host and ``prefix``."""
    if "://" in target.split("?", 1)[0]:
        target = urlsplit(target).path or "/"
    path = target.split("?", 1)[0]
    return path.removeprefix(prefix) if prefix and path.startswith(prefix + "/") else path


@dataclass(slots=True, eq=False)
class Turn:
    """One request and its answer. ``exchange`` is null for those that are not recorded."""

    began_ns: int
    url: bytes = b""
    method: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    headed: bool = False
    exchange: Exchange | None = None
    body: list[bytes] = field(default_factory=list)
    size: int = 0
    first_read: int = 0
    answering: bool = False
    partial: bool = False
    """Bytes of the request are missing."""
    gap: bool = False
    """Bytes of the server are missing since it came."""

    def cancelled(self, now_ns: int, why: str) -> None:
        """The client left, or the capture ended."""
        if self.exchange is not None:
            self.exchange.cancelled(now_ns, why)

    def failed(self, now_ns: int, why: str) -> None:
        """The server did not answer, or not to the end."""
        if self.exchange is not None:
            self.exchange.failed(now_ns, why)


class Requests:
    """Callbacks of httptools for the client's side."""

    def __init__(self, conversation: Conversation) -> None:
        self._c = conversation
        self._parser = httptools.HttpRequestParser(self)
        self._parser.set_dangerous_leniencies(lenient_headers=True, lenient_optional_cr_before_lf=True)

    def feed(self, data: bytes) -> bool:
        """Take bytes; gives whether they can be read as HTTP/1.1."""
        while data:
            try:
                self._parser.feed_data(data)
                return True
            except httptools.HttpParserUpgrade as e:
                # It asks for another protocol. Until the server agrees, what follows are requests.
                data = data[e.args[0] :]
            except httptools.HttpParserError:
                return False
        return True

    def on_message_begin(self) -> None:
        self._c.asking = Turn(self._c.now_ns, first_read=self._c.reads)

    def on_url(self, url: bytes) -> None:
        if self._c.asking is not None:
            self._c.asking.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        turn = self._c.asking
        if turn is not None and not turn.headed:
            turn.headers[name.decode("latin-1").lower()] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        c, turn = self._c, self._c.asking
        if turn is None:
            return
        turn.headed = True
        turn.method = self._parser.get_method().decode("latin-1")
        c.asked()
        path = path_of(turn.url.decode("latin-1"), c.prefix)
        if turn.method == "POST" and path in RECORDED_PATHS:
            turn.exchange = c.recorder.begin(turn.began_ns, turn.headers, path)
        c.heads_due += turn.method == "HEAD"
        c.turns.append(turn)

    def on_body(self, body: bytes) -> None:
        turn = self._c.asking
        if turn is not None:
            turn.size += len(body)
            if turn.exchange is not None and turn.size <= BODY_LIMIT_BYTES:
                turn.body.append(body)

    def on_message_complete(self) -> None:
        c, turn = self._c, self._c.asking
        c.asking = None
        if turn is None or turn.exchange is None:
            return
        turn.exchange.forwarded(c.sent_ns, turn.size, c.reads - turn.first_read + 1, c.now_ns)
        if turn.size <= BODY_LIMIT_BYTES:
            turn.exchange.described(b"".join(turn.body))
        turn.body = []


class Answers:
    """Callbacks of httptools for the server's side."""

    def __init__(self, conversation: Conversation) -> None:
        self._c = conversation
        self.switched = False
        self._late = False
        self._body: list[bytes] = []
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._parser.set_dangerous_leniencies(
            lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_data_after_close=True,
            lenient_spaces_after_chunk_size=True,
        )  # fmt: skip
        self._clear()

    def _clear(self) -> None:
        self._headers: dict[str, str] = {}
        self._headed = self._passing = self._bodiless = False

    def feed(self, data: bytes, late: bool) -> bool:
        """Take bytes; gives whether they can be read as HTTP/1.1."""
        self._late = late
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.switched = True
        except httptools.HttpParserError:
            return False
        if self._bodiless:
            self.on_message_complete()
            self._begin()
        return True

    @property
    def chunked(self) -> bool:
        """Whether the answer that is being read tells its end by a last chunk."""
        return "chunked" in self._headers.get("transfer-encoding", "").lower()

    def hand_over(self) -> None:
        """Give the exchange what one read brought. Several HTTP chunks in one read are one read."""
        if self._body:
            body, self._body = self._body, []
            turn = self._turn()
            if turn is not None and turn.exchange is not None:
                turn.exchange.read(body[0] if len(body) == 1 else b"".join(body), self._c.now_ns, self._late)

    def close(self, gone: bool) -> None:
        """The server sends no more: the end of an answer that told no length. If the client is ``gone``, only of one that says
        itself that it is whole."""
        unbounded = "content-length" not in self._headers and not self.chunked
        if self._headed and not self._passing and unbounded and self._c.turns:
            exchange = self._c.turns[0].exchange
            if not gone or exchange is None or exchange.whole:
                self.on_message_complete()

    def _turn(self) -> Turn | None:
        return self._c.turns[0] if self._c.turns else None

    def on_message_begin(self) -> None:
        self._clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._headed:
            self._headers[name.decode("latin-1").lower()] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        self._headed = True
        status, turn = self._parser.get_status_code(), self._turn()
        self._passing = 100 <= status < 200
        if status == 101 or (turn is not None and turn.method == "CONNECT" and 200 <= status < 300):
            self.switched = True
        if self._passing or turn is None:
            return
        turn.answering = True
        self._bodiless = turn.method == "HEAD"
        if turn.exchange is not None:
            told: Mapping[str, str] = self._headers
            turn.exchange.answered(status, told.get("content-type", ""), told.get("content-encoding", ""))

    def on_body(self, body: bytes) -> None:
        if not self._bodiless:
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self._passing or not self._headed:
            return
        self.hand_over()
        self._headed = self._bodiless = False
        if not self._c.turns:
            return  # an answer that nobody asked for: servers send 408 to idle connections
        turn = self._c.turns.popleft()
        self._c.heads_due -= turn.method == "HEAD"
        if turn.exchange is not None:
            turn.exchange.finished(self._c.now_ns)
