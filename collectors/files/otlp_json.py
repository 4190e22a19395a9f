"""Spans from files: OTLP as JSON (one message a line, as the OpenTelemetry collector's file exporter writes, or one document),
and lists of GenAI spans with times as text (github kubernetes-sigs/inference-perf, examples/otel).

What a span means is what it means to the live receiver (:mod:`hoptrace.collectors.engines.published.otlp_spans`). The texts of
prompts and answers, where spans have them, are neither kept nor measured: a length in tokens is only what a span tells as one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import polars as pl

from hoptrace.collectors.engines.published.otlp_call import Call
from hoptrace.collectors.engines.published.otlp_calls import Calls
from hoptrace.collectors.engines.published.otlp_wire import Malformed, Span, Spans, spans_of_json
from hoptrace.collectors.files.base import Importer, Sink
from hoptrace.errors import InputError
from hoptrace.manifest import Server

__all__ = ["IMPORTER", "OtlpJson", "iso_ns"]

MAX_DOCUMENT_BYTES = 256 << 20
_BATCH = 20_000
_ISO = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,9})\d*)?(Z|[+-]\d\d:?\d\d)?")
_KINDS = {"SPAN_KIND_INTERNAL": 1, "SPAN_KIND_SERVER": 2, "SPAN_KIND_CLIENT": 3, "SERVER": 2, "CLIENT": 3, "INTERNAL": 1}
_NO_ZONE = "Times without a zone are taken as UTC."
_NO_LENGTHS = "{n} requests do not tell their prompt's or answer's tokens: a replay leaves them out."


class OtlpJson(Importer):
    """OTLP JSON, and lists of spans."""

    kind = "otlp-json"
    summary = "OpenTelemetry spans as JSON (OTLP, the collector's file exporter, GenAI span lists): requests, engine times"

    def matches(self, path: Path, head: bytes) -> bool:
        if b'"resourceSpans"' in head or b'"resource_spans"' in head:
            return head.lstrip()[:1] in (b"{", b"[")
        return b'"spans"' in head and b'"span_id"' in head and b'"start_time"' in head

    def read(self, path: Path, sink: Sink) -> None:
        """Each request and each span that cannot be used is one record.

        Raises:
            InputError: it is no JSON, or no span of it is about a request to a model.
        """
        sink.epoch = "utc"
        out = _Rows(sink)
        for line, message in _messages(path, sink):
            spans = _spans(message, sink)
            if spans is None:
                sink.count()
                sink.reject(line, "it is no OTLP message and no list of spans")
                continue
            for reason, n in spans.bad.items():
                for _ in range(n):
                    sink.count()
                    sink.reject(line, reason)
            for span in spans.spans:
                out.take(span)
        out.end()
        if not sink.read:
            raise InputError(
                f"No span of {path} is about a request to a model.",
                hint="Requests are told by vLLM's and SGLang's spans, and by spans with gen_ai.operation.name.",
            )


def _messages(path: Path, sink: Sink) -> Iterator[tuple[int, Any]]:
    """(line, parsed message): one a line; a document over several lines is one at line 1. Null: no JSON."""
    with sink.open() as file:
        line = 0
        while raw := file.readline(MAX_DOCUMENT_BYTES + 1):
            line += 1
            if len(raw) > MAX_DOCUMENT_BYTES:
                raise _too_large(path)
            if not raw.strip():
                continue
            try:
                yield line, json.loads(raw)
            except (ValueError, RecursionError):
                if line > 1 and raw.strip() not in (b"{", b"["):
                    yield line, None
                    continue
                rest = file.read(MAX_DOCUMENT_BYTES + 1)
                if len(rest) > MAX_DOCUMENT_BYTES:
                    raise _too_large(path) from None
                yield from _document(path, line, raw, rest)
                return


def _document(path: Path, line: int, first: bytes, rest: bytes) -> Iterator[tuple[int, Any]]:
    try:
        yield line, json.loads(first + rest)
    except (ValueError, RecursionError):
        # Not one document: lines, of which the first is damaged.
        parsed = []
        for number, raw in enumerate(rest.splitlines(), line + 1):
            if raw.strip():
                try:
                    parsed.append((number, json.loads(raw)))
                except (ValueError, RecursionError):
                    parsed.append((number, None))
        if not any(isinstance(m, dict) for _, m in parsed):
            raise InputError(f"{path} is no JSON, and not a JSON message a line.", hint="Is it cut off?") from None
        yield line, None
        yield from parsed


def _too_large(path: Path) -> InputError:
    return InputError(
        f"{path}: one message is larger than {MAX_DOCUMENT_BYTES >> 20} MiB.",
        hint="Write one message a line: jq -c '.resourceSpans[] | {resourceSpans: [.]}' FILE.",
    )


def _spans(message: object, sink: Sink) -> Spans | None:
    if isinstance(message, list):  # several messages in one document
        found = [s for m in message if (s := _spans(m, sink)) is not None]
        if len(found) != len(message):
            return None
        out = Spans([s for f in found for s in f.spans])
        for f in found:
            for reason, n in f.bad.items():
                out.bad[reason] = out.bad.get(reason, 0) + n
        return out
    if isinstance(message, Mapping) and isinstance(message.get("spans"), list):
        return _listed(message, sink)
    try:
        return spans_of_json(message)
    except Malformed:
        return None


def _listed(message: Mapping[str, Any], sink: Sink) -> Spans:
    """A list of spans with times as text."""
    out = Spans()
    for s in message["spans"]:
        if not isinstance(s, Mapping):
            out.reject("it is no span")
            continue
        start, end = iso_ns(s.get("start_time")), iso_ns(s.get("end_time"))
        if start is None:
            out.reject("start_time is not a date and time (2026-02-25T10:00:00.5)")
            continue
        if not start[1]:
            sink.note(_NO_ZONE)
        status, attributes, resource = s.get("status"), s.get("attributes"), s.get("resource_attributes")
        kind = s.get("kind")
        out.take(
            Span(
                str(s.get("trace_id") or message.get("trace_id") or ""), str(s.get("span_id") or ""),
                s["parent_span_id"] if isinstance(s.get("parent_span_id"), str) and s["parent_span_id"] else None,
                str(s.get("name", ""))[:300], _KINDS.get(kind, 0) if isinstance(kind, str) else 0, start[0],
                end[0] if end is not None else None,
                attributes if isinstance(attributes, Mapping) else {}, resource if isinstance(resource, Mapping) else {},
                str(s.get("scope", "")), isinstance(status, Mapping) and status.get("code") in (2, "STATUS_CODE_ERROR", "ERROR"),
                str(status.get("message", ""))[:300] if isinstance(status, Mapping) else "",
            )
        )  # fmt: skip
    return out


def iso_ns(text: object) -> tuple[int, bool] | None:
    """(ns since 1970, whether it had a zone) of an ISO 8601 date and time; null if it is none. Without a zone it is UTC."""
    m = _ISO.fullmatch(text.strip()) if isinstance(text, str) else None
    if m is None:
        return None
    zone = UTC
    if m[4] and m[4] != "Z":
        hours, minutes = int(m[4][1:3]), int(m[4][-2:])
        shift = timedelta(hours=hours, minutes=minutes)
        if shift >= timedelta(hours=24):
            return None
        zone = timezone(-shift if m[4][0] == "-" else shift)
    try:
        whole = datetime.fromisoformat(f"{m[1]}T{m[2]}").replace(tzinfo=zone)
    except ValueError:
        return None
    return int(whole.timestamp()) * 1_000_000_000 + int((m[3] or "").ljust(9, "0")), m[4] is not None


class _Rows:
    """Requests on their way into the sink: each is written once, when its last span can have come."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._calls = Calls()
        self._requests: list[dict[str, Any]] = []
        self._stages: list[dict[str, Any]] = []
        self._events: list[dict[str, Any]] = []
        self._next = 0

    def take(self, span: Span) -> None:
        service = span.resource.get("service.name")
        if not isinstance(service, str) or not service or service.startswith("unknown_service"):
            service = "sglang" if span.scope.startswith("sglang") else "vllm" if span.scope.startswith("vllm") else "server"
        pid = span.resource.get("vllm.process_id", span.resource.get("process.pid"))
        origin = f"{span.resource.get('host.name')}/{service}/{span.resource.get('service.instance.id')}/{pid}"
        taken = self._calls.take(span, service[:100], origin)
        if (what := taken.start_up) is not None:
            took = "" if what.seconds is None else f": {what.seconds:.3f} s"
            self._events.append(
                {"time_ns": what.start_ns, "server": service[:100], "kind": "start-up", "detail": f"{what.what}{took}"}
            )
        for call in taken.forgotten:
            self._keep(call)

    def end(self) -> None:
        self._calls.end()
        for call in self._calls.calls():
            self._keep(call)
        self._flush(0)
        for what, n in self._calls.counts.items():
            self._sink.tally(f"{{n}} × {what}.", n)
        for scope, n in sorted(self._calls.ignored.items()):
            self._sink.tally(f"{{n}} spans of {scope} are not about a request to a model, and were left out.", n)

    def _keep(self, call: Call) -> None:
        if call.gone or call.written:
            return
        call.written = True
        request = call.request()
        self._requests.append({"request": self._next} | request)
        if "prompt_tokens" not in request or "output_tokens" not in request:
            self._sink.tally(_NO_LENGTHS)
        order: dict[str | None, int] = {}
        for row, stay in zip(call.stages(), call.stays, strict=True):
            nth = order.setdefault(stay.origin, len(order))
            self._stages.append({"request": self._next, "attempt": 0, "stage": nth} | row)
            self._name(stay.server, stay.said.engine if stay.said is not None else None)
        self._next += 1
        self._flush(_BATCH)

    def _name(self, server: str | None, engine: str | None) -> None:
        known = self._sink.manifest.servers
        if server is not None and all(s.name != server for s in known):
            known.append(Server(name=server, engine=engine))

    def _flush(self, most: int) -> None:
        if len(self._requests) > most:
            self._sink.count(len(self._requests))
        for table, rows in (("requests", self._requests), ("stages", self._stages), ("events", self._events)):
            if rows and (len(self._requests) > most or not most):
                self._sink.write(table, pl.DataFrame(rows, infer_schema_length=None))
        if len(self._requests) > most or not most:
            self._requests, self._stages, self._events = [], [], []


IMPORTER = OtlpJson()
