"""The answer to one request as it comes: which tokens when, totals, how it ended. Bytes and times in, rows of `tokens` out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hoptrace.collectors.engines.streams.encoding import Decoding, Garbled, decoding
from hoptrace.collectors.engines.streams.engine_times import EngineTimes, count_back
from hoptrace.openai_stream import Chunk, StreamDecoder, Timings, Usage, error_kind, usage_over, usage_sum
from hoptrace.sse import ServerSentEvent, SSEParser
from hoptrace.stream_fast import ABSENT, VISIBLE

__all__ = ["BODY_LIMIT_BYTES", "Answer", "Sequence"]

BODY_LIMIT_BYTES = 8 << 20
"""Bodies beyond this pass, but are not read."""

_MAX_ANSWERS = 4096
# What servers call an end by the end-of-sequence token: OpenAI and vLLM, TGI, Anthropic, OpenAI Responses.
_STOPS = frozenset(("stop", "eos_token", "end_turn", "completed"))


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
        self._decoding: Decoding | None = None
        self._done = False
        self._here: set[int] = set()
        self._began_ns: int | None = None
        self._cached: int | None = None
        self._prompt: int | None = None
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
        if encoding not in ("", "identity"):
            self._decoding = decoding(encoding)
            if self._decoding is None:
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
        if self._here:
            self._here.clear()  # sequences that this read has brought a token of
        if self._decoding is None:
            return self._plain(data, now_ns, late)
        tokens = 0
        try:
            for piece in self._decoding.feed(data):
                tokens += self._plain(piece, now_ns, late)
        except Garbled:
            self._drop("answer that is not in the encoding that it tells", 1)
            self._parser = self._body = None
        return tokens

    def _plain(self, data: bytes, now_ns: int, late: bool) -> int:
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
        if self._parser is None or self._decoding is not None:
            return
        if self._tail is None:
            self._tail = SSEParser(), StreamDecoder()
        parser, decoder = self._tail
        for event in parser.feed(data):
            chunk = decoder.event(event)
            if chunk.malformed:
                continue
            self._note(chunk, now_ns)
            for e in chunk.emissions:
                if e.finish_reason is not None:
                    sequence = self.sequences.setdefault(e.sequence, Sequence())
                    sequence.finish_reason, sequence.ended_ns = e.finish_reason, now_ns

    def end(self, now_ns: int) -> int:
        """The answer was read to its end. Gives the number of tokens in what was still open."""
        tokens = 0
        if self._parser is not None:
            if now_ns != self.last_read_ns:
                self._here.clear()
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
            return self._done or (bool(self.sequences) and all(s.ended_ns is not None for s in self.sequences.values()))
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
        here = self._here
        tokens = 0
        for event in events:
            plain = self._decoder.plain(event)
            if plain is None:
                chunk = self._decoder.event(event)
                self._note(chunk, now_ns)
                for e in chunk.emissions:
                    tokens += self._emission(e.sequence, e.count, e.visible, e.finish_reason, now_ns, late)
                continue
            # Nearly every chunk of nearly every stream: one token's text and no more.
            told_id, model, index, what, reason = plain
            if self.id is None and told_id is not None:
                self.id = told_id
                self._named(told_id)
            if self.model is None:
                self.model = model
            if what != ABSENT and reason is None and self.first_visible_ns is not None and index in self.sequences:
                sequence = self.sequences[index]
                sequence.assumed = True
                self._emit(index, sequence.index, now_ns, 1, late or index in here)
                sequence.index += 1
                self.last_token_ns = now_ns
                here.add(index)
                tokens += 1
            elif what != ABSENT or reason is not None:
                tokens += self._emission(index, None if what else 0, bool(what & VISIBLE), reason, now_ns, late)
        return tokens

    def _emission(self, number: int, count: int | None, visible: bool, reason: str | None, now_ns: int, late: bool) -> int:
        sequence = self.sequences.get(number)
        if sequence is None:
            sequence = self.sequences[number] = Sequence()
        if reason is not None:
            sequence.finish_reason, sequence.ended_ns = reason, now_ns
        if count == 0:
            return 0
        sequence.assumed |= count is None
        count = count or 1
        self._token(number, sequence, now_ns, count, late or number in self._here)
        self._here.add(number)
        if visible and self.first_visible_ns is None:
            self.first_visible_ns = now_ns
        return count

    def _token(self, number: int, sequence: Sequence, now_ns: int, count: int, coalesced: bool) -> None:
        self._emit(number, sequence.index, now_ns, count, coalesced)
        sequence.index += count
        self.last_token_ns = now_ns
        if self.first_token_ns is None:
            self.first_token_ns = now_ns

    def _note(self, chunk: Chunk, now_ns: int) -> None:
        if chunk.usage is not None:
            self.usage = usage_over(chunk.usage, self.usage)
        self.timings = chunk.timings or self.timings
        self.model = self.model or chunk.model
        self._done |= chunk.done
        if self.id is None and chunk.id is not None:
            self.id = chunk.id
            self._named(chunk.id)
        if chunk.progress is not None:
            self._cached, self._prompt = chunk.progress.cache, chunk.progress.total
            if chunk.progress.time_ms is not None:
                # News can only come late: of several tellings the earliest is nearest to the truth.
                began_ns = now_ns - round(chunk.progress.time_ms * 1e6)
                self._began_ns = began_ns if self._began_ns is None else min(began_ns, self._began_ns)
        if chunk.error is not None:
            # The message may quote the prompt: only type and code are kept.
            self.error = f"{self.error or 'the stream reported an error'}: {chunk.error_kind}"
        if chunk.malformed:
            self._drop("chunk that is no JSON object", 1)

    def _whole(self, body: bytes, now_ns: int) -> None:
        """A non-streaming answer: totals, but no token's time. Some servers answer several prompts with a list."""
        try:
            data = json.loads(body)
        except (ValueError, RecursionError):
            return
        if self.error is not None:
            kind = error_kind(data.get("error", data)) if isinstance(data, Mapping) else "error"
            self.error += f": {kind}"
            return
        objects = data if isinstance(data, list) else [data]
        usages: list[Usage | None] = []
        for place, one in enumerate(objects[:_MAX_ANSWERS]):
            if not isinstance(one, Mapping):
                continue
            chunk = self._decoder.object(one)
            self._note(chunk, now_ns)
            usages.append(chunk.usage)
            for e in chunk.emissions:
                self.sequences[e.sequence or place] = Sequence(0, True, now_ns, e.finish_reason)
        if isinstance(data, list) and usages:
            self.usage = usage_sum(usages)

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
        if self._parser is None or told is None:
            return True
        missing = told - sum(s.index for s in self.sequences.values())
        if missing == 0 or not self.assumed:
            return missing == 0
        stopped = {n: s for n, s in self.sequences.items() if s.finish_reason in _STOPS and s.ended_ns is not None}
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
        if t is not None and t.prompt_tokens is not None and t.cached_tokens is not None:
            return t.prompt_tokens + t.cached_tokens
        return self._prompt

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that came from a cache."""
        if self.usage is not None and self.usage.cached is not None:
            return self.usage.cached
        if self.timings is not None and self.timings.cached_tokens is not None:
            return self.timings.cached_tokens
        return self._cached

    def engine_times(self, not_before_ns: int) -> EngineTimes | None:
        """When the engine queued, began, and made the first token: see :func:`count_back`. Null where there are several sequences
        (the durations are those of one)."""
        if len(self.sequences) > 1:
            return None
        return count_back(self.timings, self._began_ns, self.first_token_ns, self.ended_ns, not_before_ns)
