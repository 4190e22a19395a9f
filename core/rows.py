"""Rows as a collector hands them over (mappings) to Arrow, exactly: what does not fit is counted, never bent.

* A float in an integer column is taken if it is a whole number below 2**53, else the value is lost (Arrow would cut 1.5 to 1).
* NaN is unknown and becomes null. Lone surrogates and bytes that are no UTF-8 become U+FFFD.
* A value that fits no way becomes null and is counted; in a required column it takes its row with it, and the row is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from hoptrace.schema import Column, Table

__all__ = ["Losses", "to_arrow"]

_EXACT = 1 << 53
_BAD = (pa.ArrowException, ValueError, TypeError, OverflowError)


@dataclass(slots=True)
class Losses:
    """What could not be stored, by ``table.column``."""

    rows: dict[str, int] = field(default_factory=dict)
    values: dict[str, int] = field(default_factory=dict)


def to_arrow(rows: Sequence[Mapping[str, Any]], spec: Table) -> tuple[pa.Table, Losses]:
    """``rows`` as an Arrow table with the columns of ``spec``; missing columns are null. Never raises for a value."""
    losses = Losses()
    arrays: list[pa.Array] = []
    gone: set[int] = set()
    for column in spec.columns:
        values = [row.get(column.name) for row in rows]
        try:
            arrays.append(_array(values, column))
        except _BAD:
            kept, bad = _one_by_one(values, column)
            arrays.append(_array(kept, column))
            if bad:
                what = f"{spec.name}.{column.name}: not {column.type}"
                if not column.required:
                    losses.values[what] = len(bad)
                elif lost := set(bad) - gone:
                    # A row is lost once, however many of its values are bad.
                    losses.rows[what] = len(lost)
                    gone |= lost
    data = pa.Table.from_arrays(arrays, schema=spec.arrow)
    if gone:
        data = data.filter(pa.array([i not in gone for i in range(len(rows))]))
    return data, losses


def _array(values: list[Any], column: Column) -> pa.Array:
    if pa.types.is_integer(column.type):
        if _has_floats(values):
            values = [_whole(v) for v in values]
    elif pa.types.is_list(column.type) and pa.types.is_integer(column.type.value_type):
        present = [v for v in values if v is not None]
        if _has_floats(chain.from_iterable(present)):
            values = [None if v is None else [_whole(x) for x in v] for v in values]
    # from_pandas: NaN reads as null.
    return pa.array(values, type=column.type, from_pandas=True)


def _has_floats(values: Any) -> bool:
    return any(issubclass(t, float | np.floating) for t in set(map(type, values)))


def _whole(value: Any) -> Any:
    if not isinstance(value, float | np.floating) or value != value:
        return value
    if not float(value).is_integer() or abs(float(value)) > _EXACT:
        raise ValueError("not a whole number")
    return int(value)


def _one_by_one(values: list[Any], column: Column) -> tuple[list[Any], list[int]]:
    """Each value as it is, mended, or null; and the indices of those that are lost."""
    kept: list[Any] = []
    bad: list[int] = []
    for i, value in enumerate(values):
        for candidate in (value, _mend(value)):
            try:
                _array([candidate], column)
            except _BAD:
                continue
            kept.append(candidate)
            break
        else:
            kept.append(None)
            bad.append(i)
    return kept, bad


def _mend(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, list | tuple):
        return [_mend(v) for v in value]
    return value
