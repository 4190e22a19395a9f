"""Totals of counters over the trace: increases of cumulative ones (wraps, resets and restarts handled), means of gauges."""

from __future__ import annotations

from collections.abc import Collection

import polars as pl

from hoptrace.analysis.term import sql_of
from hoptrace.reader import Trace

__all__ = ["counter_totals"]

_WHERE = "WHERE coalesce(status, 'ok') = 'ok'"


def counter_totals(
    trace: Trace, names: Collection[str] | None = None, *, kinds: Collection[str] = (), but: Collection[str] = ()
) -> pl.DataFrame:
    """One row per counter: host, entity, name, direction, unit, semantics, samples, from_ns, to_ns, total, counted_ns, breaks,
    falls, mean, largest, source, incarnation (the last). The rules are written in ``analysis/sql/counter_totals.sql``.

    ``names``: only counters of these names. ``kinds``: and all of these kinds of entities (``gpu`` of ``gpu:UUID``) ``but`` those
    of some names. A capture of hours holds hundreds of others, and sorting those takes memory.
    """
    text = sql_of("counter_totals")
    if names is not None:
        if not names:
            raise ValueError("no names")
        wanted = f"name IN ({_listed(names)})"
        if kinds:
            rest = f"name NOT IN ({_listed(but)}) AND " if but else ""
            wanted = f"({wanted} OR ({rest}split_part(entity, ':', 1) IN ({_listed(kinds)})))"
        text = text.replace(_WHERE, f"{_WHERE} AND {wanted}", 1)
    return trace.sql(text)


def _listed(words: Collection[str]) -> str:
    return ", ".join("'" + n.replace("'", "''") + "'" for n in sorted(words))
