"""How much of a replay's error is the luck of its seed, where steps draw the scatter of the recorded ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from hoptrace.metrics import request_metrics, stat
from hoptrace.reader import Trace
from hoptrace.replay.planning import Planned
from hoptrace.replay.rows.requests import times
from hoptrace.replay.setting import Ints
from hoptrace.replay.simulation import Simulate
from hoptrace.replay.workload import Workload

__all__ = ["SEEDS", "Spread", "spread"]

SEEDS = 8
_METRICS = (("ttft", "mean"), ("tpot", "mean"), ("e2e", "mean"), ("e2e", "p95"))


@dataclass(frozen=True)
class Spread:
    """``error_pct``: (least, greatest) error under the trace's own policy over the ``seeds``, by metric and statistic."""

    seeds: int
    error_pct: dict[str, tuple[float, float]]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the manifest."""
        return {"seeds": self.seeds, "error_pct": {k: [round(x, 3) for x in v] for k, v in self.error_pct.items()}}

    def sentence(self) -> str:
        """For the screen."""
        said = ", ".join(f"{k} {low:+.1f} to {high:+.1f} %" for k, (low, high) in self.error_pct.items())
        return f"Over {self.seeds} seeds the error under its own policy is: {said}."


class _Nobody:
    def take(self, kind: str, rows: Ints) -> None:
        """Only the requests' times are asked for."""


def spread(trace: Trace, work: Workload, own: Planned, simulate: Simulate, seed: int, seeds: int = SEEDS) -> Spread | None:
    """Replay ``trace`` under its own policy with ``seeds`` seeds from ``seed`` on, and compare each with what was observed. Null
    where no step draws anything, or nothing can be compared."""
    if not any(c.residuals for c in own.plan.costs):
        return None
    seen = request_metrics(trace).select("request", *(pl.col(f"{m}_ns").alias(f"{m}_seen") for m in ("ttft", "tpot", "e2e")))
    errors: dict[str, list[float]] = {}
    for i in range(seeds):
        outcome = simulate(work, replace(own.plan, seed=seed + i), _Nobody())
        t = times(work, outcome, own.overheads)
        more = pl.col("output_tokens") > 1
        both = seen.join(t, on="request").select(
            "ttft_seen",
            "tpot_seen",
            "e2e_seen",
            (pl.col("first_token_ns") - pl.col("arrival_ns")).alias("ttft"),
            pl.when(more)
            .then((pl.col("last_token_ns") - pl.col("first_token_ns")) / (pl.col("output_tokens") - 1))
            .alias("tpot"),
            (pl.col("finish_ns") - pl.col("arrival_ns")).alias("e2e"),
        )
        for metric, statistic in _METRICS:
            pair = both.select(pl.col(f"{metric}_seen").cast(pl.Float64), pl.col(metric).cast(pl.Float64)).drop_nulls()
            there, here = (getattr(stat(pair[c]), f"{statistic}_ns") for c in (f"{metric}_seen", metric))
            if there and here is not None:
                errors.setdefault(f"{metric} {statistic}", []).append(100 * (here / there - 1))
    return Spread(seeds, {k: (min(v), max(v)) for k, v in errors.items()}) if errors else None
