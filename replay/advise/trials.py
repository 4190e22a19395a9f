"""Runs of many what-ifs of one trace: once as they are, and on the same draws as the own policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from hoptrace.replay.advise.evidence import Evidence, evidence_of
from hoptrace.replay.advise.model import Change
from hoptrace.replay.advise.objective import Figures, Objective
from hoptrace.replay.outcome import DONE, REQUEST, STEP, Kept, Outcome
from hoptrace.replay.planning import Planned
from hoptrace.replay.policy import Policy, with_settings
from hoptrace.replay.prepare import Prepared
from hoptrace.replay.simulation import Engine, simulation
from hoptrace.replay.uncertainty import Runner, Study
from hoptrace.replay.uncertainty.figures import Lens
from hoptrace.replay.workload import Workload
from hoptrace.stepcost_domain import Domain

__all__ = ["Point", "Trials", "policy_of"]

_PRICED = (
    "start_ns", "end_ns", "prefill_requests", "prefill_tokens", "prefill_context_tokens", "decode_requests", "decode_tokens",
    "decode_context_tokens",
)  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One run as it is: its figures, requests that were not done, and where its steps leave what the step cost knows.

    ``extrapolated``: share of the step time; null where the cost does not say what it was measured on.
    """

    planned: Planned
    figures: Figures
    undone: int
    extrapolated: float | None
    beyond: tuple[str, ...]


def policy_of(changes: Sequence[Change]) -> Policy:
    """The policy that these changes mean."""
    settings = [s for c in changes for s in c.settings]
    return with_settings(Policy(name="advised"), settings)


class Trials:
    """``study``: the draws, null for none. What-ifs share them, so that the difference between two is theirs alone."""

    def __init__(self, prepared: Prepared, objective: Objective, engine: Engine, study: Study | None) -> None:
        self.prepared, self.objective, self.study = prepared, objective, study
        self._engine = engine
        self._work = prepared.asked_work
        self._lens = Lens(prepared.parent, self._work)
        self._own: list[Figures] | None = None

    def plan(self, changes: Sequence[Change]) -> Planned:
        """InputError: they do not go together, or with what the trace ran under."""
        assert self.prepared.plan_for is not None
        return self.prepared.plan_for(policy_of(changes)) if changes else self.prepared.planned

    def lens_of(self, work: Workload) -> Lens:
        """What looks at runs of ``work``."""
        return self._lens if work is self._work else Lens(self.prepared.parent, work)

    def evidence(self) -> Evidence:
        """What the own policy's run shows."""
        kept, planned = Kept(), self.prepared.planned
        return evidence_of(self._work, self._simulate(planned, kept), kept, planned.resolved[0].max_batched_tokens)

    def point(self, changes: Sequence[Change] = ()) -> Point:
        """The run as it is. HoptraceError as :meth:`plan`."""
        planned, kept = self.plan(changes), Kept()
        outcome = self._simulate(planned, kept)
        watch = self._lens.watch(planned.plan)
        for kind in ("step", "run"):
            watch.take(kind, kept.rows(kind))
        seen = self._lens.look(watch, outcome, planned.overheads)
        figures = self.objective.figures(seen, self._work)
        undone = int((outcome.requests[:, REQUEST.index("status")] != DONE).sum())
        share, beyond = _outside(planned, kept)
        return Point(planned, figures, undone, share, beyond)

    def draws(self, planned: Planned) -> list[tuple[Figures, Figures]]:
        """(own policy, what-if) on each draw; empty without draws."""
        if self.study is None:
            return []
        if self._own is None:
            self._own = self._drawn(self.prepared.planned)
        return list(zip(self._own, self._drawn(planned), strict=True))

    def _drawn(self, planned: Planned) -> list[Figures]:
        assert self.study is not None
        runner = Runner(self.study, self._work, planned, engine=self._engine)
        return [self.objective.figures(runner.run(d), self._work, d.often) for d in self.study.draws]

    def _simulate(self, planned: Planned, kept: Kept) -> Outcome:
        if planned.parts is not None:
            return simulation("plain")(self._work, planned.plan, kept, parts=planned.parts)
        return simulation(self._engine)(self._work, planned.plan, kept)


def _outside(planned: Planned, kept: Kept) -> tuple[float | None, tuple[str, ...]]:
    """Share of the step time that lies outside what the step costs were measured on, and what left it."""
    rows = kept.rows("step")
    cost_of = np.array([e.cost for e in planned.plan.engines], dtype=np.int64)[rows[:, STEP.index("engine")]]
    all_ns = outside_ns = 0
    said: list[str] = []
    for i, cost in enumerate(planned.plan.costs):
        domain = Domain(cost)
        if not domain.known:
            return None, ()
        mine = rows[cost_of == i]
        domain.add(pl.DataFrame({n: mine[:, STEP.index(n)] for n in _PRICED}))
        total, beyond = domain.step_ns
        all_ns, outside_ns = all_ns + total, outside_ns + beyond
        said += domain.sentences()
    return (outside_ns / all_ns if all_ns else 0.0), tuple(said)
