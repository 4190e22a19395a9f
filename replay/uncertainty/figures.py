"""The figures of one simulated run, without making a trace of it: as :func:`hoptrace.comparison.compare` would compute them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from hoptrace.comparison import METRICS, STATISTICS, values
from hoptrace.metrics import arrivals_known, request_metrics
from hoptrace.replay.outcome import DONE, Outcome
from hoptrace.replay.overheads import Overheads
from hoptrace.replay.parent import Parent
from hoptrace.replay.plan import Plan
from hoptrace.replay.rows.requests import times
from hoptrace.replay.rows.runlog import RunLog
from hoptrace.replay.rows.steplog import StepLog
from hoptrace.replay.setting import Ints
from hoptrace.replay.workload import Workload

__all__ = ["Lens", "Sample", "Seen", "statistics"]

Figures = dict[tuple[str, str], float]
_Floats = np.ndarray[Any, np.dtype[np.float64]]
_QUANTILES = np.array([0.5, 0.95, 0.99])


@dataclass(frozen=True)
class Sample:
    """Values (ns), ascending, and whose each is, by position in the work."""

    value: _Floats
    owner: Ints


@dataclass(frozen=True)
class Seen:
    """One run: its values by metric, and its rates (per second)."""

    samples: dict[str, Sample]
    rates: Figures


class Watch:
    """A :class:`hoptrace.replay.outcome.Sink` that keeps what the figures need."""

    def __init__(self, engines: int) -> None:
        self.steps, self.runs = StepLog(engines), RunLog()

    def take(self, kind: str, rows: Ints) -> None:
        """See :class:`hoptrace.replay.outcome.Sink`."""
        if kind == "step":
            self.steps.take(rows)
        elif kind == "run":
            self.runs.take(rows)


class Lens:
    """Looks at runs of one work. Each metric is taken over the requests for which the trace knows it (all, where it knows it of
    none), so that the figures are those printed beside the observed ones."""

    def __init__(self, parent: Parent, work: Workload) -> None:
        trace = parent.trace
        metrics = request_metrics(trace)
        finished = np.isin(work.request, metrics["request"].to_numpy())
        self._work = work
        self._order: Ints = np.argsort(work.request, kind="stable")
        self._rated = arrivals_known(trace)
        self._all = finished if finished.any() else np.ones(work.n, dtype=np.bool_)
        self._known = {}
        for m in METRICS:
            told = np.isin(work.request, values(m, trace, metrics)["request"].unique().to_numpy())
            self._known[m] = told if told.any() else self._all
        seen = trace.table("requests").select("request", "arrival_of").collect().sort("request")
        at = np.searchsorted(seen["request"].to_numpy(), work.request)
        later = seen["arrival_of"].is_in(["intended", "sent"]).fill_null(False).to_numpy()[at]
        # Queueing counts from the first of these that the parent's rows show (rows.requests leaves out the others).
        self._queued, self._passes, self._received = parent.queued, parent.between, parent.received & later

    def watch(self, plan: Plan) -> Watch:
        """A sink for one run."""
        return Watch(len(plan.engines))

    def look(self, watch: Watch, outcome: Outcome, overheads: Overheads) -> Seen:
        """The values of a run that has ended."""
        work = self._work
        t = times(work, outcome, overheads)
        done = (t["status"] == DONE).to_numpy()
        # From the first arrival on: at the size of a wall clock a float64 is a hundred ns off.
        origin = int(work.arrival_ns[0]) if work.n else 0
        ns = {c: (t[c] - origin).cast(pl.Float64).fill_null(np.nan).to_numpy() for c in (
            "arrival_ns", "received_ns", "queued_ns", "looked_ns", "scheduled_ns", "first_token_ns", "last_token_ns", "finish_ns",
        )}  # fmt: skip
        queued = np.fmax(ns["queued_ns"], ns["looked_ns"]) if self._passes else ns["queued_ns"]
        since = queued if self._queued else np.where(self._received, ns["received_ns"], ns["arrival_ns"])
        more = np.where(work.output_tokens > 1, work.output_tokens - 1, np.nan)
        each = {
            "ttft": ns["first_token_ns"] - ns["arrival_ns"],
            "tpot": np.floor((ns["last_token_ns"] - ns["first_token_ns"]) / more + 0.5),
            "e2e": ns["finish_ns"] - ns["arrival_ns"],
            "queue": ns["scheduled_ns"] - since,
        }
        samples = {m: _sample(v, np.arange(work.n), done & self._known[m]) for m, v in each.items()}
        watch.steps.seal()
        watch.runs.seal(self._order)
        samples["itl"] = self._between(watch, done)
        kept = done & self._all
        rates: Figures = {}
        if kept.any() and self._rated:
            span = float(ns["finish_ns"][kept].max() - ns["arrival_ns"][kept].min())
            if span > 0:
                rates[("throughput", "output tokens")] = float(work.output_tokens[kept].sum()) * 1e9 / span
                rates[("throughput", "requests")] = float(kept.sum()) * 1e9 / span
        return Seen(samples, rates)

    def _between(self, watch: Watch, done: np.ndarray[Any, np.dtype[np.bool_]]) -> Sample:
        """ITL: the gap of each emission after a request's first ÷ its tokens, as often as it has tokens."""
        owner, _, count, end = watch.runs.emissions(0, self._work.n, watch.steps)
        whose = self._order[owner]
        gap = np.diff(end, prepend=0)
        later = np.diff(owner, prepend=-1) == 0
        keep = later & (done & self._known["itl"])[whose] & (count > 0)
        each = np.repeat(gap[keep] / count[keep], count[keep])
        return _sample(each, np.repeat(whose[keep], count[keep]), np.ones(len(each), dtype=np.bool_))


def _sample(value: _Floats, owner: Ints, keep: np.ndarray[Any, np.dtype[np.bool_]]) -> Sample:
    keep = keep & np.isfinite(value)
    value, owner = value[keep], owner[keep]
    order = np.argsort(value, kind="stable")
    return Sample(value[order], owner[order])


def statistics(seen: Seen, often: Ints | None = None) -> Figures:
    """Mean and percentiles (linear between ranks, as everywhere) by metric, and, of the run as it was, its rates. ``often``:
    int64[n], how often each request of the work was drawn; null: once."""
    found: Figures = {}
    for m, s in seen.samples.items():
        weight = np.ones(len(s.value), dtype=np.int64) if often is None else often[s.owner]
        upto = np.cumsum(weight)
        n = int(upto[-1]) if len(upto) else 0
        if not n:
            continue
        at = _QUANTILES * (n - 1)
        low = np.floor(at)
        first = s.value[np.searchsorted(upto, low, side="right")]
        second = s.value[np.searchsorted(upto, np.minimum(low + 1, n - 1), side="right")]
        figures = [float(s.value @ weight) / n, *(first + (second - first) * (at - low))]
        found |= {(m, name): float(v) for name, v in zip(STATISTICS, figures, strict=True)}
    if often is None:
        found |= seen.rates
    return found
