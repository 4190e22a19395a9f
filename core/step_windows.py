"""Stored steps by windows of time and number, read from the row groups that hold them: the whole is never in memory.

Within one (server, rank) steps ascend in number, start and end, in the order of the files, each once and not in a pipeline; a
table that is otherwise has no windows, and whoever asks holds all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from hoptrace.reader import Trace
from hoptrace.row_groups import RowGroups
from hoptrace.schema import table

__all__ = ["StepWindows", "step_windows"]

Ints = npt.NDArray[np.int64]
Key = tuple[str, int]
_ORDER = ("server", "dp_rank", "pp_rank", "step", "start_ns", "end_ns")
_ROWS = 1 << 20


@dataclass(frozen=True)
class _Stretch:
    """The steps of one (server, rank) in one row group: first and last number, start of the first and the last, end of the
    last."""

    group: int
    first: int
    last: int
    start: int
    begun: int
    end: int


class StepWindows:
    """``rows``: steps in all; ``keys``: (server, rank) of every step, ascending."""

    def __init__(self, groups: RowGroups, stretches: dict[Key, list[_Stretch]]) -> None:
        self._groups = groups
        self._stretches = stretches
        self.keys = sorted(stretches)
        self.rows = int(groups.rows.sum())

    def read(self, columns: Sequence[str], span: tuple[int, int] | None, numbers: dict[Key, tuple[int, int]]) -> pl.DataFrame:
        """Of each (server, rank): the steps that lie in ``span`` (ns, both ends included) at least partly, those with a number in
        ``numbers``, all between them, and the last one that began before ``span``; ascending by key and number. ``dp_rank`` is
        never null."""
        wanted = {}
        for key, s in self._stretches.items():
            if (reach := _reach(s, span, numbers.get(key))) is not None:
                wanted[key] = reach
        every = sorted({s.group for key, (a, b) in wanted.items() for s in self._stretches[key][a : b + 1]})
        need = [*dict.fromkeys((*_ORDER, *columns))]
        frame = self._groups.read(every, need)
        frame = frame.with_columns(pl.col("dp_rank").cast(pl.Int64).fill_null(0), pl.col("pp_rank").cast(pl.Int64).fill_null(0))
        if len(self.keys) == 1:
            parts = {self.keys[0]: frame}
        else:
            parts = {(str(s), int(r)): f for (s, r), f in frame.partition_by("server", "dp_rank", as_dict=True).items()}
        out = [_trim(parts[k], span, numbers.get(k)) for k in self.keys if k in wanted and k in parts]
        kinds = {c.name: c.type for c in table("steps").columns}
        frame = pl.concat(out) if out else frame.clear()
        empty = pl.from_arrow(table("steps").arrow.empty_table())
        assert isinstance(empty, pl.DataFrame)
        return frame.select(pl.col(c).cast(empty.schema[c]) if c in kinds else pl.col(c) for c in need)

    def batches(self, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        """All rows, about a million at a time, in the order of the files."""
        yield from _batches(self._groups, columns)


def step_windows(trace: Trace) -> StepWindows | None:
    """Null where the table has no windows (see the module). InputError if a file is damaged."""
    groups = RowGroups.of(trace.files("steps"), "steps")
    if groups is None:
        return None
    stretches: dict[Key, list[_Stretch]] = {}
    at = 0
    for frame in _batches(groups, _ORDER):
        frame = frame.with_columns(pl.col("dp_rank").cast(pl.Int64).fill_null(0))
        if frame["pp_rank"].null_count() < frame.height and (frame["pp_rank"].max() != 0 or frame["pp_rank"].min() != 0):
            return None
        row = 0
        while row < frame.height:
            size = int(groups.rows[at])
            piece = frame.slice(row, size)
            if not _take_in(piece, at, stretches):
                return None
            row, at = row + size, at + 1
    return StepWindows(groups, stretches)


def _batches(groups: RowGroups, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
    waiting: list[int] = []
    rows = 0
    for i, n in enumerate(groups.rows.tolist()):
        waiting.append(i)
        rows += n
        if rows >= _ROWS:
            yield groups.read(waiting, columns, threads=True)
            waiting, rows = [], 0
    if waiting:
        yield groups.read(waiting, columns, threads=True)


def _take_in(piece: pl.DataFrame, group: int, stretches: dict[Key, list[_Stretch]]) -> bool:
    """Add one row group; false if its steps do not ascend from those before."""
    by_key = piece.select("server", "dp_rank").unique(maintain_order=True).rows()
    for server, rank in by_key:
        own = piece
        if len(by_key) > 1:
            own = piece.filter((pl.col("server") == server) & (pl.col("dp_rank") == rank))
        number, start, end = (own[c].to_numpy() for c in ("step", "start_ns", "end_ns"))
        before = stretches.setdefault((str(server), int(rank)), [])
        if not _ascends(number, start, end):
            return False
        if before and not (before[-1].last < number[0] and before[-1].begun <= start[0] and before[-1].end <= end[0]):
            return False
        before.append(_Stretch(group, int(number[0]), int(number[-1]), int(start[0]), int(start[-1]), int(end[-1])))
    return True


def _ascends(number: Ints, start: Ints, end: Ints) -> bool:
    return bool(
        (number[1:] > number[:-1]).all()
        and (start[1:] >= start[:-1]).all()
        and (end[1:] >= end[:-1]).all()
        and (end >= start).all()
    )


def _reach(s: list[_Stretch], span: tuple[int, int] | None, numbers: tuple[int, int] | None) -> tuple[int, int] | None:
    """First and last stretch to read; null for none."""
    low, high = [], []
    if span is not None:
        started = [i for i, x in enumerate(s) if x.start <= span[0]]
        open_ = [i for i, x in enumerate(s) if x.end > span[0]]
        low.append(min(started[-1] if started else 0, open_[0] if open_ else len(s) - 1))
        within = [i for i, x in enumerate(s) if x.start <= span[1]]
        high.append(within[-1] if within else 0)
    if numbers is not None:
        own = [i for i, x in enumerate(s) if x.last >= numbers[0] and x.first <= numbers[1]]
        if own:
            low.append(own[0])
            high.append(own[-1])
    if not low:
        return None
    return min(low), max(high)


def _trim(own: pl.DataFrame, span: tuple[int, int] | None, numbers: tuple[int, int] | None) -> pl.DataFrame:
    number, start, end = (own[c].to_numpy() for c in ("step", "start_ns", "end_ns"))
    low, high = [], []
    if span is not None:
        low.append(min(int(np.searchsorted(start, span[0], side="right")) - 1, int(np.searchsorted(end, span[0], side="right"))))
        high.append(int(np.searchsorted(start, span[1], side="right")))
    if numbers is not None:
        a, b = np.searchsorted(number, numbers[0], side="left"), np.searchsorted(number, numbers[1], side="right")
        if a < b:
            low.append(int(a))
            high.append(int(b))
    first, last = max(min(low) - 1, 0), min(max(high) + 1, own.height)
    return own.slice(first, last - first)
