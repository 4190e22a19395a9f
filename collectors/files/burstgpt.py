"""BurstGPT traces (CSV): ``Timestamp`` (s), ``Model``, ``Request tokens``, ``Response tokens``, ``Log Type``; the third file has
``Session ID`` and ``Elapsed time`` (s) too. A request without response tokens has failed (README of github HPMLL/BurstGPT)."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from hoptrace.collectors.files.base import Importer, Sink
from hoptrace.collectors.files.checked import Batch, Requests
from hoptrace.collectors.files.csv_rows import CsvFile, header_of
from hoptrace.collectors.files.turns import Turns
from hoptrace.collectors.files.values import duration_ns, is_missing

__all__ = ["IMPORTER", "BurstGPT"]

_FAILED = "The log has no response tokens for it, which is how this trace marks a failure."
_FAILURES = "Requests without response tokens (they failed, and a replay leaves them out): {n}."


class BurstGPT(Importer):
    """BurstGPT's logs of ChatGPT and GPT-4 requests."""

    kind = "burstgpt"
    summary = "BurstGPT traces (CSV): arrival, model, lengths, failures; session and duration where the file has them"

    def matches(self, path: Path, head: bytes) -> bool:
        names = {n.casefold() for n in header_of(head)}
        return {"timestamp", "request tokens", "response tokens"} <= names

    def read(self, path: Path, sink: Sink) -> None:
        """One request a row. Raises InputError: a column is missing or stands twice."""
        file = CsvFile(sink)
        time = str(file.column("Timestamp", needed="the arrival"))
        prompt = str(file.column("Request tokens", needed="the prompt length"))
        output = str(file.column("Response tokens", needed="the output length"))
        model, session, elapsed = file.column("Model"), file.column("Session ID"), file.column("Elapsed time")
        used = [n for n in (time, prompt, output, model, session, elapsed) if n is not None]
        total = file.column("Total tokens")
        if unused := [n for n in file.names if n not in used and n != total]:
            sink.note(f"Columns that were not used: {', '.join(unused)}.")
        sink.epoch = "relative"
        sink.note(f"{time} is in seconds since the log's own start.")
        requests, turns = Requests(sink), Turns()
        for frame in file.frames(*used):
            batch = Batch(frame)
            columns = {
                "arrival_ns": batch.take(time, duration_ns(frame[time], "s"), "a number of seconds"),
                "prompt_tokens": batch.count(prompt, "tokens", least=1),
                "output_tokens": batch.count(output, "tokens"),
            }
            batch.bad(columns["arrival_ns"] < 0, f"{time} is negative", frame[time])
            if columns["arrival_ns"].null_count():
                batch.bad(is_missing(frame[time]), f"it has no {time}")
            if model is not None:
                columns["model"] = frame[model]
            if session is not None:
                columns["session"] = frame[session]
            if elapsed is not None:
                columns["elapsed"] = batch.take(elapsed, duration_ns(frame[elapsed], "s"), "a number of seconds")
                batch.bad(columns["elapsed"] < 0, f"{elapsed} is negative", frame[elapsed])
            rows = requests.number(batch.done(sink, columns))
            failed = pl.col("output_tokens") == 0
            rows = rows.with_columns(
                pl.col("arrival_ns").alias("received_ns"),
                pl.lit("received").alias("arrival_of"),
                pl.when(failed).then(pl.lit(_FAILED)).alias("error"),
            )
            sink.tally(_FAILURES, int(rows.select(failed.sum()).item()))
            if elapsed is not None:
                rows = rows.with_columns((pl.col("arrival_ns") + pl.col("elapsed")).alias("finish_ns")).drop("elapsed")
            if session is not None:
                rows = turns.link(rows, "session")
            requests.write(rows)


IMPORTER = BurstGPT()
