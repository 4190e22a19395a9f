"""When moves were recorded, by the trace's coverage, and how much of the requests' time that is."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from hoptrace.reader import Trace

__all__ = ["blind", "covered", "length_within"]

_EVER = 1 << 62
_ENOUGH = 0.99  # of the time; what a capture misses while it starts and ends is less
Spans = list[tuple[int, int]]


def covered(trace: Trace, table: str = "moves") -> Spans | None:
    """The stretches (from_ns, to_ns), ascending and apart, in which all who record ``table`` did so; null where nobody says.

    Each source has its own stretches for each server (a capture that loses sight of a server ends one and begins another). What
    one of them missed, nobody else has: only where all of them recorded is nothing missing. An end that is not told is never.
    """
    told = trace.table("coverage").filter(pl.col("table") == table).select("source", "server", "from_ns", "to_ns").collect()
    if not told.height:
        return None
    found: Spans | None = None
    for _, mine in told.group_by("source", "server"):
        own = _union([(a, _EVER if z is None else z) for a, z in mine.select("from_ns", "to_ns").iter_rows()])
        found = own if found is None else _both(found, own)
    return found


def blind(trace: Trace, low: int | None, high: int | None) -> dict[str, float]:
    """The sources of moves that recorded less than 99 % of the time between ``low`` and ``high``, or lost some of the moves:
    which share they have at most. Of a source that names no coverage nothing is known. Of several servers the one seen least."""
    told = trace.table("coverage").filter(pl.col("table") == "moves").collect()
    if not told.height or low is None or high is None or high <= low:
        return {}
    found: dict[str, float] = {}
    for (source, _), mine in told.group_by("source", "server"):
        spans = _union([(a, _EVER if z is None else z) for a, z in mine.select("from_ns", "to_ns").iter_rows()])
        share = length_within(spans, low, high) / (high - low)
        kept = mine["fraction"].drop_nulls().to_list()
        share *= min([1.0, *kept])
        if share < _ENOUGH:
            found[str(source)] = min(found.get(str(source), 1.0), share)
    return found


def length_within(spans: Sequence[tuple[int, int]], low: int, high: int) -> int:
    """How much of ``low`` … ``high`` the spans cover, ns."""
    return sum(max(0, min(z, high) - max(a, low)) for a, z in spans)


def _union(spans: Spans) -> Spans:
    out: Spans = []
    for a, z in sorted(s for s in spans if s[1] > s[0]):
        if out and a <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], z))
        else:
            out.append((a, z))
    return out


def _both(first: Spans, second: Spans) -> Spans:
    return [(max(a, c), min(b, d)) for a, b in first for c, d in second if max(a, c) < min(b, d)]
