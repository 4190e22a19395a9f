"""Runs one side of a study: the same work and plan with one draw after another. Nothing is planned or compiled anew."""

from __future__ import annotations

from dataclasses import replace

from hoptrace.replay.parent import Parent
from hoptrace.replay.planning import Planned
from hoptrace.replay.simulation import Engine, simulation
from hoptrace.replay.uncertainty.beyond import Beyond
from hoptrace.replay.uncertainty.figures import Lens, Seen
from hoptrace.replay.uncertainty.outside import outside
from hoptrace.replay.uncertainty.parameters import applied
from hoptrace.replay.uncertainty.residuals import redrawn
from hoptrace.replay.uncertainty.study import Draw, Study
from hoptrace.replay.workload import Workload

__all__ = ["Runner"]

_DRAWN = ("random", "power_of_two")


class Runner:
    """``work`` under ``planned`` with the draws of ``study``. ``parent``: whose requests they are; null: the trace's own."""

    def __init__(
        self, study: Study, work: Workload, planned: Planned, engine: Engine = "auto", parent: Parent | None = None
    ) -> None:
        self._study, self._work, self._planned = study, work, planned
        self._lens = Lens(parent or study.prepared.parent, work)
        plan = planned.plan
        # Seed 0 takes the residuals in the order of their table, which is redrawn here; another takes runs of sixteen of it.
        self._seeded = plan.speculation is not None or any(r.kind in _DRAWN for r in (plan.routing, plan.decode_routing))
        self._more = {} if planned.parts is None else {"parts": planned.parts}
        self._simulate = simulation("plain" if planned.parts is not None else engine)

    def point(self) -> Seen:
        """The run without any draw: the one that is printed."""
        return self._run(self._planned)

    def run(self, draw: Draw) -> Seen:
        """The run of a draw."""
        planned, plan, base = self._planned, self._planned.plan, self._study.base
        costs = tuple(
            replace(applied(c, base, draw.cost, draw.speed), residuals=redrawn(c.residuals, draw.blocks)) for c in plan.costs
        )
        was = planned.overheads
        now = outside(was, self._study.measured, draw.outside, draw.speed)
        engines = tuple(replace(e, gap_ns=now.between_steps_ns) if e.gap_ns == was.between_steps_ns else e for e in plan.engines)
        after = now.step_to_token_ns + now.last_token_to_finish_ns - was.step_to_token_ns - was.last_token_to_finish_ns
        drawn = replace(
            plan,
            costs=costs,
            engines=engines,
            before_ns=max(0, plan.before_ns + now.before_ns - was.before_ns),
            after_ns=max(0, plan.after_ns + after),
            seed=draw.seed if self._seeded else 0,
        )
        return self._run(replace(planned, plan=drawn, overheads=now))

    def extrapolated(self) -> float:
        """The share of the step time, without any draw, that rests on extrapolated step costs."""
        sink = Beyond(self._planned.plan)
        self._simulate(self._work, self._planned.plan, sink, **self._more)
        return sink.share()

    def _run(self, planned: Planned) -> Seen:
        watch = self._lens.watch(planned.plan)
        outcome = self._simulate(self._work, planned.plan, watch, **self._more)
        return self._lens.look(watch, outcome, planned.overheads)
