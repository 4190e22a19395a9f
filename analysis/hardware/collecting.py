"""What the collecting itself cost, as its own counters tell (entity ``collector:NAME``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

__all__ = ["ALLOWED", "KIND", "Collector", "Cost", "collecting"]

KIND = "collector"
ALLOWED = 0.01
"""Share of a core that all of it may take, where a trace does not tell what its capture was allowed."""


@dataclass(frozen=True, slots=True)
class Collector:
    """One source: CPU time of its samples, their number, beats that were missed, time between two samples, how late the latest
    one began. ``share`` of one core while it ran."""

    name: str
    cpu_ns: int
    window_ns: int
    samples: int | None
    missed: int | None
    every_ns: int | None
    late_ns: int | None

    @property
    def share(self) -> float | None:
        return self.cpu_ns / self.window_ns if self.window_ns else None

    @property
    def each_ns(self) -> float | None:
        """CPU time of a sample."""
        return self.cpu_ns / self.samples if self.samples else None

    def as_dict(self) -> dict[str, Any]:
        return {f: getattr(self, f) for f in self.__slots__} | {
            "share": None if self.share is None else round(self.share, 6),
            "cpu_ns_per_sample": None if self.each_ns is None else round(self.each_ns),
        }


@dataclass(frozen=True)
class Cost:
    """``collectors``: the dearest first. ``share``: of one core, all together; null where none was long enough to tell.
    ``allowed``: the capture's --max-overhead. ``whole_share``: of one core, hoptrace's process with its proxy, polling of pages
    and writing; null if not recorded."""

    collectors: list[Collector]
    whole_share: float | None = None
    allowed: float = ALLOWED

    @property
    def share(self) -> float | None:
        known = [c.share for c in self.collectors if c.share is not None]
        return sum(known) if known else None

    @property
    def over(self) -> bool:
        return self.share is not None and self.share > self.allowed

    def as_dict(self) -> dict[str, Any]:
        share = None if self.share is None else round(self.share, 6)
        whole = None if self.whole_share is None else round(self.whole_share, 6)
        return {
            "share": share,
            "whole_share": whole,
            "allowed": self.allowed,
            "over": self.over,
            "collectors": [c.as_dict() for c in self.collectors],
        }


def collecting(totals: pl.DataFrame) -> Cost:
    """From :func:`hoptrace.analysis.counters.counter_totals` with the entities of kind :data:`KIND`."""
    mine = totals.filter(pl.col("entity").str.starts_with(f"{KIND}:"))
    found = []
    for (_, entity), rows in mine.group_by("host", "entity", maintain_order=True):
        by_name = {r["name"]: r for r in rows.to_dicts()}
        cpu = by_name.get("cpu_ns")
        if cpu is None or cpu["total"] is None:
            continue

        def total(name: str, known: dict[str, Any] = by_name) -> int | None:
            value = known.get(name, {}).get("total")
            return None if value is None else round(value)

        def gauge(name: str, figure: str, known: dict[str, Any] = by_name) -> int | None:
            value = known.get(name, {}).get(figure)
            return None if value is None else round(value)

        found.append(
            Collector(
                str(entity).removeprefix(f"{KIND}:"), round(cpu["total"]), int(cpu["counted_ns"] or 0), total("samples"),
                total("missed"), gauge("every_ns", "mean"), gauge("late_ns", "largest"),
            )
        )  # fmt: skip
    own = totals.filter(
        pl.col("entity").str.starts_with("hoptrace:") & (pl.col("name") == "on_cpu_ns") & (pl.col("counted_ns") > 0)
    )
    whole = float((own["total"] / own["counted_ns"]).sum()) if own.height else None
    told = mine.filter(pl.col("name") == "allowed_share")["largest"].drop_nulls()
    allowed = float(told[0]) if told.len() else ALLOWED
    return Cost(sorted(found, key=lambda c: (-(c.share or 0), c.name)), whole, allowed)
