"""What exports to other tools' request logs have in common: which requests they can hold, what is lost, a file whole or none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from hoptrace.analysis.export.whole_file import whole_file
from hoptrace.errors import InputError
from hoptrace.metrics import arrivals_known
from hoptrace.reader import Trace
from hoptrace.schema import TABLES

__all__ = ["Written", "needed", "start_ns", "unheld", "untimed", "write_lines"]

# Times from here on are UTC (1973); smaller ones count from a log's own start.
_UTC_FROM_NS = 10**17
# Said by the arrival that every format has, by the file's order, or of no meaning outside of a trace.
_IMPLIED = ("request", "source", "arrival_ns", "arrival_of", "intended_ns", "sent_ns", "received_ns")


@dataclass(frozen=True, slots=True)
class Written:
    """One exported file.

    ``left_out``: requests that the format cannot hold, by reason. ``unheld``: values (by ``table.column``) and rows (by table)
    that it has no place for. ``notes``: what a reader of the file must know.
    """

    path: Path
    requests: int
    left_out: dict[str, int] = field(default_factory=dict)
    unheld: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def needed(trace: Trace, *columns: str) -> tuple[pl.DataFrame, dict[str, int]]:
    """The requests whose ``columns`` are known, by arrival; and how many are left out, by reason.

    Raises:
        InputError: none is left.
    """
    frame = trace.table("requests").sort("arrival_ns", "request").collect()
    left_out: dict[str, int] = {}
    for name in columns:
        if n := frame[name].null_count():
            left_out[f"no {name}"] = n
            frame = frame.filter(pl.col(name).is_not_null())
    if not frame.height:
        why = "; ".join(f"{n:,} {w}" for w, n in left_out.items()) or "it has no requests"
        raise InputError(f"{trace.path} has no request that can be written: {why}.")
    return frame, left_out


def start_ns(frame: pl.DataFrame) -> int:
    """What times in a log that starts at 0 count from: the first arrival if arrivals are UTC, else 0: then they do already."""
    first = int(frame["arrival_ns"].min())  # type: ignore[arg-type]
    return first if first >= _UTC_FROM_NS else 0


def unheld(trace: Trace, frame: pl.DataFrame, held: Iterable[str]) -> dict[str, int]:
    """How many values and rows of the trace a format that holds the columns ``held`` of `requests` has no place for."""
    known = {*held, *_IMPLIED}
    lost = {
        f"requests.{c.name}": n
        for c in TABLES["requests"].columns
        if c.name not in known and (n := frame.height - frame[c.name].null_count())
    }
    for name in TABLES:
        if name not in ("requests", "coverage", "clock_sync") and (n := trace.rows(name) if trace.has(name) else 0):
            lost[name] = n
    return lost


def untimed(trace: Trace) -> pl.Expr:
    """Which requests have no arrival that a log could tell.

    A trace of durations sets each arrival to 0 and leaves it out of `coverage`; a row whose line had no time has no `arrival_of`
    and none of the moments that an engine saw. Where an engine's queue is the first that saw it, that is its arrival.
    """
    if not arrivals_known(trace):
        return pl.lit(True)
    return pl.col("arrival_of").is_null() & pl.col("queued_ns").is_null() & pl.col("scheduled_ns").is_null()


def write_lines(path: Path, lines: Iterable[str], *, force: bool) -> None:
    """Write lines (with their ends) as UTF-8. Raises what :func:`whole_file` raises."""
    with whole_file(path, force=force) as file:
        file.writelines(line.encode() for line in lines)
