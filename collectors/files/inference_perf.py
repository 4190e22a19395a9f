"""inference-perf: `per_request_lifecycle_metrics.json` (an array of requests) and the summaries of stages and runs.

Stamps are the client's monotonic clock (Python's perf_counter). `start_time` is when the request was sent; when it was meant to
be sent is not in the file.
"""

from __future__ import annotations

from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from hoptrace.collectors.files.base import Importer, Sink
from hoptrace.collectors.files.bench_figures import Figures
from hoptrace.collectors.files.bench_rows import Measured, Reject, Rows, epoch_ns, number, read_records, text, tokens_of
from hoptrace.collectors.files.json_walk import Buffer, document, load, one_line, roots, whole_object

__all__ = ["IMPORTER", "InferencePerf"]

_MONOTONIC = "Times are the client's monotonic clock (perf_counter), not UTC."
_SENT = "Only the moment of sending is known, not the intended one (schedule_delay is in inference-perf's summaries only)."
_OWN_COUNT = "{n} requests have inference-perf's own count of output tokens: the server told none."
_MERGED = "{n} requests got chunks of several tokens (by inference-perf's tokenizer): each chunk is one emission."
_CUT = "The file ends inside a request: those before it are kept."


class InferencePerf(Importer):
    """inference-perf."""

    kind = "inference-perf"
    summary = "inference-perf requests (per_request_lifecycle_metrics.json) or summaries: sending, token times, failures"

    def matches(self, path: Path, head: bytes) -> bool:
        start = head.lstrip()
        if start.startswith(b"["):
            return b'"start_time"' in start[:400] and (
                b'"info"' in start or b'"request"' in start or b'"computed_metrics"' in start
            )
        return start.startswith(b"{") and b'"load_summary"' in start and b'"successes"' in start

    def read(self, path: Path, sink: Sink) -> None:
        sink.epoch = "relative"
        with document(sink) as buffer:
            begin = next(roots(buffer), 0)
            if buffer[begin : begin + 1] == b"[":
                sink.note(_MONOTONIC)
                sink.note(_SENT)
                rows = Rows(sink)
                read_records(sink, rows, buffer, begin, partial(_measured, sink), _CUT)
                rows.close()
                return
        figures = Figures(sink, "inference-perf")
        figures.tree(whole_object(sink))
        figures.write(None, requests=0)


def _measured(sink: Sink, buffer: Buffer, span: tuple[int, int]) -> Measured:
    record = load(buffer, *span)
    if not isinstance(record, dict):
        raise Reject("it is not an object")
    start, end = number(record.get("start_time"), "start_time"), number(record.get("end_time"), "end_time")
    if start is None:
        raise Reject("it has no start_time")
    info = record.get("info")
    told: dict[str, Any] = info if isinstance(info, dict) else {}
    response = told.get("response_metrics")
    response = response if isinstance(response, dict) else {}
    usage = response.get("server_usage")
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("prompt_tokens_details")
    m = Measured(
        sent_ns=epoch_ns(start, "start_time"),
        finish_ns=None if end is None else epoch_ns(end, "end_time"),
        adapter=text(told.get("lora_adapter")),
        prompt_tokens=tokens_of(usage.get("prompt_tokens"), "prompt_tokens"),
        output_tokens=tokens_of(usage.get("completion_tokens"), "completion_tokens"),
        cached_tokens=tokens_of(details.get("cached_tokens"), "cached_tokens") if isinstance(details, dict) else None,
    )
    if m.prompt_tokens is None:
        m.prompt_tokens = tokens_of(_input_tokens(told), "input_tokens")
    failed = record.get("error")
    if isinstance(failed, dict):
        kind, message = one_line(failed.get("error_type")), one_line(failed.get("error_msg"))
        m.error = ": ".join(x for x in (kind, message) if x) or "failed without a message"
    elif failed:
        m.error = one_line(str(failed))
    if m.output_tokens is None and (own := tokens_of(response.get("output_tokens"), "output_tokens")):
        m.output_tokens = own
        sink.tally(_OWN_COUNT)
    _chunks(sink, m, response)
    return m


def _chunks(sink: Sink, m: Measured, response: dict[str, Any]) -> None:
    stamps = response.get("output_token_times") or response.get("chunk_times")
    if not stamps:
        return
    if not isinstance(stamps, list):
        raise Reject("output_token_times is no list")
    times = []
    for stamp in stamps:
        found = number(stamp, "a token's time")
        if found is None:
            raise Reject("a token's time is null")
        times.append(epoch_ns(found))
    # Tokens of one chunk have its time each.
    grouped = [(time, len(list(same))) for time, same in groupby(times)]
    m.times, m.counts = [time for time, _ in grouped], [n for _, n in grouped]
    if len(grouped) < len(times):
        sink.tally(_MERGED)


def _input_tokens(told: dict[str, Any]) -> Any:
    asked = told.get("request_metrics")
    words = asked.get("text") if isinstance(asked, dict) else None
    found = words.get("input_tokens") if isinstance(words, dict) else None
    return told.get("input_tokens") if found is None else found


IMPORTER = InferencePerf()
