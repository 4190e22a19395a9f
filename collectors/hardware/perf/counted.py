"""The events of one process: a counter for each thread and event, and what ended threads have counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hoptrace.collectors.hardware.perf.events import Event, PerfEvent, total_of

__all__ = ["Counted"]


class Counted:
    """One life of a process, from when it was seen first. ``whole``: whether every thread that was seen is counted; else there is
    no sum."""

    def __init__(self, pid: int, start_ticks: int, events: Mapping[str, Sequence[Event]], *, user_only: bool = False) -> None:
        self.pid, self.start_ticks = pid, start_ticks
        self.whole = True
        self.counts: dict[int, dict[str, int | None]] = {}
        self._events, self._user_only = events, user_only
        self._threads: dict[int, list[tuple[str, list[PerfEvent]]]] = {}
        self._ended: dict[str, int | None] = dict.fromkeys(events, 0)

    @property
    def threads(self) -> set[int]:
        """Threads that are counted."""
        return set(self._threads)

    def begin(self, tid: int) -> None:
        """Count a thread. OSError: then it is not."""
        opened: list[tuple[str, list[PerfEvent]]] = []
        try:
            for name, events in self._events.items():
                mine: list[PerfEvent] = []
                opened.append((name, mine))
                mine += (PerfEvent(event, pid=tid, user_only=self._user_only) for event in events)
        except OSError:
            _close(opened)
            raise
        self._threads[tid] = opened

    def read(self) -> None:
        """Read every thread's counters into ``counts``: null what none could be had for."""
        for tid, opened in self._threads.items():
            self.counts[tid] = {name: total_of(events) for name, events in opened}

    def end(self, tid: int) -> int:
        """A thread has ended: its counts, read since, stay in the sum. Gives the number of counters that knew nothing."""
        unknown = 0
        for name, n in self.counts.pop(tid, {}).items():
            so_far = self._ended[name]
            if n is None:
                unknown += 1
                self._ended[name] = None
            elif so_far is not None:
                self._ended[name] = so_far + n
        _close(self._threads.pop(tid))
        return unknown

    def total(self, name: str) -> int | None:
        """Over all threads, ended ones among them; null where one of them is not known. It never falls."""
        total = self._ended[name]
        if total is None or not self.whole:
            return None
        for counts in self.counts.values():
            n = counts[name]
            if n is None:
                return None
            total += n
        return total

    def close(self) -> None:
        for opened in self._threads.values():
            _close(opened)
        self._threads.clear()
        self.counts.clear()


def _close(opened: Sequence[tuple[str, Sequence[PerfEvent]]]) -> None:
    for _, events in opened:
        for event in events:
            event.close()
