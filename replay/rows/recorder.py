"""Makes the tables of a replay: steps, residency and moves while it is simulated, all else from them afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from hoptrace.manifest import Server
from hoptrace.replay.outcome import REFUSED, STEP, UNFINISHED, Outcome
from hoptrace.replay.overheads import Overheads
from hoptrace.replay.parent import Parent
from hoptrace.replay.plan import Plan
from hoptrace.replay.refusals import refusals
from hoptrace.replay.rows.manifest import Traffic
from hoptrace.replay.rows.requests import requests, stages
from hoptrace.replay.rows.runlog import RunLog
from hoptrace.replay.rows.steplog import StepLog
from hoptrace.replay.rows.steps import move_table, residency_table, step_table
from hoptrace.replay.rows.tokens import messages, token_table
from hoptrace.replay.rows.waits import waits
from hoptrace.replay.setting import Ints, Setting, fitted
from hoptrace.replay.workload import Workload
from hoptrace.stepcost_domain import Domain

__all__ = ["PRICED", "Recorder", "Submit", "coverage"]

Submit = Callable[[str, Callable[[], pa.Table]], None]
Tell = Callable[[float], None]

PRICED = (
    "start_ns", "end_ns", "prefill_requests", "prefill_tokens", "prefill_context_tokens", "decode_requests", "decode_tokens",
    "decode_context_tokens",
)  # fmt: skip
"""Columns of a step that its cost hangs on, and its times."""
# A part in memory: 80 MB of steps; requests of a part; tokens of a part.
_STEPS = 1 << 19
_ROWS = 1 << 20
_REQUESTS = 1 << 17


class Recorder:
    """A :class:`hoptrace.replay.outcome.Sink`. ``submit`` takes a table's name and a function that makes a part of it."""

    def __init__(
        self,
        parent: Parent,
        work: Workload,
        plan: Plan,
        servers: Sequence[Server],
        overheads: Overheads,
        submit: Submit,
        *,
        tokens: bool = True,
    ) -> None:
        self._parent, self._work, self._plan, self._servers, self._overheads = parent, work, plan, servers, overheads
        self._submit = submit
        self._tokens = tokens
        self._steps = StepLog(len(plan.engines))
        self._runs = RunLog(emitting=tokens)
        self._held: dict[str, list[Ints]] = {"step": [], "run": [], "move": []}
        self.errors: dict[int, str] = {}
        self.domains = [Domain(cost) for cost in plan.costs]
        self.traffic = Traffic(plan)
        self._cost_of = np.array([e.cost for e in plan.engines], dtype=np.int64)
        self.rows: dict[str, int] = dict.fromkeys(("steps", "residency", "moves"), 0)
        self.late = 0

    def take(self, kind: str, rows: Ints) -> None:
        """See :class:`hoptrace.replay.outcome.Sink`."""
        if not len(rows):
            return
        rows = rows.copy()
        if kind == "step":
            self._steps.take(rows)
            self._priced(rows)
        elif kind == "run":
            self._runs.take(rows)
        else:
            self.traffic.take(rows)
        held = self._held[kind]
        held.append(rows)
        if sum(map(len, held)) >= (_STEPS if kind == "step" else _ROWS):
            self._flush(kind)

    def _priced(self, rows: Ints) -> None:
        """Whether the step costs know such steps."""
        if not any(c.domain or c.pieces for c in self._plan.costs):
            return
        of = self._cost_of[rows[:, STEP.index("engine")]]
        for i, domain in enumerate(self.domains):
            mine = rows if len(self.domains) == 1 else rows[of == i]
            domain.add(pl.DataFrame({n: mine[:, STEP.index(n)] for n in PRICED}))

    def _flush(self, kind: str) -> None:
        held, self._held[kind] = self._held[kind], []
        if not held:
            return
        plan, servers, number = self._plan, self._servers, self._work.request
        table = {"step": "steps", "run": "residency", "move": "moves"}[kind]
        self.rows[table] += sum(map(len, held))

        def make() -> pa.Table:
            rows = np.concatenate(held)
            held.clear()
            if kind == "step":
                return step_table(rows, plan, servers)
            return (residency_table if kind == "run" else move_table)(rows, plan, number)

        self._submit(table, make)

    def finish(self, outcome: Outcome, tell: Tell | None = None) -> Setting:
        """All that is left to make. ``tell``: the share of it that is done. Of a request that had not arrived by the horizon
        nothing is written; they are counted in ``late``."""
        for kind in self._held:
            self._flush(kind)
        self._steps.seal()
        s = Setting(self._parent, self._work, self._plan, self._servers, self._overheads, outcome, self._steps)
        self._runs.seal(s.order)
        status = s.column("status", np.arange(self._work.n))
        self.errors = refusals(self._work, self._plan, np.flatnonzero(status == REFUSED))
        until = self._plan.horizon_ns
        arrival = s.column("arrival_ns", np.arange(self._work.n))
        gone = (status == UNFINISHED) & (arrival < 0)
        if until is not None:
            gone |= arrival > until
        self.late = int(gone.sum())
        work = list(self._pieces(s, until))
        for i, (name, make) in enumerate(work):
            self._submit(name, make)
            if tell is not None:
                tell((i + 1) / len(work))
        return s

    def _pieces(self, s: Setting, until: int | None) -> Iterator[tuple[str, Callable[[], pa.Table]]]:
        n = len(s.order)
        for low in range(0, n, _REQUESTS):
            high = min(n, low + _REQUESTS)
            yield "requests", _later(lambda at: fitted(requests(s, at, self.errors, until), "requests"), s.order[low:high])
            yield "stages", _later(lambda at: fitted(stages(s, at, until), "stages"), s.order[low:high])
            yield "waits", _later(lambda a, b: fitted(waits(s, self._runs, a, b), "waits"), low, high)
            if s.parent.messages:
                yield "moves", _later(lambda at: fitted(messages(s, at), "moves"), s.order[low:high])
        if self._tokens:
            for low, high in _token_ranges(s):
                yield "tokens", _later(lambda a, b: token_table(s, self._runs, a, b), low, high)


def _later(make: Callable[..., pa.Table], *args: Any) -> Callable[[], pa.Table]:
    return lambda: make(*args)


def _token_ranges(s: Setting) -> Iterator[tuple[int, int]]:
    """Ranges of ``s.order`` of about a million tokens each."""
    total = np.cumsum(s.work.output_tokens[s.order])
    low = 0
    while low < len(total):
        before = int(total[low - 1]) if low else 0
        high = max(low + 1, int(np.searchsorted(total, before + _ROWS, side="right")))
        yield low, high
        low = high


def coverage(s: Setting, tables: Sequence[str]) -> pa.Table:
    """Everything that a replay holds is covered, from its first arrival to its last end."""
    arrival, last = s.column("arrival_ns", np.arange(s.work.n)), s.outcome.end_ns
    came = arrival[arrival >= 0]
    oh = s.overheads
    end = last + oh.step_to_token_ns + oh.last_token_to_finish_ns
    only = s.servers[0].name if len(s.servers) == 1 else None
    frame = pl.DataFrame(
        {"table": list(tables)}, schema={"table": pl.String}
    ).with_columns(
        pl.lit(only, dtype=pl.String).alias("server"),
        pl.lit(int(came.min()) if len(came) else 0).alias("from_ns"),
        pl.lit(end).alias("to_ns"),
        pl.lit(1.0).alias("fraction"),
    )  # fmt: skip
    return fitted(frame, "coverage")
