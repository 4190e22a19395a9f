"""LLMServingSim workloads (JSON lines): ``input_toks``, ``output_toks``, ``arrival_time_ns`` (casys-kaist/LLMServingSim)."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from hoptrace.collectors.files.base import Importer, Sink
from hoptrace.collectors.files.checked import Batch, Requests
from hoptrace.collectors.files.json_rows import json_frames, keys_of, note_unused
from hoptrace.collectors.files.values import duration_ns, is_missing

__all__ = ["IMPORTER", "LLMServingSim"]

_TEXTS = ("input_toks", "output_toks", "arrival_time_ns")


class LLMServingSim(Importer):
    """What a simulator is fed: lengths and arrivals."""

    kind = "llmservingsim"
    summary = "LLMServingSim workloads (JSON lines): arrival, prompt and output length"

    def matches(self, path: Path, head: bytes) -> bool:
        return set(_TEXTS) <= (keys_of(head) or {}).keys()

    def read(self, path: Path, sink: Sink) -> None:
        """One request a line."""
        sink.epoch = "relative"
        sink.note("arrival_time_ns counts from the workload's own start.")
        note_unused(sink, _TEXTS)
        requests = Requests(sink)
        for frame in json_frames(sink, _TEXTS):
            batch = Batch(frame)
            columns = {
                "prompt_tokens": batch.count("input_toks", "tokens", least=1),
                "output_tokens": batch.count("output_toks", "tokens"),
                "arrival_ns": batch.take("arrival_time_ns", duration_ns(frame["arrival_time_ns"], "ns"), "a number of ns"),
            }
            batch.bad(columns["arrival_ns"] < 0, "arrival_time_ns is negative", frame["arrival_time_ns"])
            if columns["arrival_ns"].null_count():
                batch.bad(is_missing(frame["arrival_time_ns"]), "it has no arrival_time_ns")
            rows = requests.number(batch.done(sink, columns))
            # A workload says when each request is meant to come.
            requests.write(
                rows.with_columns(pl.col("arrival_ns").alias("intended_ns"), pl.lit("intended").alias("arrival_of"))
            )  # fmt: skip


IMPORTER = LLMServingSim()
