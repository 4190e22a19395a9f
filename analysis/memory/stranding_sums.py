"""The sums over time behind :mod:`hoptrace.analysis.memory.stranding`: all KV spaces side by side, chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import polars as pl

from hoptrace.analysis.memory.stranding_exact import Ints, distinct, dot
from hoptrace.analysis.memory.stranding_line import Lines
from hoptrace.analysis.memory.stranding_pieces import Pieces
from hoptrace.analysis.memory.stranding_wants import Bools, Wants, capacity_waits, queue_of
from hoptrace.reader import Trace

__all__ = ["SERIES", "Common", "Sums", "sweep"]

SERIES = ("covered_ns", "provisioned", "used", "held", "stranded", "lacking")


@dataclass
class Sums:
    covered: int = 0
    provisioned: int = 0
    used: int = 0
    held: int = 0
    idle: int = 0
    stranded: int = 0
    queued: int = 0
    peak: int = 0
    common_peak: int = 0
    over_90: int = 0
    lacking: int = 0
    capacity: int = -1
    common_capacity: int = 0
    sized: bool = True
    known: bool = True
    bins: dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]] = field(default_factory=dict)


@dataclass
class Common:
    ns: int = 0
    used: int = 0
    peak: int = 0
    wanted: int = 0
    lendable: int = 0
    told: bool = True


def sweep(
    trace: Trace, found: Lines, who: pl.DataFrame, scale: list[int], pooled: list[int], bins: int
) -> tuple[list[Sums], Common, tuple[int, int, int]]:
    ranks = found.ranks
    sums, common = [Sums() for _ in ranks], Common()
    if not ranks:
        return sums, common, (0, 1, 0)
    low, high = found.cuts[0], found.cuts[-1]
    width = -(-(high - low) // bins)
    count = -(-(high - low) // width)
    for s in sums:
        s.bins = {name: np.zeros(count) for name in SERIES}
    alone = {r.server: sum(q.server == r.server for q in ranks) == 1 for r in ranks}
    spans = capacity_waits(trace)
    queues = [queue_of(r, who, spans, alone[r.server]) for r in ranks]
    for begin, end, pieces in found.chunks():
        edges = np.arange(low + -(-(begin - low) // width) * width, end, width, dtype=np.int64)
        at = distinct(np.concatenate([[begin, end], edges, *(x for p in pieces for x in (p.start, p.end))]))
        t, dt = at[:-1], np.diff(at)
        where = (t - low) // width
        rows = [_Row.of(p, queues[i].wants(ranks[i], p), t, scale[i]) for i, p in enumerate(pieces)]
        lacking = np.sum([r.lacks for r in rows], axis=0)
        queueing = np.sum([r.queued for r in rows], axis=0)
        told = np.all([r.known for r in rows], axis=0)
        for s, r in zip(sums, rows, strict=True):
            _add(s, r, dt, where, (lacking - r.lacks > 0), (queueing - r.queued > 0), bool(told.all()))
        _add_common(common, [sums[i] for i in pooled], [rows[i] for i in pooled], dt)
    return sums, common, (low, high, width)


@dataclass(frozen=True)
class _Row:
    """One space over the chunk's common intervals, in the unit; −1: not known."""

    used: Ints
    held: Ints
    capacity: Ints
    wanted: Ints
    lacks: Bools
    queued: Bools
    known: Bools

    @classmethod
    def of(cls, p: Pieces, w: Wants, t: Ints, scale: int) -> _Row:
        i = p.at(t)
        there = i >= 0
        if not len(p.start):
            none = np.full(len(t), -1, dtype=np.int64)
            no = np.zeros(len(t), dtype=np.bool_)
            return cls(none, none, none, np.zeros_like(none), no, no, no)
        j = np.maximum(i, 0)

        def of(values: Ints, otherwise: int = -1) -> Ints:
            found: Ints = np.where(there & (values[j] >= 0), values[j] * scale, otherwise)
            return found

        wanted = np.where(there, np.where(w.tokens[j] < 0, -1, w.tokens[j] * scale), 0)
        return cls(
            of(p.used), of(p.held), of(p.capacity), wanted, there & w.lacks[j], there & w.queued[j], ~there | w.known[j]
        )  # fmt: skip


def _add(s: Sums, r: _Row, dt: Ints, where: Ints, wanted: Bools, queued: Bools, told: bool) -> None:
    known = r.used >= 0
    sized = known & (r.capacity >= 0)
    span, used, held = np.where(known, dt, 0), np.where(known, r.used, 0), np.where(known, r.held, 0)
    s.sized &= bool((sized == known).all())
    s.known &= told
    s.covered += int(span.sum())
    s.used += dot(used, span)
    s.held += dot(held, span)
    s.peak = max(s.peak, int(used.max(initial=0)))
    s.capacity = max(s.capacity, int(np.where(sized, r.capacity, -1).max(initial=-1)))
    capacity = np.where(sized, r.capacity, 0)
    idle = np.where(sized, capacity - used, 0)
    stranded, behind = np.where(wanted, idle, 0), np.where(queued, idle, 0)
    s.provisioned += dot(capacity, span)
    s.idle += dot(idle, span)
    s.stranded += dot(stranded, span)
    s.queued += dot(behind, span)
    s.over_90 += int(span[sized & (used * 10 > capacity * 9)].sum())
    s.lacking += int(span[r.lacks].sum())
    for name, values in (
        ("covered_ns", np.ones_like(span)), ("provisioned", capacity), ("used", used), ("held", held), ("stranded", stranded),
        ("lacking", r.lacks),
    ):  # fmt: skip
        s.bins[name] += np.bincount(where, weights=values * span.astype(np.float64), minlength=len(s.bins[name]))


def _add_common(c: Common, sums: list[Sums], rows: list[_Row], dt: Ints) -> None:
    if not rows:
        return
    all_known = np.all([(r.used >= 0) & (r.capacity >= 0) for r in rows], axis=0)
    span = np.where(all_known, dt, 0)
    used = np.where(all_known, np.sum([r.used for r in rows], axis=0), 0)
    c.ns += int(span.sum())
    c.used += dot(used, span)
    c.peak = max(c.peak, int(used.max(initial=0)))
    for s, r in zip(sums, rows, strict=True):
        s.common_peak = max(s.common_peak, int(np.where(all_known, r.used, 0).max(initial=0)))
        s.common_capacity = max(s.common_capacity, int(np.where(all_known, r.capacity, 0).max(initial=0)))
    wanted = np.where(all_known, np.sum([np.maximum(r.wanted, 0) for r in rows], axis=0), 0)
    spare = np.where(all_known, np.sum([np.where(r.lacks, 0, r.capacity - r.used) for r in rows], axis=0), 0)
    c.told &= not bool((all_known & np.any([r.wanted < 0 for r in rows], axis=0)).any())
    c.wanted += dot(wanted, span)
    c.lendable += dot(np.minimum(wanted, spare), span)
