"""Runs a plan, fast: the tables are made, the compiled loop goes over them, and rows are handed on as they come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hoptrace.replay import draws
from hoptrace.replay.compiled import columns as c
from hoptrace.replay.compiled import heap, transfers
from hoptrace.replay.compiled.loop import CROWDED, FULL, SHORT, advance, close
from hoptrace.replay.compiled.setup import ints, prepare, refused, requests
from hoptrace.replay.compiled.store import room
from hoptrace.replay.draws import draw
from hoptrace.replay.engine_blocks import in_engine_blocks
from hoptrace.replay.jit import compiled
from hoptrace.replay.outcome import REQUEST, Outcome, Sink
from hoptrace.replay.plan import Plan
from hoptrace.replay.workload import Workload

__all__ = ["simulate"]

Ints = np.ndarray[Any, np.dtype[np.int64]]

_ARRIVAL = REQUEST.index("arrival_ns")
_NONE = np.empty(0, dtype=np.int64)
_ALONE = {"round_robin": 0, "random": 1, "session": 2}


@compiled(c, draws)
def _assign(at: np.ndarray, unfit: np.ndarray, session: np.ndarray, kind: int, entry: np.ndarray, seed: int) -> None:
    """Where each request goes, if that depends on nothing that happens: into ``at``."""
    n = entry.size
    i, without = 0, 0
    for r in range(at.size):
        k = 0
        if not unfit[r]:
            if kind == 0:
                k = i % n
            elif kind == 1:
                k = draw(seed, 1, r, 0) % n
            elif session.size > 0 and session[r] >= 0:
                k = draw(seed, 3, session[r], 0) % n
            else:
                k = without % n
                without += 1
            i += 1
        at[r] = entry[k]


@compiled(c, heap)
def _enqueue_arrivals(w: c.World, arrival_ns: np.ndarray, after: np.ndarray, engine: int) -> None:
    """Requests that come by themselves go to the router's queue; ``engine`` ≥ 0: all go to that engine."""
    horizon = w.g[c.HORIZON]
    for r in range(arrival_ns.size):
        w.s[r, c.EXPECTED] = engine
        if after.size == 0 or after[r] < 0:
            if arrival_ns[r] <= horizon:
                w.out[r, _ARRIVAL] = arrival_ns[r]
            heap.enqueue(w.queues, w.nodes, w.g[c.ROUTER_QUEUE], r, arrival_ns[r] + w.g[c.BEFORE_NS], 0, r)


def simulate(
    work: Workload, plan: Plan, sink: Sink, *, progress: Callable[[float], None] | None = None, separate: bool = False
) -> Outcome:
    """Run ``plan`` over ``work``: docs/replay-engine.md.

    Args:
        sink: takes the rows of steps, runs and moves in blocks as they come.
        progress: called now and then with the fraction of the requests that are done.
        separate: go through every decoder in every step, as a check of the fast way; the rows are the same.
    """
    return _Run(in_engine_blocks(work, plan), plan, sink, progress, separate).go()


class _Run:
    def __init__(self, work: Workload, plan: Plan, sink: Sink, progress: Callable[[float], None] | None, separate: bool) -> None:
        self.work, self.plan, self.sink, self.progress, self.separate = work, plan, sink, progress, separate
        self.unfit = refused(work, plan)
        self.index: Ints | None = None

    def go(self) -> Outcome:
        """Run all engines: one after another, each with its own requests, where none touches another."""
        plan, work = self.plan, self.work
        after = work.after if work.after is not None and bool((work.after >= 0).any()) else None
        alone = plan.routing.kind in _ALONE and plan.handover is None and not plan.tiers
        # What a horizon cuts off would be left in queues that the engines share.
        if alone and plan.clients is None and after is None and plan.horizon_ns is None:
            requests_of = self._one_by_one()
        else:
            self._prepare(None)
            if plan.clients is not None:
                self._first_clients()
            else:
                _enqueue_arrivals(
                    self.w, ints(work.arrival_ns), np.empty(0, dtype=np.int64) if after is None else ints(after), -1
                )
            self._advance()
            if plan.clients is not None:
                self._late_clients()
            self._close()
            requests_of = self.w.out
        end = int(self.w.g[c.END])
        return Outcome(requests_of, self.w.eng[:, c.STEPS].copy(), 0 if end == -c.NEVER else end)

    def _prepare(self, index: Ints | None) -> None:
        self.index = index
        self.w, self.table, self.entries, self.log = prepare(self.work, self.plan, self.unfit, index, separate=self.separate)

    def _one_by_one(self) -> Ints:
        """Engine after engine; what has come out of the requests."""
        work, plan = self.work, self.plan
        entry = np.array(plan.entry, dtype=np.int64)
        at = np.zeros(work.n, dtype=np.int64)
        session = _NONE if work.session_id is None else ints(work.session_id)
        _assign(at, self.unfit, session, _ALONE[plan.routing.kind], entry, plan.seed & ((1 << 63) - 1))
        order, ends = (None, [work.n]) if len(entry) == 1 else (np.argsort(at, kind="stable"), np.cumsum(np.bincount(at)))
        found, begin = np.empty((0, 0), dtype=np.int64), 0
        for e in plan.entry:
            end = int(ends[e]) if e < len(ends) else begin
            index = None if order is None else order[begin:end]
            if e == plan.entry[0]:
                self._prepare(index)
                self.w.g[c.ASSIGNED] = 1
                found = self.w.out if index is None else np.empty((work.n, len(REQUEST)), dtype=np.int64)
            else:
                self.index = index
                self.w = self.w._replace(**requests(work, plan, self.unfit, index))
            self.w = self.w._replace(order=np.array([e], dtype=np.int64))
            self.w.eng[e, c.PLACE] = 0
            arrival_ns = work.arrival_ns if index is None else work.arrival_ns[index]
            _enqueue_arrivals(self.w, ints(arrival_ns), _NONE, e)
            self._advance()
            self._close()
            if index is not None:
                found[index] = self.w.out
            begin = end
        return found

    def _close(self) -> None:
        """What the horizon has cut off."""
        at = 0
        while at < len(self.w.s):
            at = close(self.w, at)
            self._hand_on()

    def _late_clients(self) -> None:
        """A place that came free by the horizon, though whoever took it would have reached the router only after it."""
        w, g = self.w, self.w.g
        while g[c.NEXT_CLIENT] < self.work.n:
            x = heap.first(w.queues, w.nodes, g[c.CLIENT_QUEUE])
            if x < 0 or (arrival := w.nodes[x, heap.KEY] - self.plan.before_ns) > g[c.HORIZON]:
                return
            heap.dequeue(w.queues, w.nodes, g[c.CLIENT_QUEUE])
            w.out[g[c.NEXT_CLIENT], REQUEST.index("arrival_ns")] = arrival
            g[c.NEXT_CLIENT] += 1

    def _first_clients(self) -> None:
        w, n = self.w, min(self.plan.clients or 0, self.work.n)
        for r in range(n):
            heap.enqueue(w.queues, w.nodes, w.g[c.ROUTER_QUEUE], r, int(self.work.arrival_ns[0]) + self.plan.before_ns, 0, r)
        w.g[c.NEXT_CLIENT] = n

    def _advance(self) -> None:
        while True:
            code = advance(self.w, self.table, self.entries, self.log)
            if code == SHORT:
                more = 2 * int(self.w.g[c.WANTED])
                self.table, self.entries, self.log = room(self.table, self.entries, self.w.head, self.log, more)
                continue
            if code == CROWDED:
                self._make_places(int(self.w.g[c.WANTED]))
                continue
            taken = self._hand_on()
            if code != FULL:
                return
            if not taken:
                runs = self.w.runs
                self.w = self.w._replace(runs=np.empty((2 * len(runs), runs.shape[1]), dtype=np.int64))
            if self.progress is not None:
                self.progress(float(self.w.g[c.DONE_N]) / max(1, self.work.n))

    def _make_places(self, more: int) -> None:
        """Room for transfers, and for the rows of all that may be under way."""
        w = self.w
        under_way, left = transfers.room(w.under_way, w.left, w.thead, 2 * more)
        moves = w.moves
        if len(moves) < 2 * len(under_way):
            moves = np.empty((2 * len(under_way), moves.shape[1]), dtype=np.int64)
            moves[: len(w.moves)] = w.moves
        self.w = w._replace(under_way=under_way, left=left, moves=moves)

    def _hand_on(self) -> bool:
        """Give the rows to the sink; whether there were any."""
        g, some = self.w.g, False
        for kind, counter, rows in (
            ("step", c.N_STEPS, self.w.steps), ("run", c.N_RUNS, self.w.runs), ("move", c.N_MOVES, self.w.moves)
        ):  # fmt: skip
            n = int(g[counter])
            if n:
                if kind == "run" and self.index is not None:
                    rows[:n, 0] = self.index[rows[:n, 0]]
                self.sink.take(kind, rows[:n])
                g[counter] = 0
                some = True
        return some
