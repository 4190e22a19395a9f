"""Closed Parquet parts: sorted, zstd, delta-encoded integers, dictionaries only for strings, written by temp + fsync + rename."""

from __future__ import annotations

import os
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from hoptrace.manifest import sync_folder
from hoptrace.schema import VERSION, Table

__all__ = ["conform", "merge_rows", "write_part"]

_ROW_GROUP = 131_072


def conform(data: pa.Table, table: Table) -> pa.Table:
    """``data`` with exactly the columns of ``table`` in order: missing ones null, types cast. Unknown columns are kept at the end."""
    columns: list[pa.ChunkedArray | pa.Array] = []
    names: list[str] = []
    for c in table.columns:
        names.append(c.name)
        if c.name in data.column_names:
            columns.append(data[c.name].cast(c.type))
        else:
            columns.append(pa.nulls(data.num_rows, c.type))
    for name in data.column_names:
        if name not in names:
            names.append(name)
            columns.append(data[name])
    return pa.table(columns, names=names)


def merge_rows(frame: pl.LazyFrame, table: Table) -> pl.LazyFrame:
    """One row per key: in each column the last value that is not null. Keeps the order of first appearance."""
    key = list(table.key)
    rest = [n for n in frame.collect_schema().names() if n not in key]
    return frame.group_by(key, maintain_order=True).agg(pl.col(n).drop_nulls().last() for n in rest).select([*key, *rest])


def write_part(path: Path, data: pa.Table, table: Table) -> int:
    """Write one closed part; returns its rows. The file appears whole or not at all. Raises OSError (a full disk)."""
    data = conform(data, table)
    if table.merge and data.num_rows:
        merged = merge_rows(pl.from_arrow(data).lazy(), table).collect()  # type: ignore[union-attr]
        data = merged.select(data.column_names).to_arrow().cast(data.schema)
    if table.sort and data.num_rows:
        data = data.sort_by([(name, "ascending") for name in table.sort])
    meta = {"hoptrace.schema": VERSION, "hoptrace.table": table.name}
    data = data.replace_schema_metadata(meta)
    strings = [f.name for f in data.schema if pa.types.is_string(f.type)]
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
            )
            f.flush()
            os.fsync(f.fileno())
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise
    os.replace(tmp, path)
    sync_folder(path.parent)
    return int(data.num_rows)
