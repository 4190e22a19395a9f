"""One KV space over time in pieces: what is in use during each step and between steps. See
:mod:`hoptrace.analysis.memory.stranding_line`."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import polars as pl

from hoptrace.analysis.latency.serverstate import Samples
from hoptrace.analysis.memory.stranding_exact import MOST_NS, MOST_TOKENS, Ints
from hoptrace.analysis.memory.stranding_rank import Rank

__all__ = ["UNKNOWN", "Next", "Pieces", "columns", "pieces_of"]

UNKNOWN = -1
Next = tuple[int, int | None, int, int | None]
"""Of the first step after a chunk: start_ns, tokens in use, requests that decode in it, capacity."""


@dataclass(frozen=True)
class Pieces:
    """Pieces of one rank: ``start`` ≤ t < ``end``, ascending, without overlap; what they leave out is not known.

    ``since``: when what it tells was so, also where it is cut. ``used``, ``held`` (by the requests that compute, at most),
    ``capacity`` (−1: not told): tokens. ``step``: the step, or the last one before the gap (−1: before the first); ``inside``: 1
    within a step, 0 in a gap. Of the step, −1 where not told: ``running`` and ``waiting`` (requests), ``queued`` (tokens of
    those that wait), ``preempted`` (requests), ``back`` (those of the waiting that have run already) and ``back_tokens``.
    """

    start: Ints
    end: Ints
    used: Ints
    held: Ints
    capacity: Ints
    step: Ints
    inside: Ints
    running: Ints
    waiting: Ints
    queued: Ints
    preempted: Ints
    back: Ints
    back_tokens: Ints
    since: Ints

    @classmethod
    def none(cls) -> Pieces:
        """No pieces."""
        return cls(*(np.zeros(0, dtype=np.int64) for _ in fields(cls)))

    def at(self, t: Ints) -> Ints:
        """Index of the piece that speaks for each t, −1 where none does."""
        if not len(self.start):
            return np.full(len(t), -1, dtype=np.int64)
        i = np.searchsorted(self.start, t, side="right") - 1
        found: Ints = np.where((i >= 0) & (t < self.end[np.maximum(i, 0)]), i, -1).astype(np.int64)
        return found

    def take(self, which: npt.NDArray[np.bool_] | Ints) -> Pieces:
        """Some of the pieces."""
        return Pieces(*(getattr(self, f.name)[which] for f in fields(self)))

    def within(self, low: int, high: int) -> Pieces:
        """What lies between two instants."""
        if not len(self.start) or (self.start[0] >= low and self.end[-1] <= high):
            return self
        cut = Pieces(np.maximum(self.start, low), np.minimum(self.end, high), *(getattr(self, f.name) for f in fields(self)[2:]))
        return cut.take(cut.start < cut.end)

    def without(self, away: tuple[Ints, Ints]) -> Pieces:
        """All but some intervals (start, end)."""
        found = self
        for a, b in zip(*away, strict=True):
            found = _joined([found.within(-MOST_NS, int(a)), found.within(int(b), MOST_NS)])
        return found


def columns(steps: pl.LazyFrame) -> pl.LazyFrame:
    """What pieces are made of, of the steps whose times are times. Values that nothing can have are null."""
    computed = pl.col("prefill_tokens") + pl.col("decode_tokens")
    context = pl.col("prefill_context_tokens") + pl.col("decode_context_tokens") + computed
    sane = pl.col("start_ns").is_between(-MOST_NS, MOST_NS) & pl.col("end_ns").is_between(-MOST_NS, MOST_NS)

    def within(e: pl.Expr) -> pl.Expr:
        return pl.when(e.is_between(0, MOST_TOKENS)).then(e)

    def either(a: str, b: str) -> pl.Expr:
        return pl.when(pl.col(a).is_not_null() | pl.col(b).is_not_null()).then(pl.col(a).fill_null(0) + pl.col(b).fill_null(0))

    return steps.filter(sane).select(
        "server",
        pl.col("dp_rank").fill_null(0),
        pl.col("pp_rank").fill_null(0),
        "step",
        "start_ns",
        "end_ns",
        within(pl.col("kv_used_tokens")).alias("used"),
        within(context).alias("context"),
        within(pl.col("kv_capacity_tokens")).alias("capacity"),
        within(pl.col("prefill_requests") + pl.col("decode_requests")).alias("members"),
        "decode_requests",
        within(pl.col("running")).alias("running"),
        within(pl.col("waiting")).alias("waiting"),
        within(either("queued_prefill_tokens", "queued_decode_context_tokens")).alias("queued"),
        within(pl.col("preempted")).alias("preempted"),
        within(pl.col("queued_decode_requests")).alias("back"),
        within(pl.col("queued_decode_context_tokens")).alias("back_tokens"),
    )


def pieces_of(rank: Rank, rows: pl.DataFrame, begun: bool, low: int, high: int, following: Next | None) -> Pieces:
    """The pieces between ``low`` and ``high``.

    ``rows``: the rank's steps that begin there, ascending by start; before them, where ``begun``, the last one that began
    earlier.
    """
    if rank.samples is not None and rank.capacity_tokens is not None:
        return _sampled(rank.samples, rank.capacity_tokens).within(low, high).without(rank.away)
    found: list[Pieces] = []
    if not begun:
        first = following
        if rows.height:
            first = (int(rows["start_ns"][0]), None, rows["decode_requests"][0] or 0, rows["capacity"][0])
        # Where the first step finds somebody who decodes already, the time before it holds more than was seen.
        if first is not None and not first[2] and rank.knows_gaps and rank.from_ns < first[0]:
            found.append(_empty(rank, rank.from_ns, first[0], first[3]))
    if rows.height:
        found.append(_of_rows(rank, rows, following))
    return _joined(found).within(low, high).without(rank.away)


def _of_rows(rank: Rank, rows: pl.DataFrame, following: Next | None) -> Pieces:
    start = np.maximum.accumulate(_ints(rows["start_ns"]))
    then = np.append(start[1:], following[0] if following is not None else MOST_NS)
    until = np.minimum(np.maximum(_ints(rows["end_ns"]), start), then)
    capacity = np.append(_ints(rows["capacity"]), UNKNOWN if following is None or following[3] is None else following[3])
    if rank.capacity_tokens is not None:
        capacity = np.where(capacity < 0, rank.capacity_tokens, capacity)
    # The step after them stands last, for the gap before it.
    used = _ints(rows["used" if rank.basis == "counted" else "context"])
    used = np.append(used, UNKNOWN if following is None or following[1] is None else following[1])
    if rank.basis == "derived":
        used = np.where((capacity >= 0) & (used > capacity), capacity, used)  # a shared prefix counts for each who has it
    used = np.where((capacity >= 0) & (used > capacity), UNKNOWN, used)
    used, after, capacity = used[:-1], used[1:], capacity[:-1]
    members, running, context = _ints(rows["members"]), _ints(rows["running"]), _ints(rows["context"])
    whole = (context >= 0) & (members >= 0) & ((running < 0) | (running == members))
    held = np.where(whole, np.minimum(used, context + members * (rank.block_tokens - 1)), used)
    step = _ints(rows["step"])
    told = {c: _ints(rows[c]) for c in ("waiting", "queued", "preempted", "back", "back_tokens")}
    ones = np.ones_like(start)
    inside = Pieces(start, until, used, held, capacity, step, ones, running, since=start, **told)

    gone = rank.nobody(step, until, then)
    rest = np.where((used < 0) | (after < 0), UNKNOWN, np.minimum(used, after))
    rest = np.where(gone, 0, rest if rank.knows_gaps else UNKNOWN)
    if following is None:
        then[-1] = max(rank.to_ns, int(until[-1])) if gone[-1] else until[-1]
    # Who waited in the last step of all need not wait in the gap behind it.
    unsaid = {c: np.where(gone, UNKNOWN, t) for c, t in told.items()}
    less = np.where(held < 0, rest, np.minimum(rest, held))
    gap = Pieces(until, then, rest, less, capacity, step, ones - 1, np.where(gone, 0, running), since=until, **unsaid)
    both = Pieces(*(np.column_stack([getattr(inside, f.name), getattr(gap, f.name)]).ravel() for f in fields(Pieces)))
    return both.take((both.used >= 0) & (both.start < both.end))


def _sampled(samples: Samples, capacity: int) -> Pieces:
    """Each sample over the time that it speaks for; who waited is told by the stays."""
    used = np.clip(samples.value, 0, 1_000_000) * capacity // 1_000_000
    none, of = np.full(len(used), UNKNOWN, dtype=np.int64), np.full(len(used), capacity, dtype=np.int64)
    found = Pieces(samples.start, samples.end, used, used, of, none, none * 0, *(none,) * 6, samples.start)
    return found.take(samples.start < samples.end)


def _empty(rank: Rank, start: int, end: int, capacity: int | None) -> Pieces:
    capacity = capacity if capacity is not None else rank.capacity_tokens
    values = (start, end, 0, 0, UNKNOWN if capacity is None else capacity, UNKNOWN, 0, 0, *(UNKNOWN,) * 5, start)
    return Pieces(*(np.array([v], dtype=np.int64) for v in values))


def _joined(found: list[Pieces]) -> Pieces:
    """In the order of their start; each part is in order, and its parts lie apart."""
    found = [p for p in found if len(p.start)]
    if len(found) < 2:
        return found[0] if found else Pieces.none()
    one = Pieces(*(np.concatenate([getattr(p, f.name) for p in found]) for f in fields(Pieces)))
    return one.take(np.lexsort((one.end, one.start)))


def _ints(column: pl.Series) -> Ints:
    return column.cast(pl.Int64).fill_null(UNKNOWN).to_numpy().astype(np.int64)
