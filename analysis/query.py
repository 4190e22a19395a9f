"""Run one of the queries in ``analysis/sql``: the SQL beside the code says exactly how a figure comes about."""

from __future__ import annotations

from importlib.resources import files

import polars as pl

from hoptrace.reader import Trace

__all__ = ["query"]


def query(trace: Trace, name: str) -> pl.DataFrame:
    """The result of ``analysis/sql/NAME.sql`` over the trace's tables."""
    return trace.sql(files("hoptrace.analysis.sql").joinpath(f"{name}.sql").read_text(encoding="utf-8"))
