"""One request and its answer, as rows of the trace. Knows nothing of sockets: it is told bytes and times.

A fault of the recorder ends the recording of this request, never its stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from hoptrace.collectors.engines.streams.answer import Answer
from hoptrace.collectors.engines.streams.asked import Asked, model_name, read_body, session_of, tenant_of
from hoptrace.collectors.engines.streams.hashing import HashKey, Prompt, keyed, prefix_hashes
from hoptrace.collectors.engines.streams.sessions import Past
from hoptrace.collectors.left import Left

if TYPE_CHECKING:
    from hoptrace.collectors.engines.streams.record import Recorder

__all__ = ["CAPTURE_ENDED", "CLIENT_LEFT", "Exchange"]

CLIENT_LEFT = "the client closed the connection"
CAPTURE_ENDED = "the capture ended"
_HEADER_WINDOW_NS = 86_400 * 10**9
_SLOW_BODY_NS = 100_000_000
_HASHES_AT_ONCE = 128
# vLLM makes its identifiers of the client's x-request-id (vllm/entrypoints/openai: `_base_request_id`).
_ID_PREFIX = {"/v1/chat/completions": "chatcmpl-", "/v1/completions": "cmpl-"}

P = ParamSpec("P")


def _guarded(method: Callable[Concatenate[Exchange, P], None]) -> Callable[Concatenate[Exchange, P], None]:
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
    """One stay of a request on one server. ``first``: no other server of this session has had the request before.

    A router hands a request on from server to server. Only the first stay tells when the request came. Tokens are written once:
    by the stay that is open while the others are (the router), else by the first one that emits any; a prefill whose decode is
    elsewhere (``do_remote_decode``) emits a token that reaches no user.
    """

    def __init__(self, recorder: Recorder, received_ns: int, headers: Mapping[str, str], path: str) -> None:
        self.recorder = recorder
        self.broken = False
        self._path = path
        told_id = self._told_id = headers.get("x-request-id") or None
        self.number, self.first = recorder.links.begin(told_id, recorder.server)
        self.outer = None if self.first else recorder.shared.open.get(self.number)
        self._began_ns = self._received_ns = received_ns
        self._enqueued_ns: int | None = None
        self._sent_bytes = self._sent_reads = 0
        self._ended = False
        self._role = "both"
        self._past: Past | None = None
        self._answer = Answer(self._emit, recorder.writer.drop, self._claim)
        self._common = {"request": self.number, "source": recorder.place.source}
        self._row: dict[str, Any] = dict(self._common)
        if self.first:
            self._row |= _arrival(received_ns, headers)
            recorder.shared.open[self.number] = self
        self._session = session_of(headers)
        if self.first and (tenant := tenant_of(headers, recorder.key)) is not None:
            self._row["tenant"] = tenant
        if told_id is not None:
            self._row["request_id"] = told_id[:256]
            self._claim_prefixed(told_id)
        stage = recorder.links.stage(self.number, recorder.server)
        self._stage: dict[str, Any] = self._common | {
            "sequence": 0, "attempt": 0, "stage": stage, "server": recorder.server, "role": self._role,
        }  # fmt: skip
        if self.outer is not None:
            self.outer.routes()
        if self.first:
            recorder.append("requests", [self._row])

    # -- the request --------------------------------------------------------------------------------------------------

    @_guarded
    def forwarded(self, enqueued_ns: int, size: int, reads: int, received_ns: int | None = None) -> None:
        """The request is on its way to the server: ``size`` bytes that came in ``reads`` reads.

        ``received_ns`` is when the whole body was there, if that was later than the headers: the request is received only then.
        """
        if self._ended:
            return
        if received_ns is not None:
            self._received_ns = received_ns
        if self.first:
            self._row["received_ns"] = self._received_ns
            if self._row["arrival_of"] == "received":
                self._row["arrival_ns"] = self._received_ns
            if self._received_ns - self._began_ns > _SLOW_BODY_NS:
                self.recorder.append("requests", [self._row])
        self._enqueued_ns = enqueued_ns
        self._sent_bytes, self._sent_reads = size, reads
        self._stage["enqueued_ns"] = enqueued_ns
        self.recorder.append("stages", [self._stage])
        for node in self.recorder.place.between:
            wait = {
                "start_ns": self._received_ns, "end_ns": enqueued_ns, "server": self.recorder.server, "kind": "message",
                "on": node, "count": 1, "basis": "counted",
            }  # fmt: skip
            self.recorder.append("waits", [self._common | wait])

    @_guarded
    def described(self, body: bytes) -> None:
        """The request's whole body is there. Its blocks are hashed later (:meth:`Recorder.work`), since that takes long."""
        asked = read_body(body)
        if asked is None:
            return
        self._describe(asked)
        if asked.prompt is not None and self.recorder.key is not None:
            self.recorder.jobs.append(self._hash(asked.prompt, self.recorder.key))

    def _hash(self, prompt: Prompt, key: HashKey) -> Iterator[None]:
        hashes: list[int] = []
        for value in prefix_hashes(prompt, key):
            hashes.append(value)
            if len(hashes) % _HASHES_AT_ONCE == 0:
                yield
        self._row |= {
            "prefix_blocks": hashes, "hash_space": key.space, "block_size": prompt.block_size, "block_unit": prompt.unit,
        }  # fmt: skip
        if self._ended:
            self.recorder.append("requests", [self._row])

    def _describe(self, asked: Asked) -> None:
        self._row |= {k: v for k, v in asked.columns().items() if v is not None}
        if asked.request_id is not None and self.alone:
            self._claim_prefixed(asked.request_id)
        if asked.choices > 1:
            self.recorder.links.choices(self.number, asked.choices)
        self._role = self._stage["role"] = asked.role if self._role == "both" else self._role
        if self.first and self.recorder.key is not None:
            self._join(asked, self.recorder.key)
        if self._ended:
            self.recorder.append("requests", [self._row])

    def _join(self, asked: Asked, key: HashKey) -> None:
        """Find the conversation that the request belongs to, and the request that it continues."""
        sessions, told = self.recorder.shared.sessions, self._session or asked.session
        past = self._past = Past(self.number, None if told is None else keyed(key, "session", told), told is not None)
        if not self.alone:
            self.recorder.shared.remember(self.number, past)
        arrival_ns = self._row["arrival_ns"]
        if asked.continues is not None:
            parent = sessions.by_answer(asked.continues)
        else:
            parent = sessions.asked(past, asked.messages, key, self._received_ns) if asked.messages else None
        if parent is not None:
            known = parent.session
            session = sessions.join(past, parent, key)
            self._row["parent_request"] = parent.number
            if parent.finish_ns is not None and arrival_ns >= parent.finish_ns:
                self._row["think_ns"] = arrival_ns - parent.finish_ns
            if known is None:
                self.recorder.append("requests", [{"request": parent.number, "session": session, "source": self._row["source"]}])
        if past.session is not None:
            self._row["session"] = past.session

    def routes(self) -> None:
        """The same request has come to another server meanwhile: this one hands it on."""
        self._role = self._stage["role"] = "route"

    # -- the answer ---------------------------------------------------------------------------------------------------

    @_guarded
    def answered(self, status: int, content_type: str, content_encoding: str) -> None:
        """The server's status line and headers are there."""
        self._answer.begin(status, content_type, content_encoding)
        if status >= 400:
            self._stage["end_reason"] = "refused" if status < 500 or status == 503 else "failed"

    def read(self, data: bytes, now_ns: int, late: bool) -> None:
        """Bytes of the answer that one read at ``now_ns`` brought. ``late``: see :meth:`Answer.read`."""
        if self.broken:
            return
        try:
            self.recorder.stats.tokens += self._answer.read(data, now_ns, late)
        except Exception as e:
            self.broken = True
            self.recorder.fault(e)

    @_guarded
    def after_gap(self, data: bytes, now_ns: int) -> None:
        """Bytes of the answer after some that are missing: see :meth:`Answer.after_gap`."""
        self._answer.after_gap(data, now_ns)

    @property
    def whole(self) -> bool:
        """Whether the answer says itself that nothing more comes."""
        return self._answer.whole

    def _claim_prefixed(self, told_id: str) -> None:
        if self._path in _ID_PREFIX:
            self._claim(_ID_PREFIX[self._path] + told_id)

    def _claim(self, told_id: str) -> None:
        self.recorder.links.claim(self.number, told_id)

    @property
    def alone(self) -> bool:
        """Whether no other server can have had this request: it bears no identifier of the client's."""
        return self._told_id is None

    @property
    def _may_speak(self) -> bool:
        """Whether what this stay emits can be what the client gets."""
        return self.outer is None and self._role != "prefill"

    @property
    def _speaks(self) -> bool:
        """Whether what this stay emits is what the client gets: no other stay's tokens are."""
        return self._may_speak and self.recorder.shared.speaker(self.number, self) is self

    def _emit(self, sequence: int, index: int, time_ns: int, count: int, coalesced: bool) -> None:
        if self.alone or self._speaks:
            self.recorder.tokens.add(self.number, sequence, index, time_ns, count, coalesced)

    # -- the end ------------------------------------------------------------------------------------------------------

    @_guarded
    def finished(self, now_ns: int) -> None:
        """The answer was read to its end."""
        if self._ended:
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
        self.recorder.stats.cancelled += 1
        self._answer.error = self._answer.error or why
        named = self._answer.id is not None or (self._told_id is not None and self._path in _ID_PREFIX)
        if not named and self._enqueued_ns is not None:
            asked = (self._row.get(name) for name in ("prompt_tokens", "max_tokens"))
            self.recorder.links.left(Left(self.number, self.recorder.server, self._enqueued_ns, now_ns, *asked))
        self._end(now_ns, "cancelled")

    @_guarded
    def failed(self, now_ns: int, why: str) -> None:
        """The server could not be reached, or broke off."""
        if self._ended:
            return
        self.recorder.stats.failed += 1
        self._answer.error = why
        self._end(now_ns, "failed")

    @_guarded
    def missed(self, now_ns: int, why: str) -> None:
        """Some of it was not seen: ``why``. What was read until then stands; of totals only what the server told."""
        if self._ended:
            return
        self.recorder.stats.failed += 1
        self._answer.error = self._answer.error or why
        self._end(now_ns, None)

    def _end(self, now_ns: int, reason: str | None) -> None:
        self._ended = True
        answer, shared = self._answer, self.recorder.shared
        now_ns = max(now_ns, self._began_ns, self._received_ns, answer.last_read_ns or 0)
        past = self._past or shared.past(self.number)
        if past is not None and reason == "done" and self._may_speak:
            shared.sessions.answered(past, answer.id, now_ns)
        if shared.open.get(self.number) is self:
            del shared.open[self.number]
        counts = answer.first_token_ns is not None or reason == "done"
        speaks = self.alone or (self._speaks if counts else self._may_speak)
        if speaks:
            self._row |= {
                "first_token_ns": answer.first_token_ns, "first_visible_ns": answer.first_visible_ns,
                "last_token_ns": answer.last_token_ns if reason else None,
                "output_tokens": answer.output_tokens if reason else answer.told_at_end,
                "finish_reason": answer.finish_reason,
            }  # fmt: skip
        if speaks or (self.outer is None and self._role == "prefill"):
            self._row |= {"finish_ns": now_ns, "error": answer.error}
            self._row.setdefault("request_id", answer.id)
        if answer.model is not None:
            self._row.setdefault("model", model_name(answer.model))
        if answer.prompt_tokens is not None and not answer.total_of_one:
            self._row["prompt_tokens"] = answer.prompt_tokens
        end_ns: int | None = now_ns if answer.ended_ns is None or reason != "done" else answer.ended_ns
        if reason is None or (reason == "cancelled" and not answer.streams):
            # llama.cpp notices that nobody reads only when it writes: how long it goes on computing is not known.
            end_ns = None
        if reason == "done" and self._role == "prefill":
            reason = "handed over"
        # Of several sequences servers tell a count of one of them (vLLM) or of all: that is not this sequence's.
        known = self.recorder.links.knows_cached(self.number, self.recorder.server)
        cached = answer.cached_tokens if len(answer.sequences) < 2 and not known else None
        self._stage |= {"engine_request_id": answer.id, "cached_tokens": cached, "end_ns": end_ns}
        self._stage.setdefault("end_reason", reason)
        times = answer.engine_times(self._enqueued_ns) if self._enqueued_ns is not None else None
        if times is not None:
            self._stage["scheduled_ns"] = times.began_ns
            if self.first:
                self._row |= {"queued_ns": times.queued_ns, "scheduled_ns": times.began_ns}
            if speaks and times.first_ns is not None:
                self._row["engine_first_token_ns"] = times.first_ns
        append = self.recorder.append
        append("requests", [self._row])
        append("stages", [self._stage])
        append("moves", self._moves(whole=reason is not None))

    def _moves(self, *, whole: bool) -> list[dict[str, Any]]:
        place, name = self.recorder.place, self.recorder.server
        client = "client" if self.outer is None else f"server:{self.outer.recorder.server}"
        server = f"server:{name}"
        there = place.links(name, client)
        common = self._common | {
            "server": name, "mechanism": "message", "payload_hops": len(there), "basis": "counted",
        }  # fmt: skip
        rows: list[dict[str, Any]] = []
        prompt: dict[str, Any]
        tokens: dict[str, Any]
        if self._enqueued_ns is not None:
            prompt = {"object": "prompt", "src": client, "dst": server, "path": there}
            prompt |= {"start_ns": self._began_ns, "end_ns": self._enqueued_ns}
            rows.append(common | prompt | {"bytes": self._sent_bytes, "transfers": self._sent_reads})
        if self._answer.first_read_ns is not None:
            tokens = {"object": "tokens", "src": server, "dst": client, "path": there[::-1]}
            tokens |= {"start_ns": self._answer.first_read_ns, "end_ns": self._answer.last_read_ns}
            size = {"bytes": self._answer.bytes, "transfers": self._answer.reads} if whole else {}
            rows.append(common | tokens | size)
        return rows


def _arrival(received_ns: int, headers: Mapping[str, str]) -> dict[str, Any]:
    """The times before our own, if a load generator told them, and the earliest of all as the arrival."""
    times = {"received": received_ns}
    for name in ("intended", "sent"):
        told = headers.get(f"x-hoptrace-{name}-ns", "")
        if told.isascii() and told.isdigit() and len(told) < 20 and abs(int(told) - received_ns) < _HEADER_WINDOW_NS:
            times[name] = int(told)
    of = min(times, key=lambda name: times[name])
    return {f"{name}_ns": t for name, t in times.items()} | {"arrival_ns": times[of], "arrival_of": of}
