"""What the reconstruction does not see: requests that ran without token times (answers in one piece, streams whose counts do not
add up). In the steps beside them, what was computed is unknown, and is left out rather than told too low."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

if TYPE_CHECKING:
    from hoptrace.reader import Trace

__all__ = ["Stretches", "blank", "known_share", "known_steps", "unseen_requests"]

_Ints = np.ndarray[Any, np.dtype[np.int64]]
_ALWAYS = np.iinfo(np.int64).max
_NEVER = np.iinfo(np.int64).min

DECODE = ("decode_requests", "decode_tokens", "decode_context_tokens", "running")
PREFILL = ("prefill_requests", "prefill_tokens", "prefill_context_tokens")
_BYTES = ("weight_bytes", "kv_read_bytes", "kv_write_bytes")


@dataclass(frozen=True)
class Stretches:
    """When requests were on a server, int64[n] each, ns: reached it, the engine can have begun, made the first token, ended. What
    is not known is as early or as late as it can be, so that a stretch is never too short."""

    reached: _Ints
    began: _Ints
    first: _Ints
    ended: _Ints

    def beside(self, steps: pl.DataFrame) -> int:
        """How many of them ran in any of the steps."""
        low, high = _span(steps, self.began, self.ended)
        return int((high > low).sum())


def unseen_requests(trace: Trace, server: str, emitted: pl.DataFrame) -> tuple[pl.DataFrame, Stretches]:
    """The requests of ``server`` that are not in ``emitted`` (column request), with the times between which they were there.

    A request that does not say its server may have been on any. Where the engine told when it began and when its first token was
    made (llama.cpp's timings come with answers in one piece too), these bound it; else its arrival and its end do.
    """
    stays = (
        trace.table("stages")
        .group_by("request")
        .agg(
            (pl.col("server") == server).any().alias("here"),
            pl.col("server").is_null().all().alias("anywhere"),
            pl.col("enqueued_ns", "scheduled_ns").min().name.prefix("stay_"),
            pl.when(pl.col("end_ns").is_null().any()).then(None).otherwise(pl.col("end_ns").max()).alias("stay_end_ns"),
        )
    )
    # Several stays count from the start of the first to the end of the last.
    rows = (
        trace.table("requests")
        .join(emitted.lazy().select("request").unique(), on="request", how="anti")
        .join(stays, on="request", how="left")
        .filter(pl.col("here").fill_null(True) | pl.col("anywhere").fill_null(True))
        .with_columns(
            pl.coalesce("stay_enqueued_ns", "queued_ns", "received_ns", "arrival_ns").alias("reached"),
            pl.coalesce("stay_scheduled_ns", "scheduled_ns").alias("told"),
        )
        .select(
            "request",
            "output_tokens",
            pl.col("error").is_null().alias("good"),
            "finish_ns",
            pl.col("reached").fill_null(_NEVER),
            pl.coalesce("told", "reached").fill_null(_NEVER).alias("began"),
            pl.coalesce("stay_end_ns", "finish_ns").fill_null(_ALWAYS).alias("ended"),
            pl.coalesce("engine_first_token_ns", "stay_end_ns", "finish_ns").fill_null(_ALWAYS).alias("first"),
        )
        .sort("request")
        .collect()
    )
    return rows, Stretches(*(rows[c].to_numpy() for c in ("reached", "began", "first", "ended")))


def blank(steps: pl.DataFrame, unseen: Stretches, doubted_from: _Ints, doubted_to: _Ints) -> pl.DataFrame:
    """``steps`` with what nobody knows set to null: beside an unseen request who waited, who ran and what they decoded, and,
    until its first token, the prompts; beside a sequence of doubted counts, from its first to its last token, the decoding."""
    ran = within(steps, unseen.began, unseen.ended)
    prompts = within(steps, unseen.began, unseen.first)
    decoding = ran | within(steps, doubted_from, doubted_to)
    unknown = {
        **dict.fromkeys(DECODE, decoding),
        **dict.fromkeys(PREFILL, prompts),
        **dict.fromkeys(_BYTES, decoding | prompts),
        "waiting": within(steps, unseen.reached, unseen.ended),
    }
    return steps.with_columns(
        *(pl.when(pl.lit(pl.Series(mask))).then(None).otherwise(pl.col(name)).alias(name) for name, mask in unknown.items()),
        # Who else was in them nobody knows.
        pl.when(pl.lit(pl.Series(decoding | prompts))).then(0.0).otherwise("confidence").alias("confidence"),
    )


def within(steps: pl.DataFrame, begin: _Ints, end: _Ints) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which steps overlap one of the stretches. ``steps`` are in order and do not overlap."""
    low, high = _span(steps, begin, end)
    change = np.zeros(steps.height + 1, dtype=np.int64)
    np.add.at(change, low, 1)
    np.add.at(change, high, -1)
    return np.cumsum(change[:-1]) > 0


def _span(steps: pl.DataFrame, begin: _Ints, end: _Ints) -> tuple[_Ints, _Ints]:
    low = np.searchsorted(steps["end_ns"].to_numpy(), begin, side="right")
    return low, np.maximum(np.searchsorted(steps["start_ns"].to_numpy(), end, side="left"), low)


def known_steps(steps: pl.DataFrame) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which steps have a wholly known composition."""
    return steps.select(pl.all_horizontal(pl.col(*DECODE[:3], *PREFILL).is_not_null())).to_series().to_numpy()


def known_share(made: _Ints, known: np.ndarray[Any, np.dtype[np.bool_]], tokens: pl.Series, unseen: pl.DataFrame) -> float | None:
    """Share of a server's output tokens that come from steps of known composition.

    Args:
        made: tokens seen to come from each step.
        tokens: of each request with token times, its output tokens.
        unseen: the others; those that failed or have not finished count with what is told of them. Null if one that finished
            well does not tell its tokens, or there are no tokens.
    """
    if unseen.filter(pl.col("good") & pl.col("finish_ns").is_not_null() & pl.col("output_tokens").is_null()).height:
        return None
    total = int(tokens.sum()) + int(unseen["output_tokens"].sum())
    return min(int(made[known].sum()) / total, 1.0) if total else None
