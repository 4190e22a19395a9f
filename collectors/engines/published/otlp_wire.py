"""Spans from OTLP messages: protobuf, and JSON as the OTLP specification writes it (collector file exporter, HTTP/JSON).

Protocol: opentelemetry-proto, ExportTraceServiceRequest. In JSON, identifiers are hex, 64-bit integers are strings, enumerations
are numbers; older exporters wrote names of enumerations and numbers without quotes, and these are read too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CLIENT", "INTERNAL", "SERVER", "Malformed", "Span", "Spans", "spans_of_json", "spans_of_protobuf"]

INTERNAL, SERVER, CLIENT = 1, 2, 3
"""Span.SpanKind of opentelemetry/proto/trace/v1/trace.proto."""

_KINDS = {"SPAN_KIND_INTERNAL": 1, "SPAN_KIND_SERVER": 2, "SPAN_KIND_CLIENT": 3, "SPAN_KIND_PRODUCER": 4, "SPAN_KIND_CONSUMER": 5}
_ERROR = 2
_TEXT = 4096
_DEPTH = 8
_LATEST_NS = 1 << 62


class Malformed(ValueError):
    """The bytes are no OTLP message."""


@dataclass(frozen=True, slots=True)
class Span:
    """One span; times are the exporter's wall clock in ns. ``end_ns`` is null if it has none."""

    trace: str
    id: str
    parent: str | None
    name: str
    kind: int
    start_ns: int
    end_ns: int | None
    attributes: Mapping[str, Any]
    resource: Mapping[str, Any]
    scope: str
    error: bool = False
    status: str = ""
    events: tuple[tuple[str, int], ...] = ()


@dataclass(slots=True)
class Spans:
    """The spans of a message. ``bad`` counts, by reason, those that cannot be used."""

    spans: list[Span] = field(default_factory=list)
    bad: dict[str, int] = field(default_factory=dict)

    def reject(self, reason: str) -> None:
        self.bad[reason] = self.bad.get(reason, 0) + 1

    def take(self, span: Span) -> None:
        if not span.id or not span.trace:
            self.reject("span without an identifier")
        elif not 0 < span.start_ns < _LATEST_NS:
            self.reject("span without a start time")
        else:
            self.spans.append(span)


def spans_of_protobuf(body: bytes) -> Spans:
    """The spans of an ExportTraceServiceRequest. Raises Malformed."""
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest()
    try:
        request.ParseFromString(body)
    except (DecodeError, RecursionError):
        raise Malformed("it is no ExportTraceServiceRequest in protobuf") from None
    out = Spans()
    for group in request.resource_spans:
        resource = {a.key: _proto_value(a.value) for a in group.resource.attributes}
        for scoped in group.scope_spans:
            scope = scoped.scope.name[:_TEXT]
            for s in scoped.spans:
                end = s.end_time_unix_nano
                out.take(
                    Span(
                        s.trace_id.hex(), s.span_id.hex(), s.parent_span_id.hex() or None, s.name[:_TEXT], s.kind,
                        s.start_time_unix_nano, end if 0 < end < _LATEST_NS else None,
                        {a.key: _proto_value(a.value) for a in s.attributes}, resource, scope,
                        s.status.code == _ERROR, s.status.message[:_TEXT],
                        tuple((e.name[:_TEXT], e.time_unix_nano) for e in s.events[:1000] if e.time_unix_nano < _LATEST_NS),
                    )
                )  # fmt: skip
    return out


def _proto_value(value: Any, depth: int = 0) -> Any:
    kind = value.WhichOneof("value")
    if kind == "string_value":
        return value.string_value[:_TEXT]
    if kind == "array_value":
        return [_proto_value(v, depth + 1) for v in value.array_value.values] if depth < _DEPTH else None
    if kind in ("bool_value", "int_value", "double_value"):
        return getattr(value, kind)
    return None  # maps and bytes: nothing that is read here


def spans_of_json(message: object) -> Spans:
    """The spans of an ExportTraceServiceRequest that was parsed from JSON. Raises Malformed for anything else."""
    groups = message.get("resourceSpans", message.get("resource_spans")) if isinstance(message, Mapping) else None
    if not isinstance(groups, list):
        raise Malformed("it has no list resourceSpans")
    out = Spans()
    for group in _maps(groups):
        resource = _attributes(_at(group, "resource", {}))
        # Before 1.0: instrumentationLibrarySpans.
        for scoped in _maps(_at(group, "scopeSpans", _at(group, "instrumentationLibrarySpans", []))):
            named = _at(scoped, "scope", _at(scoped, "instrumentationLibrary", {}))
            scope = _text(named.get("name")) if isinstance(named, Mapping) else ""
            for s in _maps(_at(scoped, "spans", [])):
                out.take(_json_span(s, resource, scope))
    return out


def _json_span(s: Mapping[str, Any], resource: dict[str, Any], scope: str) -> Span:
    status = _at(s, "status", {})
    status = status if isinstance(status, Mapping) else {}
    code, kind = status.get("code", 0), s.get("kind", 0)
    end = _whole(_at(s, "endTimeUnixNano", 0))
    happened = ((_text(e.get("name")), _whole(_at(e, "timeUnixNano", 0))) for e in _maps(_at(s, "events", []))[:1000])
    return Span(
        _text(_at(s, "traceId", "")), _text(_at(s, "spanId", "")), _text(_at(s, "parentSpanId", "")) or None,
        _text(s.get("name")),
        _KINDS.get(kind, 0) if isinstance(kind, str) else _whole(kind), _whole(_at(s, "startTimeUnixNano", 0)), end or None,
        _attributes(s), resource, scope, code in (_ERROR, "STATUS_CODE_ERROR"), _text(status.get("message")),
        tuple((n, t) for n, t in happened if t),
    )  # fmt: skip


def _at(data: Mapping[str, Any], name: str, default: Any) -> Any:
    """A field by its JSON name, or by its protobuf name (which parsers must take too)."""
    if name in data:
        return data[name]
    return data.get("".join(f"_{c.lower()}" if c.isupper() else c for c in name), default)


def _maps(items: object) -> list[Mapping[str, Any]]:
    return [i for i in items if isinstance(i, Mapping)] if isinstance(items, list) else []


def _attributes(holder: object) -> dict[str, Any]:
    listed = holder.get("attributes") if isinstance(holder, Mapping) else None
    return {_text(a.get("key")): _json_value(a.get("value")) for a in _maps(listed)}


def _json_value(value: object, depth: int = 0) -> Any:
    if not isinstance(value, Mapping):
        return None
    for name, found in _pairs(value):
        if name == "stringValue" and isinstance(found, str):
            return found[:_TEXT]
        if name == "boolValue" and isinstance(found, bool):
            return found
        if name == "intValue":
            return _signed(found)
        if name == "doubleValue":
            try:
                return float(found) if isinstance(found, int | float | str) else None
            except (ValueError, OverflowError):
                return None
        if name == "arrayValue" and isinstance(found, Mapping) and depth < _DEPTH:
            return [_json_value(v, depth + 1) for v in _maps(found.get("values"))]
    return None


def _signed(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    try:
        number = int(value) if len(str(value)[:30]) < 30 else None
    except ValueError:
        return None
    return number if number is not None and -(1 << 63) <= number < 1 << 63 else None


def _pairs(value: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, found in value.items():
        head, *rest = str(name).split("_")
        yield head + "".join(r.title() for r in rest), found


def _text(value: object) -> str:
    return value[:_TEXT] if isinstance(value, str) else ""


def _whole(value: object) -> int:
    """A 64-bit number that may be text; 0 for anything else."""
    if isinstance(value, bool):
        return 0
    if isinstance(value, str):
        value = int(value) if value.isascii() and value.isdigit() and len(value) < 20 else 0
    return value if isinstance(value, int) and 0 <= value < _LATEST_NS else 0
