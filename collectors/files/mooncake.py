"""Mooncake request traces (JSON lines), and AIPerf's and others' form of them.

``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids`` (one per block of the prompt, 512 tokens unless the lengths
say otherwise); AIPerf adds ``session_id``, ``delay`` (ms after the turn before) and ``text_input`` or ``messages`` in place of a
length (github ai-dynamo/aiperf, docs/benchmark-modes/trace-replay.md).
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from hoptrace.collectors.files.base import Importer, Sink
from hoptrace.collectors.files.checked import Batch, Requests
from hoptrace.collectors.files.json_rows import json_frames, keys_of, note_unused
from hoptrace.collectors.files.prefix import Prefixes
from hoptrace.collectors.files.turns import Turns
from hoptrace.collectors.files.values import duration_ns, is_missing

__all__ = ["BLOCK_TOKENS", "IMPORTER", "Mooncake"]

# README of the Mooncake FAST'25 traces: "512-token blocks".
BLOCK_TOKENS = 512

_TEXTS = (
    "timestamp", "input_length", "output_length", "session_id", "session", "chat_id", "request_id", "delay", "text_input",
    "messages",
)  # fmt: skip
_USED = {*_TEXTS, "hash_ids"}
_UNTIMED = "Requests without a timestamp (they arrive with the line before, in the file's order): {n}."
_NO_OUTPUT = "Requests without output_length (it is unknown, and a replay leaves them out): {n}."
_NO_PROMPT = "Requests with a text instead of its length in tokens (that is unknown, and a replay leaves them out): {n}."
_DELAYED = "Requests that say how long after the turn before they come (delay, kept as think_ns), not when: {n}."


class Mooncake(Importer):
    """Mooncake's and AIPerf's JSON lines."""

    kind = "mooncake"
    summary = "Mooncake traces and AIPerf's form of them (JSON lines): arrival, lengths, prefix block hashes"

    def matches(self, path: Path, head: bytes) -> bool:
        keys = keys_of(head)
        if keys is None:
            line = head.split(b"\n", 1)[0].lstrip()
            return line.startswith(b"{") and b'"input_length"' in line
        texts = "text_input" in keys or "messages" in keys
        return "input_length" in keys or (texts and ("timestamp" in keys or "output_length" in keys))

    def read(self, path: Path, sink: Sink) -> None:
        """One request a line; what cannot be used is rejected with its line."""
        sink.epoch = "relative"
        sink.note("Times are ms since the log's own start.")
        note_unused(sink, _USED)
        requests, prefixes, turns = Requests(sink), Prefixes(sink, BLOCK_TOKENS), Turns()
        last = 0
        for frame in json_frames(sink, _TEXTS, ("hash_ids",)):
            batch = Batch(frame)
            columns = self._lengths(batch)
            arrival = batch.take("timestamp", duration_ns(frame["timestamp"], "ms"), "a number of ms")
            batch.bad(arrival < 0, "timestamp is negative", frame["timestamp"])
            columns |= {"received_ns": arrival, "session": _session(frame), "request_id": frame["request_id"]}
            columns["think_ns"] = batch.take("delay", duration_ns(frame["delay"], "ms"), "a number of ms")
            batch.bad(columns["think_ns"] < 0, "delay is negative", frame["delay"])
            columns["prefix_blocks"] = prefixes.check(batch, frame["hash_ids"], columns["prompt_tokens"])
            columns["session_id"] = frame["session_id"]
            rows = requests.number(batch.done(sink, columns))
            if not rows.height:
                continue
            rows = rows.with_columns(pl.col("received_ns").forward_fill().fill_null(last).alias("arrival_ns"))
            last = int(rows["arrival_ns"][-1])
            self._tell(sink, rows)
            rows = prefixes.columns(turns.link(rows, "session_id")).drop("session_id")
            requests.write(
                rows.with_columns(pl.when(pl.col("received_ns").is_not_null()).then(pl.lit("received")).alias("arrival_of"))
            )

    @staticmethod
    def _lengths(batch: Batch) -> dict[str, pl.Series]:
        frame = batch.frame
        prompt = batch.count("input_length", "tokens", least=1, needed=False)
        texts = frame["text_input"].is_not_null() | frame["messages"].is_not_null()
        if prompt.null_count():
            batch.bad(is_missing(frame["input_length"]) & ~texts, "it has no input_length")
        chars = frame["text_input"].str.len_chars().cast(pl.Int64)
        return {
            "prompt_tokens": prompt,
            "prompt_chars": chars,
            "output_tokens": batch.count("output_length", "tokens", needed=False),
        }

    @staticmethod
    def _tell(sink: Sink, rows: pl.DataFrame) -> None:
        untimed, delayed = rows["received_ns"].is_null(), rows["think_ns"].is_not_null()
        sink.tally(_UNTIMED, int((untimed & ~delayed).sum()))
        sink.tally(_DELAYED, int((untimed & delayed).sum()))
        sink.tally(_NO_OUTPUT, rows["output_tokens"].null_count())
        sink.tally(_NO_PROMPT, rows["prompt_tokens"].null_count())


def _session(frame: pl.DataFrame) -> pl.Series:
    return frame.select(pl.coalesce("session_id", "session", "chat_id")).to_series()


IMPORTER = Mooncake()
