"""Results of SGLang's `bench_serving` (`--output-file`, with `--output-details` for requests): one JSON object a run, appended.

It writes neither when a request was sent nor how long it took: only TTFT and the gaps. With `--backend sglang` the gap before a
chunk of several tokens is shared out among them, so a run of equal gaps is one chunk: the first chunk's tokens are those that
have no gap.
"""

from __future__ import annotations

from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from hoptrace.collectors.files.base import Importer, Sink
from hoptrace.collectors.files.bench_lists import Element, Run, failure, gaps, read_bench
from hoptrace.collectors.files.bench_rows import Measured, Rows, emissions, number, tokens_of

__all__ = ["IMPORTER", "SglangBench"]

_NO_DETAIL = "Run bench_serving with --output-details to have requests."
_END = "A request's end is its last chunk: the file has no latencies of requests (the tool's E2E runs to the end of the stream)."
_SHARED = "SGLang's own backend shares a chunk's gap out among its tokens: equal gaps in a row are one chunk again."
_ASKED = "Output lengths are those that the server told, or where it told none, those asked for."
_NATIVE = ("sglang", "sglang-native")
_DETAIL = ("ttfts", "input_lens")


class SglangBench(Importer):
    """SGLang's bench_serving."""

    kind = "sglang-bench"
    summary = "SGLang bench_serving results (JSON lines, --output-details): lengths, TTFT, gaps, failures"

    def matches(self, path: Path, head: bytes) -> bool:
        start = head[:8192]
        return start.lstrip().startswith(b"{") and b'"sharegpt_output_len"' in start and b'"random_input_len"' in start

    def read(self, path: Path, sink: Sink) -> None:
        read_bench(sink, "sglang", partial(_rows, sink), partial(_measured, sink), _DETAIL, _NO_DETAIL)


def _rows(sink: Sink, run: Run) -> Rows:
    sink.epoch = "relative"
    sink.note(_END)
    sink.note(_ASKED)
    return Rows(sink, anchored=False)


def _measured(sink: Sink, e: Element) -> Measured:
    first_s = number(e["ttfts"], "ttft")
    error = failure(e, first_s)
    m = Measured(
        prompt_tokens=tokens_of(e["input_lens"], "input_len"),
        output_tokens=tokens_of(e["output_lens"], "output_len"),
        cached_tokens=tokens_of(e["cached_tokens"], "cached_tokens"),
        error=error,
    )
    if error is not None:
        m.output_tokens = m.output_tokens or None
    if first_s:
        found = gaps(e)
        if e.run.settings.get("backend") in _NATIVE and isinstance(found, list) and found:
            sink.note(_SHARED)
            found, m.counts = _chunks(found, m.output_tokens)
        m.times = emissions(0, first_s, found)
    return m


def _chunks(shared: list[Any], output_tokens: int | None) -> tuple[list[Any], list[int] | None]:
    """Gaps between chunks, and tokens of each chunk, from gaps that were shared out; no counts where the total is not known."""
    gaps_s: list[Any] = []
    counts: list[int] = []
    for gap, group in groupby(shared):
        n = len(list(group))
        gaps_s.append(gap * n if isinstance(gap, int | float) else gap)
        counts.append(n)
    first = None if output_tokens is None else output_tokens - len(shared)
    if first is None or first < 1:
        return shared, None
    return gaps_s, [first, *counts]


IMPORTER = SglangBench()
