"""Steps of two runs held against each other by who computed how many tokens in them, without regard to time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

__all__ = ["alike", "matches", "members"]

_Unsigned = npt.NDArray[np.uint64]
_SIZE = ("prefill_requests", "prefill_tokens", "decode_requests")
_LANE = ["server", "dp_rank"]


def members(steps: pl.DataFrame, residency: pl.DataFrame, twins: Mapping[int, int], side: int) -> Counter[Hashable] | None:
    """How often each composition occurs: a hash of the requests that computed tokens in a step, each with how many.

    Two steps have the same hash if, and but for one chance in some 10^19 only if, the same requests compute as many tokens each.
    Null where nothing tells who was in the steps; 0 is a step of which nobody knows who was in it.

    Args:
        steps, residency: as :func:`hoptrace.reconstruct.steps_of` gives them.
        twins: by request, a number that both sides have for it; requests that the other run has not are like nobody's.
        side: 0 or 1, so that those without a twin differ between the sides.
    """
    runs = residency.filter(pl.col("phase").is_in(["chunk", "decode"]) & (pl.col("tokens_per_step").fill_null(1) > 0))
    if not runs.height or not steps.height:
        return None
    runs = runs.with_columns(
        pl.col("request").replace_strict(dict(twins), default=None, return_dtype=pl.Int64).alias("_twin"),
        pl.col("dp_rank").fill_null(0),
    )
    alone = (2 + side) << 56
    who = np.where(runs["_twin"].is_null(), runs["request"].to_numpy() + alone, runs["_twin"].fill_null(0).to_numpy())
    sequence, tokens = (runs[c].fill_null(d).to_numpy().astype(np.uint64) for c, d in (("sequence", 0), ("tokens_per_step", 1)))
    share = _mixed(_mixed(_mixed(who.astype(np.uint64)) + sequence) + tokens)
    runs = runs.with_columns(pl.Series("_share", share))
    found: Counter[Hashable] = Counter()
    own = steps.filter(pl.col("pp_rank").fill_null(0) == 0).with_columns(pl.col("dp_rank").fill_null(0))
    lanes = dict(runs.group_by(_LANE))
    for key, lane in own.group_by(_LANE):
        found.update(_hashes(lane["step"].sort().to_numpy(), lanes.get(key)))
    return found


def alike(steps: pl.DataFrame) -> Counter[Hashable] | None:
    """How often each size of a step occurs: requests and tokens of prompts, decoders. Null if any step does not tell."""
    own = steps.filter(pl.col("pp_rank").fill_null(0) == 0).select(_SIZE)
    if not own.height or any(own[c].null_count() > 0 for c in _SIZE):
        return None
    return Counter({row[:-1]: row[-1] for row in own.group_by(_SIZE).len().rows()})


def matches(a: Counter[Hashable], b: Counter[Hashable]) -> int:
    """How many steps of ``a`` have a step of their own in ``b`` that is equal."""
    return sum((a & b).values())


def _hashes(steps: npt.NDArray[np.int64], runs: pl.DataFrame | None) -> list[int]:
    """The hash of each step (numbers ascending): a sum, so that a run adds its share where it begins and takes it away after."""
    if runs is None:
        return [0] * len(steps)
    share: Any = runs["_share"].to_numpy()
    first, last = runs["first_step"].to_numpy(), runs["last_step"].to_numpy()
    at = np.concatenate([first, last + 1])
    by = np.argsort(at, kind="stable")
    at, change = at[by], np.concatenate([share, np.negative(share)])[by]  # sums wrap at 2^64, which loses nothing
    upto = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(change, dtype=np.uint64)])
    found: list[int] = upto[np.searchsorted(at, steps, side="right")].tolist()
    return found


def _mixed(x: _Unsigned) -> _Unsigned:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014): neighbouring numbers come out far apart."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
