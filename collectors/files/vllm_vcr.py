"""vllm-vcr's token traces (JSON lines): a line about the run, then a request a line with TTFT and the gap before each step.

`itl_tokens` says how many tokens each step gave (speculative decoding); the first step gives one token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hoptrace.collectors.files.base import Importer, Sink
from hoptrace.collectors.files.bench_rows import Measured, Reject, Rows, emissions, ns, number, text, tokens_of
from hoptrace.collectors.files.json_lines import json_lines
from hoptrace.manifest import Server

__all__ = ["IMPORTER", "VllmVcr"]

_RELATIVE = "arrival_ms counts from the trace's own start."
_SUMMED = "{n} requests have the mean gap and its count only: they have no token times, their last token is TTFT + mean × count."
_WITHOUT = "Some requests have no arrival_ms: "
_FAILED = ("abort", "error")


class VllmVcr(Importer):
    """vllm-vcr."""

    kind = "vllm-vcr"
    summary = "vllm-vcr token traces (JSON lines): TTFT, gap and tokens of each step, cached tokens"

    def matches(self, path: Path, head: bytes) -> bool:
        lines = head.split(b"\n", 2)
        body = lines[1] if lines[0].lstrip().startswith(b'{"meta"') and len(lines) > 1 else lines[0]
        return b'"ttft_ms"' in body and b'"prompt_tokens"' in body and (b'"itl_ms"' in head or b'"itl_summary"' in head)

    def read(self, path: Path, sink: Sink) -> None:
        sink.epoch = "relative"
        rows: Rows | None = None
        model = None
        for line, record in json_lines(sink):
            about = record.get("meta")
            if isinstance(about, dict):
                model = text(about.get("model"))
                _server(sink, about, model)
                continue
            if rows is None:
                anchored = record.get("arrival_ms") is not None
                if anchored:
                    sink.note(_RELATIVE)
                rows = Rows(sink, anchored=anchored, server="vllm")
            rows.record(line, _measured, sink, record, model, rows.anchored)
        if rows is not None:
            rows.close()


def _server(sink: Sink, about: dict[str, Any], model: str | None) -> None:
    if sink.manifest.server("vllm") is None:
        numbers = {n: v for n in ("max_num_seqs", "block_size") if type(v := about.get(n)) is int}
        sink.manifest.servers.append(
            Server(name="vllm", engine="vllm", model=model, max_sequences=numbers.get("max_num_seqs"),
                   block_size_tokens=numbers.get("block_size"))
        )  # fmt: skip


def _measured(sink: Sink, record: dict[str, Any], model: str | None, anchored: bool) -> Measured:
    first = number(record.get("ttft_ms"), "ttft_ms")
    arrival = number(record.get("arrival_ms"), "arrival_ms")
    reason = text(record.get("finish_reason"))
    sent = ns(arrival / 1e3) if arrival is not None and anchored else None
    m = Measured(
        request_id=text(record.get("request_id")),
        sent_ns=sent,
        model=model,
        prompt_tokens=tokens_of(record.get("prompt_tokens"), "prompt_tokens"),
        output_tokens=tokens_of(record.get("output_tokens"), "output_tokens"),
        cached_tokens=tokens_of(record.get("cached_tokens"), "cached_tokens"),
        finish_reason=reason,
        error=f"the engine ended it: {reason}" if reason in _FAILED else None,
    )
    if first is None:
        if m.error is None:
            raise Reject("it has no ttft_ms")
        return m
    base = sent or 0
    gaps = record.get("itl_ms")
    summary = record.get("itl_summary")
    if isinstance(gaps, list):
        m.times = emissions(base, first / 1e3, [g / 1e3 if isinstance(g, int | float) else g for g in gaps], "an itl_ms")
        m.counts = _counts(record, gaps, m)
        m.finish_ns = m.times[-1]
        return m
    m.first_ns = base + ns(first / 1e3)
    if isinstance(summary, dict):
        mean, count = number(summary.get("mean_ms"), "itl_summary.mean_ms"), tokens_of(summary.get("count"), "itl_summary.count")
        if mean is not None and count is not None:
            m.last_ns = base + ns((first + mean * count) / 1e3)
            sink.tally(_SUMMED)
    elif m.output_tokens == 1:
        m.last_ns = m.first_ns
    m.finish_ns = m.last_ns
    return m


def _counts(record: dict[str, Any], gaps: list[Any], m: Measured) -> list[int] | None:
    told = record.get("itl_tokens")
    if told is None:
        return None
    if not isinstance(told, list) or len(told) != len(gaps):
        raise Reject("itl_tokens and itl_ms are not two lists of one length")
    counts = [tokens_of(n, "an itl_tokens") for n in told]
    if any(n is None for n in counts):
        raise Reject("an itl_tokens is null")
    return [1, *(n for n in counts if n is not None)]


IMPORTER = VllmVcr()
