"""Results of `vllm bench serve` (`--save-result`, with `--save-detailed` for requests), as vLLM 0.6 to 0.32 writes them.

The clock of `start_times` is the client's monotonic one (Python's perf_counter). The timer starts when a request is sent; behind
a cap on concurrency it may have waited before, which newer versions write as `queue_times`.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

from hoptrace.collectors.files.base import Importer, Sink
from hoptrace.collectors.files.bench_lists import Element, Run, failure, gaps, read_bench
from hoptrace.collectors.files.bench_rows import Measured, Reject, Rows, emissions, epoch_ns, ns, number, text, tokens_of

__all__ = ["IMPORTER", "VllmBench"]

_MONOTONIC = "Times are the client's monotonic clock (perf_counter), not UTC."
_INTENDED = "intended_ns is when the benchmark created the request, sent_ns when a place under --max-concurrency was free."
_ONLY_SENT = (
    "Only the moment of sending is known (the file has no queue_times): with a cap on concurrency the wait before it is in no "
    "latency."
)
_CLOSED = "The benchmark sent as fast as its cap on concurrency allowed (request rate inf): nothing was intended earlier."
_NO_DETAIL = "Run `vllm bench serve` with --save-detailed to have requests."
_DISAGREE = "{n} requests: TTFT + Σ ITL is not the latency that the file states (by more than 1 µs); the latency is the end."
_APART_NS = 1_000
_DETAIL = ("ttfts", "input_lens")


class VllmBench(Importer):
    """`vllm bench serve`."""

    kind = "vllm-bench"
    summary = "vllm bench serve results (JSON, --save-detailed): arrivals, sending, token times, failures"

    def matches(self, path: Path, head: bytes) -> bool:
        start = head[:8192]
        return start.lstrip().startswith(b"{") and b'"tokenizer_id"' in start and b'"num_prompts"' in start

    def read(self, path: Path, sink: Sink) -> None:
        read_bench(sink, "vllm", partial(_rows, sink), partial(_measured, sink), _DETAIL, _NO_DETAIL)


def _rows(sink: Sink, run: Run) -> Rows:
    sink.epoch = "relative"
    anchored = run.has("start_times")
    if anchored:
        sink.note(_MONOTONIC)
        if not run.has("queue_times"):
            sink.note(_ONLY_SENT)
        else:
            sink.note(_INTENDED if _paced(run) else _CLOSED)
    return Rows(sink, anchored=anchored)


def _paced(run: Run) -> bool:
    """Whether requests had a schedule: a finite rate, or times of a trace."""
    rate = run.settings.get("request_rate")
    return not (rate == "inf" or (isinstance(rate, float) and math.isinf(rate)))


def _measured(sink: Sink, e: Element) -> Measured:
    first_s = number(e["ttfts"], "ttft")
    error = failure(e, first_s)
    start_s = number(e["start_times"], "start_time")
    latency_s = number(e["latencies"], "latency")
    wait_s = number(e["queue_times"], "queue_time")
    if e.run.has("start_times") and start_s is None:
        raise Reject("it has no start_time")
    sent = None if start_s is None else epoch_ns(start_s, "start_time")
    base = sent or 0
    m = Measured(
        sent_ns=sent,
        prompt_tokens=tokens_of(e["input_lens"], "input_len"),
        output_tokens=tokens_of(e["output_lens"], "output_len"),
        model=text(e.run.settings.get("model_id")),
        error=error,
    )
    if start_s is not None and wait_s is not None and _paced(e.run):
        m.intended_ns = epoch_ns(start_s - wait_s, "start_time less queue_time")
    if first_s:
        m.times = emissions(base, first_s, gaps(e))
        m.finish_ns = m.times[-1]
    if error is not None:
        # A failed request's latency and length are left at 0: not known.
        m.finish_ns = None
        m.output_tokens = m.output_tokens or None
    elif latency_s is not None:
        end = base + ns(latency_s)
        if m.finish_ns is not None and abs(end - m.finish_ns) > _APART_NS:
            sink.tally(_DISAGREE)
        m.finish_ns = end if m.finish_ns is None or abs(end - m.finish_ns) > _APART_NS else m.finish_ns
    return m


IMPORTER = VllmBench()
