"""Which engine runs a plan: the compiled one, or the plain one that is slower and can be added to."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal, Protocol

from hoptrace.errors import UsageError
from hoptrace.replay.outcome import Outcome, Sink
from hoptrace.replay.plan import Plan
from hoptrace.replay.workload import Workload

__all__ = ["ENGINES", "Engine", "Simulate", "simulation"]

Engine = Literal["compiled", "plain"]
ENGINES: tuple[Engine, ...] = ("compiled", "plain")


class Simulate(Protocol):
    """What both engines are: they run the work through the plan and hand the rows to the sink as they come.

    ``progress``: told the share of the requests that are done, 0 to 1, now and then. The plain one also takes ``parts``.
    """

    def __call__(self, work: Workload, plan: Plan, sink: Sink, *, progress: Any = None, **more: Any) -> Outcome: ...


def _plain_only(plan: Plan) -> bool:
    """What the compiled engine does not have yet."""
    alone = {"round_robin", "random", "session"}
    modes = {e.mode for e in plan.engines}
    return bool(
        plan.handover is not None
        or plan.tiers
        or plan.speculation
        or plan.routing.kind not in alone
        or modes - {"mixed", "prefill_first"}
    )


def simulation(engine: str) -> Simulate:
    """The engine of that name; where the compiled one does not know a part of a plan, the plain one runs it. UsageError if there
    is no such engine."""
    if engine not in ENGINES:
        raise UsageError(f"There is no engine {engine!r}.", hint=f"There are: {', '.join(ENGINES)}.")
    plain: Simulate = import_module("hoptrace.replay.plain").simulate
    if engine == "plain":
        return plain
    fast: Simulate = import_module("hoptrace.replay.compiled").simulate

    def either(work: Workload, plan: Plan, sink: Sink, *, progress: Any = None, **more: Any) -> Outcome:
        if _plain_only(plan):
            return plain(work, plan, sink, progress=progress, **more)
        try:
            return fast(work, plan, sink, progress=progress, **more)
        except NotImplementedError:  # before any row
            return plain(work, plan, sink, progress=progress, **more)

    return either
