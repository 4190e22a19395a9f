"""Totals of counters over the trace: increases of cumulative ones (wraps, resets and restarts handled), means of gauges."""

from __future__ import annotations

import polars as pl

from hoptrace.analysis.query import query
from hoptrace.reader import Trace

__all__ = ["counter_totals"]


def counter_totals(trace: Trace) -> pl.DataFrame:
    """One row per counter: host, entity, name, direction, unit, semantics, samples, from_ns, to_ns, total, counted_ns, breaks,
    falls, mean, largest. The rules are written in ``analysis/sql/counter_totals.sql``."""
    return query(trace, "counter_totals")
