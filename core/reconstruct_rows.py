"""The rows of `steps` and `residency` from what the reconstruction has found: who decoded where, and where the prompts were
placed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from hoptrace.reconstruct_prefill import Placed

__all__ = ["Lines", "decode_shares", "lay_out", "residency_rows", "step_rows"]

_Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Lines:
    """The final steps. ``number``: the final number of each step that had a token; ``chunks``: unit, step, tokens (null:
    unknown) and context of each chunk of a prompt, numbered finally; ``begin``: by unit, its first step."""

    start: _Ints
    end: _Ints
    number: _Ints
    chunks: pl.DataFrame
    begin: dict[int, int]


def decode_shares(
    unit: _Ints, step: _Ints, count: _Ints, index: _Ints, opening: np.ndarray[Any, Any], prompt: pl.Series, with_first: _Ints, *,
    hidden: bool,
) -> dict[str, _Ints]:  # fmt: skip
    """One entry per sequence and step that it decoded in: unit, step, tokens, context (before the step; −1 where the prompt is
    unknown).

    The reads come sorted by unit and index; ``opening`` marks each unit's first, of whose tokens its prefill made ``with_first``
    (by unit). If reads of several tokens hide steps, such a read is spread over as many, back to the read before.
    """
    tokens = count.copy()
    tokens[opening] -= with_first
    skipped = np.zeros(len(count), dtype=np.int64)
    skipped[opening] = with_first
    rest = np.flatnonzero(~opening | (tokens > 0))
    if hidden:
        back = np.where(opening, tokens, np.diff(step, prepend=0))[rest]
        span = np.clip(np.minimum(tokens[rest], back), 1, None)
    else:
        span = np.ones(len(rest), dtype=np.int64)
    read = np.repeat(rest, span)
    of = np.repeat(span, span)
    j = np.arange(len(read)) - np.repeat(np.cumsum(span) - span, span)
    done = tokens[read] * j // of
    lengths = prompt.fill_null(-1).to_numpy()[unit[read]]
    return {
        "unit": unit[read],
        "step": step[read] - of + 1 + j,
        "tokens": tokens[read] * (j + 1) // of - done,
        # The token that a step puts out is not in its context, nor is the one that it takes in.
        "context": np.where(lengths < 0, -1, lengths + index[read] + skipped[read] - 1 + done),
    }


def lay_out(start: _Ints, end: _Ints, decoding: _Ints, placed: Placed, batch: int | None) -> Lines:
    """Put the inferred steps in and number anew. A step's time is shared out among its parts by the tokens in them."""
    extra = np.zeros(len(start), dtype=np.int64)
    for k, n in placed.extra.items():
        extra[k] = n
    number = np.arange(len(start)) + np.cumsum(extra)
    new_end = np.repeat(end, extra + 1)
    new_start = np.repeat(start, extra + 1)
    chunks: list[tuple[int, int, int | None, int]] = []
    split: dict[int, list[tuple[int, int, int]]] = {}
    for unit, k, tokens, context in placed.chunks:
        if k in placed.extra and tokens is not None:
            split.setdefault(k, []).append((unit, tokens, context))
        else:
            chunks.append((unit, int(number[k]), tokens, context))
    begin = {unit: int(number[k] - extra[k]) for unit, k in placed.begin.items()}
    for k, parts in split.items():
        assert batch is not None
        lowest, part, free = int(number[k] - extra[k]), 0, batch
        weight = np.zeros(int(extra[k]) + 1, dtype=np.int64)
        weight[-1] = decoding[k]
        for unit, tokens, context in parts:
            first = True
            while tokens > 0:
                if free == 0 and part < extra[k]:
                    part, free = part + 1, batch
                n = min(tokens, free) if part < extra[k] else tokens
                chunks.append((unit, lowest + part, n, context))
                if first and placed.begin.get(unit) == k:
                    begin[unit] = lowest + part
                first = False
                weight[part] += n
                tokens, context, free = tokens - n, context + n, max(free - n, 0)
        edges = start[k] + (end[k] - start[k]) * np.concatenate(([0], np.cumsum(weight))) // max(int(weight.sum()), 1)
        new_start[lowest : lowest + len(weight)] = edges[:-1]
        new_end[lowest : lowest + len(weight)] = edges[1:]
    frame = pl.DataFrame(
        chunks, schema={"unit": pl.Int64, "step": pl.Int64, "tokens": pl.Int64, "context": pl.Int64}, orient="row"
    ).sort("unit", "step")
    return Lines(new_start, new_end, number, frame, begin)


def step_rows(lines: Lines, shares: dict[str, _Ints], units: pl.DataFrame, unit: _Ints, step: _Ints) -> pl.DataFrame:
    """Rows of `steps` without server, origin and source. ``unit`` and ``step`` are of the reads."""
    n = len(lines.start)
    at = lines.number[shares["step"]]
    unknown = np.zeros(n, dtype=bool)
    unknown[at[shares["context"] < 0]] = True
    context = _sum(at, np.maximum(shares["context"], 0), n)
    prefill = lines.chunks.group_by("step").agg(
        pl.col("unit").n_unique().cast(pl.Int64).alias("prefill_requests"),
        pl.when(pl.col("tokens").is_null().any()).then(None).otherwise(pl.col("tokens").sum()).alias("prefill_tokens"),
        pl.when(pl.col("tokens").is_null().any()).then(None).otherwise(pl.col("context").sum()).alias("prefill_context_tokens"),
    )

    # Who holds a place, and who waits for one.
    final = np.zeros(units.height, dtype=np.int64)
    np.maximum.at(final, unit, lines.number[step])
    first = np.full(units.height, n, dtype=np.int64)
    np.minimum.at(first, unit, lines.number[step])
    begin = np.minimum(first, np.array([lines.begin.get(u, n) for u in range(units.height)], dtype=np.int64))
    begun = np.cumsum(np.bincount(begin, minlength=n))
    running = begun - np.concatenate(([0], np.cumsum(np.bincount(final, minlength=n))[:-1]))
    known = units["available_ns"].to_numpy() if units["available_ns"].null_count() == 0 else None
    waiting = None
    if known is not None:
        waiting = np.maximum(
            np.searchsorted(np.sort(np.minimum(known, lines.start[begin])), lines.start, side="right") - begun, 0
        )
    some = pl.col("prefill_requests").is_null()
    return (
        pl.DataFrame(
            {
                "step": np.arange(n),
                "start_ns": lines.start,
                "end_ns": lines.end,
                "decode_requests": _sum(at, np.ones(len(at), dtype=np.int64), n),
                "decode_tokens": _sum(at, shares["tokens"], n),
                "decode_context_tokens": pl.Series(context).zip_with(pl.Series(~unknown), pl.Series([None], dtype=pl.Int64)),
                "running": running,
                "waiting": pl.Series(waiting if waiting is not None else [None] * n, dtype=pl.Int64),
            }
        )
        .join(prefill, on="step", how="left", maintain_order="left")
        .with_columns(
            pl.when(some).then(0).otherwise(pl.col(c)).alias(c)
            for c in ("prefill_tokens", "prefill_context_tokens", "prefill_requests")
        )
    )


def residency_rows(lines: Lines, shares: dict[str, _Ints], units: pl.DataFrame) -> pl.DataFrame:
    """Rows of `residency` without server and source: runs of steps in which a sequence's phase and tokens per step do not
    change."""
    decode = pl.DataFrame(
        {
            "unit": shares["unit"],
            "step": lines.number[shares["step"]],
            "tokens": shares["tokens"],
            "context": pl.Series(shares["context"]),
            "phase": pl.repeat("decode", len(shares["unit"]), eager=True),
        }
    ).with_columns(pl.when(pl.col("context") >= 0).then("context").alias("context"))
    every = pl.concat([lines.chunks.with_columns(pl.lit("chunk").alias("phase")), decode]).sort("unit", "step")
    same = (
        (pl.col("unit") == pl.col("unit").shift(1))
        & (pl.col("step") == pl.col("step").shift(1) + 1)
        & pl.col("tokens").eq_missing(pl.col("tokens").shift(1))
        & (pl.col("phase") == pl.col("phase").shift(1))
        # A token in between that is laid to no step leaves a gap in the context.
        & (pl.col("context") == pl.col("context").shift(1) + pl.col("tokens").shift(1)).fill_null(True)
    )
    return (
        every.with_columns((~same.fill_null(False)).cast(pl.Int64).cum_sum().alias("run"))
        .group_by("run", maintain_order=True)
        .agg(
            pl.col("unit", "phase").first(),
            pl.col("step").first().alias("first_step"),
            pl.col("step").last().alias("last_step"),
            pl.col("tokens").first().alias("tokens_per_step"),
            pl.col("context").first().alias("context_at_start"),
        )
        .join(units.select("unit", "request", "sequence"), on="unit", how="left", maintain_order="left")
        .drop("run", "unit")
    )


def _sum(at: _Ints, values: _Ints, n: int) -> _Ints:
    out = np.zeros(n, dtype=np.int64)
    np.add.at(out, at, values)
    return out
