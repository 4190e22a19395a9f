"""What the kernel moved between memory nodes by itself (promotion, demotion). It stands beside the moves and is never one of
them: whose pages they were, and between which two nodes each went, the kernel does not count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from hoptrace.analysis.query import query
from hoptrace.analysis.text import bytes_text, counted
from hoptrace.reader import Trace

__all__ = ["TierPages", "switched_off", "tier_pages", "tier_says"]

_PAGE = 4096
_SWITCHES = {"demotion_enabled": ("demotion", 1), "numa_balancing": ("promotion", 2)}
"""Gauge of entity `memory` → what it lets the kernel do, and the bit that does (sysfs-kernel-mm-numa;
admin-guide/sysctl/kernel.rst, NUMA_BALANCING_MEMORY_TIERING)."""


@dataclass(frozen=True, slots=True)
class TierPages:
    """``direction``: in (promoted to the node, which counts them) or out (demoted from it). ``page_basis``: counted, where the
    page size was recorded, else assumed (4 KiB). ``nodes_pages``: of the machine's own count, what the nodes' counters saw of it
    where they contradict it."""

    host: str
    node: str
    direction: str
    counter: str
    pages: int
    page_bytes: int
    page_basis: str
    nodes_pages: int | None = None

    @property
    def bytes(self) -> int:
        return self.pages * self.page_bytes

    def as_dict(self) -> dict[str, Any]:
        return {f: getattr(self, f) for f in self.__slots__} | {"bytes": self.bytes}


def tier_pages(trace: Trace) -> list[TierPages]:
    """By node, direction and counter; empty where nothing of it was recorded. InputError if a table is damaged."""
    if not trace.has("counters"):
        return []
    rows = query(trace, "ledger_tier_pages").to_dicts()
    if not rows:
        return []
    told = trace.table("counters").filter(pl.col("name") == "page_size_bytes").select("value_int").drop_nulls()
    sizes = told.unique().collect(engine="streaming")["value_int"].to_list()
    size, basis = (int(sizes[0]), "counted") if len(sizes) == 1 else (_PAGE, "assumed")
    return [
        TierPages(r["host"], r["entity"], r["direction"], r["name"], int(r["pages"]), size, basis, r["nodes_pages"]) for r in rows
    ]


def switched_off(trace: Trace) -> tuple[str, ...]:
    """What the kernel might not do while this was recorded (demotion, promotion): its switch was read, and never on."""
    if not trace.has("counters"):
        return ()
    rows = trace.table("counters").filter(pl.col("name").is_in(_SWITCHES) & (pl.col("entity") == "memory"))
    read = rows.select("name", "value_int").drop_nulls().unique().collect(engine="streaming").rows()
    seen = {name for name, _ in read}
    on = {name for name, value in read if int(value) & _SWITCHES[name][1]}
    return tuple(what for name, (what, _) in _SWITCHES.items() if name in seen - on)


def tier_says(found: list[TierPages], off: tuple[str, ...] = ()) -> list[str]:
    """In sentences: what each node received and gave up; in one where nothing moved. ``off``: see :func:`switched_off`."""
    moved = [t for t in found if t.pages]
    if not found:
        return []
    if not moved:
        why = f": {' and '.join(off)} {'were' if len(off) > 1 else 'was'} switched off" if off else ""
        return [f"The kernel moved no page between memory tiers{why}."]
    out = []
    for host, node in dict.fromkeys((t.host, t.node) for t in moved):
        mine = [t for t in moved if (t.host, t.node) == (host, node)]
        told = []
        for way, words in (("in", "received {} by promotion"), ("out", "gave up {} by demotion")):
            some = [t for t in mine if t.direction == way]
            if some:
                by = ", ".join(f"{t.counter} {t.pages:,}" for t in some)
                told.append(f"{words.format(bytes_text(sum(t.bytes for t in some)))} ({by})")
        out.append(f"{node} {' and '.join(told)}")
    size = f"pages of {bytes_text(moved[0].page_bytes)}{' (assumed)' if moved[0].page_basis == 'assumed' else ''}"
    nodes = counted(len(out), "node")
    says = [f"Between memory tiers the kernel moved, beside all moves ({nodes}, {size}): {'; '.join(out)}."]
    odd = [t for t in moved if t.nodes_pages is not None]
    if odd:
        lacks = ", ".join(f"{t.nodes_pages:,} of the {t.pages:,} of {t.counter}" for t in odd)
        says.append(f"The nodes' own counters contradict the machine's: they saw {lacks}.")
    return says
