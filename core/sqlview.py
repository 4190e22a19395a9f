"""SQL over a trace: DuckDB sees the tables by their names, and nothing else of the machine.

Tables whose Parquet files are their rows are scanned where they lie (projections and filters reach the files); others (journals,
rows to be merged) are read first. Only the tables that a query names are set up. The connection has no access to files (but those
in an empty temporary folder, which it spills to), network, extensions or Python variables, and cannot be given any: a trace comes
from somebody else, and so may the query.
"""

from __future__ import annotations

import difflib
import re
import tempfile
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from hoptrace.errors import InputError, UsageError
from hoptrace.schema import TABLES, table

if TYPE_CHECKING:
    from hoptrace.reader import Trace

__all__ = ["connect", "query"]

_CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",
    "lock_configuration": "true",
    # What needs more (a sort of all tokens) goes to the disk.
    "memory_limit": "2GiB",
}
_WORD = re.compile(r"\w+")
# Words of queries that ask what there is.
_LISTING = {"show", "information_schema", "duckdb_tables", "duckdb_columns", "sqlite_master"}
_NO_TABLE = re.compile(r"Table with name (\S+) does not exist")


@cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder of this process alone, which goes with it: the one place that a query may write to, and DuckDB spills to."""
    return tempfile.TemporaryDirectory(prefix="hoptrace-sql-")


def connect(trace: Trace, names: Iterable[str] = ()) -> duckdb.DuckDBPyConnection:
    """An in-memory connection with the tables ``names`` of the trace, or all of the schema. Raises KeyError, InputError."""
    con = duckdb.connect(":memory:", config={**_CONFIG, "temp_directory": _scratch().name})
    try:
        for name in tuple(names) or TABLES:
            con.register(name, _source(trace, name))
    except BaseException:
        con.close()
        raise
    return con


def query(trace: Trace, text: str) -> pl.DataFrame:
    """Run one query. Sums of integers come back as integers (of 64 bits, else of 128), not as DuckDB's decimals; other
    decimals as floats."""
    words = {w.lower() for w in _WORD.findall(text)}
    names = [name for name in TABLES if name in words]
    with connect(trace, names or ("clock_sync",)) as con:
        try:
            if words & _LISTING:  # their names and columns, not their rows
                for name in TABLES:
                    if name not in (names or ("clock_sync",)):
                        con.register(name, table(name).arrow.empty_table())
            relation = con.sql(text)
            if relation is None:
                return pl.DataFrame()
            columns = relation.columns
            if repeated := sorted({name for name in columns if columns.count(name) > 1}):
                raise UsageError(
                    f"The result has several columns named {', '.join(repeated)}.",
                    hint="Name them apart with AS, or leave some out with EXCLUDE.",
                )
            return _plain(relation.to_arrow_table())
        except duckdb.Error as e:
            message = str(e).strip()
            if "arrow_scan" in message or "IOError" in message or "OSError" in message:
                raise InputError(
                    f"A file of {trace.path} is damaged ({message.splitlines()[0]}).", hint=f"Run: hoptrace validate {trace.path}"
                ) from None
            if missing := _NO_TABLE.search(message):
                near = difflib.get_close_matches(missing[1].lower(), TABLES, n=1)
                guess = f"Did you mean {near[0]}? " if near else ""
                raise UsageError(f"There is no table {missing[1]}.", hint=f"{guess}Tables: {', '.join(TABLES)}.") from None
            hint = None
            if isinstance(e, duckdb.OutOfMemoryException):
                hint = "Narrow it (fewer columns, a WHERE on request or time), or write the table with --csv and work on that."
            raise UsageError(message, hint=hint) from None


def _source(trace: Trace, name: str) -> pa.Table | ds.Dataset:
    frame = trace.table(name)  # also tells of a missing or damaged file, and follows a live writer
    paths = trace.files(name)
    if paths is not None:
        schemas = [pq.read_schema(p).remove_metadata() for p in paths]
        want = pa.unify_schemas([table(name).arrow, *schemas]) if _agree(schemas, table(name).arrow) else None
        if want is not None:
            return ds.dataset([str(p) for p in paths], format="parquet", schema=want)
    return frame.collect().to_arrow()


def _agree(schemas: list[pa.Schema], arrow: pa.Schema) -> bool:
    """Whether the files have the schema's types, so that they can be scanned as they are."""
    known: dict[str, pa.DataType] = {f.name: f.type for f in arrow}
    return all(known.setdefault(f.name, f.type) == f.type for schema in schemas for f in schema)


def _plain(data: pa.Table) -> pl.DataFrame:
    frame = pl.from_arrow(data)
    assert isinstance(frame, pl.DataFrame)
    changes: list[pl.Expr] = []
    for name, kind in frame.schema.items():
        if isinstance(kind, pl.Decimal):
            values = frame[name].drop_nulls().to_list() if kind.scale == 0 else []
            fits = all(-(1 << 63) <= int(v) < 1 << 63 for v in values)
            changes.append(pl.col(name).cast(pl.Float64 if kind.scale else pl.Int64 if fits else pl.Int128))
    return frame.with_columns(changes)
