"""Everything that a simulation holds, for the files that make things happen in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappush
from typing import Any

import numpy as np

from hoptrace.replay.plain.engine import Engine
from hoptrace.replay.plain.parts import CachedTokens, Clock, Victim
from hoptrace.replay.plain.requests import Request
from hoptrace.replay.plain.routing import Dispatcher
from hoptrace.replay.plain.rows import Rows
from hoptrace.replay.plain.tiers import Tiers
from hoptrace.replay.plain.transfers import Network
from hoptrace.replay.plan import Plan

__all__ = ["World"]


@dataclass
class World:
    """The state of a simulation.

    Attributes:
        costs, cost_at: packed step costs, and where that of each engine begins.
        entry, decode: routers; decode is null without decode engines.
        victim: who gives way; its name for messages.
        ended: (ns, number) of requests that end for their client, heap.
        joins: (ns, number) of requests that reach a decode queue, heap.
        wakes: (ns, engine) of steps' ends and gaps' ends, heap.
        loads: how many loads and hand-overs have begun.
        clock, cached: instead of the step cost and of the cache's own look-up; null: neither.
    """

    plan: Plan
    requests: list[Request]
    engines: list[Engine]
    network: Network
    tiers: Tiers | None
    rows: Rows
    entry: Dispatcher
    decode: Dispatcher | None
    victim: Victim
    victim_name: str
    costs: np.ndarray[Any, np.dtype[np.int64]]
    cost_at: list[int]
    ended: list[tuple[int, int]] = field(default_factory=list)
    joins: list[tuple[int, int]] = field(default_factory=list)
    wakes: list[tuple[int, int]] = field(default_factory=list)
    loads: int = 0
    clock: Clock | None = None
    cached: CachedTokens | None = None
    done: int = 0
    finished: dict[int, list[Request]] = field(default_factory=dict)

    def number_load(self, r: Request) -> None:
        """A load or hand-over of a request begins."""
        r.load_seq = self.loads
        self.loads += 1

    def wake_at(self, e: Engine, now: int) -> None:
        """The engine may want something then."""
        heappush(self.wakes, (now, e.index))

    def end_on(self, r: Request, e: Engine) -> None:
        """A request has ended on an engine: its blocks in the tiers count as used at the end of the next pass."""
        if self.tiers is not None:
            self.finished.setdefault(e.index, []).append(r)

    def sent_by(self, e: Engine) -> Dispatcher:
        """The router that sends requests to an engine."""
        if e.spec.role == "decode":
            assert self.decode is not None
            return self.decode
        return self.entry
