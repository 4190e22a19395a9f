"""Runs a plan, fast: the tables are made, the compiled loop goes over them, and rows are handed on as they come."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hoptrace.replay.compiled import columns as c
from hoptrace.replay.compiled import transfers
from hoptrace.replay.compiled.heap import enqueue
from hoptrace.replay.compiled.loop import CROWDED, FULL, SHORT, advance, close
from hoptrace.replay.compiled.setup import ints, prepare
from hoptrace.replay.compiled.store import room
from hoptrace.replay.draws import draw
from hoptrace.replay.jit import compiled
from hoptrace.replay.outcome import REQUEST, Outcome, Sink
from hoptrace.replay.plan import Plan
from hoptrace.replay.workload import Workload

__all__ = ["simulate"]

_ARRIVAL, _STATUS = REQUEST.index("arrival_ns"), REQUEST.index("status")
_ALONE = {"round_robin": 0, "random": 1, "session": 2}


@compiled(c)
def _assign(w: c.World, kind: int, entry: np.ndarray) -> None:
    """Where each request goes, if that depends on nothing that happens: into the column EXPECTED."""
    n = entry.size
    i, without = 0, 0
    for r in range(w.s.shape[0]):
        k = 0
        if w.s[r, c.FLAGS] & c.NEVER_FITS == 0:
            if kind == 0:
                k = i % n
            elif kind == 1:
                k = draw(w.g[c.SEED], 1, r, 0) % n
            elif w.session[r] >= 0:
                k = draw(w.g[c.SEED], 3, w.session[r], 0) % n
            else:
                k = without % n
                without += 1
            i += 1
        w.s[r, c.EXPECTED] = entry[k]


@compiled(c)
def _enqueue_arrivals(w: c.World, arrival_ns: np.ndarray, after: np.ndarray, only: int) -> None:
    """Requests that come by themselves go to the router's queue (``only`` ≥ 0: those of that engine)."""
    horizon = w.g[c.HORIZON]
    for r in range(arrival_ns.size):
        if (after.size == 0 or after[r] < 0) and (only < 0 or w.s[r, c.EXPECTED] == only):
            if arrival_ns[r] <= horizon:
                w.out[r, _ARRIVAL] = arrival_ns[r]
            enqueue(w.queues, w.nodes, w.g[c.ROUTER_QUEUE], r, arrival_ns[r] + w.g[c.BEFORE_NS], 0, r)


def simulate(
    work: Workload, plan: Plan, sink: Sink, *, progress: Callable[[float], None] | None = None, separate: bool = False
) -> Outcome:
    """Run ``plan`` over ``work``: docs/replay-engine.md.

    Args:
        sink: takes the rows of steps, runs and moves in blocks as they come.
        progress: called now and then with the fraction of the requests that are done.
        separate: go through every decoder in every step, as a check of the fast way; the rows are the same.
    """
    run = _Run(work, plan, sink, progress, separate)
    run.go()
    return run.outcome()


class _Run:
    def __init__(self, work: Workload, plan: Plan, sink: Sink, progress: Callable[[float], None] | None, separate: bool) -> None:
        self.work, self.plan, self.sink, self.progress = work, plan, sink, progress
        self.w, self.table, self.entries, self.log = prepare(work, plan, separate=separate)

    def go(self) -> None:
        """Run all engines, one after another where none touches another."""
        w, plan = self.w, self.plan
        after = getattr(self.work, "after", None)
        free = np.empty(0, dtype=np.int64) if after is None or not w.g[c.SUCCESSORS] else ints(after)
        alone = plan.routing.kind in _ALONE and plan.handover is None and not plan.tiers
        if alone and not free.size and not w.g[c.CLIENTS]:
            w.g[c.ASSIGNED] = 1
            _assign(w, _ALONE[plan.routing.kind], np.array(plan.entry, dtype=np.int64))
            for e in range(len(plan.engines)):
                _enqueue_arrivals(w, ints(self.work.arrival_ns), free, e)
                self.w = w._replace(order=np.array([e], dtype=np.int64))
                w.eng[e, c.PLACE] = 0
                self._advance()
        else:
            if w.g[c.CLIENTS]:
                self._first_clients()
            else:
                _enqueue_arrivals(w, ints(self.work.arrival_ns), free, -1)
            self._advance()
        at = 0
        while at < self.work.n:
            at = close(self.w, at)
            self._hand_on()

    def _first_clients(self) -> None:
        w, n = self.w, min(self.plan.clients or 0, self.work.n)
        for r in range(n):
            enqueue(w.queues, w.nodes, w.g[c.ROUTER_QUEUE], r, int(self.work.arrival_ns[0]) + self.plan.before_ns, 0, r)
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
                self.sink.take(kind, rows[:n])
                g[counter] = 0
                some = True
        return some

    def outcome(self) -> Outcome:
        """What has come out."""
        end = int(self.w.g[c.END])
        return Outcome(self.w.out, self.w.eng[:, c.STEPS].copy(), 0 if end == -c.NEVER else end)
