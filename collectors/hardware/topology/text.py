"""The platform graph in words: a table of nodes and one of links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["graph_text"]


def graph_text(graph: Mapping[str, Any]) -> str:
    """Columns apart by two blanks, what is not known left empty; groups of coherent nodes below."""
    nodes, links = list(graph.get("nodes", [])), list(graph.get("links", []))
    if not nodes:
        return "  nothing is told of this machine"
    parts = [_table(("node", "kind", "size", "NUMA", "what"), [_node(n) for n in nodes])]
    if links:
        rows = [_link(k) for k in links]
        parts.append(_table(("link", "kind", "ends", "rate", "latency", "PCIe", "counted by"), rows))
    for group in graph.get("coherent", []):
        parts.append(f"  coherent: {', '.join(group)}")
    return "\n".join(parts)


def _node(n: Mapping[str, Any]) -> Sequence[str]:
    told = [n.get("model"), f"{n['cores']} CPUs" if n.get("cores") else None, n.get("bdf"), n.get("device")]
    told += [f"tier {n['tier']}" if n.get("tier") is not None else None]
    told += [f"weight {n['interleave_weight']}" if n.get("interleave_weight") is not None else None]
    numa = "" if n.get("numa") is None else str(n["numa"])
    return n["name"], n.get("kind", ""), _size(n.get("capacity_bytes")), numa, ", ".join(t for t in told if t)


def _link(k: Mapping[str, Any]) -> Sequence[str]:
    read, write = k.get("read_bytes_per_s"), k.get("write_bytes_per_s")
    rate = f"{_rate(read)} read, {_rate(write)} written" if read and write and read != write else _rate(k.get("bytes_per_s"))
    latency = "" if k.get("latency_ns") is None else f"{k['latency_ns']:g} ns"
    pcie = f"Gen{k['generation']} x{k['width']}" if k.get("generation") and k.get("width") else k.get("crosses", "")
    if k.get("kind") == "nvlink" and k.get("width") and not k.get("generation"):
        pcie = f"{k['width']} links"
    return k["name"], k.get("kind", ""), f"{k.get('a')} → {k.get('b')}", rate, latency, pcie, k.get("entity", "")


def _rate(value: float | None) -> str:
    return "" if not value else f"{value / 1e9:,.4g} GB/s"


def _size(value: int | None) -> str:
    if not value:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value = value / 1024  # type: ignore[assignment]
    return f"{value:.4g} TiB"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    kept = [i for i, _ in enumerate(head) if any(r[i] for r in rows)]
    lines = [[head[i] for i in kept], *([r[i] for i in kept] for r in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(kept))]
    return "\n".join("  " + "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)
