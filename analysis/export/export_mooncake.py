"""A trace's requests as a Mooncake trace (JSON lines), and in AIPerf's form of it.

Mooncake: ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids``. AIPerf reads the same and ``session_id`` and
``delay`` (ai-dynamo/aiperf, docs/benchmark-modes/trace-replay.md), and wants a hash for each block of a prompt that has any.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from hoptrace.analysis.export.export_requests import Written, needed, start_ns, unheld, untimed, write_lines
from hoptrace.reader import Trace

__all__ = ["export_aiperf", "export_mooncake"]

_MS = 1_000_000
_USUAL_BLOCK = 512
_TIMED = "_timed"
# A replayer that takes timestamps as they are would wait so long before the first request.
_LATE_NS = 60 * 10**9
_COLUMNS = (
    "request", "arrival_ns", "arrival_of", "prompt_tokens", "output_tokens", "prefix_blocks", "hash_space", "block_size",
    "session", "think_ns", _TIMED,
)  # fmt: skip


def export_mooncake(trace: Trace, path: Path, *, force: bool = False) -> Written:
    """Write the requests whose prompt and output lengths are known, by arrival; block hashes are numbered as they come.

    Raises:
        UsageError: ``path`` is already there.
        InputError: no request can be written.
        EnvironmentProblem: the file cannot be written.
    """
    return _export(trace, path, force=force, aiperf=False)


def export_aiperf(trace: Trace, path: Path, *, force: bool = False) -> Written:
    """As :func:`export_mooncake`, with sessions, and a delay in place of a timestamp where only that is known.

    Blocks of a prompt that no hash covers get numbers of their own: they are unlike any other text, as in the trace.
    """
    return _export(trace, path, force=force, aiperf=True)


def _export(trace: Trace, path: Path, *, force: bool, aiperf: bool) -> Written:
    frame, left_out = needed(trace, "prompt_tokens", "output_tokens")
    frame = frame.with_columns((~untimed(trace)).alias(_TIMED))
    start = start_ns(frame)
    without = int((~frame[_TIMED]).sum())
    notes = [f"Timestamps count from the first arrival, {start} ns after 1970."] if start and without < frame.height else []
    first = 0 if start or without == frame.height else int(frame.filter(_TIMED)["arrival_ns"].min())  # type: ignore[arg-type]
    if first >= _LATE_NS:
        notes.append(f"The first timestamp is {first / 1e9:,.0f} s: they are the trace's own clock, unchanged.")
    if without:
        notes.append(f"Requests whose arrival nobody saw, written without a timestamp: {without:,}.")
    frame, block, lost = _blocks(_in_tokens(frame, notes), notes)
    numbers = _Numbers(block if aiperf else None)
    write_lines(path, _lines(frame, start, numbers, aiperf=aiperf), force=force)
    if numbers.filled:
        notes.append(f"Blocks that no hash covered, given numbers of their own: {numbers.filled:,}.")
    if block is not None and (bare := frame["prefix_blocks"].null_count()):
        notes.append(f"Requests without block hashes, written without hash_ids: {bare:,}.")
    held = ["prompt_tokens", "output_tokens", "prefix_blocks", "hash_space", "block_size", "block_unit"]
    if aiperf:
        held.append("session")
        if without:
            held.append("think_ns")
    missing = unheld(trace, frame, held)
    if lost:
        missing = {"requests.prefix_blocks": lost, **missing}
    return Written(path, frame.height, left_out, missing, tuple(notes))


def _in_tokens(frame: pl.DataFrame, notes: list[str]) -> pl.DataFrame:
    """The frame with hashes of blocks in characters (what a proxy sees) joined to blocks of 512 tokens.

    At the trace's mean number of characters a token: one number for all, so that equal text stays equal. Hashes are chained, so
    the last one of the joined stands for all.
    """
    usable = (pl.col("block_unit") == "characters") & (pl.col("block_size") > 0) & (pl.col("prompt_chars") > 0)
    usable = (usable & pl.col("prefix_blocks").is_not_null()).fill_null(False)
    sizes = frame.filter(usable)["block_size"].value_counts(sort=True)
    if not sizes.height:
        return frame
    size = int(sizes["block_size"][0])
    mine = (usable & (pl.col("block_size") == size)).fill_null(False)
    chars, tokens = frame.filter(mine).select(pl.col("prompt_chars").sum(), pl.col("prompt_tokens").sum()).row(0)
    if not tokens:
        return frame
    joined = max(1, round(_USUAL_BLOCK * chars / tokens / size))
    # Only blocks that are whole in tokens: where a shorter one ends cannot be told.
    whole = pl.col("prefix_blocks").list.gather_every(joined, joined - 1).list.head(pl.col("prompt_tokens") // _USUAL_BLOCK)
    n = int(frame.select(mine.sum()).item())
    out = frame.with_columns(
        pl.when(mine).then(pl.when(whole.list.len() > 0).then(whole)).otherwise(pl.col("prefix_blocks")).alias("prefix_blocks"),
        pl.when(mine).then(_USUAL_BLOCK).otherwise(pl.col("block_size")).cast(pl.Int64).alias("block_size"),
        pl.when(mine).then(pl.lit("tokens")).otherwise(pl.col("block_unit")).alias("block_unit"),
    )
    short = int(out["prefix_blocks"].null_count()) - int(frame["prefix_blocks"].null_count())
    notes.append(
        f"Block hashes of {size} characters were joined to blocks of {_USUAL_BLOCK} tokens at {chars / tokens:.2f} characters a "
        f"token, the mean of these {n:,} requests: where a block ends is approximate."
    )
    if short:
        notes.append(f"Requests too short for a whole block, written without hashes: {short:,}.")
    return out


def _blocks(frame: pl.DataFrame, notes: list[str]) -> tuple[pl.DataFrame, int | None, int]:
    """The frame with only hashes that the format can hold (all of blocks of one length in tokens); that length; how many
    requests lose theirs."""
    has = pl.col("prefix_blocks").is_not_null()
    fits = (pl.col("block_unit") == "tokens") & (pl.col("block_size") > 0)
    sizes = frame.filter(has & fits)["block_size"].value_counts(sort=True)
    block = int(sizes["block_size"][0]) if sizes.height else None
    keep = (fits & (pl.col("block_size") == block)).fill_null(False) if block is not None else pl.lit(False)
    lost = int(frame.select((has & ~keep).sum()).item())
    if lost:
        notes.append(f"Requests whose block hashes are not of blocks of one length in tokens, written without: {lost:,}.")
    if block is not None and block != _USUAL_BLOCK:
        notes.append(f"A hash stands for {block} tokens, not {_USUAL_BLOCK}: tell the reader (aiperf: --isl-block-size {block}).")
    return frame.with_columns(pl.when(keep).then(pl.col("prefix_blocks")).alias("prefix_blocks")), block, lost


class _Numbers:
    """Block hashes to numbers from 0, in the order of their first sight. With ``fill``, the tokens of a block, prompts get a
    number for each of their blocks."""

    def __init__(self, fill: int | None) -> None:
        self._fill = fill
        self._of: dict[tuple[str | None, int], int] = {}
        self._next = 0
        self.filled = 0

    def of(self, space: str | None, hashes: list[int], prompt: int) -> list[int]:
        found = []
        for h in hashes:
            number = self._of.get((space, h))
            if number is None:
                number = self._of[space, h] = self._next
                self._next += 1
            found.append(number)
        if self._fill is not None:
            missing = -(-prompt // self._fill) - len(found)
            if missing > 0:
                found += range(self._next, self._next + missing)
                self._next += missing
                self.filled += missing
        return found


def _lines(frame: pl.DataFrame, start: int, numbers: _Numbers, *, aiperf: bool) -> Iterator[str]:
    for row in frame.select(_COLUMNS).iter_rows(named=True):
        record: dict[str, Any] = {}
        if aiperf and row["session"] is not None:
            record["session_id"] = row["session"]
        if row[_TIMED]:
            record["timestamp"] = _ms(row["arrival_ns"] - start)
        elif aiperf and row["think_ns"] is not None:
            record["delay"] = _ms(row["think_ns"])
        record |= {"input_length": row["prompt_tokens"], "output_length": row["output_tokens"]}
        if row["prefix_blocks"] is not None:
            record["hash_ids"] = numbers.of(row["hash_space"], row["prefix_blocks"], row["prompt_tokens"])
        yield json.dumps(record) + "\n"


def _ms(ns: int) -> int | float:
    """Milliseconds: a whole number where it is one; a float holds 2^53 ns (104 days) exactly enough to round back."""
    return ns // _MS if ns % _MS == 0 else ns / _MS
