"""When steps were, from their lengths and from when each was heard of: one at a time, in order, no later than it was heard of."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Placed", "StepTimes"]

WINDOW_NS = 500_000_000
_MOST = 512

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Placed(Generic[T]):
    """A step with its times. ``cut``: it began before the one ahead of it ended, and its start was put at that end."""

    what: T
    start_ns: int
    end_ns: int
    cut: bool = False


@dataclass(slots=True)
class _Heard(Generic[T]):
    what: T
    heard_ns: int
    length_ns: int


class StepTimes(Generic[T]):
    """Places the steps of one rank.

    A message about a step comes some time after its end, a different time on each occasion. Two facts bound that: a step ended
    before it was heard of, and before the next one began. So within a window of half a second the ends are pulled forward from
    the newest to the oldest: end(i) = min(heard(i), end(i+1) − length(i+1)). In a busy stretch that finds the smallest delay in
    the window and gives it to all. A step is handed out once the window has passed it.

    Where lengths overlap all the same (asynchronous scheduling measured from schedule to result), the start is cut to the end of
    the step ahead and the row says so; a step that would then have no length left is not placed.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Heard[T]] = deque()
        self._last_end_ns: int | None = None
        self.unplaced = 0

    def add(self, what: T, heard_ns: int, length_ns: int) -> None:
        """A step of a positive length. Times of :meth:`add` must not fall."""
        self._waiting.append(_Heard(what, heard_ns, length_ns))

    def take(self, now_ns: int | None) -> list[Placed[T]]:
        """The steps that the window has passed at ``now_ns``; all of them if that is null (the end)."""
        ripe = sum(1 for h in self._waiting if now_ns is None or now_ns - h.heard_ns > WINDOW_NS)
        ripe = max(ripe, len(self._waiting) - _MOST)
        if ripe <= 0:
            return []
        ends: list[int] = []
        bound: int | None = None
        for heard in reversed(self._waiting):
            end = heard.heard_ns if bound is None else min(heard.heard_ns, bound)
            ends.append(end)
            bound = end - heard.length_ns
        ends.reverse()
        out: list[Placed[T]] = []
        for i in range(ripe):
            heard = self._waiting.popleft()
            start, end, cut = ends[i] - heard.length_ns, ends[i], False
            last = self._last_end_ns
            if last is not None and start < last:
                # Later windows may find smaller delays: move it back as far as it was heard of, then cut.
                end = min(last + heard.length_ns, heard.heard_ns)
                start = end - heard.length_ns
                if start < last:
                    start, cut = last, True
            if end <= start:
                self.unplaced += 1
                continue
            self._last_end_ns = end
            out.append(Placed(heard.what, start, end, cut))
        return out
