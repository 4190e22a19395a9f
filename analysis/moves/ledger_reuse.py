"""Re-use: which prompt tokens a cache gave, by the tier that gave them; over what window an engine's own hit rate is; and how
many bytes were moved for each byte that a hit served.

Own tokens found again after a preemption (resumed) are no re-use: an engine that counts them shows a hit rate that no other
request can have.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import polars as pl

from hoptrace.analysis.counters import counter_totals
from hoptrace.analysis.moves.ledger_resident import Resident
from hoptrace.analysis.query import query, query_with
from hoptrace.kv import geometry
from hoptrace.platform import graph_of
from hoptrace.reader import Trace

__all__ = ["TIERS", "EngineRate", "Reuse", "Upkeep", "engine_rates", "reuse", "upkeep"]

TIERS = ("device", "host", "peer", "pool", "disk")
# Kinds of nodes that keep KV outside the device that computes with it.
_TIER_KINDS = ("dram", "host", "cxl", "nvme", "disk", "pool", "peer", "file")
# The node that vLLM's plug-in names for what an offloading connector keeps.
_OFFLOAD = "/offload"
# Hits and look-ups as engines count them, by the name without its labels: what they count, and over which window.
_COUNTED = (
    ("vllm:prefix_cache", "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total",
     "tokens, over the recording (increase of a counter); first look-ups only, not those after a preemption"),
    ("vllm:external_prefix_cache", "vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_queries_total",
     "tokens asked of the KV connector, over the recording"),
    ("plugin:prefix_cache", "plugin:prefix_cache_hits", "plugin:prefix_cache_queries", "tokens, over the recording, by step"),
    ("plugin:prefix_cache_preempted", "plugin:prefix_cache_preempted_hits", "plugin:prefix_cache_preempted_queries",
     "tokens that preempted requests looked up again, over the recording: resumption, no re-use"),
)  # fmt: skip
_GAUGES = (
    ("log:prefix_cache_hit_rate", "weighted by tokens, over the engine's last 1,000 requests, as its last line says (vLLM)"),
    ("sglang:cache_hit_rate", "of the last prefill batch before the last scrape (SGLang)"),
    ("vllm:gpu_prefix_cache_hit_rate", "over the engine's last 1,000 look-ups (vLLM 0)"),
)


@dataclass(frozen=True, slots=True)
class Reuse:
    """Prompt tokens by where they came from, over stays that say so; null is unknown. ``cached_tokens`` counts every tier.

    ``handed_over_tokens``: KV that decode servers got from those that computed it: no look-up, in none of the others.
    ``resumed_tokens``: own tokens found again after a preemption, in none of the others. ``recomputed_tokens``: computed again.
    ``impossible`` stays say that more came from caches than their prompt has: left out; so are ``unsure`` stays, of requests with
    several sequences whose own prompts nobody tells. The rate is over ``stays`` stays that
    began work between ``from_ns`` and ``to_ns``, weighted by tokens; ``hit_share`` counts stays instead: those with any cached
    token.
    """

    prompt_tokens: int | None
    cached_tokens: int | None
    by_tier: dict[str, int | None]
    resumed_tokens: int | None
    recomputed_tokens: int | None
    impossible: int = 0
    unsure: int = 0
    stays: int = 0
    stays_with_a_hit: int = 0
    from_ns: int | None = None
    to_ns: int | None = None
    handed_over_tokens: int | None = None

    @property
    def share(self) -> float | None:
        """Cached ÷ prompt tokens."""
        if self.cached_tokens is None or not self.prompt_tokens:
            return None
        return self.cached_tokens / self.prompt_tokens

    @property
    def share_with_resumption(self) -> float | None:
        """What a rate shows that takes resumption for re-use: (cached + resumed) ÷ (prompt + resumed + recomputed), all that a
        preempted request looks up again being in it; null without resumption."""
        if self.cached_tokens is None or not self.prompt_tokens or not self.resumed_tokens:
            return None
        again = self.resumed_tokens + (self.recomputed_tokens or 0)
        return (self.cached_tokens + self.resumed_tokens) / (self.prompt_tokens + again)

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "share": _rounded(self.share),
            "by_tier": self.by_tier,
            "handed_over_tokens": self.handed_over_tokens,
            "resumed_tokens": self.resumed_tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "share_with_resumption": _rounded(self.share_with_resumption),
            "stays": self.stays,
            "stays_with_a_hit": self.stays_with_a_hit,
            "from_ns": self.from_ns,
            "to_ns": self.to_ns,
            "impossible_stays": self.impossible,
            "unsure_stays": self.unsure,
        }


@dataclass(frozen=True, slots=True)
class EngineRate:
    """A hit rate as the engine itself tells it. ``window`` says what it is over; two rates of unequal windows may both be
    right."""

    server: str
    name: str
    share: float | None
    hits: float | None
    queries: float | None
    window: str

    def as_dict(self) -> dict[str, Any]:
        return {f: getattr(self, f) for f in self.__slots__} | {"share": _rounded(self.share)}


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What keeping the cache moved. ``moved_bytes``: KV between tiers, from moves (else from the blocks' copies: ``moved_from``).
    ``served_bytes``: KV of the tokens that hits gave (derived: tokens × bytes of a token). ``by_medium``: stored, copied in,
    evicted and hit bytes of each medium, as its events say. ``at_least``: further moves between tiers do not say their bytes, or
    have another basis, and are not in it. Null is unknown, with the reason in ``unseen``."""

    moved_bytes: int | None
    moved_basis: str | None
    moved_from: str | None
    served_bytes: int | None
    stored_bytes: int | None
    by_medium: dict[str, dict[str, int | None]] = field(default_factory=dict)
    unseen: list[str] = field(default_factory=list)
    at_least: bool = False

    @property
    def moved_per_byte_served(self) -> float | None:
        return None if self.moved_bytes is None or not self.served_bytes else self.moved_bytes / self.served_bytes

    @property
    def stored_per_byte_served(self) -> float | None:
        return None if self.stored_bytes is None or not self.served_bytes else self.stored_bytes / self.served_bytes

    def as_dict(self) -> dict[str, Any]:
        return {
            "moved_bytes": self.moved_bytes,
            "moved_basis": self.moved_basis,
            "moved_from": self.moved_from,
            "at_least": self.at_least,
            "served_bytes": self.served_bytes,
            "stored_bytes": self.stored_bytes,
            "moved_per_byte_served": _rounded(self.moved_per_byte_served),
            "stored_per_byte_served": _rounded(self.stored_per_byte_served),
            "by_medium": self.by_medium,
        }


def _rounded(x: float | None) -> float | None:
    return None if x is None else round(x, 6)


def reuse(rows: pl.DataFrame) -> Reuse:
    """From the rows of ``analysis/sql/ledger_reuse.sql``: one a server."""

    def total(column: str) -> int | None:
        values = rows[column].drop_nulls()
        return int(values.sum()) if values.len() else None

    def bound(column: str, least: bool) -> int | None:
        values = rows[column].drop_nulls().to_list()
        return None if not values else int(min(values) if least else max(values))

    known = rows.height > 0 and not int(rows["prompt_unknown"].sum())
    return Reuse(
        prompt_tokens=total("prompt_tokens") if known else None,
        cached_tokens=total("cached_tokens"),
        by_tier={t: total(t) for t in TIERS},
        resumed_tokens=total("resumed_tokens"),
        recomputed_tokens=total("recomputed_tokens"),
        impossible=total("impossible") or 0,
        unsure=total("unsure") or 0,
        stays=total("stays") or 0,
        stays_with_a_hit=total("stays_with_a_hit") or 0,
        from_ns=bound("from_ns", least=True),
        to_ns=bound("to_ns", least=False),
        handed_over_tokens=total("handed_over"),
    )


def engine_rates(trace: Trace) -> list[EngineRate]:
    """The hit rates that the engines tell of themselves, each with the window that it is over."""
    names = [n for _, hits, queries, _ in _COUNTED for n in (hits, queries)] + [n for n, _ in _GAUGES]
    told = query_with(trace, "ledger_engine_rates", {"named": pl.DataFrame({"name": names})})
    if not told.height:
        return []
    totals = counter_totals(trace, told["full_name"].unique().to_list()).join(
        told.rename({"full_name": "name", "name": "plain"}), on=["entity", "name"]
    )
    out: list[EngineRate] = []
    for entity in totals["entity"].unique().sort():
        mine = totals.filter(pl.col("entity") == entity)
        server = str(entity).removeprefix("server:")
        seen: set[tuple[float, float]] = set()
        for name, hits, queries, window in _COUNTED:
            q = _summed(mine, queries)
            # A counter of hits that never moved has one sample and no increase; one that nobody recorded is unknown.
            h = _summed(mine, hits) or (0.0 if (mine["plain"] == hits).any() else None)
            # The same figure told twice (metrics page and plug-in) is one.
            if q and h is not None and (h, q) not in seen:
                seen.add((h, q))
                out.append(EngineRate(server, name, h / q, h, q, window))
        for name, window in _GAUGES:
            last = mine.filter((pl.col("plain") == name) & (pl.col("semantics") == "gauge"))["last"].drop_nulls()
            if last.len():
                out.append(EngineRate(server, name, float(last[-1]), None, None, window))
    return out


def _summed(totals: pl.DataFrame, name: str) -> float | None:
    values = totals.filter(pl.col("plain") == name)["total"].drop_nulls()
    return float(values.sum()) if values.len() else None


def upkeep(trace: Trace, by_server: pl.DataFrame, blocks: list[Resident]) -> Upkeep:
    """``by_server``: the rows of ``analysis/sql/ledger_reuse.sql``; ``blocks``: law 2 of the KV blocks."""
    unseen: list[str] = []
    served: int | None = 0
    for name, tokens in by_server.select("server", "cached_tokens").iter_rows():
        if not tokens:
            continue
        server = trace.manifest.server(name or None)
        shape = geometry(server) if server is not None else None
        if shape is None:
            served = None
            unseen.append(f"{name or 'A server'}: the bytes of a token's KV are unknown, and so what its cache hits served.")
        elif served is not None:
            served += tokens * shape.bytes_per_token
    if not by_server.height or by_server["cached_tokens"].null_count() == by_server.height:
        served = None
    by_medium: dict[str, dict[str, int | None]] = {}
    for b in blocks:
        one = by_medium.setdefault(b.medium, dict.fromkeys(("stored", "copied_in", "evicted", "hit")))
        for key, value in (
            ("stored", b.produced_bytes), ("copied_in", b.copied_in_bytes), ("evicted", b.evicted_bytes), ("hit", b.hit_bytes),
        ):  # fmt: skip
            if value is not None:
                one[key] = (one[key] or 0) + value
    stored = [m["stored"] for m in by_medium.values() if m["stored"] is not None]
    moved, basis, where, partly = _moved(trace, blocks)
    if moved is None:
        unseen.append(
            "No move of KV between tiers and no event of KV blocks says its bytes: what the cache's upkeep moved is unknown."
        )
    return Upkeep(moved, basis, where, served, sum(stored) if stored else None, by_medium, unseen, partly)


def _moved(trace: Trace, blocks: list[Resident]) -> tuple[int | None, str | None, str | None, bool]:
    """Bytes, their basis, what tells them, and whether they are a lower bound."""
    nodes = graph_of(trace.manifest).nodes

    def tier(name: str) -> bool:
        node = nodes.get(name)
        kind = node.kind if node is not None and node.kind is not None else name.split(":", 1)[0]
        return kind in _TIER_KINDS or name.endswith(_OFFLOAD)

    between = [r for r in query(trace, "ledger_tier_moves").iter_rows(named=True) if tier(r["src"]) or tier(r["dst"])]
    for basis in ("counted", "derived"):
        mine = [r for r in between if r["basis"] == basis]
        known = [r["bytes"] for r in mine if r["bytes"] is not None]
        if known:
            return sum(known), basis, "moves", len(mine) < len(between) or any(r["bytes_unknown"] for r in mine)
    if not blocks or between:
        return None, None, None, False
    # What is stored outside the device's memory had been computed on it, so it was carried there, seen or not.
    carried = [(b.copied_in_blocks, b.copied_in_bytes) for b in blocks]
    carried += [(b.produced_blocks, b.produced_bytes) for b in blocks if b.medium not in ("device", "unstated")]
    if any(size is None for n, size in carried if n):
        return None, None, None, False
    return sum(size or 0 for n, size in carried if n), "derived", "blocks", False
