"""How long a server or a role takes to drain: if no new work came from a moment on, when would the last request leave.

As recorded: requests that came after the moment slowed those before it, so without them it would have been sooner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from hoptrace.analysis.memory.stranding_exact import Ints
from hoptrace.analysis.memory.stranding_stays import NEVER

__all__ = ["Drain", "drain_at", "drains"]


@dataclass(frozen=True)
class Drain:
    """Of one server, or of all stays in one role (``kind``: server, role), over evenly spaced moments: ns until the last of those
    that run or wait is gone; 0 where nobody is there. ``open``: moments at which somebody was there whose end nobody saw; they
    are in no other figure. ``idle``: moments at which nobody was there. ``resident_bytes``: mean KV in use at the moments
    (server only)."""

    kind: str
    name: str
    moments: int
    open: int
    idle: int
    mean_ns: float | None
    p50_ns: int | None
    p95_ns: int | None
    max_ns: int | None
    resident_bytes: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON."""
        keys = ("kind", "name", "moments", "open", "idle", "mean_ns", "p50_ns", "p95_ns", "max_ns", "resident_bytes")
        return {k: getattr(self, k) for k in keys}


def drain_at(stays: pl.DataFrame, t: Ints) -> Ints:
    """ns from each t until the last stay that had begun by then ends, 0 where none is left, −1 where one never ends."""
    if stays.is_empty():
        return np.zeros(len(t), dtype=np.int64)
    mine = stays.select("enqueued_ns", "end_ns").sort("enqueued_ns")
    begin = mine["enqueued_ns"].to_numpy()
    reach = np.maximum.accumulate(mine["end_ns"].to_numpy())
    i = np.searchsorted(begin, t, side="right") - 1
    last = np.where(i >= 0, reach[np.maximum(i, 0)], t)
    found: Ints = np.where(last >= NEVER, -1, np.maximum(np.minimum(last, NEVER - 1) - t, 0))
    return found


def drains(stays: pl.DataFrame, t: Ints, windows: Mapping[str, tuple[int, int]]) -> list[tuple[Drain, Ints, Ints]]:
    """Of each server (at the moments within its window) and each role that stays name: (drain, its moments, the values there)."""
    out = []
    for kind in ("server", "role"):
        for name in sorted(n for n in stays[kind].unique().to_list() if n):
            begin, end = windows.get(name, (0, 0)) if kind == "server" else (t.min(initial=0), t.max(initial=0) + 1)
            mine = t[(t >= begin) & (t < end)]
            values = drain_at(stays.filter(pl.col(kind) == name), mine)
            out.append((_drain(kind, name, values), mine, values))
    return out


def _drain(kind: str, name: str, values: Ints) -> Drain:
    known = np.sort(values[values >= 0])

    def at(q: float) -> int | None:
        return int(known[min(int(q * len(known)), len(known) - 1)]) if len(known) else None

    return Drain(
        kind, name, len(values), int((values < 0).sum()), int((values == 0).sum()),
        float(known.mean()) if len(known) else None, at(0.5), at(0.95), int(known[-1]) if len(known) else None,
    )  # fmt: skip
