"""Intervals of many requests on one line: the requests' lives are laid end to end, so that one sorted array serves them all.

Request ``r`` takes ``[base[r], base[r] + e2e[r])``. Everything below is integer arithmetic on sorted arrays; a partition of the
line is a partition of each request's time, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Axis", "Cover", "Ints", "distinct", "flatten"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Axis:
    """``request`` (ascending), ``arrival`` and ``e2e`` of each, and where each begins on the line."""

    request: Ints
    arrival: Ints
    e2e: Ints
    base: Ints

    @classmethod
    def of(cls, request: Ints, arrival: Ints, e2e: Ints) -> Axis:
        """Lay them end to end. The caller sees to it that Σ e2e fits in an int64."""
        base = np.zeros(len(e2e), dtype=np.int64)
        if len(e2e):
            np.cumsum(e2e[:-1], out=base[1:])
        return cls(request, arrival, e2e, base)

    @property
    def length(self) -> int:
        return int(self.base[-1] + self.e2e[-1]) if len(self.base) else 0

    def find(self, request: Ints) -> Ints:
        """Position of each request number, −1 where it is not on the line."""
        if not len(self.request):
            return np.full(len(request), -1, dtype=np.int64)
        at = np.minimum(np.searchsorted(self.request, request), len(self.request) - 1)
        return np.where(self.request[at] == request, at, -1).astype(np.int64)

    def place(self, at: Ints, time_ns: Ints) -> Ints:
        """The point of time ``time_ns`` of the request at position ``at``, clipped into that request's life."""
        low, e2e = self.arrival[at], self.e2e[at]
        # Clip before subtracting: a hostile stamp must not wrap round.
        return self.base[at] + (np.clip(time_ns, low, low + e2e) - low)

    def owner(self, x: Ints) -> Ints:
        """Position of the request whose life holds the point (or begins there)."""
        return np.searchsorted(self.base, x, side="right").astype(np.int64) - 1

    def time(self, at: Ints, x: Ints) -> Ints:
        """The trace time of a point of the request at position ``at``."""
        return x - self.base[at] + self.arrival[at]


@dataclass(frozen=True)
class Cover:
    """Disjoint intervals ``[start, end)`` in ascending order, each with the row number that it came from."""

    start: Ints
    end: Ints
    row: Ints

    def at(self, x: Ints) -> Ints:
        """For each point, the row of the interval that holds it, −1 where none does."""
        if not len(self.start):
            return np.full(len(x), -1, dtype=np.int64)
        i = np.searchsorted(self.start, x, side="right") - 1
        inside = (i >= 0) & (x < self.end[i])
        return np.where(inside, self.row[i], -1).astype(np.int64)

    @property
    def points(self) -> Ints:
        return np.concatenate([self.start, self.end])


def distinct(x: Ints) -> Ints:
    """The values, ascending, each once. (``np.unique`` hashes first, which takes several times as long as sorting.)"""
    x = np.sort(x)
    found: Ints = x[np.append(True, x[1:] != x[:-1])] if len(x) else x
    return found


def flatten(start: Ints, end: Ints, rank: Ints | None = None) -> Cover:
    """Disjoint intervals from overlapping ones: at each point the later end wins, ties by the lower ``rank``, then by row.

    Among the intervals that begin at or before a point, the one with the greatest end covers the point if any does; so a running
    maximum over the starts decides in one pass.
    """
    row = np.flatnonzero(start < end).astype(np.int64)
    if not len(row):
        empty = np.zeros(0, dtype=np.int64)
        return Cover(empty, empty, empty)
    tie = rank[row] if rank is not None else np.zeros(len(row), dtype=np.int64)
    # Precedence of each interval as one number: position in the order (end, −rank, −row).
    order = np.lexsort((-row, -tie, end[row]))
    precedence = np.empty(len(row), dtype=np.int64)
    precedence[order] = np.arange(len(row))
    by_start = np.lexsort((precedence, start[row]))
    s = start[row][by_start]
    winner = np.maximum.accumulate(precedence[by_start])
    last = np.append(s[1:] != s[:-1], True)  # of equal starts only the last sees them all
    s, winner = s[last], winner[last]
    w = row[order[winner]]
    e = np.minimum(end[w], np.append(s[1:], np.iinfo(np.int64).max))
    keep = s < e
    return Cover(s[keep], e[keep], w[keep])
