"""Run one of the queries in ``analysis/sql``: the SQL beside the code says exactly how a figure comes about."""

from __future__ import annotations

import re
from collections.abc import Mapping

import duckdb
import polars as pl

from hoptrace.analysis.term import sql_of
from hoptrace.errors import InputError
from hoptrace.reader import Trace
from hoptrace.schema import TABLES

__all__ = ["query", "query_with"]


def query(trace: Trace, name: str) -> pl.DataFrame:
    """The result of ``analysis/sql/NAME.sql`` over the trace's tables."""
    return trace.sql(sql_of(name))


def query_with(
    trace: Trace, name: str, relations: Mapping[str, pl.DataFrame], views: Mapping[str, str] | None = None
) -> pl.DataFrame:
    """The result of ``analysis/sql/NAME.sql`` over the trace's tables and small ``relations`` by their names, which the query
    needs and the trace does not hold as a table (links of the platform graph, block sizes of servers). ``views``: other queries
    of the folder by the name under which this one uses their result; they are not held in memory.

    Raises:
        InputError: a table is damaged.
    """
    text = sql_of(name)
    bodies = {view: sql_of(file) for view, file in (views or {}).items()}
    words = set(re.findall(r"\w+", re.sub(r"--[^\n]*", "", " ".join((text, *bodies.values())))))
    with trace.duckdb(*(t for t in TABLES if t in words)) as con:
        for relation, frame in relations.items():
            con.register(relation, frame.to_arrow())
        try:
            for view, body in bodies.items():
                con.execute(f"CREATE TEMP VIEW {view} AS {body}")
            found = pl.from_arrow(con.sql(text).to_arrow_table())
        except duckdb.Error as e:
            raise InputError(f"{trace.path} can't be queried ({str(e).strip().splitlines()[0]}).") from None
    assert isinstance(found, pl.DataFrame)
    return found
