"""Run one of the queries in ``analysis/sql``: the SQL beside the code says exactly how a figure comes about."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import duckdb
import polars as pl

from hoptrace.analysis.term import sql_of
from hoptrace.errors import InputError
from hoptrace.reader import Trace
from hoptrace.schema import TABLES

__all__ = ["Ask", "asking", "query", "query_with"]


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
    with asking(trace, (name,), relations, views) as ask:
        return ask(name)


class Ask(Protocol):
    """Runs one of the named queries, with further relations."""

    def __call__(self, name: str, relations: Mapping[str, pl.DataFrame] | None = None) -> pl.DataFrame: ...


@contextmanager
def asking(
    trace: Trace,
    names: Collection[str],
    relations: Mapping[str, pl.DataFrame],
    views: Mapping[str, str] | None = None,
    tables: Mapping[str, str] | None = None,
) -> Iterator[Ask]:
    """Several queries that share relations, views and ``tables``: results of other queries that are computed once, in that order,
    and kept (on the disk, where they are large) until the end. InputError as :func:`query_with`, also from what it gives."""
    texts = {name: sql_of(name) for name in names}
    bodies = {view: sql_of(file) for view, file in (views or {}).items()}
    kept = {table: sql_of(file) for table, file in (tables or {}).items()}
    all_text = " ".join((*texts.values(), *bodies.values(), *kept.values()))
    words = set(re.findall(r"\w+", re.sub(r"--[^\n]*", "", all_text)))
    with trace.duckdb(*(t for t in TABLES if t in words)) as con:

        def guarded(text: str) -> duckdb.DuckDBPyRelation | None:
            try:
                return con.sql(text)
            except duckdb.Error as e:
                raise InputError(f"{trace.path} can't be queried ({str(e).strip().splitlines()[0]}).") from None

        def ask(name: str, relations: Mapping[str, pl.DataFrame] | None = None) -> pl.DataFrame:
            for relation, frame in (relations or {}).items():
                con.register(relation, frame.to_arrow())
            result = guarded(texts[name])
            assert result is not None
            try:
                found = pl.from_arrow(result.to_arrow_table())
            except duckdb.Error as e:
                raise InputError(f"{trace.path} can't be queried ({str(e).strip().splitlines()[0]}).") from None
            assert isinstance(found, pl.DataFrame)
            return found

        for relation, frame in relations.items():
            con.register(relation, frame.to_arrow())
        for kind, made in (("VIEW", bodies), ("TABLE", kept)):
            for name, body in made.items():
                guarded(f"CREATE TEMP {kind} {name} AS {body}")
        yield ask
