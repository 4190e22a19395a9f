"""What is moved, reused and repeated per output token, as figures that a comparison compares.

Counted, derived and assumed figures have names of their own, and a sum of which some moves do not say their part is unknown: a
lower bound is nothing to compare.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl

from hoptrace.analysis.compare.diff_figure import Figure, per_token
from hoptrace.analysis.compare.diff_side import Side

__all__ = ["BASES", "MOVED", "TIERS", "ledger_figures", "reuse_figures", "reuse_of"]

BASES = ("counted", "derived", "assumed", "unstated")
MOVED = ("transfers", "bytes", "link_bytes", "payload_hops", "control_ops")
TIERS = ("device", "host", "peer", "pool", "disk")
_ASSUMED = ("payload_hops", "control_ops")

Rows = list[dict[str, Any]]


def ledger_figures(side: Side) -> Iterator[tuple[str, Figure]]:
    """Moves by basis, own memory by object, ways, nodes, links, amplification."""
    moved = side.ledger
    tokens = moved.output_tokens or None
    rows = moved.rows.to_dicts()
    inside = [r for r in rows if _own_memory(r)]
    outside = [r for r in rows if not _own_memory(r)]
    yield from _by_basis(side, outside, tokens)
    for object_, name in (("weights", "weight_bytes"), ("kv", "kv_bytes"), (None, "memory_bytes")):
        for basis in _bases(inside):
            mine = [r for r in inside if r["basis"] == basis and object_ in (None, r["object"])]
            value = per_token(_whole(mine, "bytes"), tokens) if moved.cover.whole else None
            if mine:
                yield f"{name}_per_token.{basis}", Figure(value, "bytes", "ledger", None, basis)
    ways: dict[tuple[str, str], Rows] = {}
    for r in [*outside, *(inside if moved.cover.whole else [])]:
        way = f"{r['object']} {r['src']} → {r['dst']} {r['mechanism'] or '?'} {r['basis']}"
        ways.setdefault((way, r["basis"]), []).append(r)
    for (way, basis), mine in ways.items():
        yield f"bytes_per_token[{way}]", Figure(per_token(_whole(mine, "bytes"), tokens), "bytes", "ledger", None, basis)
    yield from _nodes(outside, tokens)
    yield from _links(side, outside, tokens)
    for x in moved.amplification:
        yield (
            f"amplification.{x.object}.{x.moved_basis}",
            Figure(None if x.at_least else x.factor, "1", "ledger", None, x.weakest),
        )


def _by_basis(side: Side, rows: Rows, tokens: int | None) -> Iterator[tuple[str, Figure]]:
    for basis in _bases(rows):
        mine = [r for r in rows if r["basis"] == basis]
        for what in MOVED:
            value = per_token(_whole(mine, what), tokens)
            if what in _ASSUMED and basis == "assumed":
                continue
            yield f"{what}_per_token.{basis}", Figure(value, "bytes" if "bytes" in what else "1", "ledger", None, basis)
        for what, name in (("bytes", "kv_moved_bytes"), ("transfers", "kv_transfers")):
            kv = [r for r in mine if r["object"] == "kv"]
            value = per_token(_whole(kv, what), tokens) if kv else 0.0 if tokens and _no_kv_moves(side) else None
            yield f"{name}_per_token.{basis}", Figure(value, "bytes" if "bytes" in what else "1", "ledger", None, basis)
    # Hops and operations that moves do not say: of their mechanism's access path. A move that is assumed as a whole counts
    # here too.
    for what in _ASSUMED:
        found = [r[f"{what}_assumed"] for r in rows if r[f"{what}_assumed"] is not None]
        found += [r[what] for r in rows if r["basis"] == "assumed" and r[what] is not None]
        if found:
            yield f"{what}_per_token.assumed", Figure(per_token(float(sum(found)), tokens), "1", "ledger", None, "assumed")


def _nodes(rows: Rows, tokens: int | None) -> Iterator[tuple[str, Figure]]:
    """Bytes per output token that leave or reach each node: what its ports carry."""
    keys = sorted({(str(node), r["basis"]) for r in rows for node in (r["src"], r["dst"]) if node is not None})
    for node, basis in keys:
        mine = [r for r in rows if r["basis"] == basis and node in (r["src"], r["dst"])]
        value = per_token(_whole(mine, "bytes"), tokens)
        yield f"bytes_per_token[node {node} {basis}]", Figure(value, "bytes", "ledger", None, basis)


def _links(side: Side, rows: Rows, tokens: int | None) -> Iterator[tuple[str, Figure]]:
    """Bytes per output token on each link, of moves with a path; and bytes × latency, where every move has a path and every
    link of it a latency."""
    links = side.ledger.links.to_dicts()
    partly = {str(r["basis"]) for r in rows if r["partly"]}
    for name, basis in sorted({(str(r["link"]), str(r["basis"])) for r in links}):
        mine = [r for r in links if (r["link"], r["basis"]) == (name, basis)]
        value = None if basis in partly else per_token(_whole(mine, "bytes"), tokens)
        yield f"bytes_per_token[link {name} {basis}]", Figure(value, "bytes", "ledger", None, basis)
    for basis in _bases(links):
        mine = [r for r in links if r["basis"] == basis]
        latency = [None if (k := side.graph.links.get(str(r["link"]))) is None else k.latency_ns for r in mine]
        if (
            basis in partly
            or None in latency
            or any(r["path"] is None for r in rows if r["basis"] == basis)
            or _whole(mine, "bytes") is None
        ):
            continue
        total = sum(r["bytes"] * (ns or 0.0) for r, ns in zip(mine, latency, strict=True))
        yield f"byte_latency_per_token.{basis}", Figure(per_token(total, tokens), "ns·bytes", "ledger", None, basis)


def reuse_of(side: Side) -> Iterator[tuple[str, Figure]]:
    """Of finished requests only: of one that was broken off, nobody knows how much of its prompt was computed."""
    yield from reuse_figures(side.reuse)
    answers = float(side.reuse["sequences"].sum())
    yield "stays_per_answer", Figure(per_token(float(side.servers["answers"].sum()), answers), "1", "ledger", None, "counted")
    basis = "derived" if side.steps.origin == "reconstructed" else "counted"
    yield "decode_tokens_per_step", Figure(side.decode_tokens_per_step, "1", "ledger", None, basis)


def reuse_figures(rows: pl.DataFrame) -> Iterator[tuple[str, Figure]]:
    """``rows``: of :attr:`hoptrace.analysis.compare.diff_side.Side.reuse`."""
    prompt, output = _sum(rows["prompt"]), _sum(rows["output"]) if rows["output"].null_count() == 0 else None
    cached = _sum(rows["cached"])
    yield "cached_share", Figure(per_token(cached, prompt), "share", "ledger", None, "counted")
    for tier in TIERS:
        if (n := _sum(rows[tier])) is not None:
            yield f"cached_share.{tier}", Figure(per_token(n, prompt), "share", "ledger", None, "counted")
    computed = None if prompt is None or cached is None else prompt - cached
    yield "computed_prompt_tokens_per_token", Figure(per_token(computed, output), "1", "ledger", None, "counted")
    for name in ("recomputed", "resumed"):
        yield f"{name}_tokens_per_token", Figure(per_token(_sum(rows[name]), output), "1", "ledger", None, "counted")


def _sum(column: pl.Series) -> float | None:
    """Σ of what is known; null where nothing is."""
    return float(column.sum()) if column.count() else None


def _own_memory(row: dict[str, Any]) -> bool:
    """What compute reads and writes of its own memory. (KV that is copied from one memory to another is a move like any
    other.)"""
    ends = str(row["src"]).partition(":")[0], str(row["dst"]).partition(":")[0]
    return set(ends) == {"memory", "compute"}


def _bases(rows: Rows) -> list[str]:
    return sorted({str(r["basis"]) for r in rows})


def _no_kv_moves(side: Side) -> bool:
    """Whether a trace without moves of KV had none: someone says that every move was recorded; or each answer was made by one
    server from first to last, and nothing tells of another tier."""
    moves = (pl.col("table") == "moves") & (pl.col("fraction") >= 1)
    if side.trace.table("coverage").filter(moves).select(pl.len()).collect().item():
        return True
    answers = float(side.reuse["sequences"].sum())
    if not answers or float(side.servers["answers"].sum()) != answers:
        return False
    return not any(side.reuse[t].sum() for t in TIERS if t != "device")


def _whole(rows: Rows, what: str) -> float | None:
    """Sum over rows; null where some of their moves do not say theirs."""
    values = [r[what] for r in rows]
    if not rows or None in values or any(_untold(r, what) for r in rows):
        return None
    return float(sum(values))


def _untold(row: dict[str, Any], what: str) -> bool:
    if row.get("partly"):
        return True
    if "bytes" in what:
        return bool(row["bytes_unknown"])
    if row.get(f"{what}_unknown"):
        return True
    return what in _ASSUMED and bool(row[f"{what}_assumed"])
