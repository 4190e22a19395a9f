"""GenAI-Perf's `profile_export.json`, which Perf Analyzer writes: when each request and each of its responses was seen.

The file has no counts of tokens: GenAI-Perf counts them later with a tokenizer. Chunks are read as an OpenAI stream; the server's
own totals are used where the stream has them (`stream_options.include_usage`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hoptrace.collectors.files.base import Importer, Sink
from hoptrace.collectors.files.bench_rows import Measured, Reject, Rows, stamp_ns, text
from hoptrace.collectors.files.json_walk import Buffer, Cut, document, elements, load, members, one_line, roots, starts
from hoptrace.errors import InputError
from hoptrace.openai_stream import StreamDecoder
from hoptrace.sse import SSEParser

__all__ = ["IMPORTER", "GenaiPerf"]

_NO_COUNTS = "{n} requests have no count of tokens: the stream had no usage, and GenAI-Perf's own tokenizer is not asked again."
_PLAIN = "{n} requests were not read as an OpenAI stream: each response is one chunk."
_BEGINS = ("data:", "event:", ":")
_CUT = "The file ends inside a request: those before it are kept."


class GenaiPerf(Importer):
    """GenAI-Perf and Perf Analyzer."""

    kind = "genai-perf"
    summary = "GenAI-Perf / Perf Analyzer profile_export.json: sending, chunk times"

    def matches(self, path: Path, head: bytes) -> bool:
        start = head[:4096].lstrip()
        return start.startswith(b"{") and b'"experiments"' in start and b'"requests"' in head

    def read(self, path: Path, sink: Sink) -> None:
        sink.epoch = "utc"
        rows = Rows(sink)
        record = 0
        with document(sink) as buffer:
            found = _requests(buffer)
            while True:
                try:
                    span = next(found, None)
                except Cut:
                    sink.note(_CUT)
                    sink.count()
                    sink.reject(record + 1, "the file ends inside it")
                    break
                if span is None:
                    break
                record += 1
                rows.record(record, _measured, sink, buffer, span)
        if not record and not sink.read:
            raise InputError(f"{path} has no requests.", hint="Was the benchmark stopped at its start?")
        rows.close()


def _requests(buffer: Buffer) -> Iterator[tuple[int, int]]:
    for root in roots(buffer):
        for name, at in members(buffer, root):
            if name != "experiments":
                continue
            # Not through elements(): a run that is cut must give the requests before the cut.
            for begin in starts(buffer, at):
                for inner, place in members(buffer, begin):
                    if inner == "requests":
                        yield from elements(buffer, place)


def _measured(sink: Sink, buffer: Buffer, span: tuple[int, int]) -> Measured:
    record = load(buffer, *span)
    if not isinstance(record, dict):
        raise Reject("it is not an object")
    sent = stamp_ns(record.get("timestamp"), "timestamp")
    if sent is None:
        raise Reject("it has no timestamp")
    stamps = record.get("response_timestamps")
    outputs = record.get("response_outputs")
    if not isinstance(stamps, list) or not isinstance(outputs, list) or len(stamps) != len(outputs):
        raise Reject("response_timestamps and response_outputs are not two lists of one length")
    inputs = record.get("request_inputs")
    m = Measured(sent_ns=sent, session=text(inputs.get("session_id")) if isinstance(inputs, dict) else None)
    if not stamps:
        m.error = "no response came"
        return m
    _stream(sink, m, [stamp_ns(t, "a response timestamp") or 0 for t in stamps], outputs)
    return m


def _stream(sink: Sink, m: Measured, stamps: list[int], outputs: list[Any]) -> None:
    m.finish_ns = stamps[-1]
    bodies = [_body(output) for output in outputs]
    if any(body.lstrip().startswith(_BEGINS) for body in bodies):
        _events(m, _joined(stamps, bodies))
    else:
        sink.tally(_PLAIN)
        m.times = [time for time, body in zip(stamps, bodies, strict=True) if body.strip()]
    if m.output_tokens is None:
        sink.tally(_NO_COUNTS)
    if not m.times:
        m.times = m.counts = m.coalesced = None
        m.error = m.error or "no token came"


def _body(output: Any) -> str:
    """What a response says: OpenAI's as it came, Triton's text, or, in the oldest files, the text alone."""
    if isinstance(output, dict):
        output = output.get("response", output.get("text_output"))
    return output if isinstance(output, str) else ""


def _joined(stamps: list[int], bodies: list[str]) -> list[tuple[int, str]]:
    """Responses of which each begins with an event: what is left of one that was split is put to the part before it, as
    GenAI-Perf does."""
    whole: list[tuple[int, str]] = []
    for time, body in zip(stamps, bodies, strict=True):
        if whole and not body.lstrip().startswith(_BEGINS):
            at = body.find("data: ")
            rest, body = (body, "") if at < 0 else (body[:at], body[at:])
            whole[-1] = (whole[-1][0], whole[-1][1] + rest)
        if body:
            whole.append((time, body))
    return whole


def _events(m: Measured, responses: list[tuple[int, str]]) -> None:
    decoder, parser = StreamDecoder(), SSEParser()
    times: list[int] = []
    counts: list[int] = []
    coalesced: list[bool] = []
    for time, body in responses:
        before = len(times)
        for event in parser.feed(body.encode("utf-8", "replace") + b"\n\n"):
            chunk = decoder.event(event)
            m.error = m.error or one_line(chunk.error)
            m.model = m.model or chunk.model
            if chunk.usage is not None:
                m.prompt_tokens = chunk.usage.prompt if chunk.usage.prompt is not None else m.prompt_tokens
                m.output_tokens = chunk.usage.output if chunk.usage.output is not None else m.output_tokens
                m.cached_tokens = chunk.usage.cached if chunk.usage.cached is not None else m.cached_tokens
            for emission in chunk.emissions:
                m.finish_reason = emission.finish_reason or m.finish_reason
                if not (emission.visible or emission.reasoning or emission.count):
                    continue
                if m.visible_ns is None and emission.visible:
                    m.visible_ns = time
                coalesced.append(len(times) > before)
                times.append(time)
                counts.append(emission.count or 1)
    m.times, m.counts, m.coalesced = times, counts, coalesced


IMPORTER = GenaiPerf()
