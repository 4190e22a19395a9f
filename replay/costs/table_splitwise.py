"""Splitwise's measured phase times (``perf_model.csv`` of github.com/Mutinifni/splitwise-sim), with the meaning that they have
there: time by the tokens of a batch, the median over repeats, linear between; a step of both phases takes 1.1 times the prompt
time of all its tokens. splitwise-sim goes on beyond the ends in a line (``beyond=line``), by which 32 decoders of its Llama2-70b
on H100 take longer than 128."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from hoptrace.errors import UsageError
from hoptrace.replay.costs.table_rows import chosen, grid_of, numbers, with_ps
from hoptrace.stepcost import StepCost
from hoptrace.stepcost_table import MILLION, Piece

__all__ = ["is_splitwise", "splitwise"]

_KEYS = ("model", "hardware", "tensor_parallel")
_BEYOND = "beyond"
_NEEDED = ("prompt_size", "batch_size", "prompt_time", "token_time")
_MIXED_PPM = 1_100_000


def is_splitwise(frame: pl.DataFrame) -> bool:
    """Whether a table has this form's columns."""
    return set(_NEEDED) <= set(frame.columns)


def splitwise(name: str, frame: pl.DataFrame, rows: Mapping[str, str]) -> StepCost:
    """The step cost of one model on one device; times are in ms. Raises as :func:`hoptrace.replay.costs.table.read_table`."""
    beyond = rows.get(_BEYOND, "held")
    if beyond not in ("held", "line"):
        raise UsageError(
            f"beyond={beyond} is no way to go on.", hint="beyond=held (the default) or beyond=line, as splitwise-sim does."
        )
    frame, said = chosen(name, frame, {k: v for k, v in rows.items() if k != _BEYOND}, _KEYS)
    frame = numbers(name, frame, ("prompt_size", "batch_size"))
    frame = frame.with_columns((pl.col("prompt_size") * pl.col("batch_size")).alias("tokens"))
    pieces = []
    for column, what, factors in (
        ("prompt_time", "prompt", (MILLION, 0, _MIXED_PPM)),
        ("token_time", "decode", (0, MILLION, 0)),
    ):
        times = with_ps(name, frame, column, 1e9)
        grid, seen = grid_of(name, times, None, "tokens", line=beyond == "line")
        pieces.append(Piece(grid, "tokens", factors=factors, seen=seen, name=f"{what} step"))
    which = ", ".join(f"{k} {v}" for k, v in said.items())
    return StepCost(
        {},
        "table",
        pieces=tuple(pieces),
        notes=(
            f"Step times of {name} ({which or 'all rows'}): medians by tokens of the batch, linear between; a step of both "
            "phases takes 1.1 times the prompt time of all its tokens, as splitwise-sim has it.",
        ),
    )
