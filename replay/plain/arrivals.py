"""When requests arrive: as the work says, after those before them, or as places of a closed loop become free."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

from hoptrace.replay.plain.requests import Request
from hoptrace.replay.plan import Plan

if TYPE_CHECKING:
    from hoptrace.replay.workload import Workload

__all__ = ["Arrivals"]


class Arrivals:
    """The requests that are still outside.

    ``at_router``: heap of (ns, number). A request that is refused ends at its arrival; ``ended`` (the world's heap) tells so.
    """

    def __init__(
        self, work: Workload, plan: Plan, requests: list[Request], refused: frozenset[int], ended: list[tuple[int, int]]
    ) -> None:
        self._plan = plan
        self._requests = requests
        self._refused = refused
        self._ended = ended
        self._horizon = plan.horizon_ns
        self.at_router: list[tuple[int, int]] = []
        self.refused_ns: dict[int, int] = {}
        self._times = work.arrival_ns.tolist()
        n = work.n
        after = [-1] * n if work.after is None or plan.clients is not None else work.after.tolist()
        self._think = [0] * n if work.think_ns is None else work.think_ns.tolist()
        self._floor = [False] * n if work.floor is None else work.floor.tolist()
        self._successors: dict[int, list[int]] = {}
        for r, before in enumerate(after):
            if before >= 0:
                self._successors.setdefault(before, []).append(r)
        self._next = n if plan.clients is None else min(n, plan.clients)
        if plan.clients is None:
            for r in range(n):
                if after[r] < 0:
                    self._arrive(r, self._times[r])
        else:
            for r in range(self._next):
                self._arrive(r, self._times[0])

    def _arrive(self, number: int, at: int) -> None:
        if self._horizon is not None and at > self._horizon:
            return
        r = self._requests[number]
        r.arrival_ns = at
        r.put("arrival_ns", at)
        if number in self._refused:
            self.refused_ns[number] = at
            heappush(self._ended, (at, number))
        else:
            heappush(self.at_router, (at + self._plan.before_ns, number))

    def go_on(self, now: int) -> bool:
        """Let in those who wait for ends that are now; whether there were any."""
        any_at_all = False
        while self._ended and self._ended[0][0] <= now:
            at, number = heappop(self._ended)
            any_at_all = True
            if self._plan.clients is not None:
                if self._next < len(self._requests):
                    self._arrive(self._next, at + self._plan.think_ns)
                    self._next += 1
                continue
            for r in self._successors.get(number, ()):
                arrival = at + self._think[r]
                self._arrive(r, max(arrival, self._times[r]) if self._floor[r] else arrival)
        return any_at_all
