"""What could have been re-used: hits of one cache that all servers share, from the block hashes of the prompts, without a limit
and as a curve over its capacity. Counted hashes, an assumed cache: no server had it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from hoptrace.analysis.moves.ledger_lru import Batch, lru_hits
from hoptrace.analysis.query import query
from hoptrace.analysis.term import sql_of
from hoptrace.errors import InputError
from hoptrace.reader import Trace

__all__ = ["CAPACITIES", "Point", "Reusable", "reusable"]

CAPACITIES = (1_000, 10_000, 30_000, 100_000, 300_000)
"""Capacities of the curve in blocks; those that hold all there is are left out."""

_BATCH = 2_000  # requests
_ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Point:
    """Hits of a cache of ``capacity_blocks`` (null: without a limit); token figures over the requests whose sizes are known."""

    capacity_blocks: int | None
    blocks: int
    hit_blocks: int
    prompt_tokens: int | None
    hit_tokens: int | None

    @property
    def block_share(self) -> float:
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    @property
    def token_share(self) -> float | None:
        return None if not self.prompt_tokens or self.hit_tokens is None else self.hit_tokens / self.prompt_tokens

    def as_dict(self) -> dict[str, Any]:
        share = self.token_share
        return {f: getattr(self, f) for f in self.__slots__} | {
            "block_share": round(self.block_share, 6),
            "token_share": None if share is None else round(share, 6),
        }


@dataclass(frozen=True, slots=True)
class Reusable:
    """``unlimited`` and the ``curve`` below it (ascending capacities), of ``requests`` requests with ``distinct_blocks``
    different blocks in ``spaces`` spaces (hash space, model, adapter, block size) that cannot share. ``mean_ratio``: mean over
    requests of their hit share. ``block_sizes``: as recorded, e.g. "512 tokens"."""

    unlimited: Point
    curve: list[Point]
    requests: int
    distinct_blocks: int
    spaces: int
    mean_ratio: float | None
    block_sizes: list[str]

    def points(self) -> pl.DataFrame:
        """capacity_blocks, block_share, token_share, ascending; last the cache without a limit, as large as all blocks."""
        rows = [(p.capacity_blocks, p.block_share, p.token_share) for p in self.curve]
        rows.append((self.distinct_blocks, self.unlimited.block_share, self.unlimited.token_share))
        schema = {"capacity_blocks": pl.Int64, "block_share": pl.Float64, "token_share": pl.Float64}
        return pl.DataFrame(rows, schema=schema, orient="row")

    def as_dict(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "distinct_blocks": self.distinct_blocks,
            "spaces": self.spaces,
            "block_sizes": self.block_sizes,
            "unlimited": self.unlimited.as_dict(),
            "mean_block_share": None if self.mean_ratio is None else round(self.mean_ratio, 6),
            "lru": [p.as_dict() for p in self.curve],
            "basis": "assumed",
        }


def reusable(trace: Trace, capacities: Sequence[int] = CAPACITIES) -> Reusable | None:
    """Of any trace whose requests have ``prefix_blocks``; else null. Raises InputError if a table is damaged."""
    rows = query(trace, "ledger_reusable").to_dicts()
    if not rows:
        return None
    requests, distinct = sum(r["requests"] for r in rows), sum(r["distinct_blocks"] for r in rows)
    told = [r for r in rows if r["prompt_tokens"]]
    unlimited = Point(
        None,
        sum(r["blocks"] for r in rows),
        sum(r["hit_blocks"] for r in rows),
        sum(r["prompt_tokens"] for r in told) if told else None,
        sum(r["hit_tokens"] for r in told) if told else None,
    )
    wanted = sorted({c for c in capacities if 0 < c < distinct})
    curve = [
        Point(x["capacity_blocks"], x["blocks"], x["hit_blocks"], x["prompt_tokens"] or None, x["hit_tokens"])
        for x in (lru_hits(_batches(trace), wanted) if wanted and unlimited.hit_blocks else [])
    ]
    sizes = sorted({(r["block_size"], r["block_unit"]) for r in rows if r["block_size"] is not None})
    ratio = sum(r["mean_ratio"] * r["requests"] for r in rows) / requests
    return Reusable(unlimited, curve, requests, distinct, len(rows), ratio, [f"{n:,} {unit}" for n, unit in sizes])


def _batches(trace: Trace) -> Iterator[Batch]:
    with trace.duckdb("requests") as con:
        try:
            reader: pa.RecordBatchReader = con.sql(sql_of("ledger_blocks_in_order")).to_arrow_reader(_BATCH)
            for batch in reader:
                yield _batch(batch)
        except (pa.ArrowException, OSError) as e:
            raise InputError(f"A file of {trace.path} is damaged ({str(e).splitlines()[0]}).") from None


def _batch(batch: pa.RecordBatch) -> Batch:
    lists = batch.column("prefix_blocks")
    keys = pc.fill_null(lists.flatten(), 0).to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    counts = np.diff(lists.offsets.to_numpy(zero_copy_only=False)).astype(np.int64)
    kin = np.repeat(batch.column("kin").to_numpy(zero_copy_only=False).astype(np.uint64), counts)
    # Blocks of other kin are other blocks: an odd multiple per kin keeps equal keys of one kin equal, and others apart.
    mixed = (keys.view(np.uint64) ^ ((kin - np.uint64(1)) * _ODD)).view(np.int64)
    block = batch.column("block_tokens").to_numpy(zero_copy_only=False).astype(np.float64)
    tokens = batch.column("prompt_tokens").to_numpy(zero_copy_only=False).astype(np.int64)
    return Batch(np.ascontiguousarray(mixed), np.cumsum(counts), tokens, block)
