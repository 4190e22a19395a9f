"""When a server is full: its slots are taken, its KV has no space for the head of the queue, or the token budget is used up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from hoptrace.analysis.axis import Ints
from hoptrace.analysis.stepline import Busy
from hoptrace.manifest import Server

__all__ = ["Fullness", "fullness"]

_FAR = np.iinfo(np.int64).max // 4


@dataclass(frozen=True)
class Fullness:
    """``busy``: when the server is known to be full. ``certain``: whether there is room otherwise (slots are known)."""

    busy: Busy
    certain: bool


def fullness(stays: pl.DataFrame, steps: pl.DataFrame, server: Server | None) -> Fullness:
    """For one (server, rank).

    ``stays``: enqueued_ns, scheduled_ns, end_ns, prompt_tokens (less what was cached), of all requests, finished or not.
    ``steps``: start_ns, end_ns, prefill_tokens, decode_tokens, kv_used_tokens, kv_capacity_tokens, ascending.
    The number of slots is per rank (``max-num-seqs``, ``--parallel``).
    """
    found: list[tuple[Ints, Ints]] = []
    slots = server.max_sequences if server is not None else None
    if slots:
        found.append(_slots(stays, slots))
    if steps.height:
        found += _budget(steps, server.max_batched_tokens if server is not None else None)
        found += _kv(steps, stays, server)
    start = np.concatenate([s for s, _ in found]) if found else np.zeros(0, dtype=np.int64)
    end = np.concatenate([e for _, e in found]) if found else np.zeros(0, dtype=np.int64)
    order = np.lexsort((end, start))
    return Fullness(Busy.of(start[order], end[order]), bool(slots))


def _slots(stays: pl.DataFrame, slots: int) -> tuple[Ints, Ints]:
    placed = stays.filter(pl.col("scheduled_ns").is_not_null())
    begin = placed["scheduled_ns"].to_numpy()
    end = np.maximum(placed["end_ns"].fill_null(_FAR).to_numpy(), begin)
    time = np.concatenate([begin, end])
    change = np.concatenate([np.ones(len(begin), dtype=np.int64), -np.ones(len(end), dtype=np.int64)])
    order = np.lexsort((change, time))  # a place that is freed and taken at once was never both
    time, taken = time[order], np.cumsum(change[order])
    if not len(time):
        return time, time
    until = np.append(time[1:], _FAR)
    full = (taken >= slots) & (until > time)
    return time[full], until[full]


def _budget(steps: pl.DataFrame, tokens: int | None) -> list[tuple[Ints, Ints]]:
    if not tokens:
        return []
    spent = steps.filter(pl.col("prefill_tokens") + pl.coalesce("decode_tokens", "decode_requests", pl.lit(0)) >= tokens)
    return [(spent["start_ns"].to_numpy(), spent["end_ns"].to_numpy())]


def _kv(steps: pl.DataFrame, stays: pl.DataFrame, server: Server | None) -> list[tuple[Ints, Ints]]:
    capacity = pl.coalesce(
        "kv_capacity_tokens", pl.lit(server.kv_capacity_tokens if server is not None else None, dtype=pl.Int64)
    )
    frame = steps.select("start_ns", "kv_used_tokens", capacity.alias("capacity")).with_columns(
        pl.col("start_ns").shift(-1, fill_value=_FAR).alias("until_ns")
    )
    frame = frame.drop_nulls(["kv_used_tokens", "capacity"])
    if not frame.height:
        return []
    block = (server.block_size_tokens if server is not None else None) or 1
    queue = stays.filter(pl.col("enqueued_ns").is_not_null() & pl.col("scheduled_ns").is_not_null()).sort("enqueued_ns")
    start = frame["start_ns"].to_numpy()
    need = np.full(len(start), block, dtype=np.int64)
    if queue.height:
        # First come, first served: the head at a moment is the first by enqueuing that is scheduled after it.
        enqueued, prompt = queue["enqueued_ns"].to_numpy(), queue["prompt_tokens"].fill_null(0).to_numpy()
        reach = np.maximum.accumulate(queue["scheduled_ns"].to_numpy())
        head = np.minimum(np.searchsorted(reach, start, side="right"), len(reach) - 1)
        waits = (reach[head] > start) & (enqueued[head] <= start)
        need = np.where(waits, np.maximum(prompt[head], block), block)
    full = (frame["capacity"] - frame["kv_used_tokens"]).to_numpy() < need
    return [(start[full], frame["until_ns"].to_numpy()[full])]
