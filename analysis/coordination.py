"""What arranging costs: its share of latency, its operations per token, and what the operating system counted of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from hoptrace.analysis.accounting import Accounting, account
from hoptrace.analysis.ledger import Ledger, ledger
from hoptrace.analysis.osfigures import OsFigures, os_figures
from hoptrace.analysis.parts import PARTS
from hoptrace.analysis.query import query
from hoptrace.reader import Trace

__all__ = ["Coordination", "Density", "coordination"]


@dataclass(frozen=True, slots=True)
class Density:
    """Semantic density of one basis: payload bytes ÷ control operations, over the moves that know both."""

    basis: str
    payload_bytes: int
    control_ops: int

    @property
    def bytes_per_op(self) -> float | None:
        return self.payload_bytes / self.control_ops if self.control_ops else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "basis": self.basis,
            "payload_bytes": self.payload_bytes,
            "control_ops": self.control_ops,
            "bytes_per_op": self.bytes_per_op,
        }


@dataclass(frozen=True)
class Coordination:
    """The coordination of a trace.

    Attributes:
        share: coordination ÷ e2e: of all requests and around p50, p95, p99, null where no part of it is shown; empty without
            finished requests.
        parts_ns: mean ns per request of each part of the class; null where no request shows it.
        operations: kind, on, basis, waits (rows), operations (Σ count), wait_ns, per_output_token (Float64): recorded waits of
            coordination kinds, whether a request or a step waited.
        density: semantic density by basis.
        os: what the operating system counted of the servers' processes, or null where no counters were recorded.
        unseen: what cannot be shown, in sentences.
    """

    share: dict[str, float | None]
    parts_ns: dict[str, float | None]
    operations: pl.DataFrame
    density: list[Density]
    os: OsFigures | None
    unseen: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "share": {k: None if v is None else round(v, 6) for k, v in self.share.items()},
            "parts_ns": {k: None if v is None else round(v) for k, v in self.parts_ns.items()},
            "operations": [
                {**r, "per_output_token": None if r["per_output_token"] is None else round(r["per_output_token"], 6)}
                for r in self.operations.to_dicts()
            ],
            "semantic_density": [d.as_dict() for d in self.density],
            "os": None if self.os is None else self.os.as_dict(),
            "unseen": self.unseen,
        }


def coordination(trace: Trace, *, accounting: Accounting | None = None, moved: Ledger | None = None) -> Coordination:
    """The coordination of any trace. What has been computed already may be handed in.

    Raises:
        InputError: a table is damaged.
    """
    accounting = accounting if accounting is not None else account(trace)
    moved = moved if moved is not None else ledger(trace)
    whole = accounting.compositions.get("all")
    names = [p.name for p in PARTS if p.klass == "coordination"]
    unseen: list[str] = []
    waits = query(trace, "coordination_waits").with_columns(
        (pl.col("operations") / pl.lit(moved.output_tokens or None, dtype=pl.Int64)).alias("per_output_token")
    )
    if not waits.height:
        unseen.append("No waits of coordination kinds were recorded: how many operations arranging took is unknown.")
    density = [Density(*r) for r in query(trace, "coordination_density").rows()]
    if not density:
        unseen.append("No move says its control operations: semantic density is unknown.")
    figures = os_figures(trace, moved.output_tokens)
    if figures is None:
        unseen.append("No counters of the server's processes were recorded: run-queue delay, switches and CPU time are unknown.")
    return Coordination(
        share={k: c.class_shares["coordination"] for k, c in accounting.compositions.items()},
        parts_ns={n: whole.parts[n] for n in names} if whole else {},
        operations=waits,
        density=density,
        os=figures,
        unseen=unseen,
    )
