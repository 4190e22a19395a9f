"""Counters of a trace that contradict each other: see :mod:`hoptrace.contradictions`."""

from __future__ import annotations

from typing import Any

import polars as pl

from hoptrace.analysis.query import query, query_with
from hoptrace.contradictions import LEAST_NS, Contradiction, Seen, contradictions, thing_of
from hoptrace.reader import Trace

__all__ = ["contradictions_of"]

_LATE_NS = (2_000_000_000, 60_000_000_000)
_WINDOW = {
    **dict.fromkeys(("host", "entity", "name", "direction", "source"), pl.String), "from_ns": pl.Int64, "to_ns": pl.Int64,
}  # fmt: skip


def contradictions_of(trace: Trace) -> list[Contradiction]:
    """Over the time that all counters of a thing have in common. What a counter would only tell later (an exporter's page is as
    old as its interval) is not held against it: the others' last samples are left out by as much. InputError if a table is
    damaged.
    """
    if not trace.has("counters"):
        return []
    things: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for r in query(trace, "contradicted_extents").to_dicts():
        things.setdefault((r["host"], thing_of(r["entity"], r["name"]), r["direction"]), []).append(r)
    windows = []
    for mine in things.values():
        if len(mine) < 2:
            continue
        low, high = max(r["from_ns"] for r in mine), min(r["to_ns"] for r in mine)
        for r in mine:
            # How late the slowest of the others may be.
            late = max((min(x["apart_ns"] or 0, _LATE_NS[1]) for x in mine if x is not r), default=0)
            until = high - (late if late > _LATE_NS[0] else 0)
            if until - low >= LEAST_NS:
                windows.append((*(r[k] for k in ("host", "entity", "name", "direction", "source")), low, until))
    if not windows:
        return []
    told = query_with(trace, "contradicted_totals", {"window": pl.DataFrame(windows, schema=_WINDOW, orient="row")})
    return contradictions(
        Seen(
            r["host"], r["entity"], r["name"], r["direction"], r["source"], r["bytes"], r["covered_ns"], r["to_ns"] - r["from_ns"]
        )
        for r in told.to_dicts()
    )
