"""Inter-token latency of a whole trace in bounded memory: the definitions of :func:`hoptrace.metrics.itl_ns`, batch by batch.

A property test holds the two equal. The ITLs of one read of n tokens with gap g are g mod n times ⌊g ÷ n⌋ + 1, else ⌊g ÷ n⌋.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from hoptrace.compiling import cached_njit
from hoptrace.exact_quantiles import Scan, Zones, brackets, order_statistics, type7
from hoptrace.reader import Trace
from hoptrace.token_batches import PlainBatch, TokenBatch, TokenSource, each_batch, each_range

__all__ = ["Itl", "itl"]

Ints = npt.NDArray[np.int64]

_QUANTILES = (0.5, 0.95, 0.99)
_SAMPLES = 64
_SAMPLE_ROWS = 1 << 14
_FEW_ROWS = 4_000_000  # up to here all values are kept: one pass


@dataclass(frozen=True, slots=True)
class Itl:
    """``n`` values, their mean and percentiles (ns, rounded halves up; null without values); ``left_out``: finished requests with
    a gap whose counts are doubted."""

    n: int
    mean_ns: int | None
    p50_ns: int | None
    p95_ns: int | None
    p99_ns: int | None
    left_out: int


class _Totals:
    """What the first pass adds up besides."""

    def __init__(self) -> None:
        self.sum_ns = 0
        self.left_out = 0


def itl(trace: Trace, *, few: int = _FEW_ROWS, batch_rows: int | None = None, held: int = 8_000_000, cells: int = 1 << 24) -> Itl:
    """The trace's ITL. ``few``, ``batch_rows``, ``held``, ``cells``: sizes, for tests. InputError if a table is damaged."""
    source = TokenSource(trace)
    if not source.rows:
        return Itl(0, None, None, None, None, 0)
    done = _finished(trace)
    ranges = source.ranges(batch_rows) if batch_rows else source.ranges()
    edges = None
    if source.rows > few:
        places = source.sample(_SAMPLES, min(_SAMPLE_ROWS, batch_rows or _SAMPLE_ROWS))
        edges = brackets(list(each_batch(source, lambda b: _values(b, done)[:2], ranges=places)), _QUANTILES)
    totals = _Totals()
    first = True

    def scan(work):  # type: ignore[no-untyped-def]
        nonlocal first

        def one(low: int, high: int) -> tuple[Zones, int, int]:
            plain = source.plain(low, high)
            found = _plain_values(plain, done) if plain is not None else None
            value, weight, gaps, left_out = found if found is not None else _values(source.read(low, high), done)
            return work(value, weight), gaps, left_out

        for zones, gaps, left_out in each_range(ranges, one):
            if first:
                totals.sum_ns += gaps
                totals.left_out += left_out
            yield zones
        first = False

    def ranks(n: int) -> list[int]:
        return [r for q in _QUANTILES for r in type7(n, q)[:2]] if n else []

    typed: Scan = scan
    n, at = order_statistics(typed, ranks, edges, held=held, cells=cells)
    if not n:
        return Itl(0, None, None, None, None, totals.left_out)
    figures = []
    for i, q in enumerate(_QUANTILES):
        low, high = float(at[2 * i]), float(at[2 * i + 1])
        figures.append(math.floor(low + (high - low) * type7(n, q)[2] + 0.5))
    p50, p95, p99 = figures
    return Itl(n, (2 * totals.sum_ns + n) // (2 * n), p50, p95, p99, totals.left_out)


@dataclass(frozen=True)
class _Finished:
    """Finished requests, ascending, with their ``output_tokens`` where the server tells them."""

    request: Ints
    tokens: Ints
    told: npt.NDArray[np.bool_]


def _finished(trace: Trace) -> _Finished:
    frame = (
        trace.table("requests")
        .filter(pl.col("finish_ns").is_not_null() & pl.col("error").is_null())
        .select("request", pl.col("output_tokens").fill_null(0).alias("n"), pl.col("output_tokens").is_not_null().alias("told"))
        .sort("request")
        .collect()
    )
    return _Finished(frame["request"].to_numpy(), frame["n"].to_numpy(), frame["told"].to_numpy())


def _values(b: TokenBatch, done: _Finished) -> tuple[Ints, Ints, int, int]:
    """(ITL values, how often each, Σ of all, finished requests whose counts are doubted and that have a gap)."""
    value, weight = np.empty(2 * len(b.request), dtype=np.int64), np.empty(2 * len(b.request), dtype=np.int64)
    n, high, low, left_out = _gaps(
        b.request, b.sequence, b.index, b.time_ns, b.count, b.counted, b.coalesced, done.request, done.tokens, done.told,
        value, weight,
    )  # fmt: skip
    return value[:n], weight[:n], (int(high) << 32) + int(low), int(left_out)


def _plain_values(b: PlainBatch, done: _Finished) -> tuple[Ints, Ints | None, int, int] | None:
    """The same of plain tokens, every value by itself; null where they are not in order."""
    value = np.empty(len(b.request), dtype=np.int64)
    n, high, low, left_out = _plain_gaps(
        b.request, b.index, b.time_ns, b.coalesced, done.request, done.tokens, done.told, value
    )  # fmt: skip
    return None if n < 0 else (value[:n], None, (int(high) << 32) + int(low), int(left_out))


def _walk_plain(request, index, time, coalesced, done, tokens, told, value):  # type: ignore[no-untyped-def]
    """As :func:`_walk`, where each row is one token of sequence 0. −1 values: the rows do not ascend by request and index."""
    n, out, high, low, left_out = len(request), 0, 0, 0, 0
    f = np.searchsorted(done, request[0]) if n else 0
    i = 0
    while i < n:
        r = request[i]
        j = i + 1
        while j < n and request[j] == r:
            if index[j] < index[j - 1]:
                return -1, 0, 0, 0
            j += 1
        if j < n and request[j] < r:
            return -1, 0, 0, 0
        while f < len(done) and done[f] < r:
            f += 1
        if f == len(done) or done[f] != r:
            i = j
            continue
        doubted = told[f] and j - i != tokens[f]
        # The first read is timed by its first emission, the others by their last.
        before = time[i]
        k = i + 1
        while k < j and coalesced[k]:
            before = min(before, time[k])
            k += 1
        if doubted:
            if k < j:
                left_out += 1
            i = j
            continue
        while k < j:
            at = time[k]
            start = k
            k += 1
            while k < j and coalesced[k]:
                at = max(at, time[k])
                k += 1
            gap = at - before
            before = at
            high += gap >> 32
            low += gap & 0xFFFFFFFF
            c = k - start
            if c == 1:
                value[out] = gap
                out += 1
            else:
                q = gap // c
                more = gap - q * c
                for e in range(c):
                    value[out] = q + 1 if e < more else q
                    out += 1
        i = j
    return out, high, low, left_out


_plain_gaps = cached_njit(_walk_plain, nogil=True)


def _walk(request, sequence, index, time, count, counted, coalesced, done, tokens, told, value, weight):  # type: ignore[no-untyped-def]
    """Fill ``value`` and ``weight``; returns how many, Σ of the gaps as high and low 32 bits, and the requests left out."""
    n, out, high, low, left_out = len(request), 0, 0, 0, 0
    f = np.searchsorted(done, request[0]) if n else 0
    i = 0
    while i < n:
        r = request[i]
        j = i
        total, known = 0, True
        while j < n and request[j] == r:
            if counted[j]:
                total += count[j]
            elif j + 1 < n and request[j + 1] == r and sequence[j + 1] == sequence[j]:
                total += index[j + 1] - index[j]
            else:
                known = False
            j += 1
        while f < len(done) and done[f] < r:
            f += 1
        if f == len(done) or done[f] != r:
            i = j
            continue
        doubted = known and told[f] and total != tokens[f]
        gaps = False
        before, reads = np.int64(0), 0
        k = i
        while k < j:
            # One read: an emission and those that came along with it.
            begin = last = time[k]
            c, sure = np.int64(0), True
            start = k
            while True:
                begin, last = min(begin, time[k]), max(last, time[k])
                if counted[k]:
                    c += count[k]
                elif k + 1 < j and sequence[k + 1] == sequence[k]:
                    c += index[k + 1] - index[k]
                else:
                    sure = False
                k += 1
                if k == j or sequence[k] != sequence[start] or not coalesced[k]:
                    break
            at = last if reads else begin
            if reads:
                gap = at - before
                gaps = True
                if sure and not doubted and c > 0:
                    q = gap // c
                    more = gap - q * c
                    high += gap >> 32
                    low += gap & 0xFFFFFFFF
                    if c > more:
                        value[out], weight[out] = q, c - more
                        out += 1
                    if more:
                        value[out], weight[out] = q + 1, more
                        out += 1
            before = at
            reads += 1
            if k < j and sequence[k] != sequence[start]:
                reads = 0
        if doubted and gaps:
            left_out += 1
        i = j
    return out, high, low, left_out


_gaps = cached_njit(_walk, nogil=True)
