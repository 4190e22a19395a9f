"""Spans of many exporters put together into requests: each span once, each request once.

A request may have a span of the client, of a gateway and of each engine that it was on, in any order, from processes that do not
know of each other. They are one request if they name the same identifier of the server's, or if one stands above the other in the
same trace with no other call beside it. Memory is bounded: what is oldest is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from hoptrace.collectors.engines.published.otlp_call import Call, Stay
from hoptrace.collectors.engines.published.otlp_spans import Said, Stage, StartUp, meaning
from hoptrace.collectors.engines.published.otlp_wire import Span
from hoptrace.collectors.links import readings

__all__ = ["Calls", "Taken"]

_SPANS = 100_000
_CALLS = 30_000
_WAITING = 50_000
_HEIGHT = 64
_SAME_NS = 1_000_000
_SGLANG = {
    "prefill_waiting": ("queued_ns", "scheduled_ns"),
    "prefill_forward": ("scheduled_ns", "engine_first_token_ns"),
}
# A decode server computes no prompt: there a request is queued and scheduled, and its first token came with the KV.
_SGLANG_DECODE = {"decode_waiting": ("queued_ns", "scheduled_ns")}

Key = tuple[str, str]


@dataclass(slots=True)
class Taken:
    """What a span came to: a call that is new or changed, or something of a server's start. ``forgotten`` change no more."""

    call: Call | None = None
    start_up: StartUp | None = None
    forgotten: list[Call] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Seen:
    parent: str | None
    call: Call | None


@dataclass(frozen=True, slots=True)
class _Late:
    """A stage whose request has not been heard of yet."""

    stage: Stage
    origin: str


class Calls:
    """The requests of one capture or file. ``counts``: why spans came to nothing; ``ignored``: other spans, by scope."""

    def __init__(self, limit: int = _CALLS) -> None:
        self._limit = limit
        self._seen: OrderedDict[Key, _Seen] = OrderedDict()
        self._calls: OrderedDict[str, Call] = OrderedDict()
        self._waiting: OrderedDict[Key, list[Call | _Late]] = OrderedDict()
        self._waiting_count = 0
        self.counts: dict[str, int] = {}
        self.ignored: dict[str, int] = {}

    def calls(self) -> list[Call]:
        """Those that are still remembered, each once."""
        return list({id(c): c for c in self._calls.values()}.values())

    def take(self, span: Span, server: str | None, origin: str, *, outside: bool = True) -> Taken:
        """One span. ``server``: the engine's name in the trace; ``origin`` tells exporters apart. Without ``outside`` the spans
        of clients and gateways are left out: somebody else has seen those requests, and which is which can't be told."""
        key = (span.trace, span.id)
        if key in self._seen:
            self._count("span that had come before (sent again)")
            return Taken()
        said = meaning(span)
        if isinstance(said, Said) and said.view != "engine" and not outside:
            self._count("span of a client or gateway, whose requests are seen otherwise")
            said = None
        elif said is None:
            scope = span.scope or "(no scope)"
            if scope in self.ignored or len(self.ignored) < 100:
                self.ignored[scope] = self.ignored.get(scope, 0) + 1
        taken = Taken()
        if isinstance(said, Said):
            taken.call = self._request(span, said, server, origin)
        elif isinstance(said, StartUp):
            taken.start_up = said
        self._seen[key] = _Seen(span.parent, taken.call)
        if isinstance(said, Stage):
            taken.call = self._stage(span, _Late(said, origin))
        else:
            engine = isinstance(said, Said) and said.view == "engine"
            taken.call = self._arrived(key, span, taken.call, engine) or taken.call
        while len(self._seen) > _SPANS:
            self._seen.popitem(last=False)
        while len(self._calls) > self._limit:
            taken.forgotten.append(self._calls.popitem(last=False)[1])
        return taken

    def end(self) -> None:
        """Nothing more will come: count what waits for requests that nobody told of."""
        for items in self._waiting.values():
            self._lost(items)
        self._waiting.clear()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _count(self, what: str, n: int = 1) -> None:
        if n:
            self.counts[what] = self.counts.get(what, 0) + n

    def _request(self, span: Span, said: Said, server: str | None, origin: str) -> Call | None:
        key = (span.trace, span.id)
        name = readings(said.id)[0][0] if said.id and said.view == "engine" else said.id
        # Below an engine's span stands no view of the same request from further out.
        waiting = self._waiting.get(key, ()) if said.view != "engine" else ()
        below = list({id(c.whole): c.whole for c in waiting if isinstance(c, Call)}.values())
        call = self._calls[name].whole if name is not None and name in self._calls else None
        if call is None and len(below) > 1:
            self._count("span around several calls")
            return None
        above, unknown = self._climb(span.trace, span.parent)
        if call is None:
            if below:
                call = below[0]
            elif above is not None and above.takes(said, origin):
                call = above
            else:
                call = Call(said.id or f"span:{span.trace}:{span.id}")
                self._calls[call.link] = call
        # The same request under another name, of which nobody has been told yet: one, not two.
        for other in (*below, above):
            if other is not None and call.absorb(other):
                self._count("spans of one request, put together")
        if name is not None:
            self._calls[name] = call
        if unknown is not None:
            self._wait(unknown, call)
        if said.view == "engine":
            return self._stay(call, said, server, origin)
        call.view(said)
        return call

    def _stay(self, call: Call, said: Said, server: str | None, origin: str) -> Call | None:
        assert said.id is not None
        told = [s.said for s in call.stays if s.engine_id == said.id and s.origin == origin and s.said is not None]
        # Sequences of one prompt have one arrival (to the reading of two clocks): a span with another arrival is of another
        # request, to which a client gave the same name.
        if told and abs(told[0].start_ns - said.start_ns) > _SAME_NS:
            self._count("engine span whose request id was used before")
            return None
        stay = next((s for s in call.stays if s.engine_id == said.id and s.origin == origin and s.said is None), None)
        if stay is None:
            stay = Stay(said.id, server, origin)
            call.stays.append(stay)
        stay.tell(said)
        call.view(said)
        if not call.written:
            call.link = said.id
        return call

    def _stage(self, span: Span, late: _Late) -> Call | None:
        call, unknown = self._climb(span.trace, span.parent)
        if call is not None:
            return self._use(call, late)
        if unknown is not None:
            self._wait(unknown, late)
        else:
            self._count("stage of no known request")
        return None

    def _use(self, call: Call, late: _Late) -> Call | None:
        stay = next((s for s in call.stays if s.origin == late.origin), call.stays[0] if call.stays else None)
        if stay is None:
            self._count("stage of no known request")
            return None
        decode = stay.said is not None and stay.said.role == "decode"
        names = (_SGLANG_DECODE if decode else _SGLANG).get(late.stage.name)
        if names is not None:
            for name, value in zip(names, (late.stage.start_ns, late.stage.end_ns), strict=True):
                # Again after a retraction: the first time counts.
                stay.times[name] = min(stay.times.get(name, value), value)
        return call

    def _climb(self, trace: str, parent: str | None) -> tuple[Call | None, Key | None]:
        """The nearest call above, or else the span above that has not come yet."""
        for _ in range(_HEIGHT):
            if parent is None:
                return None, None
            seen = self._seen.get((trace, parent))
            if seen is None:
                return None, (trace, parent)
            if seen.call is not None:
                return seen.call.whole, None
            parent = seen.parent
        return None, None

    def _wait(self, key: Key, item: Call | _Late) -> None:
        self._waiting.setdefault(key, []).append(item)
        self._waiting_count += 1
        while self._waiting_count > _WAITING:
            items = self._waiting.popitem(last=False)[1]
            self._waiting_count -= len(items)
            self._lost(items)

    def _lost(self, items: list[Call | _Late]) -> None:
        self._count("stage of no known request", sum(1 for i in items if isinstance(i, _Late)))

    def _arrived(self, key: Key, span: Span, call: Call | None, engine: bool) -> Call | None:
        """What waited for this span goes to its call, or waits for the next one above; gives the call that changed by it."""
        items = self._waiting.pop(key, [])
        self._waiting_count -= len(items)
        changed: Call | None = None
        for item in items:
            item = item.whole if isinstance(item, Call) else item
            above, unknown = (call, None) if call is not None else self._climb(span.trace, span.parent)
            if isinstance(item, Call):
                if above is None and unknown is not None:
                    self._wait(unknown, item)
                elif engine:
                    continue
                elif above is not None and above is not item and above.absorb(item):
                    self._count("spans of one request, put together")
                    changed = above
            elif above is not None:
                changed = self._use(above, item) or changed
            elif unknown is not None:
                self._wait(unknown, item)
            else:
                self._count("stage of no known request")
        return changed
