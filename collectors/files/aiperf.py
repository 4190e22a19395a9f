"""AIPerf's records of requests: `profile_export.jsonl`.

`credit_issued_ns` is when AIPerf's rate control let the request go, `request_start_ns` when a worker sent it. Both are UTC.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hoptrace.collectors.files.base import Importer, Sink
from hoptrace.collectors.files.bench_rows import Measured, Reject, Rows, emissions, ns, number, stamp_ns, text, tokens_of
from hoptrace.collectors.files.json_lines import json_lines
from hoptrace.collectors.files.json_walk import one_line

__all__ = ["IMPORTER", "Aiperf"]

_CLIENT_COUNT = (
    "{n} requests: the server's own prompt length (usage_prompt_tokens) is kept, not AIPerf's count of the bare prompt "
    "(input_sequence_length), which leaves out the chat template."
)
_CREDIT = "intended_ns is when AIPerf's rate control issued the request, sent_ns when its worker sent it."
_WARMUP = "{n} requests of the warm-up are kept (their session begins with warmup:)."
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}
_DISAGREE = "{n} requests: TTFT + Σ inter-chunk latencies is not request_latency (by more than 1 µs)."


class Aiperf(Importer):
    """AIPerf's records of requests."""

    kind = "aiperf"
    summary = "AIPerf records (profile_export.jsonl): arrivals, sending, chunk times, failures"

    def matches(self, path: Path, head: bytes) -> bool:
        line = head.split(b"\n", 1)[0].lstrip()
        return line.startswith(b"{") and b'"metadata"' in line and b'"request_start_ns"' in line

    def read(self, path: Path, sink: Sink) -> None:
        sink.epoch = "utc"
        rows = Rows(sink)
        for line, record in json_lines(sink):
            rows.record(line, _measured, sink, record)
        rows.close()


def _measured(sink: Sink, record: Any) -> Measured:
    about = record.get("metadata")
    metrics = record.get("metrics")
    if not isinstance(about, dict) or not isinstance(metrics, dict):
        raise Reject("it has no metadata or no metrics")
    sent = _stamp(about, "request_start_ns")
    if sent is None:
        raise Reject("it has no request_start_ns")
    intended = _stamp(about, "credit_issued_ns")
    if intended is not None:
        sink.note(_CREDIT)
    session = text(about.get("x_correlation_id")) or text(about.get("conversation_id"))
    if about.get("benchmark_phase") == "warmup":
        sink.tally(_WARMUP)
        session = f"warmup:{session}"
    m = Measured(
        request_id=text(about.get("x_request_id")),
        session=session,
        intended_ns=intended,
        sent_ns=sent,
        prompt_tokens=_tokens(metrics, "usage_prompt_tokens"),
        output_tokens=_tokens(metrics, "usage_completion_tokens"),
        cached_tokens=_tokens(metrics, "usage_prompt_cache_read_tokens"),
        error=_error(record, about),
    )
    bare = _tokens(metrics, "input_sequence_length")
    if m.prompt_tokens is None:
        m.prompt_tokens = bare
    elif bare is not None and bare != m.prompt_tokens:
        sink.tally(_CLIENT_COUNT)
    if m.output_tokens is None:
        m.output_tokens = _tokens(metrics, "output_sequence_length")
    _times(sink, m, metrics, sent)
    if m.finish_ns is None and m.error is not None:
        m.finish_ns = _stamp(about, "request_end_ns")
    return m


def _times(sink: Sink, m: Measured, metrics: dict[str, Any], sent: int) -> None:
    first = _seconds(metrics, "time_to_first_token")
    visible = _seconds(metrics, "time_to_first_output_token")
    latency = _seconds(metrics, "request_latency")
    if latency is not None:
        m.finish_ns = sent + ns(latency)
    if visible is not None:
        m.visible_ns = sent + ns(visible)
    if first is None:
        return
    m.first_ns = sent + ns(first)
    told = metrics.get("inter_chunk_latency")
    gaps = told.get("value") if isinstance(told, dict) else None
    if not isinstance(told, dict) or not isinstance(gaps, list):
        return
    scale = _scale(told, "inter_chunk_latency")
    m.times = emissions(sent, first, [g * scale if isinstance(g, int | float) else g for g in gaps], "an inter-chunk latency")
    if m.finish_ns is not None and abs(m.times[-1] - m.finish_ns) > 1_000:
        sink.tally(_DISAGREE)


def _error(record: dict[str, Any], about: dict[str, Any]) -> str | None:
    told = record.get("error")
    if isinstance(told, dict):
        words = " ".join(str(told[k]) for k in ("code", "type") if told.get(k) is not None)
        return one_line(": ".join(x for x in (words, one_line(told.get("message")) or "") if x)) or "failed without a message"
    if told:
        return one_line(str(told))
    return "cancelled by the benchmark" if about.get("was_cancelled") else None


def _stamp(about: dict[str, Any], name: str) -> int | None:
    return stamp_ns(about.get(name), name)


def _tokens(metrics: dict[str, Any], name: str) -> int | None:
    told = metrics.get(name)
    return tokens_of(told.get("value"), name) if isinstance(told, dict) else None


def _seconds(metrics: dict[str, Any], name: str) -> float | None:
    told = metrics.get(name)
    if not isinstance(told, dict):
        return None
    found = number(told.get("value"), name)
    return None if found is None else found * _scale(told, name)


def _scale(told: dict[str, Any], name: str) -> float:
    unit = told.get("unit")
    if not isinstance(unit, str) or unit not in _SECONDS:
        raise Reject(f"{name} has a unit that is no time", unit)
    return _SECONDS[unit]


IMPORTER = Aiperf()
