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


def simulation(engine: str) -> Simulate:
    """The engine of that name. UsageError if there is none."""
    if engine not in ENGINES:
        raise UsageError(f"There is no engine {engine!r}.", hint=f"There are: {', '.join(ENGINES)}.")
    found: Simulate = import_module(f"hoptrace.replay.{engine}").simulate
    return found
