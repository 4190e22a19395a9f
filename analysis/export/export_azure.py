"""A trace's requests as an Azure LLM inference trace: ``TIMESTAMP,ContextTokens,GeneratedTokens``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import polars as pl

from hoptrace.analysis.export.export_requests import Written, needed, start_ns, unheld, untimed, write_lines
from hoptrace.errors import InputError
from hoptrace.metrics import arrivals_known
from hoptrace.reader import Trace

__all__ = ["export_azure"]

# The published files have ticks of 100 ns.
_TICK_NS = 100
_FINE = "Arrivals are written to the ns (9 digits); Azure's own files have 7."
_UNTIMED = "Requests whose arrival nobody saw, dated with the request before: {n:,}."
_RELATIVE = "Arrivals count from the log's own start: they are written as dates from 1970-01-01 on."


def export_azure(trace: Trace, path: Path, *, force: bool = False) -> Written:
    """Write the requests whose prompt and output lengths are known, by arrival. Timestamps are UTC and exact.

    Raises:
        UsageError: ``path`` is already there.
        InputError: no request can be written, or no arrival is known: a row of this format is a time.
        EnvironmentProblem: the file cannot be written.
    """
    if trace.rows("requests") and not arrivals_known(trace):
        raise InputError(
            f"{trace.path} does not know when its requests arrived (it has durations only).",
            hint="Use --mooncake: its rows can lack a timestamp.",
        )
    frame, left_out = needed(trace, "prompt_tokens", "output_tokens")
    notes = []
    fine = bool((frame["arrival_ns"] % _TICK_NS != 0).any())
    if fine:
        notes.append(_FINE)
    if start_ns(frame) == 0:
        notes.append(_RELATIVE)
    if without := int(frame.select(untimed(trace).sum()).item()):
        notes.append(_UNTIMED.format(n=without))
    write_lines(path, _lines(frame, 9 if fine else 7), force=force)
    return Written(path, frame.height, left_out, unheld(trace, frame, ("prompt_tokens", "output_tokens")), tuple(notes))


def _lines(frame: pl.DataFrame, digits: int) -> Iterator[str]:
    second = 1_000_000_000
    parts = frame.select(
        pl.from_epoch(pl.col("arrival_ns") // second, time_unit="s").dt.strftime("%Y-%m-%d %H:%M:%S").alias("at"),
        (pl.col("arrival_ns") % second // 10 ** (9 - digits)).alias("part"), "prompt_tokens", "output_tokens",
    )  # fmt: skip
    yield "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    for at, part, prompt, output in parts.iter_rows():
        yield f"{at}.{part:0{digits}d},{prompt},{output}\n"
