"""Which request of one trace is which of the other."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from hoptrace.reader import Trace

__all__ = ["Pairing", "finished", "pair"]

_COLUMNS = (
    "request", "request_id", "arrival_ns", "arrival_of", "intended_ns", "sent_ns", "finish_ns", "client_slot", "parent_request",
    "think_ns", "prompt_tokens", "output_tokens", "max_tokens", "hash_space", "block_size", "block_unit",
)  # fmt: skip


@dataclass(frozen=True)
class Pairing:
    """``how`` the requests were matched, in words; ``a`` and ``b``: their numbers, row i of one is row i of the other."""

    how: str
    a: pl.Series
    b: pl.Series


def finished(trace: Trace) -> pl.DataFrame:
    """The finished requests without error, by arrival: what pairs and work need, with the last prefix hash as ``prefix``."""
    return (
        trace.table("requests")
        .filter(pl.col("finish_ns").is_not_null() & pl.col("error").is_null())
        .select(
            *_COLUMNS, pl.col("prefix_blocks").list.last().alias("prefix"), pl.col("prefix_blocks").list.len().alias("blocks")
        )
        .sort("arrival_ns", "request")
        .collect()
    )


def pair(a: pl.DataFrame, b: pl.DataFrame) -> Pairing | None:
    """Match the finished requests of two traces one to one, null if that is not possible.

    By identifier, if both sides have the same ones and their prompts are equally long; else by the hash of the whole known
    prefix, where both were keyed alike, with the lengths of prompt and answer (equal ones in the order of their arrival); else by
    order of arrival, if prompts and answers are equally long one by one, or at least the prompts.
    """
    if not a.height or a.height != b.height:
        return None
    return _by_id(a, b) or _by_prefix(a, b) or _by_order(a, b)


def _by_id(a: pl.DataFrame, b: pl.DataFrame) -> Pairing | None:
    for frame in (a, b):
        if frame["request_id"].null_count() or frame["request_id"].n_unique() != frame.height:
            return None
    both = a.select("request_id", "request", "prompt_tokens").join(
        b.select("request_id", "request", "prompt_tokens"), on="request_id", how="inner", suffix="_b"
    )
    # One identifier for two prompts is a counter of the load generator, not a name.
    if both.height != a.height or not both["prompt_tokens"].equals(both["prompt_tokens_b"].alias("prompt_tokens")):
        return None
    both = both.sort("request")
    return Pairing("by request_id", both["request"], both["request_b"])


def _by_prefix(a: pl.DataFrame, b: pl.DataFrame) -> Pairing | None:
    """Requests without a known prefix are matched by their lengths alone; they have to be the fewer."""
    if min(a["prefix"].count(), b["prefix"].count()) * 2 < a.height:
        return None
    key = ["hash_space", "block_size", "block_unit", "prefix", "blocks", "prompt_tokens", "output_tokens"]
    left, right = (f.select("request", *key).with_columns(pl.int_range(pl.len()).over(key).alias("_n")) for f in (a, b))
    both = left.join(right, on=[*key, "_n"], how="inner", suffix="_b", nulls_equal=True)
    if both.height != a.height:
        return None
    both = both.sort("request")
    return Pairing("by the hash of the prompt and equal lengths", both["request"], both["request_b"])


def _by_order(a: pl.DataFrame, b: pl.DataFrame) -> Pairing | None:
    if a["prompt_tokens"].null_count() or not a["prompt_tokens"].equals(b["prompt_tokens"]):
        return None
    what = "prompts and answers" if a["output_tokens"].equals(b["output_tokens"]) else "prompts"
    return Pairing(f"by order of arrival, with {what} of equal length", a["request"], b["request"])
