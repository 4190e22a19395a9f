"""What a server's prefix cache will have found, where nobody tells: what a prompt has in common with an earlier one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from hoptrace.manifest import Server

if TYPE_CHECKING:
    from hoptrace.reader import Trace

__all__ = ["likely_cached"]


def likely_cached(trace: Trace, server: Server, units: pl.DataFrame) -> pl.Series | None:
    """By row of ``units`` (sequences of one server), the prompt tokens in whole engine blocks that begin like a prompt which had
    come before it: what a cache with room for all finds. Null where the prompt's blocks are not known; null as a whole where the
    server is not known to keep a pool of blocks, or tells of any request what it found.

    Blocks of characters are scaled by the prompt's tokens ÷ characters, and not rounded to the engine's blocks: what is equal
    beyond the last whole one is not known.
    """
    if server.prefix_caching is not True or server.engine == "llamacpp" or units["cached_tokens"].null_count() < units.height:
        return None
    rows = (
        trace.table("requests")
        .select("request", "prefix_blocks", "hash_space", "block_size", "block_unit", "prompt_chars", "prompt_tokens")
        .collect()
        .join(units.select("request", "available_ns").unique("request"), on="request")
        .sort("available_ns", "request", nulls_last=True)
    )
    size = server.block_size_tokens or 1
    known: set[tuple[str | None, int]] = set()
    found: dict[int, int] = {}
    for r in rows.iter_rows(named=True):
        blocks, prompt, each = r["prefix_blocks"], r["prompt_tokens"], r["block_size"]
        if blocks is None or not prompt or not each:
            continue
        keys = [(r["hash_space"], b) for b in blocks]
        equal = next((i for i, k in enumerate(keys) if k not in known), len(keys))
        known.update(keys)
        if r["block_unit"] == "tokens":
            found[r["request"]] = min(equal * each, prompt - 1) // size * size
        elif r["block_unit"] == "characters" and r["prompt_chars"]:
            found[r["request"]] = min(equal * each * prompt // r["prompt_chars"], prompt - 1)
    if not any(found.values()):
        return None
    return pl.Series("cached_tokens", [found.get(q) for q in units["request"].to_list()], dtype=pl.Int64)
