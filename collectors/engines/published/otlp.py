"""The OTLP receiver: spans of servers, gateways and clients into requests, stages and events of the session."""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import json
from collections import deque
from collections.abc import Callable, Collection, Sequence
from hashlib import blake2b

from hoptrace.collectors.base import Finding
from hoptrace.collectors.engines.published.foreign_clock import OneWay
from hoptrace.collectors.engines.published.otlp_call import Call
from hoptrace.collectors.engines.published.otlp_calls import Calls
from hoptrace.collectors.engines.published.otlp_ports import GrpcPort, HttpPort, taken
from hoptrace.collectors.engines.published.otlp_spans import StartUp
from hoptrace.collectors.engines.published.otlp_wire import Malformed, Span, Spans, spans_of_json, spans_of_protobuf
from hoptrace.collectors.engines.streams.hashing import HashKey
from hoptrace.collectors.links import Links
from hoptrace.manifest import Server
from hoptrace.writer import TraceWriter

__all__ = ["GRPC_PORT", "HTTP_PORT", "OtlpReceiver"]

HTTP_PORT, GRPC_PORT = 4318, 4317
"""https://opentelemetry.io/docs/specs/otlp/: the default ports."""

GRACE_NS = 6_000_000_000
"""How long a request that only its client or gateway told of waits for the engine's span: exporters send every five seconds."""

_PENDING = 50_000
_LARGE = 16_384
_BREATH = 100
_ENGINE_TIMES = ("queued_ns", "scheduled_ns", "engine_first_token_ns")


@dataclasses.dataclass(frozen=True, slots=True)
class _From:
    """Whose a span is: ``server`` in the trace, ``origin`` among exporters, ``host``, and whether that is this one."""

    server: str | None
    origin: str
    host: str
    local: bool


class OtlpReceiver:
    """Listens at ``address`` for HTTP and at ``grpc`` (its port less one, if null) for gRPC; a port 0 takes a free one.

    ``servers``: those of the session, by which spans are told apart (their name, or process, in the resource; the only one
    otherwise). ``exact``: names of servers whose times and stays a closer source records; of their spans the rest is used.
    ``key`` hashes conversation identifiers; without it none are kept.
    """

    name = "otlp"

    def __init__(
        self,
        writer: TraceWriter | None,
        links: Links | None,
        host: str,
        address: tuple[str, int] = ("127.0.0.1", HTTP_PORT),
        grpc: tuple[str, int] | None = None,
        *,
        servers: Sequence[Server] = (),
        key: HashKey | None = None,
        exact: Collection[str] = (),
    ) -> None:
        self._writer, self._links, self._host = writer, links, host
        self._address = address
        self._grpc_address = grpc or (address[0], max(0, address[1] - 1))
        self._servers, self._key, self._exact = servers, key, exact
        self._pending: deque[tuple[Span, str, int]] = deque()
        self._calls = Calls()
        self._dirty: dict[int, Call] = {}
        self._clocks: dict[str, OneWay] = {}
        self._filled: set[str] = set()
        self._started = False
        self._rows = 0
        self.received = self.messages = 0
        self.http = HttpPort(self._accept, self._refused)
        self.grpc = GrpcPort(self._accept, self._refused)

    @property
    def tables(self) -> tuple[str, ...]:
        """Tables it fills; once it listens, those that spans have come for: nobody knows what servers do not export."""
        return tuple(sorted(self._filled)) if self._started else ("requests", "stages", "events")

    async def probe(self) -> Finding:
        problems = {
            what: why
            for what, at in (("HTTP", self._address), ("gRPC", self._grpc_address))
            if at[1] and (why := taken(at)) is not None
        }
        told = [
            f"{what} on {self._named(what)} is not possible ({why}): end what listens there, or choose another port with --otlp"
            for what, why in problems.items()
        ]
        return Finding(len(problems) < 2, "; ".join(told) or None)

    async def start(self) -> None:
        problems = []
        for port, at in ((self.http, self._address), (self.grpc, self._grpc_address)):
            try:
                await port.start(at)
            except OSError as e:
                problems.append(e)
        if len(problems) == 2:
            raise problems[0]
        self._started = True

    async def sample(self) -> int:
        """Use the spans that have come."""
        done = 0
        while self._pending:
            self._next()
            done += 1
            if done % _BREATH == 0:
                await asyncio.sleep(0)
        self._write(self._now_ns())
        rows, self._rows = self._rows, 0
        return rows

    def restarted(self) -> None:
        return None

    async def close(self) -> None:
        # First what has come: closing waits for exporters that hold a connection open, up to a second.
        while self._pending:
            self._next()
        await asyncio.gather(self.http.close(), self.grpc.close(), return_exceptions=True)
        while self._pending:
            self._next()
        self._calls.end()
        self._write(None)
        if self._writer is None or not self._started:
            return
        now = self._now_ns()
        for clock in self._clocks.values():
            clock.flush(now)
        for what, n in self._calls.counts.items():
            self._writer.drop(f"{self.name}: {what}", n)
        if notes := self.notes():
            self._writer.update(lambda m: m.notes.extend(notes))

    def notes(self) -> list[str]:
        """What the reader of the trace should know."""
        notes = []
        if self.received:
            notes.append("Exporters send spans every five seconds or so: those of the last requests may not have come.")
        else:
            notes.append(f"No span came to the OTLP receiver ({self._named('HTTP')} and {self._named('gRPC')}).")
        for scope, n in sorted(self._calls.ignored.items()):
            notes.append(f"{n:,} spans of {scope} are not about a request to a model, and were left out.")
        if self._clocks:
            hosts = ", ".join(sorted(self._clocks))
            notes.append(f"Spans of {hosts} have the time of that host's clock, as it was (see `clock_sync`).")
        return notes

    # -- coming in ----------------------------------------------------------------------------------------------------

    async def _accept(self, body: bytes, form: str, peer: str) -> tuple[int, str]:
        received_ns = self._now_ns()
        parse: Callable[[bytes], Spans] = spans_of_protobuf if form == "protobuf" else _json
        spans = await asyncio.to_thread(parse, body) if len(body) > _LARGE else parse(body)
        self.messages += 1
        self.received += len(spans.spans) + sum(spans.bad.values())
        bad, reasons = sum(spans.bad.values()), list(spans.bad)
        for what, n in spans.bad.items():
            self._drop(what, n)
        room = max(0, _PENDING - len(self._pending))
        kept = spans.spans[:room]
        self._pending.extend((s, peer, received_ns) for s in kept)
        if len(kept) < len(spans.spans):
            reasons.append("hoptrace is behind")
            bad += len(spans.spans) - len(kept)
            self._drop("span that came when too many waited", len(spans.spans) - len(kept))
        return bad, "; ".join(reasons)

    def _refused(self, why: str) -> None:
        self._drop(why, 1)

    # -- going out ----------------------------------------------------------------------------------------------------

    def _next(self) -> None:
        try:
            self._use(*self._pending.popleft())
        except Exception as e:  # one odd span must not take the others with it
            self._drop(f"span that could not be used ({type(e).__name__})", 1)

    def _use(self, span: Span, peer: str, received_ns: int) -> None:
        assert self._writer is not None and self._links is not None
        whence = self._whence(span, peer)
        if whence.local:
            span = _shifted(span, -self._writer.clock.wall_step_ns())
        else:
            clock = self._clocks.get(whence.host)
            if clock is None and len(self._clocks) < 1000:
                clock = self._clocks[whence.host] = OneWay(self._writer, whence.host, self.name)
            if clock is not None:
                clock.saw(span.end_ns or span.start_ns, received_ns)
        taken = self._calls.take(span, whence.server, whence.origin, outside=not self._links.primary)
        if taken.start_up is not None:
            self._start_up(taken.start_up, whence)
        if taken.call is not None:
            taken.call.touched_ns = received_ns
            self._dirty[id(taken.call)] = taken.call
        for call in taken.forgotten:
            if self._dirty.pop(id(call), None) is not None:
                self._hand_over(call, received_ns)

    def _write(self, now_ns: int | None) -> None:
        """Hand over what has changed; null: everything, now."""
        for key, call in list(self._dirty.items()):
            if call.gone:
                del self._dirty[key]
            elif now_ns is None or call.has_engine or now_ns - call.touched_ns > GRACE_NS:
                del self._dirty[key]
                self._hand_over(call, now_ns if now_ns is not None else self._now_ns())

    def _hand_over(self, call: Call, now_ns: int) -> None:
        assert self._links is not None
        request, stages = call.request(), call.stages()
        if any(s.server in self._exact for s in call.stays):
            request = {n: v for n, v in request.items() if n not in _ENGINE_TIMES}
            stages = [s for s in stages if s.get("server") not in self._exact]
        request["session"] = self._hashed(request.get("session"))
        call.written = True
        for row in stages:
            self._links.add(call.link, "stages", row | {"source": self.name}, now_ns)
        self._links.add(call.link, "requests", request | {"source": self.name}, now_ns, done=call.done)
        self._filled |= {"requests", "stages"} if stages else {"requests"}
        self._rows += len(stages) + 1

    def _start_up(self, what: StartUp, whence: _From) -> None:
        assert self._writer is not None
        took = "" if what.seconds is None else f": {what.seconds:.3f} s"
        row = {"time_ns": what.start_ns, "host": whence.host, "server": whence.server, "kind": "start-up"}
        self._writer.append("events", [row | {"detail": f"{what.what}{took}", "source": self.name}])
        self._filled.add("events")
        self._rows += 1

    def _whence(self, span: Span, peer: str) -> _From:
        r = span.resource
        named, service = _text(r.get("host.name")), _text(r.get("service.name"))
        process = _text(r.get("vllm.process_id")) or _text(r.get("process.pid"))
        local = named == self._host if named else _loopback(peer)
        host = named or (self._host if local else peer)
        server = self._servers[0].name if len(self._servers) == 1 else None
        if server is None:
            instance = _text(r.get("service.instance.id"))
            by_name = [s for s in self._servers if s.name in (service, instance) or s.url == instance is not None]
            by_process = [s for s in self._servers if local and s.pid is not None and str(s.pid) == process]
            found = by_name or by_process
            server = found[0].name if len(found) == 1 else None
        return _From(server, f"{host}/{service}/{_text(r.get('service.instance.id'))}/{process}", host, local)

    def _hashed(self, session: object) -> str | None:
        if self._key is None or not isinstance(session, str):
            return None
        return blake2b(
            session.encode("utf-8", "surrogatepass"), digest_size=8, key=self._key.key, person=b"hoptrace-session"
        ).hexdigest()

    def _named(self, what: str) -> str:
        host, port = self._address if what == "HTTP" else self._grpc_address
        bound = self.http.port if what == "HTTP" else self.grpc.port
        return f"{host}:{bound or port}"

    def _drop(self, what: str, n: int) -> None:
        if self._writer is not None:
            self._writer.drop(f"{self.name}: {what}", n)

    def _now_ns(self) -> int:
        assert self._writer is not None
        return self._writer.clock.now_ns()


def _json(body: bytes) -> Spans:
    try:
        return spans_of_json(json.loads(body))
    except (ValueError, RecursionError) as e:
        raise Malformed(str(e) if isinstance(e, Malformed) else "it is no JSON") from None


def _shifted(span: Span, by_ns: int) -> Span:
    end = None if span.end_ns is None else span.end_ns + by_ns
    return dataclasses.replace(span, start_ns=span.start_ns + by_ns, end_ns=end)


def _text(value: object) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value[:200] if isinstance(value, str) and value else None


def _loopback(peer: str) -> bool:
    try:
        return ipaddress.ip_address(peer.split("%", 1)[0]).is_loopback
    except ValueError:
        return peer == ""
