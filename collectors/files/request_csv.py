"""Request logs as CSV: the Azure LLM inference traces (2023 and 2024, both headers in use) and Vidur's form of them.

Azure: ``TIMESTAMP,ContextTokens,GeneratedTokens``; an older header in circulation: ``PromptTokenCount,GeneratedTokenCount,Time``;
Vidur: ``arrived_at,num_prefill_tokens,num_decode_tokens`` (seconds since the first row). Columns are found by name, in any order.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from hoptrace.collectors.files.base import Importer, Sink
from hoptrace.collectors.files.blocks import ROW
from hoptrace.collectors.files.checked import Batch, Requests
from hoptrace.collectors.files.csv_rows import CsvFile, header_of
from hoptrace.collectors.files.values import Times, is_missing

__all__ = ["IMPORTER", "RequestCsv"]

_TIME = ("TIMESTAMP", "Time", "arrived_at")
_PROMPT = ("ContextTokens", "PromptTokenCount", "num_prefill_tokens")
_OUTPUT = ("GeneratedTokens", "GeneratedTokenCount", "num_decode_tokens")
_FIRST = 200


class RequestCsv(Importer):
    """Azure's and Vidur's request logs."""

    kind = "azure"
    summary = "Azure LLM inference traces 2023 and 2024 (CSV), and Vidur's form of them: arrival, prompt and output length"

    def matches(self, path: Path, head: bytes) -> bool:
        names = {n.casefold() for n in header_of(head)}
        return any(n.casefold() in names for n in _PROMPT) and any(n.casefold() in names for n in _OUTPUT)

    def read(self, path: Path, sink: Sink) -> None:
        """One request a row.

        Raises:
            InputError: a column is missing or stands twice.
        """
        file = CsvFile(sink)
        time = file.column(*_TIME)
        prompt = file.column(*_PROMPT, needed="the prompt length")
        output = file.column(*_OUTPUT, needed="the output length")
        assert prompt is not None and output is not None
        names = [n for n in (time, prompt, output) if n is not None]
        if time is None:
            sink.note("The file has no times: all requests arrive at once, in the file's order.")
        if unused := [n for n in file.names if n not in names]:
            sink.note(f"Columns that were not used: {', '.join(unused)}.")
        clock = None
        requests = Requests(sink)
        for frame in file.frames(*names):
            batch = Batch(frame)
            columns = {
                "prompt_tokens": batch.count(prompt, "tokens", least=1),
                "output_tokens": batch.count(output, "tokens"),
            }
            if time is None:
                columns["arrival_ns"] = pl.zeros(frame.height, pl.Int64, eager=True)
            else:
                clock = clock or self._clock(time, frame[time])
                columns["arrival_ns"] = batch.take(time, clock.read(frame[time]), "a time")
                if columns["arrival_ns"].null_count():
                    batch.bad(is_missing(frame[time]), f"it has no {time}")
                if clock.relative:
                    batch.bad(columns["arrival_ns"] < 0, f"{time} is negative", frame[time])
            self._write(requests, batch.done(sink, columns), timed=time is not None)
        self._say(sink, time, clock)

    @staticmethod
    def _clock(column: str, text: pl.Series) -> Times:
        """Seconds since the log's start (Vidur), or dates: what the first times are for the most part."""
        first = text.head(_FIRST).str.strip_chars()
        numbers = first.cast(pl.Float64, strict=False).is_not_null().sum()
        return Times(column, "s" if numbers * 2 > first.len() - is_missing(first).sum() else "iso8601")

    @staticmethod
    def _write(requests: Requests, rows: pl.DataFrame, *, timed: bool) -> None:
        seen = "received" if timed else "intended"
        requests.write(
            requests.number(rows.drop(ROW)).with_columns(
                pl.lit(seen).alias("arrival_of"),
                pl.col("arrival_ns").alias(f"{seen}_ns"),
            )
        )

    @staticmethod
    def _say(sink: Sink, time: str | None, clock: Times | None) -> None:
        if time is None or clock is None:
            sink.epoch = "relative"
        elif clock.relative:
            sink.epoch = "relative"
            sink.note(f"{time} is in seconds since the log's own start.")
        else:
            sink.epoch = "utc"
            if not clock.zoned:
                sink.note(f"{time} states no time zone; it is taken as UTC.")


IMPORTER = RequestCsv()
