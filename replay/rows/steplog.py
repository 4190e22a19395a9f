"""What other tables need to know of a replay's steps, kept small: when each began and ended, and where a queue stood still."""

from __future__ import annotations

from typing import Any

import numpy as np

from hoptrace.replay.outcome import BUDGET, KV, SLOTS, STEP

__all__ = ["REASONS", "StepLog"]

_Ints = np.ndarray[Any, np.dtype[np.int64]]
_ENGINE, _START, _END, _BLOCKED = (STEP.index(c) for c in ("engine", "start_ns", "end_ns", "blocked_by"))

REASONS: dict[int, str] = {SLOTS: "slot", KV: "kv", BUDGET: "budget"}
"""Why the first in the queue was not admitted: the words of `waits.on`."""


class StepLog:
    """Fed with blocks of steps (``outcome.STEP``), then :meth:`seal`-ed, then asked. 17 bytes a step."""

    def __init__(self, engines: int) -> None:
        self._engines = engines
        self._parts: list[tuple[_Ints, _Ints, np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
        self.ptr: _Ints = np.zeros(engines + 1, dtype=np.int64)
        self.start: _Ints = np.zeros(0, dtype=np.int64)
        self.end: _Ints = np.zeros(0, dtype=np.int64)

    def take(self, rows: _Ints) -> None:
        """A block of steps; those of one engine come in its order."""
        self._parts.append((
            rows[:, _START].copy(), rows[:, _END].copy(), rows[:, _ENGINE].astype(np.int32), rows[:, _BLOCKED].astype(np.int8),
        ))  # fmt: skip

    def seal(self) -> None:
        """Order all by engine: step ``s`` of engine ``e`` is at ``ptr[e] + s``."""
        if self._parts:
            start, end, engine, blocked = (np.concatenate(p) for p in zip(*self._parts, strict=True))
        else:
            start = end = np.zeros(0, dtype=np.int64)
            engine, blocked = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int8)
        self._parts = []
        counts = np.bincount(engine, minlength=self._engines)
        self.ptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        if self._engines > 1 and len(start):
            order = np.argsort(engine, kind="stable")
            start, end, blocked = start[order], end[order], blocked[order]
        self.start, self.end = start, end
        # From a step's start to the next one's: so long its queue stood as it left it.
        stood = np.flatnonzero(blocked)
        lasted = np.where(np.isin(stood + 1, self.ptr), end[stood] - start[stood], 0) if len(stood) else stood
        inner = ~np.isin(stood + 1, self.ptr)
        lasted[inner] = start[stood[inner] + 1] - start[stood[inner]]
        self._stood = stood
        self._sums = {
            code: np.concatenate([[0], np.cumsum(np.where(blocked[stood] == code, lasted, 0))]).astype(np.int64)
            for code in REASONS
        }

    def end_of(self, engine: _Ints, step: _Ints) -> _Ints:
        """End of the steps, ns."""
        found: _Ints = self.end[self.ptr[engine] + step]
        return found

    def start_of(self, engine: _Ints, step: _Ints) -> _Ints:
        """Start of the steps, ns; of one behind the engine's last step, that one's end."""
        at = self.ptr[engine] + step
        there = at < self.ptr[engine + 1]
        found: _Ints = np.where(there, self.start[np.minimum(at, len(self.start) - 1)], self.end[np.maximum(at - 1, 0)])
        return found

    def first_from(self, engine: _Ints, time_ns: _Ints) -> _Ints:
        """The engines' first steps that start at these times or later; their number of steps where there is none."""
        found = np.zeros(len(engine), dtype=np.int64)
        order = np.argsort(engine, kind="stable")
        sorted_engine = engine[order]
        cuts = np.flatnonzero(np.diff(sorted_engine)) + 1
        for group in np.split(order, cuts) if len(order) else ():
            e = int(engine[group[0]])
            found[group] = np.searchsorted(self.start[self.ptr[e] : self.ptr[e + 1]], time_ns[group])
        return found

    def stood(self, engine: _Ints, first: _Ints, last: _Ints) -> tuple[_Ints, _Ints]:
        """For what the queues stood still longest in the steps ``first ≤ step < last`` (a key of :data:`REASONS`; 0: they did
        not), and how long, ns."""
        a = np.searchsorted(self._stood, self.ptr[engine] + first)
        b = np.searchsorted(self._stood, self.ptr[engine] + np.maximum(last, first))
        codes = np.array(list(self._sums))
        times = np.stack([s[b] - s[a] for s in self._sums.values()])
        most = np.argmax(times, axis=0)
        longest = times.max(axis=0)
        return np.where(longest > 0, codes[most], 0), longest
