"""A trace's tokens as batches of whole requests: plain arrays, sorted, of one vantage, never all of them in memory.

Closed Parquet parts of one vantage are read by row groups: the footers tell which of them hold a range of requests. Everything
else (journals, several vantages, traces in memory) is filtered to the range first and then read as :meth:`Trace.table` gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl

from hoptrace.compiling import cached_njit
from hoptrace.reader import Trace
from hoptrace.row_groups import RowGroups

__all__ = ["PlainBatch", "TokenBatch", "TokenSource", "each_batch", "each_range"]

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
T = TypeVar("T")

_COLUMNS = ("request", "sequence", "index", "time_ns", "count", "coalesced")
_ROWS = 1 << 20
_MOST = 1 << 24  # rows of a batch where the parts overlap so much that small batches would read each of them many times
_OFTEN = 4.0


@dataclass(frozen=True)
class TokenBatch:
    """Rows of whole requests, ascending by request, sequence (null read as 0), index, else as the trace has them.

    ``request``, ``sequence``, ``index``, ``time_ns`` (trace clock, ns), ``count`` (tokens; 0 where unknown): int64[n];
    ``counted`` (the count is known), ``coalesced`` (null read as false): bool[n].
    """

    request: Ints
    sequence: Ints
    index: Ints
    time_ns: Ints
    count: Ints
    counted: Bools
    coalesced: Bools


@dataclass(frozen=True)
class PlainBatch:
    """Rows of whole requests as the files have them, of one sequence each and one token a row: ``request``, ``index`` and
    ``time_ns`` as in :class:`TokenBatch`, in any order; ``coalesced`` bool[n]."""

    request: Ints
    index: Ints
    time_ns: Ints
    coalesced: Bools


class TokenSource:
    """Reads ranges of requests. Thread-safe. InputError if a file is missing or damaged."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._groups = RowGroups.of(trace.files("tokens"), "tokens", _COLUMNS)
        if self._groups is not None:
            bounds = self._groups.bounds("request")
            self._low, self._high, self._rows = bounds.low, bounds.high, self._groups.rows
            # What a row group holds throughout need not be decoded.
            self._same = {}
            self._blank = {c: self._groups.bounds(c).nulls for c in _COLUMNS}
            for column in ("sequence", "count", "coalesced"):
                b = self._groups.bounds(column)
                self._same[column] = (b.low, np.where(b.nulls, b.low ^ 1, b.high))
        else:
            seen = trace.table("tokens").group_by("request").agg(pl.len()).sort("request").collect(engine="streaming")
            self._low = self._high = seen["request"].to_numpy()
            self._rows = seen["len"].cast(pl.Int64).to_numpy()

    @property
    def rows(self) -> int:
        """Rows in all."""
        return int(self._rows.sum())

    def ranges(self, rows: int = _ROWS) -> list[tuple[int, int]]:
        """Ranges ``[low, high)`` of request numbers in ascending order that hold all tokens, each of about ``rows`` rows."""
        if not len(self._rows):
            return []
        found = self._cut(rows)
        if rows < _MOST and len(found) > 1 and self._groups is not None:
            # How often a row is read, if whole row groups are.
            low, high = (np.array(x) for x in zip(*found, strict=True))
            times = np.searchsorted(low, self._high, side="right") - np.searchsorted(high, self._low, side="right")
            if float((times * self._rows).sum()) > _OFTEN * max(1, self.rows):
                return self._cut(_MOST)
        return found

    def sample(self, places: int, rows: int) -> list[tuple[int, int]]:
        """Ranges of about ``rows`` rows at about ``places`` places, evenly spread over the requests."""
        found = self._cut(rows) if len(self._rows) else []
        step = max(1, len(found) // places)
        return found[step // 2 :: step]

    def _cut(self, rows: int) -> list[tuple[int, int]]:
        # Rows below a request number, were each row group's rows spread evenly over its range: piecewise linear.
        low, high = self._low.astype(np.float64), self._high.astype(np.float64) + 1
        slope = self._rows / np.maximum(high - low, 1.0)
        at = np.concatenate([low, high])
        change = np.concatenate([slope, -slope])
        order = np.argsort(at, kind="stable")
        at, change = at[order], change[order]
        below = np.concatenate([[0.0], np.cumsum(np.cumsum(change)[:-1] * np.diff(at))])
        levels = np.arange(1, int(self.rows // max(rows, 1)) + 1, dtype=np.float64) * rows
        first, last = int(self._low.min()), int(self._high.max()) + 1
        cuts = sorted({int(c) for c in np.ceil(np.interp(levels, below, at)) if first < c < last})
        edges = [first, *cuts, last]
        return list(pairwise(edges))

    def plain(self, low: int, high: int) -> PlainBatch | None:
        """The same tokens with less ado, or null where a sequence is not 0, a count not 1, or something is null."""
        if self._groups is None:
            return None
        mine = np.flatnonzero((self._low < high) & (self._high >= low))
        for column, value in (("sequence", 0), ("count", 1)):
            a, b = self._same[column]
            if not ((a[mine] == value) & (b[mine] == value)).all():
                return None
        names = ["request", "index", "time_ns"]
        a, b = self._same["coalesced"]
        joined = not ((a[mine] == 0) & (b[mine] == 0)).all()
        if not len(mine) or any(self._blank[c][mine].any() for c in [*names, *(["coalesced"] if joined else [])]):
            return None
        found: list[Any] = self._groups.arrays(mine, [*names, *(["coalesced"] if joined else [])])
        request = found[0]
        coalesced = found[3] if joined else _constant(False, len(request))
        cut = slice(None)
        if int(self._low[mine].min()) < low or int(self._high[mine].max()) >= high:
            if not (request[1:] >= request[:-1]).all():
                return None
            cut = slice(*np.searchsorted(request, [low, high], side="left").tolist())
        return PlainBatch(request[cut], found[1][cut], found[2][cut], coalesced[cut])

    def read(self, low: int, high: int) -> TokenBatch:
        """The tokens of the requests ``low ≤ request < high``."""
        if self._groups is None:
            frame = self.trace.of_requests("tokens", low, high).select(_COLUMNS).collect()
            return _batch(frame)
        mine = np.flatnonzero((self._low < high) & (self._high >= low))
        same = {c: v for c, v in self._same.items() if (v[0][mine] == v[1][mine]).all() and len(set(v[0][mine].tolist())) == 1}
        frame = self._groups.read(mine, [c for c in _COLUMNS if c not in same])
        batch = _batch(frame, {c: int(v[0][mine[0]]) for c, v in same.items()})
        if len(mine) and (int(self._low[mine].min()) < low or int(self._high[mine].max()) >= high):
            a, b = np.searchsorted(batch.request, [low, high], side="left").tolist()
            batch = TokenBatch(*(getattr(batch, f.name)[a:b] for f in fields(TokenBatch)))
        return batch


def each_batch(
    source: TokenSource, work: Callable[[TokenBatch], T], *, ranges: list[tuple[int, int]] | None = None, threads: int = 2
) -> Iterator[T]:
    """``work`` of each batch (called in ``threads`` threads), in ascending order of requests."""
    wanted = source.ranges() if ranges is None else ranges
    return each_range(wanted, lambda low, high: work(source.read(low, high)), threads=threads)


def each_range(ranges: list[tuple[int, int]], work: Callable[[int, int], T], *, threads: int = 2) -> Iterator[T]:
    """``work`` of each range in turn, in ``threads`` threads, and a batch or two ahead of whoever takes what it gives."""
    if threads < 2 or len(ranges) < 2:
        for low, high in ranges:
            yield work(low, high)
        return
    with ThreadPoolExecutor(threads) as pool:
        waiting: list[Future[T]] = []
        try:
            for low, high in ranges:
                waiting.append(pool.submit(work, low, high))
                if len(waiting) > threads:
                    yield waiting.pop(0).result()
            while waiting:
                yield waiting.pop(0).result()
        finally:
            for future in waiting:
                future.cancel()


def _batch(frame: pl.DataFrame, same: dict[str, int] | None = None) -> TokenBatch:
    """``same``: columns that are not in the frame and hold one value."""
    n = frame.height
    same = same or {}
    r, i, t = (frame[c].cast(pl.Int64).to_numpy() for c in ("request", "index", "time_ns"))
    s = _constant(same["sequence"], n) if "sequence" in same else _ints(frame["sequence"])
    if "count" in same:
        k, c = _constant(same["count"], n), _constant(True, n)
    else:
        k, c = _ints(frame["count"]), frame["count"].is_not_null().to_numpy()
    j = _constant(bool(same["coalesced"]), n) if "coalesced" in same else _bools(frame["coalesced"])
    if not _ascends(r, s, i):
        order = np.lexsort((i, s, r))  # stable
        r, s, i, t, k, c, j = (x[order] for x in (r, s, i, t, k, c, j))
    return TokenBatch(r, s, i, t, k, c, j)


def _ints(x: pl.Series) -> Ints:
    x = x.cast(pl.Int64)
    return (x.fill_null(0) if x.null_count() else x).to_numpy()


def _bools(x: pl.Series) -> Bools:
    x = x.cast(pl.Boolean)
    return (x.fill_null(False) if x.null_count() else x).to_numpy()


@lru_cache(maxsize=64, typed=True)  # False is not 0 here
def _full(value: int | bool, power: int) -> npt.NDArray[Any]:
    return np.full(1 << power, value, dtype=np.bool_ if isinstance(value, bool) else np.int64)


def _constant(value: int | bool, n: int) -> npt.NDArray[Any]:
    """``n`` times the value; common ones (counts of one, sequence 0) are views of one array."""
    if value in (0, 1):
        return _full(value, max(n - 1, 1).bit_length())[:n]
    return np.full(n, value, dtype=np.int64)


def _in_order(r, s, i):  # type: ignore[no-untyped-def]
    for k in range(1, len(r)):
        if r[k] < r[k - 1]:
            return False
        if r[k] == r[k - 1] and (s[k] < s[k - 1] or (s[k] == s[k - 1] and i[k] < i[k - 1])):
            return False
    return True


_ascends = cached_njit(_in_order, nogil=True)
