"""Spans for tests: built as protobuf, and as the JSON of the OTLP specification."""

from __future__ import annotations

import base64
import json
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

__all__ = ["S", "T0", "as_json", "message", "vllm_span"]

T0 = 1_700_000_000_000_000_000
S = 1_000_000_000


def message(*spans: dict[str, Any], scope: str = "vllm.tracing.otel", resource: dict[str, Any] | None = None) -> bytes:
    """An ExportTraceServiceRequest. A span: id, trace, parent, name, kind, start, end, attributes, error."""
    request = ExportTraceServiceRequest()
    group = request.resource_spans.add()
    for name, value in (resource or {"service.name": "unknown_service"}).items():
        _set(group.resource.attributes.add(key=name).value, value)
    scoped = group.scope_spans.add()
    scoped.scope.name = scope
    for s in spans:
        span = scoped.spans.add()
        span.trace_id = bytes.fromhex(s.get("trace", "0" * 31 + "1"))
        span.span_id = bytes.fromhex(s["id"]) if s.get("id") else b""
        span.parent_span_id = bytes.fromhex(s.get("parent", ""))
        span.name, span.kind = s.get("name", "llm_request"), s.get("kind", 2)
        span.start_time_unix_nano, span.end_time_unix_nano = s.get("start", T0), s.get("end", T0 + S)
        for name, value in s.get("attributes", {}).items():
            _set(span.attributes.add(key=name).value, value)
        if s.get("error"):
            span.status.code, span.status.message = 2, s["error"]
    out: bytes = request.SerializeToString()
    return out


def _set(value: Any, given: Any) -> None:
    if isinstance(given, bool):
        value.bool_value = given
    elif isinstance(given, int):
        value.int_value = given
    elif isinstance(given, float):
        value.double_value = given
    elif isinstance(given, list):
        for item in given:
            _set(value.array_value.values.add(), item)
    else:
        value.string_value = given


def as_json(body: bytes) -> dict[str, Any]:
    """The same message in the specification's JSON: identifiers in hex, not base64."""
    request = ExportTraceServiceRequest()
    request.ParseFromString(body)
    data: dict[str, Any] = json.loads(json_format.MessageToJson(request, use_integers_for_enums=True))
    for group in data.get("resourceSpans", []):
        for scoped in group.get("scopeSpans", []):
            for span in scoped.get("spans", []):
                for name in ("traceId", "spanId", "parentSpanId"):
                    if name in span:
                        span[name] = base64.b64decode(span[name]).hex()
    return data


def vllm_span(number: int, start: int = T0, **more: Any) -> dict[str, Any]:
    """As vLLM 0.32 makes them: 100 ms to the first token, of which 20 in the queue and 60 of prefill; 400 ms in all."""
    attributes = {
        "gen_ai.request.id": f"cmpl-r{number}-0", "gen_ai.usage.prompt_tokens": 50 + number, "gen_ai.usage.completion_tokens": 7,
        "gen_ai.latency.time_in_queue": 0.02, "gen_ai.latency.time_to_first_token": 0.1, "gen_ai.latency.e2e": 0.4,
        "gen_ai.latency.time_in_model_prefill": 0.06, "gen_ai.latency.time_in_model_decode": 0.29,
        "gen_ai.latency.time_in_model_inference": 0.35, "gen_ai.request.max_tokens": 7, "gen_ai.request.n": 1,
    }  # fmt: skip
    return {"id": f"{number + 1:016x}", "trace": f"{number + 1:032x}", "start": start, "end": start + S // 2,
            "attributes": attributes | more.pop("attributes", {})} | more  # fmt: skip
