"""One TCP connection between a client and a server, as HTTP/1.1: which bytes belong to which request and answer.

Whoever sees the bytes (proxy, sniffer) tells them with their times; they are only noted. :meth:`Recorder.work` looks into them
later, many at once, which costs a third of one by one and makes no stream wait for another's parsing. Whoever feeds conversations
calls it some twenty times a second until it gives False.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from hoptrace.collectors.engines.streams.exchange import CAPTURE_ENDED, CLIENT_LEFT
from hoptrace.collectors.engines.streams.turn import Answers, Requests, Turn

if TYPE_CHECKING:
    from hoptrace.collectors.engines.streams.record import Recorder

__all__ = ["Conversation", "Side"]

Side = Literal["client", "server"]

_BROKE = "the server broke off in the middle of its answer"
_NEVER = "the server broke off before it answered"
_MISSED = "some of its bytes were not captured"
_REQUEST = re.compile(rb"[A-Z]{3,12} [^ ]+ HTTP/1\.")


class Conversation:
    """One connection. ``prefix``: a path before ``/v1`` that clients may send or leave out."""

    def __init__(self, recorder: Recorder, prefix: str = "") -> None:
        self.recorder = recorder
        self.prefix = prefix
        self.turns: deque[Turn] = deque()
        self.asking: Turn | None = None
        self.heads_due = 0
        self.now_ns = self.sent_ns = 0
        self.reads = 0
        self._client_gone_ns: int | None = None
        self._last_answer_ns = 0
        self._blind = False
        self._skipping = {"client": False, "server": False}
        self._requests = Requests(self)
        self._answers = Answers(self)

    # -- what was seen ------------------------------------------------------------------------------------------------

    def from_client(self, data: bytes, now_ns: int, sent_ns: int | None = None) -> None:
        """Bytes of the client, seen at ``now_ns``; a proxy handed them on at ``sent_ns``."""
        self._note(len(data), self._client, data, now_ns, now_ns if sent_ns is None else sent_ns)

    def from_server(self, data: bytes, now_ns: int, late: bool = False) -> None:
        """Bytes of the server, seen at ``now_ns``. ``late``: they may have come before (something held them up on the way)."""
        self._note(len(data), self._server, data, now_ns, late)

    def client_closed(self, now_ns: int) -> None:
        """The client sends no more (FIN), or is gone. If the server then does not finish its answer, the client cancelled it."""
        self._note(0, self._client_ends, now_ns)

    def server_closed(self, now_ns: int, reset: bool = False) -> None:
        """The server closed the connection, or the connection broke (``reset``): nothing more comes."""
        self._note(0, self._server_ends, now_ns, reset)

    def lost(self, now_ns: int, side: Side) -> None:
        """Bytes of one side are missing (a sniffer's loss, or it came in the middle). Reading begins anew with the next head."""
        self._note(0, self._lose, now_ns, side)

    def failed(self, now_ns: int, why: str) -> None:
        """The server could not be reached: ``why``."""
        self._note(0, self._fail, now_ns, why)

    def ended(self, now_ns: int) -> None:
        """The capture ends, whatever is open."""
        self._note(0, self._cut, now_ns)

    @property
    def idle(self) -> bool:
        """Whether no request is open, as far as was looked into."""
        return not self.turns and self.asking is None

    def give_up(self) -> None:
        """Look no further into this connection."""
        self._blind = True

    def _note(self, size: int, method: Callable[..., None], *told: Any) -> None:
        self.recorder.note(self, method, told, size)

    # -- looking into it ----------------------------------------------------------------------------------------------

    def _client(self, data: bytes, now_ns: int, sent_ns: int) -> None:
        if self._blind:
            return
        self.now_ns, self.sent_ns = now_ns, sent_ns
        self.reads += 1
        if self._skipping["client"]:
            if not _REQUEST.match(data):
                return
            self._skipping["client"] = False
            self._requests = Requests(self)
            self.asking = None
        if data.startswith(b"PRI * HTTP/2"):
            self._give_up("connection in HTTP/2, which is not read")
        elif not self._requests.feed(data):
            self._give_up("request that is no HTTP/1.1")

    def _server(self, data: bytes, now_ns: int, late: bool) -> None:
        if self._blind:
            return
        self.now_ns = now_ns
        if self._skipping["server"]:
            if not data.startswith(b"HTTP/1."):
                self._after_gap(data, now_ns)
                return
            self._skipping["server"] = False
            if self.turns and self.turns[0].answering:
                self._miss(self.turns.popleft())
            self._answers = Answers(self)
        self._last_answer_ns = now_ns
        for piece in self._pieces(data):
            if not self._answers.feed(piece, late):
                self._give_up("answer that is no HTTP/1.1")
                return
        self._answers.hand_over()
        if self._answers.switched:
            self._give_up("connection that went over to another protocol")

    def _after_gap(self, data: bytes, now_ns: int) -> None:
        """Where bytes of an answer are missing, the totals at its end may still be there, and the end itself."""
        self._last_answer_ns = now_ns
        if not self.turns:
            return
        if not self.turns[0].answering:
            self.turns[0].answering = True  # the head was among what is missing
            return
        exchange = self.turns[0].exchange
        if exchange is not None:
            exchange.after_gap(data, now_ns)
        if self._answers.chunked and (data.endswith(b"\r\n0\r\n\r\n") or data == b"0\r\n\r\n"):
            self._miss(self.turns.popleft())

    def _pieces(self, data: bytes) -> list[bytes]:
        """Line by line if an answer to HEAD is due: only at its head's end can the parser be told that no body follows."""
        if self.heads_due:
            return re.findall(rb"[^\n]*\n|[^\n]+", data)
        return [data]

    def asked(self) -> None:
        """A request's head is there. While answers can't be read, it tells that those before it are over."""
        if self._skipping["server"]:
            while self.turns:
                self._miss(self.turns.popleft())

    def _miss(self, turn: Turn) -> None:
        if turn.exchange is not None:
            turn.exchange.missed(self._last_answer_ns or self.now_ns, _MISSED)

    def _client_ends(self, now_ns: int) -> None:
        if self._client_gone_ns is None:
            self._client_gone_ns = now_ns

    def _server_ends(self, now_ns: int, reset: bool) -> None:
        self.now_ns = now_ns
        if not (self._blind or self._skipping["server"] or reset):
            self._answers.close(gone=self._client_gone_ns is not None)
        gone = self._client_gone_ns
        for turn in self._open():
            if turn.gap:
                self._miss(turn)
            elif gone is not None:
                turn.cancelled(max(gone, self._last_answer_ns), CLIENT_LEFT)
            else:
                turn.failed(now_ns, _BROKE if turn.answering else _NEVER)
        self._blind = True

    def _lose(self, now_ns: int, side: Side) -> None:
        if self._blind:
            return
        self.now_ns = now_ns
        self._skipping[side] = True
        if side == "client":
            # A client that had asked says more only when it has its answer: that was missed, and perhaps another request.
            asking, self.asking = self.asking, None
            while self.turns and (self.turns[0] is not asking or asking.gap):
                self._miss(self.turns.popleft())
            if self.turns:
                self.turns[0].partial = True
        elif self.turns:
            turn = self.turns[0]
            self._answers.hand_over()
            if turn.exchange is not None and turn.answering and not turn.gap:
                self.recorder.writer.drop("answers with bytes that were not captured", 1)
            turn.gap = True
            if turn.partial:
                # What is missing of both may be an answer and the next request.
                self._miss(self.turns.popleft())

    def _fail(self, now_ns: int, why: str) -> None:
        for turn in self._open():
            turn.failed(now_ns, why)
        self._blind = True

    def _cut(self, now_ns: int) -> None:
        for turn in self._open():
            if turn.gap:
                self._miss(turn)
            else:
                turn.cancelled(now_ns, CAPTURE_ENDED)
        self._blind = True

    def _give_up(self, what: str) -> None:
        """This connection can't be read on."""
        open_turns = self._open()
        if "protocol" not in what or any(t.exchange for t in open_turns):
            self.recorder.writer.drop(what, 1)
        for turn in open_turns:
            if turn.exchange is not None:
                turn.exchange.missed(self.now_ns, f"not read to its end: {what}")
        self._blind = True

    def _open(self) -> list[Turn]:
        found = list(self.turns)
        self.turns.clear()
        if self.asking is not None and self.asking not in found:
            found.append(self.asking)
        self.asking = None
        return found
