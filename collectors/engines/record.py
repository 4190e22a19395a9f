"""What the proxy sees of a request, as rows of the trace. Knows nothing of sockets; the proxy tells it bytes and times.

Rows are handed over as things happen (a kill loses at most the last second). Nothing in here may disturb a stream: the proxy calls
:class:`Exchange` only through methods that swallow and count their own faults.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec

from hoptrace.collectors.engines.hashing import HashKey, Prompt, prefix_hashes, prompt_of
from hoptrace.openai_stream import Chunk, StreamDecoder, Timings, Usage, error_kind
from hoptrace.sse import SSEParser
from hoptrace.writer import TraceWriter

__all__ = ["BODY_LIMIT_BYTES", "SOURCE", "Exchange", "Recorder", "Stats"]

SOURCE = "proxy"
BODY_LIMIT_BYTES = 8 << 20
_HEADER_WINDOW_NS = 86_400 * 10**9
_NS_PER_MS = 1_000_000

P = ParamSpec("P")


@dataclass(slots=True)
class Stats:
    """Live figures for a status line."""

    started: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    tokens: int = 0
    faults: int = 0
    counts_differ: int = 0
    counts_untold: int = 0
    last_fault: str | None = None

    @property
    def in_flight(self) -> int:
        return self.started - self.finished - self.failed - self.cancelled


class Recorder:
    """Numbers the requests and hands their rows to the writer."""

    def __init__(self, writer: TraceWriter, server: str, key: HashKey | None) -> None:
        self.writer = writer
        self.server = server
        self.key = key
        self.stats = Stats()
        self._next = 0

    def begin(self, received_ns: int, headers: Mapping[str, str]) -> Exchange | None:
        """A request has come; null if it can't be recorded (counted)."""
        try:
            exchange = Exchange(self, self._next, received_ns, headers)
            self._next += 1
            self.stats.started += 1
        except Exception as e:
            self.fault(e)
            return None
        return exchange

    def fault(self, error: Exception) -> None:
        """Count a fault of the recorder itself."""
        self.stats.faults += 1
        self.stats.last_fault = f"{type(error).__name__}: {error}"[:200]
        try:
            self.writer.drop(f"proxy recorder: {type(error).__name__}", 1)
        except Exception:  # the last line of defence: the stream goes on whatever happens here
            return


def _guarded(method: Callable[Concatenate[Exchange, P], None]) -> Callable[Concatenate[Exchange, P], None]:
    """A fault ends the recording of this request, never its stream."""

    @functools.wraps(method)
    def call(self: Exchange, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.broken:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as e:
            self.broken = True
            self.recorder.fault(e)

    return call


@dataclass(slots=True)
class _Sequence:
    """Tokens of one sequence so far. ``assumed``: some of its chunks were taken as one token each."""

    index: int = 0
    assumed: bool = False
    ended_ns: int | None = None
    finish_reason: str | None = None


@dataclass(slots=True)
class _Seen:
    """Times and totals of one answer."""

    first_read_ns: int | None = None
    last_read_ns: int | None = None
    first_token_ns: int | None = None
    first_visible_ns: int | None = None
    last_token_ns: int | None = None
    reads: int = 0
    bytes: int = 0
    sequences: dict[int, _Sequence] = field(default_factory=dict)
    usage: Usage | None = None
    timings: Timings | None = None
    error: str | None = None
    malformed: int = 0


class Exchange:
    """One request and its answer."""

    def __init__(self, recorder: Recorder, number: int, received_ns: int, headers: Mapping[str, str]) -> None:
        self.recorder = recorder
        self.number = number
        self.broken = False
        self._row: dict[str, Any] = {"request": number, "source": SOURCE}
        self._stage: dict[str, Any] = {
            "request": number, "sequence": 0, "attempt": 0, "stage": 0, "server": recorder.server, "role": "both",
            "source": SOURCE,
        }  # fmt: skip
        self._received_ns = received_ns
        self._enqueued_ns: int | None = None
        self._sent_bytes = 0
        self._sent_reads = 0
        self._seen = _Seen()
        self._parser: SSEParser | None = None
        self._decoder = StreamDecoder()
        self._inflate: Any = None
        self._body: bytearray | None = None
        self._ended = False
        self._client_id = headers.get("x-request-id")
        times = {"received": received_ns}
        for name in ("intended", "sent"):
            told = headers.get(f"x-hoptrace-{name}-ns", "")
            if told.isascii() and told.isdigit() and abs(int(told) - received_ns) < _HEADER_WINDOW_NS:
                times[name] = int(told)
        of = min(times, key=lambda name: times[name])
        self._row |= {f"{name}_ns": t for name, t in times.items()}
        self._row |= {"arrival_ns": times[of], "arrival_of": of}
        if self._client_id:
            self._row["request_id"] = self._client_id[:256]
        recorder.writer.append("requests", [self._row])

    # -- the request --------------------------------------------------------------------------------------------------

    @_guarded
    def forwarded(self, enqueued_ns: int, size: int, reads: int) -> None:
        """The proxy begins to hand the request on."""
        self._enqueued_ns = enqueued_ns
        self._sent_bytes = size
        self._sent_reads = reads
        append = self.recorder.writer.append
        self._stage["enqueued_ns"] = enqueued_ns
        append("stages", [self._stage])
        append(
            "waits",
            [
                {
                    "start_ns": self._received_ns, "end_ns": enqueued_ns, "request": self.number, "server": self.recorder.server,
                    "kind": "message", "on": "proxy", "count": 1, "basis": "counted", "source": SOURCE,
                }
            ],
        )  # fmt: skip

    def describe(self, body: bytes) -> Prompt | None:
        """Read what the body asks for; gives the prompt if its blocks are to be hashed. Called after the request went on."""
        if self.broken:
            return None
        try:
            return self._describe(body)
        except Exception as e:
            self.recorder.fault(e)
            return None

    def _describe(self, body: bytes) -> Prompt | None:
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):
            return None
        if not isinstance(asked, Mapping):
            return None
        row: dict[str, Any] = {}
        model = asked.get("model")
        if isinstance(model, str) and model:
            row["model"] = _model_name(model)
        for name in ("max_completion_tokens", "max_tokens", "n_predict"):
            limit = asked.get(name)
            if type(limit) is int and 0 <= limit < 1 << 53:
                row["max_tokens"] = limit
                break
        priority = asked.get("priority")
        if type(priority) is int and abs(priority) < 1 << 53:
            row["priority"] = priority
        prompt = prompt_of(asked)
        if prompt is not None and prompt.text is not None:
            row["prompt_chars"] = len(prompt.text)
        if prompt is not None and prompt.tokens is not None:
            row["prompt_tokens"] = len(prompt.tokens)
        self._row |= row
        return prompt if self.recorder.key is not None else None

    @_guarded
    def hashed(self, prompt: Prompt, hashes: list[int]) -> None:
        """The prompt's block hashes are there."""
        assert self.recorder.key is not None
        blocks = {
            "prefix_blocks": hashes, "hash_space": self.recorder.key.space, "block_size": prompt.block_size,
            "block_unit": prompt.unit,
        }  # fmt: skip
        if self._ended:
            self.recorder.writer.append("requests", [self._row | blocks])
        self._row |= blocks

    def hashes(self, prompt: Prompt) -> Any:
        """Iterator over the prompt's hashes, so that the caller can make pauses in it."""
        assert self.recorder.key is not None
        return prefix_hashes(prompt, self.recorder.key)

    # -- the answer ---------------------------------------------------------------------------------------------------

    @_guarded
    def answered(self, status: int, content_type: str, content_encoding: str, now_ns: int) -> None:
        """The server's status line and headers are there."""
        encoding = content_encoding.lower().strip()
        if encoding in ("gzip", "x-gzip", "deflate"):
            self._inflate = zlib.decompressobj(wbits=47 if encoding != "deflate" else 15)
        readable = encoding in ("", "identity") or self._inflate is not None
        if status >= 400:
            self._seen.error = f"HTTP {status}"
            self._stage["end_reason"] = "refused" if status < 500 or status == 503 else "failed"
        if readable and content_type.lower().startswith("text/event-stream"):
            self._parser = SSEParser()
        elif readable:
            self._body = bytearray()

    @_guarded
    def read(self, data: bytes, now_ns: int, late: bool) -> None:
        """Bytes of the answer that were read at ``now_ns`` and have been written to the client.

        ``late``: the proxy could not read in time (a slow client), so the gap before them is not the server's.
        """
        seen = self._seen
        seen.reads += 1
        seen.bytes += len(data)
        seen.last_read_ns = now_ns
        if seen.first_read_ns is None:
            seen.first_read_ns = now_ns
        if self._inflate is not None:
            data = self._inflate.decompress(data, BODY_LIMIT_BYTES)
        if self._parser is not None:
            self._events(self._parser.feed(data), now_ns, late)
        elif self._body is not None:
            if len(self._body) + len(data) > BODY_LIMIT_BYTES:
                self._body = None
                self.recorder.writer.drop("answer too large to read", 1)
            else:
                self._body += data

    def _events(self, events: list[Any], now_ns: int, late: bool) -> None:
        rows: list[dict[str, Any]] = []
        in_this_read: set[int] = set()
        for event in events:
            self._chunk(self._decoder.event(event), now_ns, late, in_this_read, rows)
        if rows:
            self.recorder.writer.append("tokens", rows)

    def _chunk(self, chunk: Chunk, now_ns: int, late: bool, in_this_read: set[int], rows: list[dict[str, Any]]) -> None:
        seen = self._seen
        self._note(chunk)
        for e in chunk.emissions:
            sequence = seen.sequences.setdefault(e.sequence, _Sequence())
            if e.finish_reason is not None:
                sequence.finish_reason = e.finish_reason
                sequence.ended_ns = now_ns
            if e.count == 0:
                continue
            if e.count is None:
                sequence.assumed = True
            count = e.count or 1
            rows.append(self._token(e.sequence, sequence.index, now_ns, count, late or e.sequence in in_this_read))
            in_this_read.add(e.sequence)
            sequence.index += count
            self.recorder.stats.tokens += count
            seen.last_token_ns = now_ns
            if seen.first_token_ns is None:
                seen.first_token_ns = now_ns
            if e.visible and seen.first_visible_ns is None:
                seen.first_visible_ns = now_ns

    def _token(self, sequence: int, index: int, now_ns: int, count: int, coalesced: bool) -> dict[str, Any]:
        return {
            "request": self.number, "sequence": sequence, "index": index, "time_ns": now_ns, "count": count,
            "coalesced": coalesced, "vantage": "proxy", "source": SOURCE,
        }  # fmt: skip

    def _note(self, chunk: Chunk) -> None:
        seen = self._seen
        if chunk.usage is not None:
            seen.usage = chunk.usage
        if chunk.timings is not None:
            seen.timings = chunk.timings
        if chunk.error is not None:
            seen.error = f"{seen.error or 'the stream reported'}: {chunk.error_kind}"
        if chunk.malformed:
            seen.malformed += 1
        if chunk.id is not None and "engine_request_id" not in self._stage:
            self._stage["engine_request_id"] = chunk.id
            self._row.setdefault("request_id", chunk.id)
        if chunk.model is not None:
            self._row.setdefault("model", _model_name(chunk.model))

    # -- the end ------------------------------------------------------------------------------------------------------

    @_guarded
    def finished(self, now_ns: int) -> None:
        """The answer was read to its end."""
        if self._parser is not None:
            self._events(self._parser.close(), now_ns, False)
            if self._parser.overflows:
                self.recorder.writer.drop("stream event too large", self._parser.overflows)
        elif self._body is not None:
            self._whole(bytes(self._body), now_ns)
        self._end(now_ns, "failed" if self._seen.error else "done")

    @_guarded
    def cancelled(self, now_ns: int) -> None:
        """The client went away."""
        self._seen.error = self._seen.error or "the client closed the connection"
        self._end(now_ns, "cancelled")

    @_guarded
    def failed(self, now_ns: int, why: str) -> None:
        """The server could not be reached, or broke off."""
        self._seen.error = why
        self._stage.pop("end_reason", None)
        self._end(now_ns, "failed")

    def _whole(self, body: bytes, now_ns: int) -> None:
        """A non-streaming answer: totals, but no token's time."""
        try:
            data = json.loads(body)
        except (ValueError, RecursionError):
            return
        if not isinstance(data, Mapping):
            return
        if self._seen.error is not None:
            inner = data.get("error", data)
            self._seen.error += f": {error_kind(inner)}"
            return
        chunk = self._decoder.object(data)
        self._note(chunk)
        for e in chunk.emissions:
            self._seen.sequences[e.sequence] = _Sequence(0, True, now_ns, e.finish_reason)

    def _end(self, now_ns: int, reason: str) -> None:
        self._ended = True
        seen = self._seen
        stats = self.recorder.stats
        if reason == "done":
            stats.finished += 1
        elif reason == "cancelled":
            stats.cancelled += 1
        else:
            stats.failed += 1
        self._totals()
        self._engine_times()
        ended = [s.ended_ns for s in seen.sequences.values() if s.ended_ns is not None]
        self._stage["end_ns"] = max(ended) if ended and reason == "done" else now_ns
        self._stage.setdefault("end_reason", reason)
        reasons = {s.finish_reason for s in seen.sequences.values() if s.finish_reason is not None}
        self._row |= {
            "first_token_ns": seen.first_token_ns, "first_visible_ns": seen.first_visible_ns, "last_token_ns": seen.last_token_ns,
            "finish_ns": now_ns, "finish_reason": ", ".join(sorted(reasons)) or None, "error": seen.error,
        }  # fmt: skip
        append = self.recorder.writer.append
        append("requests", [self._row])
        append("stages", [self._stage])
        append("moves", self._moves(now_ns))
        if seen.malformed:
            self.recorder.writer.drop("chunk that is no JSON object", seen.malformed)

    def _totals(self) -> None:
        """Output tokens as the server tells them; where chunks were taken as one token each, held against that total.

        One token more than was seen, and an end by `stop`: that is the end-of-sequence token, which has no text; it was made when the
        finishing chunk came. Any other difference stays: then `output_tokens` is not the sum of `tokens.count`, and the counts of this
        request are not to be trusted.
        """
        seen = self._seen
        usage, timings = seen.usage, seen.timings
        told = usage.output if usage and usage.output is not None else timings.predicted_tokens if timings else None
        counted = sum(s.index for s in seen.sequences.values())
        assumed = any(s.assumed for s in seen.sequences.values())
        if self._parser is not None and told is not None and assumed and told != counted:
            stopped = [(n, s) for n, s in seen.sequences.items() if s.finish_reason == "stop" and s.ended_ns is not None]
            if told - counted == len(stopped):
                rows = []
                for n, s in stopped:
                    assert s.ended_ns is not None
                    rows.append(self._token(n, s.index, s.ended_ns, 1, s.ended_ns == seen.last_token_ns))
                    s.index += 1
                self.recorder.writer.append("tokens", rows)
                seen.last_token_ns = max(r["time_ns"] for r in rows)
                seen.first_token_ns = seen.first_token_ns or seen.last_token_ns
            else:
                self.recorder.stats.counts_differ += 1
        if told is None and assumed:
            self.recorder.stats.counts_untold += 1
        self._row["output_tokens"] = told if told is not None else None if assumed or not seen.sequences else counted
        cached = usage.cached if usage else None
        if timings is not None and cached is None:
            cached = timings.cached_tokens
        self._stage["cached_tokens"] = cached
        prompt = usage.prompt if usage else None
        if prompt is None and timings is not None and timings.prompt_tokens is not None and timings.cached_tokens is not None:
            prompt = timings.prompt_tokens + timings.cached_tokens
        if prompt is not None:
            self._row["prompt_tokens"] = prompt

    def _engine_times(self) -> None:
        """When the engine began, from llama.cpp's durations counted back from what was seen here.

        Its prompt time ends, and its generation time begins, with the first token; the latter runs to the latest token. News can
        only arrive late, so of the two ways to count back the earlier one is nearer to the truth.
        """
        seen, timings = self._seen, self._seen.timings
        if timings is None or timings.prompt_ms is None or self._enqueued_ns is None:
            return
        first: list[int] = []
        if seen.first_token_ns is not None:
            first.append(seen.first_token_ns)
        last = max((s.ended_ns for s in seen.sequences.values() if s.ended_ns is not None), default=None)
        if last is not None and timings.predicted_ms is not None:
            first.append(last - round(timings.predicted_ms * _NS_PER_MS))
        if not first:
            return
        engine_first = min(first)
        scheduled = engine_first - round(timings.prompt_ms * _NS_PER_MS)
        if scheduled < self._enqueued_ns:
            if self._enqueued_ns - scheduled > _NS_PER_MS:
                return  # the two clocks contradict each other: unknown is better than wrong
            scheduled = self._enqueued_ns
        self._row |= {"engine_first_token_ns": engine_first, "scheduled_ns": scheduled}
        self._stage["scheduled_ns"] = scheduled

    def _moves(self, now_ns: int) -> list[dict[str, Any]]:
        server = f"server:{self.recorder.server}"
        common = {
            "request": self.number, "server": self.recorder.server, "mechanism": "message", "payload_hops": 2, "basis": "counted",
            "source": SOURCE,
        }  # fmt: skip
        rows = []
        if self._enqueued_ns is not None:
            rows.append(
                common
                | {
                    "start_ns": self._received_ns, "end_ns": self._enqueued_ns, "object": "prompt", "src": "client", "dst": server,
                    "path": ["client-proxy", f"proxy-{server}"], "bytes": self._sent_bytes, "transfers": self._sent_reads,
                }
            )  # fmt: skip
        if self._seen.first_read_ns is not None:
            rows.append(
                common
                | {
                    "start_ns": self._seen.first_read_ns, "end_ns": self._seen.last_read_ns, "object": "tokens", "src": server,
                    "dst": "client", "path": [f"proxy-{server}", "client-proxy"], "bytes": self._seen.bytes,
                    "transfers": self._seen.reads,
                }
            )  # fmt: skip
        return rows


def _model_name(name: str) -> str:
    """llama.cpp names a model by its file: keep the file's name, not where it lies on the machine."""
    return (name.rsplit("/", 1)[-1] if name.startswith("/") else name)[:256]
