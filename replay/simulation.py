"""Which engine runs a plan: the compiled one, or the plain one that is slower and can be added to. Their rows are the same.

Compiling takes a minute of CPU once in a place's life, so what the plain one has done in a second or two goes to it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal, Protocol

import numpy as np

from hoptrace.errors import UsageError
from hoptrace.replay.outcome import Kept, Outcome, Sink
from hoptrace.replay.plan import EngineSpec, Plan
from hoptrace.replay.workload import Workload
from hoptrace.stepcost import StepCost

__all__ = ["ENGINES", "Engine", "Simulate", "is_small", "simulation", "warm_up"]

Engine = Literal["auto", "compiled", "plain"]
ENGINES: tuple[Engine, ...] = ("auto", "compiled", "plain")
SMALL_REQUESTS, SMALL_TOKENS = 2_000, 60_000
"""Up to so many requests, and so many output tokens, ``auto`` takes the plain one."""


class Simulate(Protocol):
    """What both engines are: they run the work through the plan and hand the rows to the sink as they come.

    ``progress``: told the share of the requests that are done, 0 to 1, now and then. The plain one also takes ``parts``.
    """

    def __call__(self, work: Workload, plan: Plan, sink: Sink, *, progress: Any = None, **more: Any) -> Outcome: ...


def is_small(work: Workload) -> bool:
    """Whether the plain engine is quick enough."""
    return work.n <= SMALL_REQUESTS and int(work.output_tokens.sum()) <= SMALL_TOKENS


def simulation(engine: str) -> Simulate:
    """The engine of that name; ``auto``: whichever has the work done sooner, compiling included. UsageError if there is none."""
    if engine not in ENGINES:
        raise UsageError(f"There is no engine {engine!r}.", hint=f"There are: {', '.join(ENGINES)}.")
    if engine != "auto":
        found: Simulate = import_module(f"hoptrace.replay.{engine}").simulate
        return found

    def either(work: Workload, plan: Plan, sink: Sink, *, progress: Any = None, **more: Any) -> Outcome:
        return simulation("plain" if is_small(work) else "compiled")(work, plan, sink, progress=progress, **more)

    return either


def warm_up() -> None:
    """Have the compiled engine compiled (or read from numba's cache), so that what follows goes at its own speed."""
    one, none = np.ones(1, dtype=np.int64), np.empty(0, dtype=np.int64)
    work = Workload(one, one, one, one, np.zeros(2, dtype=np.int64), none, none, none)
    cost = StepCost({"step": 1000}, "fixed")
    simulation("compiled")(work, Plan((EngineSpec("one"),), (cost,)), Kept())
