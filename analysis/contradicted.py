"""Counters of a trace that contradict each other: see :mod:`hoptrace.contradictions`."""

from __future__ import annotations

from typing import Any

import polars as pl

from hoptrace.analysis.query import query, query_with
from hoptrace.contradictions import LEAST_BYTES, LEAST_NS, STILL, Contradiction, Seen, contradictions, thing_of
from hoptrace.reader import Trace

__all__ = ["contradictions_of"]

_LATE_NS = (2_000_000_000, 60_000_000_000)
_KEY = ("host", "entity", "name", "direction", "source")
_KEYS = dict.fromkeys(_KEY, pl.String)
_WINDOW = {**_KEYS, "from_ns": pl.Int64, "to_ns": pl.Int64}


def contradictions_of(trace: Trace) -> list[Contradiction]:
    """Over the time that all counters of a thing have in common. What a counter would only tell later (an exporter's page is as
    old as its interval) is not held against it: the others' last samples are left out by as much. InputError if a table is
    damaged.
    """
    if not trace.has("counters"):
        return []
    things: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for r in query(trace, "contradicted_series").to_dicts():
        things.setdefault((r["host"], thing_of(r["entity"], r["name"]), r["direction"]), []).append(r)
    # Most machines contradict themselves nowhere: only what may is looked at closely.
    suspect = [mine for mine in things.values() if _may(mine)]
    if not suspect:
        return []
    keys = pl.DataFrame([tuple(r[k] for k in _KEY) for mine in suspect for r in mine], schema=_KEYS, orient="row")
    apart = {row[:-1]: row[-1] for row in query_with(trace, "contradicted_extents", {"suspects": keys}).iter_rows()}
    windows = []
    for mine in suspect:
        low, high = max(r["from_ns"] for r in mine), min(r["to_ns"] for r in mine)
        for r in mine:
            # How late the slowest of the others may be.
            gaps = [apart.get(tuple(x[k] for k in _KEY)) or 0 for x in mine if x is not r]
            late = min(max(gaps), _LATE_NS[1])
            until = high - (late if late > _LATE_NS[0] else 0)
            if until - low >= LEAST_NS:
                windows.append((*(r[k] for k in _KEY), low, until))
    if not windows:
        return []
    told = query_with(trace, "contradicted_totals", {"window": pl.DataFrame(windows, schema=_WINDOW, orient="row")})
    return contradictions(
        Seen(
            r["host"], r["entity"], r["name"], r["direction"], r["source"], r["bytes"], r["covered_ns"], r["to_ns"] - r["from_ns"]
        )
        for r in told.to_dicts()
    )


def _may(mine: list[dict[str, Any]]) -> bool:
    """Whether one of several can have stood still while another moved. Restarts only add to what a counter can have moved by, but
    may hide that it stood still: then nothing is told."""
    if len(mine) < 2:
        return False
    most = max(r["moved"] for r in mine)
    return bool(most >= LEAST_BYTES and min(r["moved"] for r in mine) < STILL * most)
