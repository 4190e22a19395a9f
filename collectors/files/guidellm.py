"""guidellm's reports (JSON), of version 2 (0.4 and later) and of the layout before: benchmarks with their requests.

Stamps are UTC seconds. A benchmark may keep only a sample of its requests, or none: its own figures are kept beside them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hoptrace.collectors.files.base import Importer, Sink
from hoptrace.collectors.files.bench_figures import Figures
from hoptrace.collectors.files.bench_rows import Measured, Reject, Rows, epoch_ns, number, text, tokens_of
from hoptrace.collectors.files.json_walk import Buffer, Cut, document, elements, load, members, one_line, roots, starts
from hoptrace.errors import InputError

__all__ = ["IMPORTER", "Guidellm"]

# Strategies that have a schedule of arrivals; the others send as soon as they may (guidellm's own definition of dispatch delay).
# A trace has one only where its data set gives times, which its requests then bear as relative_timestamp.
_SCHEDULED = ("constant", "poisson", "async", "trace")
_INTENDED = "intended_ns is guidellm's targeted_start, for strategies that have a schedule ({n} requests)."
_FEWER = "{n} requests were made that the report does not list (guidellm keeps a sample): they are in its figures only."
_CUT = "The report is cut off: what it holds before that is kept."
_STATES = ("successful", "errored", "incomplete")
_FIGURES = ("request_totals", "requests_made")


class Guidellm(Importer):
    """guidellm."""

    kind = "guidellm"
    summary = "guidellm reports (JSON): arrivals, sending, first and last token, failures"

    def matches(self, path: Path, head: bytes) -> bool:
        start = head.lstrip()
        return start.startswith(b"{") and (b'"guidellm_version"' in start or b'"generative_benchmark' in start)

    def read(self, path: Path, sink: Sink) -> None:
        sink.epoch = "utc"
        figures = Figures(sink, "guidellm")
        rows = Rows(sink)
        with document(sink) as buffer:
            try:
                for root in roots(buffer):
                    for name, at in members(buffer, root):
                        if name == "benchmarks":
                            for number_, begin in enumerate(starts(buffer, at), 1):
                                _benchmark(sink, buffer, begin, number_, rows, figures)
            except Cut as cut:
                if not sink.read:
                    raise InputError(
                        f"{path} is cut off at byte {cut.at:,}, before its first request.", hint="Copy it again."
                    ) from None
                sink.note(_CUT)
                sink.count()
                sink.reject(sink.read, "the report ends inside it")
        figures.write(rows.last_ns, requests=sink.read)
        rows.close()


def _benchmark(sink: Sink, buffer: Buffer, at: int, run: int, rows: Rows, figures: Figures) -> None:
    strategy: str | None = None
    listed = 0
    made: int | None = None
    for name, begin in members(buffer, at):
        if name in ("config", "args"):
            settings = load(buffer, begin)
            strategy = _strategy(settings) if isinstance(settings, dict) else None
        elif name == "requests":
            for state, place in members(buffer, begin):
                if state in _STATES and buffer[place : place + 1] == b"[":
                    for span in elements(buffer, place):
                        listed += 1
                        rows.record(sink.read + 1, _measured, sink, buffer, span, state, strategy)
        elif name in ("metrics", "scheduler_metrics"):
            found = load(buffer, begin)
            figures.tree(found, run=run, leave=("pdf", "mean_ci", "percentile_cis", "start_time", "end_time"))
            made = _made(found, made)
    if made is not None and listed < made and listed:
        sink.tally(_FEWER, made - listed)


def _strategy(settings: dict[str, Any]) -> str | None:
    found = settings.get("strategy")
    return text(found.get("type_")) if isinstance(found, dict) else None


def _made(found: object, before: int | None) -> int | None:
    for name in _FIGURES:
        totals = found.get(name) if isinstance(found, dict) else None
        total = totals.get("total") if isinstance(totals, dict) else None
        if isinstance(total, int):
            return total
    return before


def _measured(sink: Sink, buffer: Buffer, span: tuple[int, int], state: str, strategy: str | None) -> Measured:
    record = load(buffer, *span)
    if not isinstance(record, dict):
        raise Reject("it is not an object")
    info = record.get("info")
    timings = info.get("timings") if isinstance(info, dict) else None
    older = not isinstance(timings, dict)
    times: dict[str, Any] = record if older else timings  # type: ignore[assignment]
    sent = _at(times, "start_time" if older else "request_start")
    m = Measured(
        request_id=text(record.get("request_id")),
        session=text(info.get("conversation_id")) if isinstance(info, dict) else None,
        sent_ns=sent,
        first_ns=_at(times, "first_token_time" if older else "first_token_iteration"),
        visible_ns=None if older else _at(times, "first_output_token_iteration"),
        last_ns=_at(times, "last_token_time" if older else "last_token_iteration"),
        finish_ns=_at(times, "end_time" if older else "request_end"),
        prompt_tokens=tokens_of(record.get("prompt_tokens"), "prompt_tokens"),
        output_tokens=tokens_of(record.get("output_tokens"), "output_tokens"),
        cached_tokens=tokens_of(record.get("cached_tokens"), "cached_tokens"),
    )
    if strategy in _SCHEDULED and (strategy != "trace" or _has_schedule(info)):
        m.intended_ns = _at(times, "targeted_start")
        if m.intended_ns is not None:
            sink.tally(_INTENDED)
    if state == "errored":
        m.error = (
            one_line(record.get("error"))
            or one_line(info.get("error") if isinstance(info, dict) else None)
            or "failed without a message"
        )
    elif state == "incomplete":
        m.error = "the benchmark ended before it was finished"
    if m.sent_ns is None and m.intended_ns is None and m.error is not None:
        # Never sent: it was still in guidellm's queue.
        m.intended_ns = _at(times, "queued")
    return m


def _has_schedule(info: Any) -> bool:
    settings = info.get("settings") if isinstance(info, dict) else None
    return isinstance(settings, dict) and settings.get("relative_timestamp") is not None


def _at(times: dict[str, Any], name: str) -> int | None:
    found = number(times.get(name), name)
    return None if found is None or found == 0 else epoch_ns(found, name)


IMPORTER = Guidellm()
