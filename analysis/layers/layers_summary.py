"""What the steps alone say, all servers together: how far from the roofline they run, and how much of them the host took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from hoptrace.analysis.layers.layers_steps import PIECES, ServerSteps

__all__ = ["KindOfStep", "StepLayers", "step_layers"]


@dataclass(frozen=True, slots=True)
class KindOfStep:
    """Steps of one kind (decode, prefill, mixed, empty, unknown), or all. Sums in ns.

    ``divided_ns`` is the time of the ``divided_steps`` steps whose roofline is known and holds, ``roofline_ns`` their roofline.
    ``host_ns`` of the ``host_steps`` steps that record host or collective time (device's idle time where that is known);
    ``device_ns`` of the ``device_steps`` that record it, ``device_span_ns`` their length and the time before them.
    ``between_ns``: from the step before until these began, while decoders waited.
    """

    kind: str
    steps: int
    took_ns: int
    divided_steps: int
    divided_ns: int
    roofline_ns: float
    pieces: dict[str, int]
    host_steps: int
    host_ns: float
    device_steps: int
    device_ns: float
    device_span_ns: int
    between_ns: int

    @property
    def times_roofline(self) -> float | None:
        """Length ÷ roofline, over the steps whose roofline is known; null without any."""
        return self.divided_ns / self.roofline_ns if self.divided_steps and self.roofline_ns > 0 else None

    @property
    def host_share(self) -> float | None:
        """Recorded host and collective time ÷ length of all steps; null where no step records it. A lower bound where some
        steps do not."""
        return self.host_ns / self.took_ns if self.host_steps and self.took_ns else None

    @property
    def device_share(self) -> float | None:
        """Device at work ÷ (steps + time between them); null where no step tells."""
        return self.device_ns / self.device_span_ns if self.device_steps and self.device_span_ns else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "steps": self.steps,
            "mean_ns": round(self.took_ns / self.steps) if self.steps else None,
            "took_ns": self.took_ns,
            "between_ns": self.between_ns,
            "divided_steps": self.divided_steps,
            "mean_roofline_ns": round(self.roofline_ns / self.divided_steps) if self.divided_steps else None,
            "times_roofline": None if self.times_roofline is None else round(self.times_roofline, 4),
            "ns": self.pieces if self.divided_steps else {**self.pieces, "compute": None, "state": None, "unexplained": None},
            "host_steps": self.host_steps,
            "mean_host_ns": round(self.host_ns / self.host_steps) if self.host_steps else None,
            "host_share": None if self.host_share is None else round(self.host_share, 6),
            "device_share": None if self.device_share is None else round(self.device_share, 6),
        }


@dataclass(frozen=True)
class StepLayers:
    """``all`` steps and ``kinds`` of them; ``faster``: those that contradict their roofline, ``faster_ns`` their time,
    ``fastest`` the least length ÷ roofline among them."""

    all: KindOfStep
    kinds: tuple[KindOfStep, ...]
    faster: int
    faster_ns: int
    fastest: float | None

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.all.as_dict(),
            "kinds": [k.as_dict() for k in self.kinds],
            "faster_than_roofline": {"steps": self.faster, "ns": self.faster_ns, "least_share_of_roofline": self.fastest},
        }


def step_layers(split: list[ServerSteps]) -> StepLayers | None:
    """All servers together; null without steps."""
    if not split:
        return None
    frame = pl.concat([s.by_kind for s in split])
    if not frame.height:
        return None
    kinds = frame.group_by("kind").agg(pl.exclude("kind").sum()).sort("took_ns", "kind", descending=[True, False])
    whole = frame.select(pl.lit("all").alias("kind"), pl.exclude("kind").sum())
    fastest = [s.fastest for s in split if s.fastest is not None]
    return StepLayers(
        _kind(whole.row(0, named=True)),
        tuple(_kind(r) for r in kinds.iter_rows(named=True)),
        sum(s.faster for s in split),
        sum(s.faster_ns for s in split),
        min(fastest) if fastest else None,
    )


def _kind(row: dict[str, Any]) -> KindOfStep:
    return KindOfStep(
        kind=row["kind"],
        steps=int(row["steps"]),
        took_ns=int(row["took_ns"]),
        divided_steps=int(row["divided_steps"]),
        divided_ns=int(row["divided_ns"]),
        roofline_ns=float(row["roofline_ns"] or 0),
        pieces={p: int(row[p + "_ns"]) for p in PIECES},
        host_steps=int(row["host_steps"]),
        host_ns=float(row["host_ns"] or 0),
        device_steps=int(row["device_steps"]),
        device_ns=float(row["device_ns"] or 0),
        device_span_ns=int(row["device_span_ns"] or 0),
        between_ns=int(row["between_ns"]),
    )
