"""Counters of the uncore and of devices, by perf: PCIe stacks, memory controllers, the data fabric, CXL devices.

They belong to no process: only who may watch the whole machine can open them. Counts begin when they are opened, so each opening
has an incarnation of its own. Where more events are asked of a device than it has counters, the kernel takes turns and the counts
are estimates: they are told as such once.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.kernel.uncore_counts import Counted, Refused
from hoptrace.collectors.hardware.perf.events import Count, Event, PerfEvent, make_room, why_not
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots, found_by_error, status_of

__all__ = ["Opened", "UncoreSource"]

_AGAIN_S, _AGAIN_MOST_S = 1.0, 60.0
_READ_S, _SHARE, _FAST_COUNTERS = 4e-6, 0.001, 100


class Opened(Protocol):
    """A counter that has been opened."""

    def read(self) -> Count: ...

    def close(self) -> None: ...


def _open(event: Event, cpu: int) -> Opened:
    return PerfEvent(event, cpu=cpu)


class _Counter:
    """One counter, open or waiting to be opened again."""

    def __init__(self, counted: Counted) -> None:
        self.counted = counted
        self.opened: Opened | None = None
        self.series: int | None = None
        self.lives = 0
        self.last = 0
        self.wait_s, self.due_s = _AGAIN_S, 0.0


class UncoreSource:
    """``list_them``: what there is to count under these roots (see :mod:`.uncore_counts`). ``missing``: why there may be nothing,
    and what would help. ``opener``: opens an event on a CPU, where the tree is not this machine's own.

    Each reading interrupts the CPU that the device is read from: all together take a thousandth of a core, at the rate that this
    leaves.
    """

    def __init__(
        self, name: str, answers: str, list_them: Callable[[Path, Path], Iterable[Counted | Refused]],
        missing: tuple[str, str], *, roots: Roots | None = None, opener: Callable[[Event, int], Opened] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.answers = name, answers
        self._list, self._missing = list_them, missing
        self._roots = roots or Roots()
        self._opener = opener
        self._boot = procfs.boot_id(self._roots.proc)[:8]
        self._counters: list[_Counter] = []
        self._estimated = False
        self._size: int | None = None

    @property
    def every_s(self) -> float | None:
        """So that reading takes :data:`_SHARE` of a core."""
        return self._many * _READ_S / _SHARE

    @property
    def pace(self) -> Pace:
        """Many counters would hold the fast sources up."""
        return "slow" if self._many > _FAST_COUNTERS else "fast"

    @property
    def _many(self) -> int:
        if self._size is None:
            self._size = sum(isinstance(c, Counted) for c in self._list(self._roots.sys, self._roots.proc))
        return self._size

    def probe(self) -> Found:
        found = list(self._list(self._roots.sys, self._roots.proc))
        counted = [c for c in found if isinstance(c, Counted)]
        refused = list(dict.fromkeys(f"{r.what}: {r.why}" for r in found if isinstance(r, Refused)))
        if not counted:
            return Found("unsupported" if refused else "absent", "; ".join(refused[:3]) or self._missing[0], self._missing[1])
        if self._opener is None and not self._roots.live:
            return Found("unsupported", "this /sys is not this machine's own", "run hoptrace on the host")
        try:
            self._try(counted[0]).close()
        except OSError as e:
            busy = e.errno == errno.EBUSY
            why = f"{counted[0].pmu}: its counters are taken (PCM, or perf)" if busy else None
            return Found("error", why, "stop the other tool") if busy else why_not(e, counted[0].pmu, self._roots.proc)
        sees = f"{len({c.pmu for c in counted})} devices, {len(counted)} counters"
        return Found("ok", "; ".join(refused[:3]) or None, sees=sees)

    def open(self, out: Sink) -> None:
        make_room()
        found = [c for c in self._list(self._roots.sys, self._roots.proc) if isinstance(c, Counted)]
        self._counters = [_Counter(c) for c in found]

    def sample(self, out: Sink) -> None:
        for counter in self._counters:
            if counter.opened is None and not self._again(counter, out):
                continue
            self._one(counter, out)

    def close(self) -> None:
        for counter in self._counters:
            if counter.opened is not None:
                counter.opened.close()
                counter.opened = None

    # -- inside -------------------------------------------------------------------------------------------------------

    def _try(self, counted: Counted) -> Opened:
        return (self._opener or _open)(counted.event, counted.cpu)

    def _again(self, counter: _Counter, out: Sink) -> bool:
        now_s = time.monotonic()
        if now_s < counter.due_s:
            return False
        c = counter.counted
        try:
            counter.opened = self._try(c)
        except OSError as e:
            counter.due_s = now_s + counter.wait_s
            counter.wait_s = min(2 * counter.wait_s, _AGAIN_MOST_S)
            at = out.now_ns()
            out.at(at, at)
            out.put(self._series(counter, out), None, status_of(e))
            return False
        counter.wait_s, counter.last, counter.series = _AGAIN_S, 0, None
        counter.lives += 1
        if counter.lives > 1:
            out.event("device", f"{c.entity} {c.name} is counted again, from 0")
        return True

    def _series(self, counter: _Counter, out: Sink) -> int:
        if counter.series is None:
            c = counter.counted
            # The process that opened it is in it: two captures in one trace each count from their own beginning.
            life = f"{self._boot}/{os.getpid()}/{counter.lives}"
            counter.series = out.series(c.entity, c.name, c.unit, "cumulative", direction=c.direction, incarnation=life)
        return counter.series

    def _one(self, counter: _Counter, out: Sink) -> None:
        assert counter.opened is not None
        series = self._series(counter, out)
        before = out.now_ns()
        try:
            count = counter.opened.read()
        except OSError as e:
            out.at(before, out.now_ns())
            out.put(series, None, "lost" if e.errno == errno.ENODEV else status_of(e))
            out.event("device", f"{found_by_error(e).reason}: {counter.counted.entity} is lost")
            counter.opened.close()
            counter.opened, counter.due_s = None, time.monotonic() + counter.wait_s
            return
        out.at(before, out.now_ns())
        if count.value is None:
            out.put(series, None, "absent")  # it has not had a hardware counter yet
            return
        if count.scaled and not self._estimated:
            self._estimated = True
            out.event("gap", f"{self.name}: events share hardware counters; counts are estimated from the time they had one")
        if count.value < counter.last:
            return  # an estimate can fall by a little: nothing was uncounted
        counter.last = count.value
        factor = counter.counted.factor
        out.put(series, count.value * int(factor) if factor == int(factor) else round(count.value * factor))
