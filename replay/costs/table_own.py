"""hoptrace's own form of a table: what a step holds, and how long it took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import polars as pl

from hoptrace.errors import InputError
from hoptrace.replay.costs.table_rows import grid_of, numbers, refuse_other_keys, with_ps
from hoptrace.stepcost import StepCost
from hoptrace.stepcost_table import MILLION, Piece

__all__ = ["is_own", "own"]

_TIMES = {"time_s": 1e12, "time_ms": 1e9, "time_us": 1e6, "time_ns": 1e3}
_COUNTS = ("prefill_requests", "prefill_tokens", "prefill_context_tokens", "decode_requests", "decode_context_tokens")


def is_own(frame: pl.DataFrame) -> bool:
    """Whether a table has this form's columns."""
    return {"prefill_tokens", "decode_requests"} <= set(frame.columns) and any(t in frame.columns for t in _TIMES)


def own(name: str, frame: pl.DataFrame, rows: Mapping[str, str]) -> StepCost:
    """The step cost of a table in hoptrace's form. Raises as :func:`hoptrace.replay.costs.table.read_table`."""
    refuse_other_keys(name, rows, ())
    frame = frame.with_columns(pl.lit(0).alias(c) for c in _COUNTS if c not in frame.columns)
    frame = frame.with_columns(pl.col(c).fill_null(0) for c in _COUNTS)
    frame = numbers(name, frame, _COUNTS)
    units = [t for t in _TIMES if t in frame.columns]
    if len(units) > 1:
        raise InputError(f"{name} has {' and '.join(units)}: which is the time of a step?", hint="Leave one.")
    unit = units[0]
    frame = with_ps(name, frame, unit, _TIMES[unit]).with_columns(
        (pl.col("decode_context_tokens") // pl.max_horizontal(pl.col("decode_requests"), 1)).alias("decode_context")
    )
    both = frame.filter((pl.col("prefill_tokens") > 0) & (pl.col("decode_requests") > 0))
    prefill = frame.filter((pl.col("prefill_tokens") > 0) & (pl.col("decode_requests") == 0))
    decode = frame.filter((pl.col("prefill_tokens") == 0) & (pl.col("decode_requests") > 0))
    for what, part in (("prompt", prefill), ("decode", decode)):
        if not part.height:
            raise InputError(
                f"{name} has no row of {what} alone.", hint="A table needs steps of either phase; see docs/costs.md."
            )
    pieces = (
        _piece(name, prefill, "prefill_context_tokens", "prefill_tokens", ("prefill_context_tokens", "prefill_tokens"), "prompt"),
        _piece(name, decode, "decode_requests", "decode_context", ("decode_batch", "decode_context"), "decode"),
    )
    if not both.height:
        factor, how = MILLION, "no step of both phases was measured, so such a step takes the sum of its phases"
    else:
        alone = StepCost({}, "table", pieces=tuple(_mixed(p, MILLION) for p in pieces)).cost_ns_array(both)
        ratio = (both["ps"] / 1000 / pl.Series(alone).clip(1)).median()
        assert isinstance(ratio, float)
        factor = min(max(round(ratio * MILLION), 0), 10 * MILLION)
        how = f"a step of both phases takes {factor / MILLION:.3f} times the sum of its phases, the median of {both.height} rows"
    note = f"Step times of {name}: medians of equal steps, linear between; {how}."
    return StepCost({}, "table", pieces=tuple(_mixed(p, factor) for p in pieces), notes=(note,))


def _piece(name: str, frame: pl.DataFrame, outer: str, inner: str, by: tuple[str, str], phase: str) -> Piece:
    """A grid by both columns; by the one that matters more where no value of it is seen with two of the other."""
    alone, other = (inner, outer) if phase == "prompt" else (outer, inner)
    flat = int(frame.group_by(alone).agg(pl.col(other).n_unique())[other].max() or 0) == 1  # type: ignore[arg-type]
    variables = dict(zip((outer, inner), by, strict=True))
    factors = (MILLION, 0, 0) if phase == "prompt" else (0, MILLION, 0)
    if flat:
        grid, seen = grid_of(name, frame, None, alone)
        return Piece(grid, variables[alone], factors=factors, seen=seen, name=f"{phase} step")
    grid, seen = grid_of(name, frame, outer, inner)
    return Piece(grid, by[1], by[0], factors, seen=seen, name=f"{phase} step")


def _mixed(piece: Piece, ppm: int) -> Piece:
    return replace(piece, factors=(*piece.factors[:2], ppm))
