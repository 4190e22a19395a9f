"""What a span says of a request: vLLM's `llm_request`, SGLang's spans, the GenAI conventions of clients and gateways.

vLLM: vllm/v1/engine/output_processor.py (``do_tracing``); its span starts with the arrival at the API server (wall clock), its
latencies are seconds. Queue, prefill and decode are differences of the engine's own clock; they are anchored at the first token
as the API server had it, so the engine's times are late by the message between the two (about a millisecond).
SGLang: sglang/srt/observability/trace.py and req_time_stats.py; a root span per request with ``rid``, below it a span per thread,
below that a span per stage, whose stamps are the scheduler's own.
Clients: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/ and the older names of OpenLLMetry.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from hoptrace.collectors.engines.published.otlp_wire import SERVER, Span

__all__ = ["Said", "Stage", "StartUp", "meaning"]

View = Literal["engine", "gateway", "client"]

_INFERENCE = {"chat", "text_completion", "generate_content", "completion"}
_SGLANG_SCOPE = "sglang server"
_SGLANG_STAGES = {"request_process", "prefill_waiting", "prefill_forward", "decode_waiting", "decode_forward"}
_MOST_S = 1e7


@dataclass(frozen=True, slots=True)
class Said:
    """One span about one request, times in ns of the exporter's clock; null is not told.

    ``id`` is what the server calls the request. ``sequences``: how many spans of this id there will be at least (vLLM 0.32 says 1
    in each of several). ``role``: the part the engine played, where it says so.
    """

    view: View
    id: str | None
    start_ns: int
    finish_ns: int | None = None
    first_token_ns: int | None = None
    queued_ns: int | None = None
    scheduled_ns: int | None = None
    engine_first_ns: int | None = None
    engine_end_ns: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    max_tokens: int | None = None
    model: str | None = None
    session: str | None = None
    finish_reason: str | None = None
    error: str | None = None
    sequences: int = 1
    role: str | None = None
    engine: str | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a request whose own span stands somewhere above (SGLang)."""

    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class StartUp:
    """What a server did while it started: loading weights, allocating memory, warming up."""

    what: str
    start_ns: int
    seconds: float | None


def meaning(span: Span) -> Said | Stage | StartUp | None:
    """What the span says; null if it is not about a request."""
    a = span.attributes
    if span.scope == _SGLANG_SCOPE or str(a.get("module", "")).startswith("sglang::"):
        return _sglang(span)
    latencies = any(str(n).startswith("gen_ai.latency.") for n in a)
    if latencies and _text(a.get("gen_ai.request.id")):
        return _vllm(span)
    if span.scope.startswith("vllm.") and "code.function" in a:
        name = _text(a.get("vllm.process_name")) or _text(span.resource.get("vllm.process_name"))
        what = f"{span.name} ({name})" if name else span.name
        return StartUp(what, span.start_ns, None if span.end_ns is None else (span.end_ns - span.start_ns) / 1e9)
    operation = a.get("gen_ai.operation.name", a.get("llm.request.type"))
    return _genai(span) if operation in _INFERENCE else None


def _vllm(span: Span) -> Said:
    a = span.attributes
    ttft, e2e = _ns(a, "gen_ai.latency.time_to_first_token"), _ns(a, "gen_ai.latency.e2e")
    queue, prefill = _ns(a, "gen_ai.latency.time_in_queue"), _ns(a, "gen_ai.latency.time_in_model_prefill")
    inference = _ns(a, "gen_ai.latency.time_in_model_inference")
    output = _whole(a.get("gen_ai.usage.completion_tokens"))
    # Aborted before its first token: the engine's stamps are 0, and their differences mean nothing.
    first = span.start_ns + ttft if ttft else None
    scheduled = first - prefill if first is not None and prefill is not None else None
    return Said(
        "engine", _text(a.get("gen_ai.request.id")), span.start_ns,
        finish_ns=span.start_ns + e2e if e2e is not None else span.end_ns,
        first_token_ns=first,
        queued_ns=scheduled - queue if scheduled is not None and queue is not None else None,
        scheduled_ns=scheduled,
        engine_first_ns=first,
        engine_end_ns=scheduled + inference if scheduled is not None and inference is not None else None,
        prompt_tokens=_whole(a.get("gen_ai.usage.prompt_tokens")),
        output_tokens=output,
        max_tokens=_whole(a.get("gen_ai.request.max_tokens")),
        model=_text(a.get("gen_ai.response.model")),
        error=_error(span),
        sequences=max(1, _whole(a.get("gen_ai.request.n")) or 1),
        engine="vllm",
    )  # fmt: skip


def _sglang(span: Span) -> Said | Stage | None:
    a = span.attributes
    rid = _text(a.get("rid"))
    if rid is None:
        if span.name in _SGLANG_STAGES and span.end_ns is not None:
            return Stage(span.name, span.start_ns, span.end_ns)
        return None
    role = span.name.split(" Req ")[0].strip() if " Req " in span.name else ""
    ttft, e2e = _ns(a, "gen_ai.latency.time_to_first_token"), _ns(a, "gen_ai.latency.e2e")
    return Said(
        "engine", _text(a.get("gen_ai.request.id")) or rid, span.start_ns,
        finish_ns=span.start_ns + e2e if e2e is not None else span.end_ns,
        first_token_ns=span.start_ns + ttft if ttft else None,
        prompt_tokens=_whole(a.get("gen_ai.usage.prompt_tokens")),
        output_tokens=_whole(a.get("gen_ai.usage.completion_tokens")),
        cached_tokens=_whole(a.get("gen_ai.usage.cached_tokens")),
        max_tokens=_whole(a.get("gen_ai.request.max_tokens")),
        model=_text(a.get("gen_ai.response.model")),
        finish_reason=_reasons(a.get("gen_ai.response.finish_reasons")),
        error=_error(span),
        sequences=max(1, _whole(a.get("gen_ai.request.n")) or 1),
        role=role if role in ("prefill", "decode") else None,
        engine="sglang",
    )  # fmt: skip


def _genai(span: Span) -> Said:
    a = span.attributes
    chunk = _ns(a, "gen_ai.response.time_to_first_chunk")
    return Said(
        "gateway" if span.kind == SERVER else "client", _text(a.get("gen_ai.response.id")), span.start_ns,
        finish_ns=span.end_ns,
        first_token_ns=span.start_ns + chunk if chunk is not None else None,
        prompt_tokens=_first(a, "gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.usage.prompt_tokens"),
        output_tokens=_first(a, "gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.usage.completion_tokens"),
        cached_tokens=_first(a, "gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cached_tokens"),
        max_tokens=_whole(a.get("gen_ai.request.max_tokens")),
        model=_text(a.get("gen_ai.request.model")) or _text(a.get("gen_ai.response.model")),
        session=_text(a.get("gen_ai.conversation.id")) or _text(a.get("session.id")) or _text(a.get("exgentic.session.id")),
        finish_reason=_reasons(a.get("gen_ai.response.finish_reasons")),
        error=_error(span),
    )  # fmt: skip


def _ns(a: Any, name: str) -> int | None:
    """Seconds as ns; null for what is no length of time."""
    value = a.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not 0 <= value < _MOST_S:
        return None
    return round(value * 1e9)


def _whole(value: object) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value < 1 << 53 else None


def _first(a: Any, *names: str) -> int | None:
    return next((n for name in names if (n := _whole(a.get(name))) is not None), None)


def _text(value: object) -> str | None:
    return value[:300] if isinstance(value, str) and value else None


def _reasons(value: object) -> str | None:
    if isinstance(value, list):
        told = list(dict.fromkeys(v for v in value if isinstance(v, str)))
        return ", ".join(told)[:100] or None
    return _text(value)


def _error(span: Span) -> str | None:
    if not span.error:
        return None
    kind = _text(span.attributes.get("error.type"))
    return ": ".join(t for t in (kind, span.status[:300]) if t) or "the span's status is an error"
