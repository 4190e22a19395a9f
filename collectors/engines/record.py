"""What the proxy sees of a request, as rows of the trace. Knows nothing of sockets; the proxy tells it bytes and times.

Rows are handed over as things happen (a kill loses at most the last second). Nothing in here may disturb a stream: the proxy
calls :class:`Exchange` only through methods that swallow and count their own faults.

What was read is only noted with its time; :meth:`Recorder.work`, called some twenty times a second, looks into it. Many reads at
once cost a third of as many one by one (the code is in the processor's caches), and no stream's stamp waits for another's JSON.
"""

from __future__ import annotations

import functools
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec

from hoptrace.collectors.engines.answer import Answer
from hoptrace.collectors.engines.hashing import HashKey, Prompt, prefix_hashes, prompt_of
from hoptrace.writer import TraceWriter

__all__ = ["CAPTURE_ENDED", "CLIENT_LEFT", "SOURCE", "Exchange", "Recorder", "Stats"]

SOURCE = "proxy"
CLIENT_LEFT = "the client closed the connection"
CAPTURE_ENDED = "the capture ended"
_HEADER_WINDOW_NS = 86_400 * 10**9
_SLOW_BODY_NS = 100_000_000
_HELD_BYTES = 1 << 20

P = ParamSpec("P")


@dataclass(slots=True)
class Stats:
    """Live figures for a status line. ``counts_differ``: not the server's total; ``counts_untold``: no total told;
    ``totals_of_one``: the total is that of one sequence among several."""

    started: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    tokens: int = 0
    rows: int = 0
    faults: int = 0
    counts_differ: int = 0
    counts_untold: int = 0
    totals_of_one: int = 0
    last_fault: str | None = None

    @property
    def in_flight(self) -> int:
        return self.started - self.finished - self.failed - self.cancelled

    def notes(self) -> list[str]:
        """What whoever uses the counts must know, for the manifest."""
        notes = {
            "streams: the tokens counted chunk by chunk are not the server's total, since some chunks hold several; "
            "per-token gaps of these are not known.": self.counts_differ,
            "requests asked for several sequences and the server's total is that of one: output_tokens is what was seen of "
            "them, or unknown where nothing was streamed.": self.totals_of_one,
            "requests: the server told no total, a chunk is taken as one token (ask for it with "
            "stream_options.include_usage).": self.counts_untold,
        }
        return [f"{n} of {self.started} {text}" for text, n in notes.items() if n]


class Recorder:
    """Numbers the requests and hands their rows to the writer. ``key`` hashes prompts; null turns hashes off."""

    def __init__(self, writer: TraceWriter, server: str, key: HashKey | None) -> None:
        self.writer = writer
        self.server = server
        self.key = key
        self.stats = Stats()
        self.pending: deque[Exchange] = deque()
        self._next = 0

    def begin(self, received_ns: int, headers: Mapping[str, str]) -> Exchange | None:
        """A request has come; null if it can't be recorded (counted)."""
        try:
            exchange = Exchange(self, self._next, received_ns, headers)
        except Exception as e:
            self.fault(e)
            return None
        self._next += 1
        self.stats.started += 1
        return exchange

    def work(self, reads: int = 64) -> bool:
        """Look into what was read; stops soon after that many reads. Gives whether there is more to do."""
        while self.pending and reads > 0:
            reads -= self.pending.popleft().take()
        return bool(self.pending)

    def append(self, table: str, rows: list[dict[str, Any]]) -> None:
        """Hand rows to the writer."""
        self.writer.append(table, rows)
        self.stats.rows += len(rows)

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


class Exchange:
    """One request and its answer."""

    def __init__(self, recorder: Recorder, number: int, received_ns: int, headers: Mapping[str, str]) -> None:
        self.recorder = recorder
        self.number = number
        self.broken = False
        self._began_ns = self._received_ns = received_ns
        self._enqueued_ns: int | None = None
        self._sent_bytes = self._sent_reads = 0
        self._ended = False
        self._reads: list[tuple[bytes, int, bool]] = []
        self._held_bytes = 0
        self._rows: list[dict[str, Any]] = []
        self._answer = Answer(self._tokens, recorder.writer.drop)
        self._common = {"request": number, "source": SOURCE}
        self._emission = self._common | {"vantage": "proxy"}
        self._row: dict[str, Any] = self._common | _arrival(received_ns, headers)
        if headers.get("x-request-id"):
            self._row["request_id"] = headers["x-request-id"][:256]
        self._stage: dict[str, Any] = self._common | {
            "sequence": 0, "attempt": 0, "stage": 0, "server": recorder.server, "role": "both",
        }  # fmt: skip
        recorder.append("requests", [self._row])

    # -- the request --------------------------------------------------------------------------------------------------

    @_guarded
    def forwarded(self, enqueued_ns: int, size: int, reads: int, received_ns: int | None = None) -> None:
        """The proxy begins to hand the request on: ``size`` bytes that came in ``reads`` reads.

        ``received_ns`` is when it had the whole body, if that was later than the headers: the request is received only then.
        """
        if received_ns is not None:
            self._received_ns = self._row["received_ns"] = received_ns
            if self._row["arrival_of"] == "received":
                self._row["arrival_ns"] = received_ns
            if received_ns - self._began_ns > _SLOW_BODY_NS:
                self.recorder.append("requests", [self._row])
        self._enqueued_ns = enqueued_ns
        self._sent_bytes, self._sent_reads = size, reads
        self._stage["enqueued_ns"] = enqueued_ns
        self.recorder.append("stages", [self._stage])
        wait = {
            "start_ns": self._received_ns, "end_ns": enqueued_ns, "server": self.recorder.server, "kind": "message",
            "on": "proxy", "count": 1, "basis": "counted",
        }  # fmt: skip
        self.recorder.append("waits", [self._common | wait])

    def describe(self, body: bytes) -> Prompt | None:
        """Read what the body asks for; gives the prompt if its blocks are to be hashed. Called after the request went on."""
        if self.broken:
            return None
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):
            return None
        try:
            prompt = self._describe(asked) if isinstance(asked, Mapping) else None
        except Exception as e:
            self.recorder.fault(e)
            return None
        return prompt if self.recorder.key is not None else None

    def _describe(self, asked: Mapping[str, Any]) -> Prompt | None:
        if isinstance(asked.get("model"), str) and asked["model"]:
            self._row["model"] = _model_name(asked["model"])
        limits = (asked.get(name) for name in ("max_completion_tokens", "max_tokens", "n_predict"))
        self._row["max_tokens"] = next((n for n in limits if type(n) is int and 0 <= n < 1 << 53), None)
        if type(asked.get("priority")) is int and abs(asked["priority"]) < 1 << 53:
            self._row["priority"] = asked["priority"]
        prompt = prompt_of(asked)
        if prompt is not None and prompt.text is not None:
            self._row["prompt_chars"] = len(prompt.text)
        if prompt is not None and prompt.tokens is not None:
            self._row["prompt_tokens"] = len(prompt.tokens)
        if self._ended:
            self.recorder.append("requests", [self._row])
        return prompt

    def hashes(self, prompt: Prompt) -> Iterator[int]:
        """The prompt's hashes one by one, so that the caller can make pauses."""
        assert self.recorder.key is not None
        return prefix_hashes(prompt, self.recorder.key)

    @_guarded
    def hashed(self, prompt: Prompt, hashes: list[int]) -> None:
        """The prompt's block hashes are there."""
        assert self.recorder.key is not None
        self._row |= {
            "prefix_blocks": hashes, "hash_space": self.recorder.key.space, "block_size": prompt.block_size,
            "block_unit": prompt.unit,
        }  # fmt: skip
        if self._ended:
            self.recorder.append("requests", [self._row])

    # -- the answer ---------------------------------------------------------------------------------------------------

    @_guarded
    def answered(self, status: int, content_type: str, content_encoding: str) -> None:
        """The server's status line and headers are there."""
        self._answer.begin(status, content_type, content_encoding)
        if status >= 400:
            self._stage["end_reason"] = "refused" if status < 500 or status == 503 else "failed"

    def read(self, data: bytes, now_ns: int, late: bool) -> None:
        """Bytes that were read at ``now_ns`` and have been written to the client. ``late``: see :meth:`Answer.read`."""
        if self.broken:
            return
        if not self._reads:
            self.recorder.pending.append(self)
        self._reads.append((data, now_ns, late))
        self._held_bytes += len(data)
        if self._held_bytes > _HELD_BYTES:
            self.take()

    def take(self) -> int:
        """Look into what was read since the last time; gives how many reads that were."""
        n = len(self._reads)
        self._take()
        return n

    @_guarded
    def _take(self) -> None:
        reads, self._reads, self._held_bytes = self._reads, [], 0
        try:
            for data, now_ns, late in reads:
                self.recorder.stats.tokens += self._answer.read(data, now_ns, late)
        finally:
            self._hand_over()

    def _tokens(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row.update(self._emission)
        self._rows += rows

    def _hand_over(self) -> None:
        rows, self._rows = self._rows, []
        if rows:
            self.recorder.append("tokens", rows)

    # -- the end ------------------------------------------------------------------------------------------------------

    @_guarded
    def finished(self, now_ns: int) -> None:
        """The answer was read to its end."""
        self._take()
        if self.broken:
            return
        self.recorder.stats.tokens += self._answer.end(now_ns)
        stats = self.recorder.stats
        stats.totals_of_one += self._answer.total_of_one
        if not self._answer.total_of_one and not self._answer.settle():
            stats.counts_differ += 1
        if self._answer.assumed and self._answer.told_tokens is None:
            stats.counts_untold += 1
        if self._answer.error is None:
            stats.finished += 1
            self._end(now_ns, "done")
        else:
            stats.failed += 1
            self._end(now_ns, "failed")

    @_guarded
    def cancelled(self, now_ns: int, why: str = CLIENT_LEFT) -> None:
        """The client went away, or hoptrace did: ``why``."""
        if self._ended:
            return
        self._take()
        if self.broken:
            return
        self.recorder.stats.cancelled += 1
        self._answer.error = self._answer.error or why
        self._end(now_ns, "cancelled")

    @_guarded
    def failed(self, now_ns: int, why: str) -> None:
        """The server could not be reached, or broke off."""
        if self._ended:
            return
        self._take()
        if self.broken:
            return
        self.recorder.stats.failed += 1
        self._answer.error = why
        self._end(now_ns, "failed")

    def _end(self, now_ns: int, reason: str) -> None:
        self._ended = True
        answer = self._answer
        self._row |= {
            "first_token_ns": answer.first_token_ns, "first_visible_ns": answer.first_visible_ns,
            "last_token_ns": answer.last_token_ns, "finish_ns": now_ns, "output_tokens": answer.output_tokens,
            "finish_reason": answer.finish_reason, "error": answer.error,
        }  # fmt: skip
        self._row.setdefault("request_id", answer.id)
        if answer.model is not None:
            self._row.setdefault("model", _model_name(answer.model))
        if answer.prompt_tokens is not None and not answer.total_of_one:
            self._row["prompt_tokens"] = answer.prompt_tokens
        end_ns: int | None = now_ns if answer.ended_ns is None or reason != "done" else answer.ended_ns
        if reason == "cancelled" and not answer.streams:
            # llama.cpp notices that nobody reads only when it writes: how long it goes on computing is not known.
            end_ns = None
        self._stage |= {"engine_request_id": answer.id, "cached_tokens": answer.cached_tokens, "end_ns": end_ns}
        self._stage.setdefault("end_reason", reason)
        times = answer.engine_times(self._enqueued_ns) if self._enqueued_ns is not None else None
        if times is not None:
            self._row["scheduled_ns"], self._row["engine_first_token_ns"] = times
            self._stage["scheduled_ns"] = times[0]
        self._hand_over()
        append = self.recorder.append
        append("requests", [self._row])
        append("stages", [self._stage])
        append("moves", self._moves())

    def _moves(self) -> list[dict[str, Any]]:
        server = f"server:{self.recorder.server}"
        there, back = ["client-proxy", f"proxy-{server}"], [f"proxy-{server}", "client-proxy"]
        common = self._common | {
            "server": self.recorder.server, "mechanism": "message", "payload_hops": 2, "basis": "counted",
        }  # fmt: skip
        rows: list[dict[str, Any]] = []
        prompt: dict[str, Any]
        tokens: dict[str, Any]
        if self._enqueued_ns is not None:
            prompt = {"object": "prompt", "src": "client", "dst": server, "path": there}
            prompt |= {"start_ns": self._began_ns, "end_ns": self._enqueued_ns}
            rows.append(common | prompt | {"bytes": self._sent_bytes, "transfers": self._sent_reads})
        if self._answer.first_read_ns is not None:
            tokens = {"object": "tokens", "src": server, "dst": "client", "path": back}
            tokens |= {"start_ns": self._answer.first_read_ns, "end_ns": self._answer.last_read_ns}
            rows.append(common | tokens | {"bytes": self._answer.bytes, "transfers": self._answer.reads})
        return rows


def _arrival(received_ns: int, headers: Mapping[str, str]) -> dict[str, Any]:
    """The times before the proxy's own, if a load generator told them, and the earliest of all as the arrival."""
    times = {"received": received_ns}
    for name in ("intended", "sent"):
        told = headers.get(f"x-hoptrace-{name}-ns", "")
        if told.isascii() and told.isdigit() and len(told) < 20 and abs(int(told) - received_ns) < _HEADER_WINDOW_NS:
            times[name] = int(told)
    of = min(times, key=lambda name: times[name])
    return {f"{name}_ns": t for name, t in times.items()} | {"arrival_ns": times[of], "arrival_of": of}


def _model_name(name: str) -> str:
    """llama.cpp names a model by its file: keep the file's name, not where it lies on the machine."""
    return (name.rsplit("/", 1)[-1] if name.startswith("/") else name)[:256]
