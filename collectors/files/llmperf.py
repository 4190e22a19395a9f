"""LLMPerf's individual responses (JSON array) and its summary (JSON object).

LLMPerf's `inter_token_latency_s` is a request's whole time ÷ its tokens, the first one's included: it is no ITL and is not used.
An `error_code` also stands on answers that its check found too short: LLMPerf leaves them out of its figures, as does hoptrace.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hoptrace.collectors.files.base import Importer, Sink
from hoptrace.collectors.files.bench_figures import Figures
from hoptrace.collectors.files.bench_rows import Measured, Reject, Rows, ns, number, read_records, tokens_of
from hoptrace.collectors.files.json_walk import Buffer, document, load, one_line, roots, whole_object

__all__ = ["IMPORTER", "Llmperf"]

_ITL = (
    "LLMPerf's inter_token_latency_s includes the first token: it is not imported. ITL and TPOT are unknown (no time of the last "
    "token)."
)
_CUT = "The file ends inside a record: those before it are kept."


class Llmperf(Importer):
    """LLMPerf."""

    kind = "llmperf"
    summary = "LLMPerf individual responses (JSON array) or summary: lengths, TTFT, end-to-end latency, failures"

    def matches(self, path: Path, head: bytes) -> bool:
        start = head.lstrip()
        if start.startswith(b"["):
            return b'"ttft_s"' in start and b'"end_to_end_latency_s"' in start
        return start.startswith(b"{") and b'"results_ttft_s' in start

    def read(self, path: Path, sink: Sink) -> None:
        sink.epoch = "relative"
        with document(sink) as buffer:
            begin = next(roots(buffer), 0)
            if buffer[begin : begin + 1] == b"[":
                sink.note(_ITL)
                rows = Rows(sink, anchored=False)
                read_records(sink, rows, buffer, begin, _measured, _CUT)
                rows.close()
                return
        figures = Figures(sink, "llmperf")
        figures.tree(whole_object(sink))
        figures.write(None, requests=0)


def _measured(buffer: Buffer, span: tuple[int, int]) -> Measured:
    record = load(buffer, *span)
    if not isinstance(record, dict):
        raise Reject("it is not an object")
    error = _error(record)
    first = number(record.get("ttft_s"), "ttft_s", least=None if error else 0)
    latency = number(record.get("end_to_end_latency_s"), "end_to_end_latency_s", least=None if error else 0)
    m = Measured(
        prompt_tokens=tokens_of(record.get("number_input_tokens"), "number_input_tokens"),
        output_tokens=tokens_of(record.get("number_output_tokens"), "number_output_tokens"),
        error=error,
    )
    # Of a request that failed LLMPerf writes 0 or -1 where nothing was measured.
    m.first_ns = None if first is None or (error and first <= 0) else ns(first)
    m.finish_ns = None if latency is None or (error and latency <= 0) else ns(latency)
    if error is None and m.finish_ns is None:
        raise Reject("it has no end_to_end_latency_s")
    return m


def _error(record: dict[str, Any]) -> str | None:
    code = record.get("error_code")
    if code in (None, "", 0):
        return None
    return one_line(f"{code}: {one_line(record.get('error_msg')) or 'no message'}")


IMPORTER = Llmperf()
