"""What happens when: instants, and at each of them transfers, steps, arrivals, new steps, in that order."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from hoptrace.errors import HoptraceError
from hoptrace.replay.engine_blocks import in_engine_blocks
from hoptrace.replay.outcome import DONE, PREEMPTED, REFUSED, REQUEST, UNFINISHED, Outcome, Sink
from hoptrace.replay.plain.arrivals import Arrivals
from hoptrace.replay.plain.build import build
from hoptrace.replay.plain.handover import join
from hoptrace.replay.plain.parts import KeyOf, Parts, guarded, wrong
from hoptrace.replay.plain.refusals import check, never_fit
from hoptrace.replay.plain.requests import ROW, Request, requests_of
from hoptrace.replay.plain.rows import Run
from hoptrace.replay.plain.stepping import end_step, try_step
from hoptrace.replay.plain.world import World
from hoptrace.replay.plan import Plan

if TYPE_CHECKING:
    from hoptrace.replay.workload import Workload

__all__ = ["simulate"]


def simulate(
    work: Workload, plan: Plan, sink: Sink, *, progress: Callable[[float], None] | None = None, parts: Parts | None = None
) -> Outcome:
    """Run a work under a plan, as docs/replay-engine.md says.

    Args:
        sink: takes the rows.
        progress: told the share of requests that are done, now and then.
        parts: instead of those of the plan.

    Raises:
        UsageError: the plan makes no sense. InputError: a plug-in is not there, or misbehaves; it is named.
    """
    check(plan)
    work = in_engine_blocks(work, plan)
    requests = requests_of(work, plan.order)
    world, order = build(work, plan, requests, sink, parts or Parts())
    arrivals = Arrivals(work, plan, requests, never_fit(plan, requests), world.ended)
    loop = _Loop(world, arrivals, order)
    loop.go(progress)
    if plan.horizon_ns is None:
        stuck = next(
            (
                r
                for r in requests
                if r.arrival_ns >= 0 and r.row[ROW["last_token_ns"]] < 0 and r.number not in arrivals.refused_ns
            ),
            None,
        )
        if stuck is not None:
            raise HoptraceError(
                f"The replay got stuck: request {stuck.number} can neither run nor be refused.", hint="Please report this policy."
            )
    return _outcome(world, arrivals)


class _Loop:
    """The instants of a simulation."""

    def __init__(self, world: World, arrivals: Arrivals, order: tuple[str, KeyOf] | None) -> None:
        self._w = world
        self._arrivals = arrivals
        self._order = order
        self._below = world.plan.handover.local_below_tokens if world.plan.handover is not None else 0

    def go(self, progress: Callable[[float], None] | None) -> None:
        """Until nothing is left, or the horizon."""
        w = self._w
        told = 0
        while True:
            now = self._next_ns()
            if now is None or (w.plan.horizon_ns is not None and now > w.plan.horizon_ns):
                return
            w.entry.before(now)
            if w.decode is not None:
                w.decode.before(now)
            while self._instant(now):
                pass
            if progress is not None and w.done >= told + 100:
                told = w.done
                progress(told / len(w.requests))

    def _next_ns(self) -> int | None:
        w = self._w
        heaps = (w.wakes, w.ended, w.joins, self._arrivals.at_router)
        times = [h[0][0] for h in heaps if h]
        transfers = w.network.next_ns()
        if transfers is not None:
            times.append(transfers)
        return min(times) if times else None

    def _instant(self, now: int) -> bool:
        """One round of an instant; whether anything happened."""
        happened = self._w.network.go_on(now)
        happened |= self._steps_end(now)
        happened |= self._arrive(now)
        happened |= self._steps_begin(now)
        return happened

    def _steps_end(self, now: int) -> bool:
        w = self._w
        ended = False
        while w.wakes and w.wakes[0][0] <= now:
            e = w.engines[heappop(w.wakes)[1]]
            if e.step is not None and e.step.end_ns == now:
                end_step(w, e, now)
                ended = True
        return ended

    def _arrive(self, now: int) -> bool:
        w, at_router = self._w, self._arrivals.at_router
        happened = self._arrivals.go_on(now)
        while at_router and at_router[0][0] <= now:
            self._route(w.requests[heappop(at_router)[1]], now)
            happened = True
        while w.joins and w.joins[0][0] <= now:
            join(w, w.requests[heappop(w.joins)[1]], now)
            happened = True
        return happened

    def _route(self, r: Request, now: int) -> None:
        w = self._w
        r.put("routed_ns", now)
        if self._order is not None:
            name, part = self._order
            r.key = guarded(name, "key", lambda: part.key(r))
            if not isinstance(r.key, int) or isinstance(r.key, bool):
                raise wrong(name, r.key, "a whole number")
        elif w.plan.order.from_arrival:
            r.key += r.arrival_ns
        local = w.decode is not None and r.prompt_tokens < self._below
        router = w.decode if local and w.decode is not None else w.entry
        e = router.route(r, now)
        r.engine = e.index
        r.put("engine", e.index)
        e.waits(r)
        e.unseen.append(r)
        e.enqueue(r)

    def _steps_begin(self, now: int) -> bool:
        tried = False
        for e in self._w.engines:
            if e.awake and e.step is None:
                clock = self._w.clock
                begin_ns = e.ready_ns if clock is None else clock.begin_ns(e.index, now, e.ready_ns)
                if begin_ns > now:
                    heappush(self._w.wakes, (begin_ns, e.index))
                    continue
                e.awake = False
                try_step(self._w, e, now)
                tried = True
        return tried


def _outcome(w: World, arrivals: Arrivals) -> Outcome:
    """Close what is open, and the columns of the requests."""
    end_ns = max([w.rows.end_ns, *arrivals.refused_ns.values()], default=0)
    steps = [e.steps - (e.step is not None) for e in w.engines]
    table = np.empty((len(w.requests), len(REQUEST)), dtype=np.int64)
    for r in w.requests:
        if isinstance(r.run, Run):
            if r.run.phase == PREEMPTED:
                r.run.last = steps[r.run.engine] - 1
            w.rows.close(r)
        done = r.row[ROW["last_token_ns"]] >= 0
        r.put("generated_tokens", r.generated)
        r.put("status", DONE if done else REFUSED if r.number in arrivals.refused_ns else UNFINISHED)
        end_ns = max(end_ns, r.row[ROW["routed_ns"]])
        table[r.number] = r.row
    w.rows.finish()
    return Outcome(table, np.array(steps, dtype=np.int64), end_ns)
