"""One vantage per request, so that no token is counted twice: engine, proxy and client may have seen the same emission."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

__all__ = ["PREFERENCE", "one_vantage", "vantages_of_part", "vantages_of_rows"]

# The times in `requests` are those that the proxy or the client saw (the engine's stand in columns of their own), and the proxy's
# clock is the trace's: so its tokens first, then those seen on the server's wire, then the client's.
PREFERENCE = ("proxy", "wire", "client", "engine")


def vantages_of_part(path: Path) -> set[str | None] | None:
    """The vantages in a Parquet part, told from its statistics alone; null if they do not tell."""
    meta = pq.read_metadata(path)
    at = meta.schema.to_arrow_schema().get_field_index("vantage")
    if at < 0:
        return {None}
    seen: set[str | None] = set()
    for i in range(meta.num_row_groups):
        stats = meta.row_group(i).column(at).statistics
        if stats is None or stats.null_count is None:
            return None
        if stats.null_count:
            seen.add(None)
        if stats.null_count < meta.row_group(i).num_rows:
            if not stats.has_min_max or stats.min != stats.max:
                return None
            seen.add(stats.min)
    return seen


def vantages_of_rows(data: pa.Table) -> set[str | None]:
    """The vantages in rows that are in memory."""
    return set(data["vantage"].unique().to_pylist())


def one_vantage(frame: pl.LazyFrame, seen: Iterable[set[str | None] | None]) -> pl.LazyFrame:
    """``frame`` with only the rows of each request's preferred vantage. ``seen``: what its pieces hold; null for unknown."""
    union: set[str | None] = set()
    for piece in seen:
        union |= {"?", "??"} if piece is None else piece
    if len(union) <= 1:
        return frame
    rank = pl.col("vantage").replace_strict(
        {v: i for i, v in enumerate(PREFERENCE)}, default=len(PREFERENCE), return_dtype=pl.Int64
    )
    return frame.filter(rank == rank.min().over("request"))
