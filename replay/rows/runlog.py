"""The runs of a replay, kept small, and the tokens that follow from them: one row per emission, never simulated one by one."""

from __future__ import annotations

from typing import Any

import numpy as np

from hoptrace.replay.outcome import DECODE, PREEMPTED, RUN
from hoptrace.replay.rows.steplog import StepLog
from hoptrace.replay.setting import Ints

__all__ = ["RunLog"]

_C = {name: i for i, name in enumerate(RUN)}


class RunLog:
    """Fed with blocks of runs (``outcome.RUN``), then :meth:`seal`-ed, then asked. 18 bytes a run.

    Only what emits tokens or is a lost place is kept; ``emitting=False``: lost places alone.
    """

    def __init__(self, emitting: bool = True) -> None:
        self._emitting = emitting
        self._parts: list[list[np.ndarray[Any, Any]]] = []
        self._columns: list[np.ndarray[Any, Any]] = []
        self.ptr: Ints = np.zeros(1, dtype=np.int64)

    def take(self, rows: Ints) -> None:
        """A block of runs, in any order."""
        keep = rows[:, _C["phase"]] == PREEMPTED
        if self._emitting:
            keep |= rows[:, _C["emitted_per_step"]] > 0
        rows = rows[keep]
        kinds = (("request", np.int32), ("engine", np.int32), ("first_step", np.int32), ("last_step", np.int32),
                 ("emitted_per_step", np.int16), ("phase", np.int8))  # fmt: skip
        self._parts.append([rows[:, _C[name]].astype(kind) for name, kind in kinds])

    def seal(self, order: Ints) -> None:
        """Group all by request, in the ``order`` of the positions of the work: those of ``order[i]`` are at
        ``ptr[i] … ptr[i+1]``."""
        rank = np.empty(len(order), dtype=np.int32)
        rank[order] = np.arange(len(order), dtype=np.int32)
        if self._parts:
            columns = [np.concatenate(c) for c in zip(*self._parts, strict=True)]
        else:
            columns = [np.zeros(0, dtype=np.int64)] * 6
        self._parts = []
        of = rank[columns[0]] if len(columns[0]) else columns[0]
        sort = np.argsort(of, kind="stable")
        self._columns = [c[sort] for c in columns[1:]]
        self.ptr = np.concatenate([[0], np.cumsum(np.bincount(of, minlength=len(order)))]).astype(np.int64)

    def emissions(self, low: int, high: int, steps: StepLog) -> tuple[Ints, Ints, Ints, Ints]:
        """Of the requests ``order[low:high]``, in that order: (which of them, index of the first token, tokens, end of the step
        in ns), one per emission in the order of time."""
        a, b = self.ptr[low], self.ptr[high]
        engine, first, last, emitted, phase = (c[a:b].astype(np.int64) for c in self._columns)
        whose = np.repeat(np.arange(high - low), np.diff(self.ptr[low : high + 1]))
        keep = phase != PREEMPTED
        if keep.any():
            begin = np.where(keep, steps.start_of(engine, np.minimum(first, last)), 0)
            sort = np.lexsort((begin, whose))
            sort = sort[keep[sort]]
        else:
            sort = np.zeros(0, dtype=np.int64)
        whose, engine, first, last, emitted, phase = (x[sort] for x in (whose, engine, first, last, emitted, phase))
        # A prompt yields its token in the last step of the run, a decoder in each.
        begin = np.where(phase == DECODE, first, last)
        n = last - begin + 1
        before = np.cumsum(n) - n
        run = np.repeat(np.arange(len(n)), n)
        step = begin[run] + np.arange(len(run)) - before[run]
        count = emitted[run]
        so_far = np.cumsum(count) - count
        owner = whose[run]
        starts = np.searchsorted(owner, np.arange(high - low))
        base = so_far[np.minimum(starts, max(0, len(so_far) - 1))] if len(so_far) else np.zeros(high - low, dtype=np.int64)
        return owner, so_far - base[owner], count, steps.end_of(engine[run], step)

    def tokens(self, low: int, high: int) -> int:
        """How many emissions :meth:`emissions` gives."""
        a, b = self.ptr[low], self.ptr[high]
        _, first, last, _, phase = (c[a:b] for c in self._columns)
        each = np.where(phase == DECODE, last.astype(np.int64) - first + 1, np.where(phase == PREEMPTED, 0, 1))
        return int(each.sum())

    def lost(self, low: int, high: int) -> tuple[Ints, Ints, Ints, Ints]:
        """Lost places of the requests ``order[low:high]``: (which of them, engine, first step, last step)."""
        a, b = self.ptr[low], self.ptr[high]
        engine, first, last, _, phase = (c[a:b] for c in self._columns)
        whose = np.repeat(np.arange(high - low), np.diff(self.ptr[low : high + 1]))
        keep = phase == PREEMPTED
        return whose[keep], engine[keep].astype(np.int64), first[keep].astype(np.int64), last[keep].astype(np.int64)
