"""The answer to one request as it comes: which tokens when, totals, how it ended. Bytes and times in, rows of `tokens` out."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hoptrace.openai_stream import Chunk, StreamDecoder, Timings, Usage, error_kind
from hoptrace.sse import ServerSentEvent, SSEParser

__all__ = ["BODY_LIMIT_BYTES", "Answer", "Sequence"]

BODY_LIMIT_BYTES = 8 << 20
"""Bodies beyond this pass, but are not read."""


@dataclass(slots=True)
class Sequence:
    """Tokens of one sequence so far. ``assumed``: some of its chunks were taken as one token each."""

    index: int = 0
    assumed: bool = False
    ended_ns: int | None = None
    finish_reason: str | None = None


class Answer:
    """One answer. ``emit`` takes (sequence, index, time_ns, count, coalesced) of each emission; ``drop`` counts what is lost;
    ``named`` is told the server's identifier as soon as it is known."""

    def __init__(
        self,
        emit: Callable[[int, int, int, int, bool], None],
        drop: Callable[[str, int], None],
        named: Callable[[str], None] = lambda told: None,
    ) -> None:
        self._emit = emit
        self._drop = drop
        self._named = named
        self._parser: SSEParser | None = None
        self._body: bytearray | None = None
        self._inflate: Any = None
        self._decoder = StreamDecoder()
        self._tail: tuple[SSEParser, StreamDecoder] | None = None
        self.sequences: dict[int, Sequence] = {}
        self.usage: Usage | None = None
        self.timings: Timings | None = None
        self.error: str | None = None
        self.id: str | None = None
        self.model: str | None = None
        self.reads = 0
        self.bytes = 0
        self.first_read_ns: int | None = None
        self.last_read_ns: int | None = None
        self.first_token_ns: int | None = None
        self.first_visible_ns: int | None = None
        self.last_token_ns: int | None = None

    def begin(self, status: int, content_type: str, content_encoding: str) -> None:
        """Status line and headers are there. A body in an encoding that is not known here is passed over."""
        encoding = content_encoding.lower().strip()
        if encoding in ("gzip", "x-gzip"):
            self._inflate = zlib.decompressobj(wbits=31)
        elif encoding == "deflate":
            self._inflate = zlib.decompressobj()
        elif encoding not in ("", "identity"):
            self._drop(f"answer in encoding {encoding[:20]}", 1)
            return
        if status >= 400:
            self.error = f"HTTP {status}"
        if content_type.lower().startswith("text/event-stream"):
            self._parser = SSEParser()
        else:
            self._body = bytearray()

    def read(self, data: bytes, now_ns: int, late: bool) -> int:
        """One read. ``late``: the gap before it is not the server's. Gives the number of tokens in it."""
        self.reads += 1
        self.bytes += len(data)
        self.last_read_ns = now_ns
        if self.first_read_ns is None:
            self.first_read_ns = now_ns
        if self._inflate is not None:
            data = self._inflate.decompress(data, BODY_LIMIT_BYTES)
        if self._parser is not None:
            return self._events(self._parser.feed(data), now_ns, late)
        if self._body is not None:
            if len(self._body) + len(data) > BODY_LIMIT_BYTES:
                self._body = None
                self._drop("answer too large to read", 1)
            else:
                self._body += data
        return 0

    def after_gap(self, data: bytes, now_ns: int) -> None:
        """Bytes as they were on the wire, HTTP chunks and all, after some that are missing. Totals and reasons are taken of them,
        tokens are not: which ones they are is not known.

        Lines with the sizes of HTTP chunks are no fields of an event, and are passed over as the format demands.
        """
        if self._parser is None or self._inflate is not None:
            return
        if self._tail is None:
            self._tail = SSEParser(), StreamDecoder()
        parser, decoder = self._tail
        for event in parser.feed(data):
            chunk = decoder.event(event)
            self.usage = chunk.usage or self.usage
            self.timings = chunk.timings or self.timings
            if chunk.error is not None:
                self._failed(chunk)
            for e in chunk.emissions:
                if e.finish_reason is not None:
                    sequence = self.sequences.setdefault(e.sequence, Sequence())
                    sequence.finish_reason, sequence.ended_ns = e.finish_reason, now_ns

    def end(self, now_ns: int) -> int:
        """The answer was read to its end. Gives the number of tokens in what was still open."""
        tokens = 0
        if self._parser is not None:
            tokens = self._events(self._parser.close(), now_ns, False)
            if self._parser.overflows:
                self._drop("stream event too large to read", self._parser.overflows)
        elif self._body is not None:
            self._whole(bytes(self._body), now_ns)
        return tokens

    @property
    def streams(self) -> bool:
        """Whether a stream of events has begun."""
        return self._parser is not None

    @property
    def whole(self) -> bool:
        """Whether it says itself that nothing more comes."""
        if self._parser is not None:
            return bool(self.sequences) and all(s.ended_ns is not None for s in self.sequences.values())
        return self._body is not None and self._body.rstrip().endswith(b"}")

    @property
    def ended_ns(self) -> int | None:
        """When the last sequence told that it ended; null if none did."""
        return max((s.ended_ns for s in self.sequences.values() if s.ended_ns is not None), default=None)

    @property
    def finish_reason(self) -> str | None:
        """Why it ended; several reasons of several sequences in alphabetical order."""
        return ", ".join(sorted({s.finish_reason for s in self.sequences.values() if s.finish_reason})) or None

    # -- inside -------------------------------------------------------------------------------------------------------

    def _events(self, events: list[ServerSentEvent], now_ns: int, late: bool) -> int:
        here: set[int] = set()
        tokens = 0
        for event in events:
            chunk = self._decoder.event(event)
            self._note(chunk)
            for e in chunk.emissions:
                sequence = self.sequences.get(e.sequence)
                if sequence is None:
                    sequence = self.sequences[e.sequence] = Sequence()
                if e.finish_reason is not None:
                    sequence.finish_reason, sequence.ended_ns = e.finish_reason, now_ns
                if e.count == 0:
                    continue
                sequence.assumed |= e.count is None
                count = e.count or 1
                tokens += count
                self._token(e.sequence, sequence, now_ns, count, late or e.sequence in here)
                here.add(e.sequence)
                if e.visible and self.first_visible_ns is None:
                    self.first_visible_ns = now_ns
        return tokens

    def _token(self, number: int, sequence: Sequence, now_ns: int, count: int, coalesced: bool) -> None:
        self._emit(number, sequence.index, now_ns, count, coalesced)
        sequence.index += count
        self.last_token_ns = now_ns
        if self.first_token_ns is None:
            self.first_token_ns = now_ns

    def _note(self, chunk: Chunk) -> None:
        self.usage = chunk.usage or self.usage
        self.timings = chunk.timings or self.timings
        if self.id is None and chunk.id is not None:
            self.id = chunk.id
            self._named(chunk.id)
        self.model = self.model or chunk.model
        if chunk.error is not None:
            self._failed(chunk)
        if chunk.malformed:
            self._drop("chunk that is no JSON object", 1)

    def _failed(self, chunk: Chunk) -> None:
        # The message may quote the prompt: only type and code are kept.
        self.error = f"{self.error or 'the stream reported an error'}: {chunk.error_kind}"

    def _whole(self, body: bytes, now_ns: int) -> None:
        """A non-streaming answer: totals, but no token's time."""
        try:
            data = json.loads(body)
        except (ValueError, RecursionError):
            return
        if not isinstance(data, Mapping):
            return
        if self.error is not None:
            self.error += f": {error_kind(data.get('error', data))}"
            return
        chunk = self._decoder.object(data)
        self._note(chunk)
        for e in chunk.emissions:
            self.sequences[e.sequence] = Sequence(0, True, now_ns, e.finish_reason)

    # -- totals -------------------------------------------------------------------------------------------------------

    @property
    def told_tokens(self) -> int | None:
        """Output tokens as the server counts them."""
        if self.usage is not None and self.usage.output is not None:
            return self.usage.output
        return self.timings.predicted_tokens if self.timings is not None else None

    @property
    def told_at_end(self) -> int | None:
        """The server's count if it came with the end of a sequence, and not on the way (both are possible in every chunk)."""
        return self.told_tokens if self.ended_ns is not None else None

    @property
    def assumed(self) -> bool:
        """Whether some counts are taken as one token per chunk."""
        return any(s.assumed for s in self.sequences.values())

    def settle(self) -> bool:
        """Hold assumed counts against the server's total; gives whether they agree (or nothing was assumed, or no total told).

        One token more per sequence than was seen, where all ended by `stop`, is the end-of-sequence token: it has no text, and
        was made when the finishing chunk came. Any other difference is left as it is: `tokens.count` then does not add up to
        `output_tokens`, and this request's counts are not to be trusted.
        """
        told = self.told_tokens
        if self._parser is None or told is None or not self.assumed:
            return True
        missing = told - sum(s.index for s in self.sequences.values())
        if missing == 0:
            return True
        stopped = {n: s for n, s in self.sequences.items() if s.finish_reason == "stop" and s.ended_ns is not None}
        if missing != len(stopped) or len(stopped) != len(self.sequences):
            return False
        for number, sequence in sorted(stopped.items(), key=lambda item: item[1].ended_ns or 0):
            at = sequence.ended_ns
            assert at is not None
            self._token(number, sequence, at, 1, at == self.last_token_ns)
        return True

    @property
    def total_of_one(self) -> bool:
        """Whether the server's total can't be that of all sequences (llama.cpp tells that of one)."""
        told = self.told_tokens
        if told is None or len(self.sequences) < 2:
            return False
        if self._parser is not None:
            return told < sum(s.index for s in self.sequences.values())
        return self.timings is not None and self.timings.predicted_tokens == told

    @property
    def output_tokens(self) -> int | None:
        """The server's total; else the sum of counts that are known one by one; else null.

        Where the total is that of one sequence among several: the tokens that were seen, null if none was (no stream).
        """
        if self.total_of_one:
            return sum(s.index for s in self.sequences.values()) if self._parser is not None else None
        if self.told_tokens is not None or self.assumed or not self.sequences:
            return self.told_tokens
        return sum(s.index for s in self.sequences.values())

    @property
    def prompt_tokens(self) -> int | None:
        """Prompt tokens, the cached ones included."""
        if self.usage is not None and self.usage.prompt is not None:
            return self.usage.prompt
        t = self.timings
        return t.prompt_tokens + t.cached_tokens if t and t.prompt_tokens is not None and t.cached_tokens is not None else None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that came from a cache."""
        if self.usage is not None and self.usage.cached is not None:
            return self.usage.cached
        return self.timings.cached_tokens if self.timings is not None else None

    def engine_times(self, not_before_ns: int) -> tuple[int, int] | None:
        """(began, first token) in the engine, ns, from llama.cpp's durations counted back from what was seen here.

        Its prompt time ends, and its generation time begins, with the first token; the latter runs to the latest token. News can
        only arrive late, so of the two ways to count back the earlier one is nearer to the truth. Null where that contradicts
        ``not_before_ns``, when the request was handed over, by more than 1 ms.
        """
        t = self.timings
        if t is None or t.prompt_ms is None or len(self.sequences) > 1:  # the durations are those of one sequence
            return None
        first = [] if self.first_token_ns is None else [self.first_token_ns]
        if self.ended_ns is not None and t.predicted_ms is not None:
            first.append(self.ended_ns - round(t.predicted_ms * 1e6))
        if not first:
            return None
        began = min(first) - round(t.prompt_ms * 1e6)
        if not_before_ns - began > 1_000_000:
            return None
        return max(began, not_before_ns), min(first)
