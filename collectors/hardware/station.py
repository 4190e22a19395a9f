"""Runs the sources of counters: each at its pace, none delaying the fast ones, with what it costs written beside what it found.

Threads: one for all fast sources, one for all slow ones, one for each source that may block, one that hands rows over. A source
that fails is tried again ever less often, one that is not there is looked for again every 30 s, one that costs more than is
allowed is asked half as often. One that does not come back for ten seconds is left in its thread, and those that it kept waiting
go on in another.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from hoptrace.collectors.hardware.sink import Sink, hand_over
from hoptrace.collectors.hardware.source import Found, Source
from hoptrace.writer import TraceWriter

__all__ = ["Running", "Station"]

_SLOW_S, _LOOK_S, _WEIGH_S, _FLUSH_S = 1.0, 30.0, 5.0, 1.0
_SLOWEST_FAULT_S, _SLOWEST_BEAT_S = 60.0, 60.0
_PATIENCE_S = 2.0
_HANGS_S = 10.0


@dataclass(slots=True)
class Running:
    """One source and how it fares. ``every_s`` grows when it costs too much; ``cpu_ns`` is what its samples took."""

    source: Source
    sink: Sink
    every_s: float
    found: Found | None = None
    due: float = 0.0
    faults: int = 0
    samples: int = 0
    missed: int = 0
    cpu_ns: int = 0
    late_ns: int = 0
    weighed: tuple[float, int] = (0.0, 0)
    opened: bool = False
    last_error: str | None = None
    began: float | None = None  # of the sample that is being taken
    hangs: bool = False
    asking: threading.Thread | None = None


@dataclass(slots=True)
class Station:
    """The sources of a capture.

    every_s: between two samples of a fast source. max_overhead: what all of them may take of one core (0.01: one per cent); null:
    they are not held back. recorded: told once a source's first sample is in (its name), for the coverage, and when it answers
    again; lost: when it hangs.
    """

    writer: TraceWriter
    host: str
    sources: Iterable[Source]
    every_s: float = 0.1
    max_overhead: float | None = 0.01
    recorded: Callable[[str], None] = lambda name: None
    lost: Callable[[str], None] = lambda name: None
    running: list[Running] = field(default_factory=list)
    hand_over_cpu_ns: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _groups: list[list[Running]] = field(default_factory=list)
    _own: Sink | None = None

    def probe(self) -> dict[str, Found]:
        """Look at every source; gives what was found, by name."""
        for source in self.sources:
            floor = max(source.every_s or 0.0, _SLOW_S if source.pace == "slow" else 0.0)
            run = Running(source, Sink(self.writer, self.host, source.name), max(self.every_s, floor))
            run.found = _probe(run)
            self.running.append(run)
        return {r.source.name: r.found for r in self.running if r.found is not None}

    def start(self) -> None:
        """Begin to sample what the probe found."""
        self._own = Sink(self.writer, self.host, "station")
        for name in ("fast", "slow"):
            self._together(name, self._of(name))
        for run in self.running:
            if run.source.pace in ("own", "events"):
                self._together(run.source.name, [run])
        self._spawn("hand-over", self._hand_over)

    def close(self) -> None:
        """Stop, take one last sample of each source that answers, hand over everything. Takes no longer than some seconds."""
        self._stop.set()
        until = time.monotonic() + _PATIENCE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        for run in self.running:
            run.sink.settle()
        self._flush()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _of(self, pace: str) -> list[Running]:
        return [r for r in self.running if r.source.pace == pace]

    def _together(self, name: str, runs: list[Running]) -> None:
        if runs:
            self._groups.append(runs)
            self._spawn(name, lambda: self._beat(runs))

    def _spawn(self, name: str, work: Callable[[], None]) -> None:
        # A daemon: a call into a driver may never return, and must not keep the process.
        thread = threading.Thread(target=work, name=f"hoptrace-{name}"[:15], daemon=True)
        thread.start()
        self._threads.append(thread)

    def _beat(self, runs: list[Running]) -> None:
        """Sample each at its deadline. Deadlines are absolute: what is missed is skipped and counted, never made up for."""
        begun = time.monotonic()
        for run in runs:
            run.due, run.weighed = begun, (begun, run.cpu_ns)
        looked = begun
        while not self._stop.is_set():
            now = time.monotonic()
            for run in runs:
                if run.due <= now and run.found is not None and run.found.available:
                    self._once(run, now)
                if self._stop.is_set():
                    break
            if now - looked >= _LOOK_S:
                looked = now
                for run in runs:
                    self._look_again(run)
            next_due = min((r.due for r in runs if r.found is not None and r.found.available), default=now + _LOOK_S)
            self._stop.wait(max(0.0, min(next_due, looked + _LOOK_S) - time.monotonic()))
        for run in runs:
            if run.opened:
                if run.source.pace != "events":
                    self._sample(run)
                with suppress(Exception):
                    run.source.close()

    def _once(self, run: Running, now: float) -> None:
        run.late_ns = max(run.late_ns, int((now - run.due) * 1e9))
        before = run.faults
        run.began = time.monotonic()
        self._sample(run)
        run.began = None
        if run.faults:
            run.due = time.monotonic() + min(run.every_s * 2.0**run.faults, _SLOWEST_FAULT_S)
            if not before:
                run.sink.event("source", f"{run.source.name} could not be read: {run.last_error}")
            return
        if before:
            run.sink.event("source", f"{run.source.name} can be read again")
        run.due += run.every_s
        behind = time.monotonic() - run.due
        if behind > 0:
            skipped = int(behind / run.every_s) + 1
            run.missed += skipped
            run.due += skipped * run.every_s
        self._weigh(run)

    def _sample(self, run: Running) -> None:
        cpu = time.thread_time_ns()
        try:
            if not run.opened:
                run.source.open(run.sink)
                run.opened = True
            run.source.sample(run.sink)
            run.samples += 1
            run.faults = 0
            if run.samples == 1:
                self.recorded(run.source.name)
        except Exception as e:  # whatever a driver or a file does, the others go on
            run.faults += 1
            run.last_error = f"{type(e).__name__}: {e}"[:300]
            run.sink.drop(f"samples that failed ({type(e).__name__})")
        run.cpu_ns += time.thread_time_ns() - cpu

    def _weigh(self, run: Running) -> None:
        """Whoever takes more than its share of the allowance is asked half as often: no source may have all of it but alone."""
        since, cpu_ns = run.weighed
        now = time.monotonic()
        if now - since < max(_WEIGH_S, 4 * run.every_s):
            return
        share = (run.cpu_ns - cpu_ns) / 1e9 / (now - since)
        run.weighed = (now, run.cpu_ns)
        if self.max_overhead is None or run.every_s >= _SLOWEST_BEAT_S:
            return
        total = sum(self._share(r, now) for r in self.running if r is not run) + share
        dearest = all(share >= self._share(r, now) for r in self.running if r is not run)
        if share > self.max_overhead or (total > self.max_overhead and dearest):
            run.every_s *= 2
            run.sink.event(
                "overhead",
                f"{run.source.name} took {share:.2%} of a core (all sources {total:.2%}, {self.max_overhead:.2%} are allowed): "
                f"it is read every {run.every_s:g} s from here on",
            )

    @staticmethod
    def _share(run: Running, now: float) -> float:
        """What it takes of a core at present, from its mean so far per sample."""
        return run.cpu_ns / run.samples / 1e9 / run.every_s if run.samples and run.opened else 0.0

    def _look_again(self, run: Running) -> None:
        """A source that was not there may be by now: a module loaded, a permission given, a device back."""
        if run.found is None or run.found.available:
            return
        found = _probe(run)
        run.found = found
        if found.available:
            run.due = time.monotonic()
            run.sink.event("source", f"{run.source.name} is there now")

    def _hand_over(self) -> None:
        while not self._stop.wait(_FLUSH_S):
            self._flush()
            self._watch()

    def _watch(self) -> None:
        """Who hangs keeps the thread that it hangs in; those that shared it go on in a new one."""
        now = time.monotonic()
        for runs in list(self._groups):
            for run in list(runs):
                began = run.began
                if began is None and run.hangs:
                    run.hangs = False
                    run.sink.event("source", f"{run.source.name} answers again")
                    self.recorded(run.source.name)
                elif began is not None and not run.hangs and now - began > _HANGS_S:
                    run.hangs = True
                    run.sink.event("source", f"{run.source.name} has not answered for {now - began:.0f} s; the others go on")
                    self.lost(run.source.name)
                    rest = [r for r in runs if r is not run]
                    runs[:] = [run]  # what the thread finds when it comes back
                    self._together(run.source.pace, rest)

    def _flush(self) -> None:
        cpu = time.thread_time_ns()
        self._tell()
        rows = [row for run in self.running for row in run.sink.take()]
        if self._own is not None:
            rows += self._own.take()
        hand_over(self.writer, self.host, rows)
        self.hand_over_cpu_ns += time.thread_time_ns() - cpu

    def _tell(self) -> None:
        """What the collecting itself costs, and how well it kept its beat: series like all others."""
        own = self._own
        if own is None:
            return
        now = own.now_ns()
        own.at(now, now)
        for run in self.running:
            if not run.samples and not run.faults:
                continue
            entity = f"collector:{run.source.name}"
            own.put(own.series(entity, "cpu_ns", "ns", "cumulative"), run.cpu_ns)
            own.put(own.series(entity, "samples", "samples", "cumulative"), run.samples)
            own.put(own.series(entity, "missed", "beats", "cumulative"), run.missed)
            own.put(own.series(entity, "late_ns", "ns", "gauge"), run.late_ns)
            own.put(own.series(entity, "every_ns", "ns", "gauge"), round(run.every_s * 1e9))
            run.late_ns = 0
        own.put(own.series("collector:station", "cpu_ns", "ns", "cumulative"), self.hand_over_cpu_ns)
        if self.max_overhead is not None:
            own.put(own.series("collector:station", "allowed_share", "1", "gauge"), float(self.max_overhead))


def _probe(run: Running) -> Found:
    if run.asking is not None and run.asking.is_alive():
        return Found("error", "looking for it has not ended yet")
    found: list[Found] = []
    run.asking = threading.Thread(target=lambda: found.append(_asked(run.source)), name="hoptrace-probe", daemon=True)
    run.asking.start()
    run.asking.join(_HANGS_S)
    return found[0] if found else Found("error", f"looking for it did not end within {_HANGS_S:g} s")


def _asked(source: Source) -> Found:
    try:
        return source.probe()
    except Exception as e:  # a fault of one source must not keep the others from recording
        return Found("error", f"looking for it failed ({type(e).__name__}: {e})"[:300])
