"""What every chart shares: an axis of seconds since the trace's start, the colour scale of classes, and small helpers.

All chart builders of the dashboard are pure functions, data frame in, Altair chart out; they change units and nothing else.
"""

from __future__ import annotations

import altair as alt
import polars as pl

from hoptrace.app.theme import classes, colours

__all__ = ["CLASS_SCALE", "MAX_ROWS", "axis_unit", "seconds"]

MAX_ROWS = 5000
"""Rows per chart: more cannot be told apart and makes the page slow (Altair's own limit)."""

CLASS_SCALE = alt.Scale(domain=classes(), range=colours())


def axis_unit(longest_ns: float) -> tuple[str, float]:
    """The unit in which an axis up to ``longest_ns`` reads best, and its length in ns."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if longest_ns >= 2 * size:
            return unit, size
    return "ns", 1.0


def seconds(frame: pl.DataFrame, origin_ns: int, *columns: str) -> pl.DataFrame:
    """``X_ns`` → ``X_s``: seconds since ``origin_ns``. The difference is taken in integers, so no digit is lost."""
    return frame.with_columns(((pl.col(c) - origin_ns) / 1e9).alias(c.removesuffix("_ns") + "_s") for c in columns)
