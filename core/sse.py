"""Server-sent events from bytes, as they come.

Follows the event stream format of the HTML standard (https://html.spec.whatwg.org/multipage/server-sent-events.html), with three
differences that inference servers need: an event that the stream's end cuts short of its blank line is still given by
:meth:`SSEParser.close`; an ``event:`` line without data is given too (``event: error`` alone says enough); and a line
``error: …`` (old llama.cpp) counts as an event of the name ``error``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["DONE", "SSEParser", "ServerSentEvent"]

DONE = "[DONE]"
"""Data of the event that ends an OpenAI-compatible stream."""

_LINE_END = re.compile(rb"[\r\n]")
_BOM = b"\xef\xbb\xbf"
# What one kept line costs in memory beside its bytes: a flood of empty `data:` lines must hit the limit too.
_LINE_COST_BYTES = 64


@dataclass(slots=True)  # not frozen: that would treble the cost of making one, and there is one per token
class ServerSentEvent:
    """One event: its data (lines joined by LF), its name, and the id if the event set one."""

    data: str
    event: str = "message"
    id: str | None = None


class SSEParser:
    """Takes bytes split anywhere, gives whole events. The events do not depend on how the bytes were split.

    Memory is bounded: an event larger than ``limit_bytes`` is dropped and counted in ``overflows``, and the next is read.
    """

    def __init__(self, limit_bytes: int = 4 << 20) -> None:
        self.overflows = 0
        self._limit = limit_bytes
        self._buffer = bytearray()
        self._scanned = 0
        self._skip_lf = False
        self._first_line = True
        self._lost_line = self._lost = False
        self._clear()

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Events that ``chunk`` completes, in order."""
        # The usual case, one whole event of one line: what follows comes to the same, more slowly.
        end = len(chunk) - 2
        if (
            chunk.startswith(b"data: ")
            and chunk.find(b"\n") == end
            and chunk.endswith(b"\n\n")
            and not (self._buffer or self._skip_lf or self._data or self._event or self._lost or self._lost_line)
            and self._id is None
            and end + _LINE_COST_BYTES <= self._limit
            and b"\r" not in chunk
        ):
            self._first_line = False
            return [ServerSentEvent(chunk[6:end].decode("utf-8", "replace"))]
        events: list[ServerSentEvent] = []
        buffer = self._buffer
        buffer += chunk
        start = 0
        if self._skip_lf and buffer:
            # The CR that ended the last chunk was half of a CRLF.
            self._skip_lf = False
            if buffer[0] == 0x0A:
                start = 1
                self._scanned = 1
        while (found := _LINE_END.search(buffer, self._scanned)) is not None:
            end = found.start()
            self._take(bytes(buffer[start:end]), events)
            start = end + 1
            if buffer[end] == 0x0D:
                if start == len(buffer):
                    self._skip_lf = True
                elif buffer[start] == 0x0A:
                    start += 1
            self._scanned = start
        del buffer[:start]
        if len(buffer) + self._size > self._limit:
            self._lost_line = self._lost = True
            self._drop_data()
            buffer.clear()
        self._scanned = len(buffer)
        return events

    def close(self) -> list[ServerSentEvent]:
        """The event that was still open when the stream ended, if any. Only a whole line counts."""
        events: list[ServerSentEvent] = []
        if self._buffer:
            self._take(bytes(self._buffer), events)
            self._buffer.clear()
            self._scanned = 0
        self._dispatch(events)
        return events

    # -- inside -------------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        self._data: list[bytes] = []
        self._size = 0
        self._event = ""
        self._id: str | None = None
        self._lost = False

    def _drop_data(self) -> None:
        self._data = []
        self._size = 0

    def _take(self, line: bytes, events: list[ServerSentEvent]) -> None:
        if self._first_line:
            self._first_line = False
            line = line.removeprefix(_BOM)
        if self._lost_line:
            self._lost_line = False
            return
        if len(line) + self._size > self._limit:
            self._lost = True
            self._drop_data()
            return
        if not line:
            self._dispatch(events)
            return
        field, colon, value = line.partition(b":")
        if colon and not field:
            return  # a comment: servers send them to keep a connection open
        value = value.removeprefix(b" ")
        if field == b"data" or field == b"error":
            if field == b"error":
                self._event = "error"
            if self._lost:
                return
            self._size += len(value) + _LINE_COST_BYTES
            if self._size > self._limit:
                self._lost = True
                self._drop_data()
                return
            self._data.append(value)
        elif field == b"event":
            self._event = value[:256].decode("utf-8", "replace")
        elif field == b"id" and b"\0" not in value:
            self._id = value[:256].decode("utf-8", "replace")

    def _dispatch(self, events: list[ServerSentEvent]) -> None:
        if self._lost:
            self.overflows += 1
        elif self._data or self._event:
            data = b"\n".join(self._data).decode("utf-8", "replace")
            events.append(ServerSentEvent(data, self._event or "message", self._id))
        self._clear()
