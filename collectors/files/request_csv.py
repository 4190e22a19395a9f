"""Request logs as CSV: the Azure LLM inference traces (both headers in use) and Vidur's form of them.

Azure 2023: ``TIMESTAMP,ContextTokens,GeneratedTokens``; an older header in circulation:
``PromptTokenCount,GeneratedTokenCount,Time``;
Vidur: ``arrived_at,num_prefill_tokens,num_decode_tokens`` (seconds since the first row). Columns are found by name, in any order.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from hoptrace.collectors.files.base import Importer, Sink
from hoptrace.errors import InputError

__all__ = ["IMPORTER", "RequestCsv"]

_TIME = ("TIMESTAMP", "Time", "arrived_at")
_PROMPT = ("ContextTokens", "PromptTokenCount", "num_prefill_tokens")
_OUTPUT = ("GeneratedTokens", "GeneratedTokenCount", "num_decode_tokens")


def _names(head: bytes) -> list[str]:
    line = head.split(b"\n", 1)[0].decode("utf-8-sig", errors="replace").strip()
    return [n.strip() for n in line.split(",")]


class RequestCsv(Importer):
    """Azure's and Vidur's request logs."""

    kind = "azure"
    summary = "Azure LLM inference traces (CSV) and Vidur's form of them: arrival, prompt and output length"

    def matches(self, path: Path, head: bytes) -> bool:
        names = _names(head)
        return any(n in names for n in _PROMPT) and any(n in names for n in _OUTPUT)

    def read(self, path: Path, sink: Sink) -> None:
        """One request a row. Rows with a missing or negative length are dropped and counted.

        Raises:
            InputError: a column is missing, a length or a time cannot be read; names file, line and column.
        """
        try:
            frame = pl.read_csv(path, infer_schema=False, truncate_ragged_lines=True, encoding="utf8-lossy")
        except (pl.exceptions.PolarsError, OSError) as e:
            raise InputError(f"{path} cannot be read as CSV ({str(e).splitlines()[0]}).") from None
        frame = frame.rename({n: n.strip().lstrip("\ufeff") for n in frame.columns})
        time = self._column(frame, _TIME)
        prompt = self._column(frame, _PROMPT)
        output = self._column(frame, _OUTPUT)
        if prompt is None or output is None:
            have = ", ".join(frame.columns[:8])
            raise InputError(
                f"{path} has no column for the {'prompt' if prompt is None else 'output'} length (columns: {have}).",
                hint=f"Rename it to {_PROMPT[0] if prompt is None else _OUTPUT[0]}.",
            )
        frame = frame.with_row_index("line", offset=2)
        notes: list[str] = []
        arrival = self._arrival(path, frame, time, notes)
        lengths = [
            self._length(path, frame, prompt).alias("prompt_tokens"),
            self._length(path, frame, output).alias("output_tokens"),
        ]
        rows = frame.select(pl.col("line"), arrival.alias("arrival_ns"), *lengths)
        good = rows.filter((pl.col("prompt_tokens") > 0) & (pl.col("output_tokens") >= 0))
        sink.count(rows.height)
        lost = rows.filter(~((pl.col("prompt_tokens") > 0) & (pl.col("output_tokens") >= 0)).fill_null(False))
        sink.reject_many(lost.select(pl.col("line").alias("row"), pl.lit("a length is missing or not positive").alias("reason")))
        good = good.sort("arrival_ns", maintain_order=True).drop("line")
        arrived = pl.lit("received") if time is not None else pl.lit("intended")
        requests = good.with_columns(
            pl.col("output_tokens").alias("max_tokens"),
            arrived.alias("arrival_of"),
            pl.col("arrival_ns").alias("received_ns" if time is not None else "intended_ns"),
            pl.lit(f"import:{self.kind}").alias("source"),
        )
        for note in notes:
            sink.note(note)
        sink.write("requests", requests.with_row_index("request"))

    @staticmethod
    def _column(frame: pl.DataFrame, names: tuple[str, ...]) -> str | None:
        return next((n for n in names if n in frame.columns), None)

    @staticmethod
    def _length(path: Path, frame: pl.DataFrame, name: str) -> pl.Series:
        text = frame[name].str.strip_chars()
        value = text.cast(pl.Float64, strict=False).cast(pl.Int64, strict=False)
        bad = value.is_null() & text.is_not_null() & (text != "")
        if bad.any():
            row = frame.filter(bad).row(0, named=True)
            raise InputError(
                f"{path}, line {row['line']}, column {name}: {row[name]!r} is not a number of tokens.",
                hint="Mend or remove the line.",
            )
        return value

    @staticmethod
    def _arrival(path: Path, frame: pl.DataFrame, name: str | None, notes: list[str]) -> pl.Series:
        if name is None:
            notes.append("The file has no times: all requests arrive at once, in the file's order.")
            return pl.Series("arrival_ns", [0] * frame.height, dtype=pl.Int64)
        text = frame[name].str.strip_chars()
        seconds = text.cast(pl.Float64, strict=False)
        if seconds.null_count() == 0:
            notes.append(f"{name} is in seconds since the log's own start.")
            return (seconds * 1e9).round().cast(pl.Int64)
        stamp = text.str.to_datetime("%Y-%m-%d %H:%M:%S%.f", time_unit="ns", strict=False)
        bad = stamp.is_null()
        if bad.any():
            row = frame.filter(bad).row(0, named=True)
            raise InputError(
                f"{path}, line {row['line']}, column {name}: {row[name]!r} is not a time.",
                hint="Expected 2023-11-16 18:15:46.680590, or seconds.",
            )
        notes.append(f"{name} states no time zone; it is taken as UTC.")
        return stamp.dt.epoch("ns")


IMPORTER = RequestCsv()
