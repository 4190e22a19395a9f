"""What counts as better: one figure or two of a run, as a gain over the own policy's run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import numpy as np
import polars as pl

from hoptrace.errors import UsageError
from hoptrace.replay.uncertainty.figures import Sample, Seen, statistics
from hoptrace.replay.workload import Workload

__all__ = ["OBJECTIVES", "SHOWN", "Figures", "Objective", "name_of", "objective_of"]

Figures = Mapping[tuple[str, str], float]
_Ints = np.ndarray[Any, np.dtype[np.int64]]
_Mask = np.ndarray[Any, np.dtype[np.bool_]]

OBJECTIVES: dict[str, tuple[tuple[str, str], ...]] = {
    "e2e": (("e2e", "p50"), ("e2e", "p95")),
    "e2e_p50": (("e2e", "p50"),),
    "e2e_p95": (("e2e", "p95"),),
    "ttft_p50": (("ttft", "p50"),),
    "ttft_p95": (("ttft", "p95"),),
    "itl_p99": (("itl", "p99"),),
    "tpot_p50": (("tpot", "p50"),),
    "throughput": (("throughput", "output tokens"),),
    "goodput": (("goodput", "share"),),
}
"""Figures of each objective: of several the gain is that of their geometric mean, and none of them may become worse."""

SHOWN: tuple[tuple[str, str], ...] = (
    ("ttft", "p50"), ("ttft", "p95"), ("itl", "p50"), ("itl", "p99"), ("tpot", "p50"), ("e2e", "p50"), ("e2e", "p95"),
    ("throughput", "output tokens"),
)  # fmt: skip
"""What is compared beside the objective, for what becomes worse."""

_WORDS = {
    "e2e": "end-to-end time (p50 and p95)", "e2e_p50": "end-to-end time p50", "e2e_p95": "end-to-end time p95",
    "ttft_p50": "TTFT p50", "ttft_p95": "TTFT p95", "itl_p99": "ITL p99", "tpot_p50": "TPOT p50",
    "throughput": "output tokens per second", "goodput": "share of requests within the limits",
}  # fmt: skip


_NAMES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "end to end", "throughput": "output tokens/s"}


def name_of(key: tuple[str, str]) -> str:
    """A figure's name on the screen: ``TTFT p95``."""
    metric, statistic = key
    return _NAMES[metric] if metric == "throughput" else f"{_NAMES[metric]} {statistic}"


@dataclass(frozen=True)
class Objective:
    """``slo``: limits in ns, for goodput."""

    name: str
    slo: Mapping[str, int] = field(default_factory=dict)

    @property
    def keys(self) -> tuple[tuple[str, str], ...]:
        """Its figures."""
        return OBJECTIVES[self.name]

    @property
    def short(self) -> str:
        """A column's title."""
        fixed = {"e2e": "E2E p50, p95", "throughput": "tokens/s", "goodput": "goodput"}
        return fixed.get(self.name) or name_of(self.keys[0]).replace("end to end", "E2E")

    @property
    def words(self) -> str:
        """What it is about."""
        return _WORDS[self.name]

    def gain(self, own: Figures, other: Figures) -> float | None:
        """Positive is better: of times 1 − what-if ÷ own, of rates what-if ÷ own − 1, of goodput the difference. Null where a
        figure is not known."""
        if any(k not in own or k not in other for k in self.keys):
            return None
        if self.name == "goodput":
            return other[self.keys[0]] - own[self.keys[0]]
        if any(own[k] <= 0 for k in self.keys):
            return None
        ratio = 1.0
        for k in self.keys:
            ratio *= other[k] / own[k]
        ratio = ratio if len(self.keys) == 1 else sqrt(ratio)
        return ratio - 1 if self.name == "throughput" else 1 - ratio

    def figures(self, seen: Seen, work: Workload, often: _Ints | None = None) -> dict[tuple[str, str], float]:
        """All figures of a run; latencies and goodput over the requests as they were drawn (``often``), rates over all."""
        found = dict(statistics(seen, often)) | dict(seen.rates)
        if self.name == "goodput":
            weight = np.ones(work.n, dtype=np.int64) if often is None else often
            found[("goodput", "share")] = float(weight[self.met(seen, work)].sum() / max(1, int(weight.sum())))
        return found

    def met(self, seen: Seen, work: Workload) -> _Mask:
        """Which requests kept every limit. Who is not done kept none; one token has no time between tokens."""
        kept = np.zeros(work.n, dtype=np.bool_)
        kept[seen.samples["e2e"].owner] = True
        for name, limit in self.slo.items():
            metric, _, statistic = name.partition("_")
            each = _each(seen.samples[metric], work.n, statistic)
            within = each <= limit
            if metric in ("itl", "tpot"):
                within |= work.output_tokens <= 1
            kept &= within
        return kept


def _each(sample: Sample, n: int, statistic: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """One figure per request, nan where it has none: its value, or a statistic of its values."""
    found = np.full(n, np.nan)
    if not statistic:
        found[sample.owner] = sample.value
        return found
    value = pl.col("value")
    of = {"mean": value.mean(), "max": value.max()} | {
        f"p{p}": value.quantile(p / 100, "linear") for p in (50, 95, 99)
    }  # fmt: skip
    frame = pl.DataFrame({"owner": sample.owner, "value": sample.value}).group_by("owner").agg(of[statistic])
    found[frame["owner"].to_numpy()] = frame["value"].to_numpy()
    return found


def objective_of(name: str | None, slo: Mapping[str, int] | None) -> Objective:
    """The objective of that name; without one goodput where there are limits, else end-to-end time.

    Raises:
        UsageError: there is none of that name, goodput without limits, or a limit on what a replay does not predict.
    """
    name = name or ("goodput" if slo else "e2e")
    name = name.replace("-", "_")
    if name not in OBJECTIVES:
        raise UsageError(f"There is no objective {name[:40]!r}.", hint=f"There are: {', '.join(OBJECTIVES)}.")
    if name == "goodput" and not slo:
        raise UsageError("Goodput needs limits.", hint="For example: --slo ttft=500ms,itl_p99=50ms.")
    if slo and name != "goodput":
        raise UsageError(f"--slo is for goodput, and the objective is {name}.", hint="Leave out one of the two.")
    if slo and "visible_ttft" in slo:
        raise UsageError("A replay does not predict visible_ttft.", hint="Set the limit on ttft.")
    return Objective(name, dict(slo or {}))
