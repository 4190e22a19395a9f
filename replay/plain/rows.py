"""Rows of steps, runs and moves, given to a sink in blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hoptrace.replay.outcome import CHUNK, DECODE, MOVE, RUN, STEP, Sink
from hoptrace.replay.plain.requests import Request

__all__ = ["Run", "Rows"]

_AT_ONCE = 4096
_COLUMNS = {"step": len(STEP), "run": len(RUN), "move": len(MOVE)}


class Run:
    """Steps in a row in which one request did the same."""

    __slots__ = ("context", "emitted", "engine", "first", "last", "phase", "tokens")

    def __init__(self, engine: int, step: int, phase: int, tokens: int, context: int, emitted: int) -> None:
        self.engine = engine
        self.first = self.last = step
        self.phase = phase
        self.tokens = tokens
        self.context = context
        self.emitted = emitted

    def goes_on(self, engine: int, step: int, phase: int, tokens: int, emitted: int) -> bool:
        """Whether a step belongs to this run; if so it is its last one now."""
        same = self.engine == engine and self.last == step - 1 and self.phase == phase and self.tokens == tokens
        if not same or (phase == DECODE and self.emitted != emitted):
            return False
        self.last = step
        if phase == CHUNK:
            self.emitted = emitted
        return True


class Rows:
    """Collects rows and hands them on."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._rows: dict[str, list[Sequence[int]]] = {"step": [], "run": [], "move": []}
        self.end_ns = 0

    def add(self, kind: str, row: Sequence[int], end_ns: int = 0) -> None:
        """One row. ``end_ns``: when what it tells of ended."""
        self.end_ns = max(self.end_ns, end_ns)
        rows = self._rows[kind]
        rows.append(row)
        if len(rows) >= _AT_ONCE:
            self._give(kind)

    def step_of(self, r: Request, engine: int, step: int, phase: int, tokens: int, context: int, emitted: int) -> None:
        """What a request did in a step that has ended."""
        run = r.run
        if isinstance(run, Run) and run.goes_on(engine, step, phase, tokens, emitted):
            return
        self.close(r)
        r.run = Run(engine, step, phase, tokens, context, emitted)

    def close(self, r: Request) -> None:
        """Its run has ended; one of no steps is not written."""
        run = r.run
        if isinstance(run, Run) and run.last >= run.first:
            self.add("run", (r.number, run.engine, run.first, run.last, run.phase, run.tokens, run.context, run.emitted))
        r.run = None

    def finish(self) -> None:
        """Hand on what is left."""
        for kind in self._rows:
            self._give(kind)

    def _give(self, kind: str) -> None:
        rows = self._rows[kind]
        if rows:
            self._sink.take(kind, np.array(rows, dtype=np.int64).reshape(len(rows), _COLUMNS[kind]))
            rows.clear()
