"""Exact order statistics of weighted int64 values that are too many to hold: one pass as a rule, bounded memory always.

Edges around the wanted ranks, guessed from a sample, cut the line into zones. A pass counts every zone; in those where a rank is
expected it counts every single value (in ns a zone is seldom wider than some millions) or, in wide ones, keeps the values. A rank
that fell elsewhere is cornered by further passes, each narrowing its zone by some millions. An edge's own value is a zone by
itself, so many equal values are never stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
import numpy.typing as npt

from hoptrace.compiling import cached_njit

__all__ = ["Scan", "Zones", "brackets", "order_statistics", "type7"]

Ints = npt.NDArray[np.int64]
Pair = tuple[Ints, Ints]  # values and their weights (≥ 1)
Scan = Callable[[Callable[[Ints, Ints | None], "Zones"]], Iterable["Zones"]]

_HELD = 8_000_000  # values that a pass may keep
_CELLS = 1 << 24  # counters that a pass may have in each thread
_LEAST, _MOST = int(np.iinfo(np.int64).min), int(np.iinfo(np.int64).max)


@dataclass(frozen=True)
class Zones:
    """What a pass got from one batch: ``count`` by zone; positions in ``zone`` of the values kept."""

    count: Ints
    zone: Ints
    value: Ints
    weight: Ints


@dataclass(frozen=True)
class _Plan:
    """Zones of a pass: below the first edge, the first edge, between it and the second, … ``width``: of a zone's cells (0: none);
    ``offset`` of its first among all ``cells``; ``low``: its least value; ``keep``: whether its values are kept."""

    edges: Ints
    width: Ints
    offset: Ints
    low: Ints
    keep: npt.NDArray[np.bool_]
    cells: int


def order_statistics(
    scan: Scan, ranks: Callable[[int], Sequence[int]], edges: Ints | None = None, *, held: int = _HELD, cells: int = _CELLS
) -> tuple[int, list[int]]:
    """(n, the values at ``ranks(n)``) of all values, n being the sum of their weights.

    ``scan(work)`` calls ``work(values, weights)`` (null: each counts once), in any threads, for every batch of the data and
    gives its results; it is called once for each pass. ``ranks(n)``: 0-based, each below n; none if n is 0. ``edges``: pairs
    around what is wanted, ascending, from :func:`brackets`; null keeps all values.
    """
    plan = _first_plan(edges, cells)
    wanted: list[int] | None = None
    n = 0
    found: dict[int, int] = {}
    open_: dict[int, None] = {}
    while wanted is None or open_:
        count, counted, values = _pass(scan, plan, held)
        if wanted is None:
            n = sum(int(c) for c in count)
            wanted = list(ranks(n))
            open_ = dict.fromkeys(sorted(set(wanted)))
        narrower: list[tuple[int, int]] = []
        for rank in list(open_):
            below, zone = _zone(count, rank)
            low, high = _reach(plan.edges, zone)
            if low == high:
                found[rank] = low
            elif zone in values:
                found[rank] = _at(values[zone], rank - below)
            elif plan.width[zone]:
                at, width = int(plan.offset[zone]), int(plan.width[zone])
                size = -(-(high - low + 1) // width)
                cell = _zone(counted[at : at + size], rank - below)[1]
                a, b = low + cell * width, min(high, low + (cell + 1) * width - 1)
                if a == b:
                    found[rank] = a
                else:
                    narrower.append((a, b))
            else:
                narrower.append((low, high))
            if rank in found:
                del open_[rank]
        plan = _next_plan(narrower, cells)
    return n, [found[r] for r in wanted]


def brackets(samples: Sequence[Pair], quantiles: Sequence[float]) -> Ints:
    """Two edges around each quantile, told from ``samples`` of the data (each drawn at another place, so that what differs
    between places shows): five standard errors of the share below on either side. Overlapping pairs become one."""
    pieces = [s for s in samples if len(s[0])]
    if not pieces:
        return np.zeros(0, dtype=np.int64)
    value, total = _sorted((np.concatenate([v for v, _ in pieces]), np.concatenate([w for _, w in pieces])))
    share = total / total[-1]
    sizes = np.array([float(w.sum()) for _, w in pieces])
    last = len(value) - 1
    edges: list[int] = []
    for q in quantiles:
        middle = value[min(int(np.searchsorted(share, q)), last)]
        below = np.array([float(w[v < middle].sum()) for v, w in pieces]) / sizes
        mean = float((below * sizes).sum() / sizes.sum())
        spread = np.sqrt(float((sizes**2 * (below - mean) ** 2).sum())) / sizes.sum()
        reach = 5 * max(float(spread), float(np.sqrt(q * (1 - q) / len(value)))) + 2 / len(value)
        a = int(value[min(int(np.searchsorted(share, max(q - reach, 0.0))), last)])
        b = int(value[min(int(np.searchsorted(share, min(q + reach, 1.0))), last)])
        if edges and a <= edges[-1]:
            edges[-1] = max(b, edges[-1])
        else:
            edges += [a, b]
    return np.array(edges, dtype=np.int64)


def type7(n: int, q: float) -> tuple[int, int, float]:
    """(rank, rank above, share of the way): the quantile's place between two order statistics (Hyndman and Fan's type 7)."""
    at = (n - 1) * q
    low = int(at)
    return low, min(low + 1, n - 1) if at > low else low, at - low


def _first_plan(edges: Ints | None, cells: int) -> _Plan:
    """Cells or keeping between the edges of each pair; without edges all is kept."""
    if edges is None or not len(edges):
        nothing = np.zeros(0, dtype=np.int64)
        one = np.zeros(1, dtype=np.int64)
        return _Plan(nothing, one, one, one, np.ones(1, dtype=bool), 0)
    pairs = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    return _plan(np.unique(edges), [(a + 1, b - 1) for a, b in pairs if b - a > 1], cells, exact=True)


def _next_plan(intervals: list[tuple[int, int]], cells: int) -> _Plan:
    """Cells over each interval (both ends included)."""
    whole = sorted(set(intervals))
    edges = {e for a, b in whole for e in (a - 1, b + 1) if _LEAST <= e <= _MOST}
    return _plan(np.array(sorted(edges), dtype=np.int64), whole, cells, exact=False)


def _plan(edges: Ints, intervals: list[tuple[int, int]], cells: int, *, exact: bool) -> _Plan:
    """``exact``: a zone that has not room for a cell for each of its values is kept instead."""
    zones = 2 * len(edges) + 1
    width, offset, low = (np.zeros(zones, dtype=np.int64) for _ in range(3))
    keep = np.zeros(zones, dtype=bool)
    used, left = 0, len(intervals)
    for a, b in sorted(intervals, key=lambda x: x[1] - x[0]):
        zone = int(_zone_of(np.array([a], dtype=np.int64), edges)[0])
        span, room = b - a + 1, max(2, (cells - used) // left)
        left -= 1
        if exact and span > room:
            keep[zone] = True
            continue
        width[zone], offset[zone], low[zone] = -(-span // room), used, a
        used += -(-span // int(width[zone]))
    return _Plan(edges, width, offset, low, keep, used)


def _pass(scan: Scan, plan: _Plan, held: int) -> tuple[Ints, Ints, dict[int, Pair]]:
    """(count by zone, count by cell, sorted values of the zones that were kept whole)."""
    count = np.zeros(len(plan.width), dtype=np.int64)
    keep = plan.keep.copy()
    kept: dict[int, list[Pair]] = {int(z): [] for z in np.flatnonzero(keep)}
    size = dict.fromkeys(kept, 0)
    free: list[Ints] = []
    made: list[Ints] = []
    lock = Lock()

    def work(value: Ints, weight: Ints | None) -> Zones:
        with lock:
            cells = free.pop() if free else np.zeros(plan.cells, dtype=np.int64)
            if not any(c is cells for c in made):
                made.append(cells)
        own = np.zeros(len(plan.width), dtype=np.int64)
        index = np.empty(len(value) if keep.any() else 0, dtype=np.int64)
        rest = (plan.edges, plan.width, plan.offset, plan.low, keep.copy(), own, cells, index)
        if weight is None:
            n = _count_singly(value, *rest, np.empty((2, len(value) if plan.cells else 0), dtype=np.int32))
        else:
            n = _count_zones(value, weight, *rest)
        with lock:
            free.append(cells)
        at = index[:n]
        held_weight = np.ones(n, dtype=np.int64) if weight is None else weight[at]
        return Zones(own, _zone_of(value[at], plan.edges), value[at], held_weight)

    for z in scan(work):
        count += z.count
        for zone in list(kept):
            mine = z.zone == zone
            if mine.any():
                kept[zone].append((z.value[mine], z.weight[mine]))
                size[zone] += int(mine.sum())
        while sum(size.values()) > held:
            fullest = max(size, key=lambda x: size[x])
            keep[fullest] = False
            del kept[fullest], size[fullest]
    counted = made[0] if made else np.zeros(plan.cells, dtype=np.int64)
    for more in made[1:]:
        counted += more
    empty = np.zeros(0, dtype=np.int64)
    return count, counted, {
        z: _sorted((np.concatenate([empty, *(v for v, _ in p)]), np.concatenate([empty, *(w for _, w in p)])))
        for z, p in kept.items()
    }  # fmt: skip


def _reach(edges: Ints, zone: int) -> tuple[int, int]:
    """Least and greatest value of a zone."""
    if zone % 2:
        return int(edges[zone // 2]), int(edges[zone // 2])
    low = int(edges[zone // 2 - 1]) + 1 if zone else _LEAST
    return low, int(edges[zone // 2]) - 1 if zone // 2 < len(edges) else _MOST


def _zone(count: Ints, rank: int) -> tuple[int, int]:
    """(values below the zone, the zone) that holds the rank."""
    total = np.cumsum(count)
    zone = int(np.searchsorted(total, rank, side="right"))
    return int(total[zone - 1]) if zone else 0, zone


def _zone_of(value: Ints, edges: Ints) -> Ints:
    return (np.searchsorted(edges, value, side="left") + np.searchsorted(edges, value, side="right")).astype(np.int64)


def _sorted(pair: Pair) -> Pair:
    """Ascending by value, with the running sum of the weights."""
    value, weight = pair
    if len(weight) and int(weight.max()) == 1:  # plain sorting is several times as fast
        return np.sort(value), np.arange(1, len(value) + 1, dtype=np.int64)
    order = np.argsort(value)
    return value[order], np.cumsum(weight[order])


def _at(pair: Pair, rank: int) -> int:
    return int(pair[0][np.searchsorted(pair[1], rank, side="right")])


def _zones(value, weight, edges, width, offset, low, keep, count, cells, index):  # type: ignore[no-untyped-def]
    """Adds to ``count`` by zone and to ``cells``; writes the positions of the values to keep into ``index``, returns how many."""
    kept = 0
    m = len(edges)
    for i in range(len(value)):
        v = value[i]
        zone = 2 * m
        for e in range(m):
            if v <= edges[e]:
                zone = 2 * e + (1 if v == edges[e] else 0)
                break
        w = weight[i]
        count[zone] += w
        if width[zone] == 1:
            cells[offset[zone] + v - low[zone]] += w
        elif width[zone] > 1:
            cells[offset[zone] + np.int64(np.uint64(v - low[zone]) // np.uint64(width[zone]))] += w
        elif keep[zone]:
            index[kept] = i
            kept += 1
    return kept


_count_zones = cached_njit(_zones, nogil=True)


def _zones_singly(value, edges, width, offset, low, keep, count, cells, index, cell):  # type: ignore[no-untyped-def]
    """As :func:`_zones` with weights of one. Without branches on the edges, since which of them a value passes is chance; and
    the cells to count, first written to ``cell``, are taken by neighbourhoods: those of one fit in the processor's cache."""
    kept, n = 0, 0
    m = len(edges)
    for i in range(len(value)):
        v = value[i]
        at, on = 0, 0
        for e in range(m):
            at += v > edges[e]
            on |= v == edges[e]
        zone = 2 * at + on
        count[zone] += 1
        if width[zone] == 1:
            cell[0, n] = offset[zone] + v - low[zone]
            n += 1
        elif width[zone] > 1:
            cell[0, n] = offset[zone] + np.int64(np.uint64(v - low[zone]) // np.uint64(width[zone]))
            n += 1
        elif keep[zone]:
            index[kept] = i
            kept += 1
    end = np.zeros((len(cells) >> 15) + 1, dtype=np.int64)
    for i in range(n):
        end[cell[0, i] >> 15] += 1
    total = 0
    for k in range(len(end)):
        total += end[k]
        end[k] = total - end[k]  # where its cells begin, for now
    for i in range(n):
        k = cell[0, i] >> 15
        cell[1, end[k]] = cell[0, i]
        end[k] += 1
    for i in range(n):
        cells[cell[1, i]] += 1
    return kept


_count_singly = cached_njit(_zones_singly, nogil=True)
