"""Memory beside the KV spaces: cached blocks, gauges of processes and devices, and the nodes of the platform graph."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import polars as pl

from hoptrace.analysis.counters import counter_totals
from hoptrace.analysis.memory.stranding_exact import Ints
from hoptrace.analysis.query import query
from hoptrace.platform import graph_of
from hoptrace.reader import Trace

if TYPE_CHECKING:
    from hoptrace.analysis.memory.stranding import Space

__all__ = ["Gauge", "Levels", "PlatformNode", "cached_levels", "gauges", "platform_nodes"]

_MEMORY = re.compile(r"(^|_)(rss|resident|mem|memory|vram|hbm|numa|free|used)(_|$)", re.I)
_NOT = re.compile(r"virtual", re.I)
_PARTS = ("used", "free")


@dataclass(frozen=True, slots=True)
class Gauge:
    """A sampled size of memory: time-weighted mean and largest (of what is free: least) over its samples. ``total``: the largest
    value of the gauge that tells the whole (same entity, `used` or `free` in its name replaced by `total`)."""

    entity: str
    name: str
    samples: int
    mean_bytes: float
    peak_bytes: int
    total_bytes: int | None

    def as_dict(self) -> dict[str, Any]:
        """JSON."""
        return {k: getattr(self, k) for k in ("entity", "name", "samples", "mean_bytes", "peak_bytes", "total_bytes")}


@dataclass(frozen=True, slots=True)
class PlatformNode:
    """A memory of the platform graph: ``capacity_bytes``, what servers keep there as weights and KV space (``assigned_bytes``),
    and the mean of what of it was in use (weights and KV in use). Null: not told."""

    name: str
    kind: str | None
    capacity_bytes: int
    assigned_bytes: int | None
    used_mean_bytes: float | None

    def as_dict(self) -> dict[str, Any]:
        """JSON."""
        return {k: getattr(self, k) for k in ("name", "kind", "capacity_bytes", "assigned_bytes", "used_mean_bytes")}


@dataclass(frozen=True)
class Levels:
    """Blocks cached from ``time`` on, ascending."""

    time: Ints
    blocks: npt.NDArray[np.float64]

    def at(self, t: Ints) -> npt.NDArray[np.float64]:
        """Blocks cached at each t; before the first event 0."""
        i = np.searchsorted(self.time, t, side="right") - 1
        found: npt.NDArray[np.float64] = np.where(i >= 0, self.blocks[np.maximum(i, 0)], 0.0)
        return found


def cached_levels(trace: Trace) -> dict[tuple[str, int], Levels]:
    """By (server, dp_rank): blocks in the cache of the device's memory, as far as block events were recorded. A lower bound:
    what was cached before the recording is seen only when it goes."""
    found: dict[tuple[str, int], Levels] = {}
    if not trace.has("blocks"):
        return found
    for (server, dp), own in query(trace, "stranding_blocks").group_by(["server", "dp_rank"], maintain_order=True):
        level = pl.col("blocks").cum_sum().over("clears")
        # More went than was seen to come: so many stood there before.
        before = pl.min_horizontal(level.min().over("clears"), pl.lit(0))
        found[str(server), int(str(dp))] = Levels(
            own["to_ns"].to_numpy(), own.select((level - before).cast(pl.Float64)).to_series().to_numpy()
        )
    return found


def gauges(trace: Trace) -> list[Gauge]:
    """Gauges of memory among the counters: resident sets, device memory, NUMA nodes, as collectors name them."""
    if not trace.has("counters"):
        return []
    # By name first: a capture has hundreds of counters that are no memory, and totals sort what they are asked for.
    names = trace.table("counters").filter(pl.col("unit") == "bytes").select(pl.col("name").unique()).collect(engine="streaming")
    asked = [n for n in names["name"].drop_nulls().sort().to_list() if _is_memory(n.split("{")[0])]
    if not asked:
        return []
    # (The total beside a part is found by its name, so it has to be among them.)
    totals_of = [n.replace(p, "total") for n in asked for p in _PARTS if p in n]
    rows = [
        r
        for r in counter_totals(trace, sorted({*asked, *totals_of})).iter_rows(named=True)
        if r["unit"] == "bytes" and r["semantics"] == "gauge" and r["mean"] is not None and r["largest"] is not None
    ]
    whole = {(r["entity"], r["name"]): r["largest"] for r in rows}
    out = []
    for r in rows:
        name = str(r["name"]).split("{")[0]
        if not _is_memory(name):
            continue
        totals = [whole.get((r["entity"], str(r["name"]).replace(p, "total"))) for p in _PARTS if p in name]
        total = next((t for t in totals if t is not None), None)
        out.append(
            Gauge(
                r["entity"], r["name"], r["samples"], float(r["mean"]), int(r["largest"]), None if total is None else int(total)
            )
        )
    return out


def _is_memory(name: str) -> bool:
    return bool(_MEMORY.search(name.replace(":", "_"))) and not _NOT.search(name)


def platform_nodes(trace: Trace, spaces: Sequence[Space]) -> list[PlatformNode]:
    """The memories of the manifest's platform graph that say their size."""
    out = []
    for node in graph_of(trace.manifest).nodes.values():
        if node.capacity_bytes is None:
            continue
        mine = [s for s in spaces if node.server is not None and s.server == node.server and s.unit == "bytes"]
        known = [s for s in mine if s.weight_bytes is not None and s.capacity is not None and s.mean is not None]
        whole = bool(mine) and len(known) == len(mine)
        out.append(
            PlatformNode(
                node.name,
                node.kind,
                node.capacity_bytes,
                sum((s.weight_bytes or 0) + (s.capacity or 0) for s in known) if whole else None,
                sum((s.weight_bytes or 0) + (s.mean or 0.0) for s in known) if whole else None,
            )
        )
    return out
