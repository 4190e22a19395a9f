"""Closed Parquet parts: sorted, zstd, delta-encoded integers, dictionaries only for strings, written by temp + fsync + rename."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hoptrace.manifest import sync_folder
from hoptrace.schema import VERSION, Table

__all__ = ["checksum", "conform", "key_range", "merge_rows", "write_part"]

_ROW_GROUP = 131_072


def conform(data: pa.Table, table: Table) -> pa.Table:
    """``data`` with the columns of ``table`` in order: missing ones null, types cast, NaN null. Unknown columns stay at the end.

    Raises ArrowInvalid (a ValueError) for a value that the column's type cannot hold exactly.
    """
    columns: list[pa.ChunkedArray | pa.Array] = []
    names: list[str] = []
    for c in table.columns:
        names.append(c.name)
        if c.name not in data.column_names:
            columns.append(pa.nulls(data.num_rows, c.type))
            continue
        column = data[c.name]
        if pa.types.is_floating(column.type):
            # NaN is unknown, and unknown is null.
            column = pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)
        columns.append(column.cast(c.type))
    for name in data.column_names:
        if name not in names:
            names.append(name)
            columns.append(data[name])
    return pa.table(columns, names=names)


def merge_rows(frame: pl.LazyFrame, table: Table) -> pl.LazyFrame:
    """One row per key: in each column the last value that is not null. Keeps the order of first appearance."""
    key = list(table.key)
    names = frame.collect_schema().names()
    rest = [n for n in names if n not in key]
    return frame.group_by(key, maintain_order=True).agg(pl.col(n).drop_nulls().last() for n in rest).select(names)


def write_part(path: Path, data: pa.Table, table: Table) -> int:
    """Write one closed part, rows merged where the table merges; returns its rows.

    The file appears whole or not at all. Raises OSError (a full disk).
    """
    data = conform(data, table)
    # Importers and replays hand over rows that are one per key and in its order already: tens of columns need no grouping then.
    ready = _in_order(data, table)
    if table.merge and data.num_rows and not ready:
        merged = merge_rows(pl.from_arrow(data).lazy(), table).collect()  # type: ignore[union-attr]
        data = merged.to_arrow().cast(data.schema)
    if table.sort and data.num_rows and not ready:
        # Arrow's sort is stable: equal keys stay as they were handed over, so the same input gives the same file.
        data = data.sort_by([(name, "ascending") for name in table.sort])
    data = data.replace_schema_metadata({"hoptrace.schema": VERSION, "hoptrace.table": table.name})
    strings = [_leaf(f) for f in data.schema if _is_text(f.type)]
    ints = {f.name: "DELTA_BINARY_PACKED" for f in data.schema if pa.types.is_integer(f.type)}
    tmp = path.with_name(path.name + ".tmp")
    try:
        with tmp.open("wb") as f:
            pq.write_table(
                data,
                f,
                compression="zstd",
                compression_level=3,
                use_dictionary=strings or False,
                column_encoding=ints or None,
                row_group_size=_ROW_GROUP,
                write_page_checksum=True,
            )
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return int(data.num_rows)


def key_range(data: pa.Table, table: Table) -> tuple[int, int] | None:
    """Least and greatest key of a table that merges by one number; null for others, and where a key is null."""
    if not table.merge or len(table.key) != 1 or not data.num_rows:
        return None
    key = data[table.key[0]]
    if not pa.types.is_integer(key.type) or key.null_count:
        return None
    found = pc.min_max(key)
    return found["min"].as_py(), found["max"].as_py()


def _in_order(data: pa.Table, table: Table) -> bool:
    """Whether the rows are in the order of their sort columns, and of a table that merges, one per key. Looked at, since a look
    costs a tenth of a sort; false also where text differs or a number is null."""
    # (Not through NumPy: Arrow would import pandas for it.)
    equal: pa.ChunkedArray | None = None
    for name in table.sort if data.num_rows > 1 else ():
        key = data[name]
        if key.null_count:
            return False
        if pa.types.is_string(key.type):
            if not pc.all(pc.equal(key, key[0])).as_py():
                return False
            continue
        before, after = key.slice(0, len(key) - 1), key.slice(1)
        rises, same = pc.less(before, after), pc.equal(before, after)
        if equal is not None:
            rises, same = pc.or_(pc.invert(equal), rises), pc.and_(equal, same)
        if not pc.all(pc.or_(rises, same)).as_py():
            return False
        equal = same
    if not table.merge or data.num_rows < 2:
        return True
    return set(table.sort) <= set(table.key) and equal is not None and not pc.any(equal).as_py()


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    crc = 0
    with path.open("rb") as f:
        while chunk := f.read(1 << 20):
            crc = zlib.crc32(chunk, crc)
    return crc


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or (pa.types.is_list(kind) and pa.types.is_string(kind.value_type)))


def _leaf(column: pa.Field) -> str:
    """A column's name as Parquet has it."""
    return f"{column.name}.list.element" if pa.types.is_list(column.type) else str(column.name)
