"""Hypothesis strategies for rows of the schema, and rows as plain Python for comparing."""

from __future__ import annotations

import math
from typing import Any

import polars as pl
import pyarrow as pa
from hypothesis import strategies as st

from hoptrace.schema import Column, Table

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(max_size=8)


def values_of(column: Column) -> st.SearchStrategy[Any]:
    """Values that the column can hold, null included."""
    kind = column.type
    if column.values:
        some: st.SearchStrategy[Any] = st.sampled_from(column.values)
    elif pa.types.is_int64(kind):
        some = INT64
    elif pa.types.is_float64(kind):
        some = st.floats(allow_nan=True)
    elif pa.types.is_boolean(kind):
        some = st.booleans()
    elif pa.types.is_list(kind):
        some = st.lists(INT64 if pa.types.is_int64(kind.value_type) else TEXT, max_size=3)
    else:
        assert pa.types.is_string(kind)
        some = TEXT
    return st.none() | some


def rows_of(table: Table, keys: int | None = None) -> st.SearchStrategy[dict[str, Any]]:
    """Rows with any of the columns. With ``keys`` each key column has only so many values (null among them, where it may be)."""
    columns = {c.name: values_of(c) for c in table.columns}
    if keys is not None:
        columns |= {k: st.sampled_from(_few(table.column(k), keys)) for k in table.key}
    return st.fixed_dictionaries({k: columns.pop(k) for k in table.key if keys is not None}, optional=columns)


def _few(column: Column, most: int) -> list[Any]:
    some: list[Any] = list(range(most)) if pa.types.is_integer(column.type) else [str(i) for i in range(most)]
    return some if column.required else [None, *some[1:]]


def plain(table: Table, row: dict[str, Any]) -> dict[str, Any]:
    """The row as it should come back: every column, NaN null."""
    full = {name: row.get(name) for name in table.names}
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in full.items()}


def stored(frame: pl.LazyFrame) -> list[dict[str, Any]]:
    """What a table holds, in its order."""
    return frame.collect().to_dicts()


def in_any_order(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(repr(sorted(r.items())) for r in rows)
