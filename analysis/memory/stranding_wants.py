"""When requests wait for KV space, and for how much of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from hoptrace.analysis.memory.stranding_exact import Ints
from hoptrace.analysis.memory.stranding_pieces import UNKNOWN, Pieces
from hoptrace.analysis.memory.stranding_rank import Rank
from hoptrace.analysis.query import query
from hoptrace.reader import Trace

__all__ = ["Queue", "Wants", "capacity_waits", "queue_of"]

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Wants:
    """By piece. ``lacks``: a request waits there for KV space. ``tokens``: how much more than is free those want that could run
    (−1: not told). ``queued``: a request waits there, for whatever. ``known``: whether it is known that somebody waits."""

    lacks: Bools
    tokens: Ints
    queued: Bools
    known: Bools


@dataclass(frozen=True)
class Queue:
    """Those who wait for a rank. ``came``/``left``: moments of entering and leaving the queue, each ascending.
    ``entered``/``reach``: of the stays in the order of entering, when, and until when somebody who entered no later waits;
    ``need``: KV of each one's prompt (tokens). ``spans``: intervals in which waits for KV were recorded."""

    came: Ints
    left: Ints
    entered: Ints
    reach: Ints
    need: Ints
    spans: tuple[Ints, Ints]

    def length(self, t: Ints) -> Ints:
        """How many wait."""
        return np.searchsorted(self.came, t, side="right") - np.searchsorted(self.left, t, side="right")

    def head_need(self, t: Ints) -> Ints:
        """KV (tokens) that the prompt of the first in the queue needs, 0 where nobody is known to wait: first come, first
        served."""
        if not len(self.reach):
            return np.zeros(len(t), dtype=np.int64)
        head = np.minimum(np.searchsorted(self.reach, t, side="right"), len(self.reach) - 1)
        waits = (self.reach[head] > t) & (self.entered[head] <= t)
        found: Ints = np.where(waits, self.need[head], 0)
        return found

    def wants(self, rank: Rank, p: Pieces) -> Wants:
        """What the queue wants in each piece."""
        told = p.waiting >= 0
        length = np.where(told, p.waiting, np.maximum(self.length(p.since), 0))
        known = told | (len(self.came) > 0)
        free = p.capacity - p.used
        slots = rank.slots or 0
        slots_full = (p.running >= slots) if slots else np.zeros(len(free), dtype=np.bool_)
        need = np.maximum(self.head_need(p.since), rank.block_tokens)
        # A preempted one stands at the head, and needs what it had.
        back = np.where(p.back > 0, p.back_tokens // np.maximum(p.back, 1), 0)
        need = np.where(back > 0, np.maximum(back, rank.block_tokens), need)
        lacks = (p.capacity >= 0) & (length > 0) & ~slots_full & (free < need)
        lacks |= p.preempted > 0
        if len(self.spans[0]):
            begun = np.searchsorted(self.spans[0], p.since, side="right") - 1
            lacks |= ~slots_full & (begun >= 0) & (p.since < self.spans[1][np.maximum(begun, 0)])
        places = np.maximum(slots - np.maximum(p.running, 0), 1) if slots else length
        runnable = np.minimum(np.maximum(places, 1), np.maximum(length, 1))
        share = -(-p.queued * runnable // np.maximum(length, 1))
        tokens = np.where(lacks & (p.queued >= 0), np.maximum(share - np.maximum(free, 0), 0), 0)
        return Wants(lacks, np.where(lacks & (p.queued < 0), UNKNOWN, tokens), length > 0, known)


def queue_of(rank: Rank, stays: pl.DataFrame, spans: dict[str, tuple[Ints, Ints]], alone: bool) -> Queue:
    """The queue of a rank. ``alone``: it is its server's only one, so that what names no rank is its own."""
    own = pl.col("dp_rank") == rank.dp_rank
    mine = stays.filter((pl.col("server") == rank.server) & (own | pl.col("dp_rank").is_null() if alone else own))
    mine = mine.select("enqueued_ns", pl.coalesce("scheduled_ns", "end_ns").alias("left_ns"), pl.col("need_tokens").fill_null(0))
    mine = mine.sort("enqueued_ns")
    entered, left = mine["enqueued_ns"].to_numpy(), mine["left_ns"].to_numpy()
    reach = np.maximum.accumulate(left) if len(left) else left
    none = np.zeros(0, dtype=np.int64)
    recorded = spans.get(rank.server, (none, none)) if alone else (none, none)
    return Queue(entered, np.sort(left), entered, reach, mine["need_tokens"].to_numpy(), recorded)


def capacity_waits(trace: Trace) -> dict[str, tuple[Ints, Ints]]:
    """By server: intervals in which a recorded wait for KV ran, ascending, apart."""
    if not trace.has("waits"):
        return {}
    found = query(trace, "stranding_waits")
    return {
        str(server): (own["start_ns"].to_numpy(), own["end_ns"].to_numpy())
        for (server,), own in found.group_by(["server"], maintain_order=True)
    }
