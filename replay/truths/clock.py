"""Step times as recorded: the engine's steps begin and end when the recording's did."""

from __future__ import annotations

import numpy as np

from hoptrace.replay.truths.recorded import EngineSteps, Recorded

__all__ = ["RecordedClock"]


class RecordedClock:
    """A :class:`hoptrace.replay.plain.parts.Clock`.

    A step begins at the start of a recorded one, and ends at its end; the scheduler decides who is in it. A recorded step at
    whose start the engine has nothing to do is passed over. Two cases in which the recording has no step to follow:

    - the engine finds work inside a step that ended a pause of the recorded engine: it takes what is left of that step, so that a
      request that comes a moment later than recorded still ends its step when the recorded one did;
    - the recorded engine was idle (or has ended) and the simulated one is not: it goes by the step cost while a step of the
      recorded median length would end before the next recorded one begins, and waits for that one then.
    """

    def __init__(self, recorded: Recorded) -> None:
        self._engines = [_Engine(s) for s in recorded.engines]

    def begin_ns(self, engine: int, now_ns: int, ready_ns: int) -> int:
        """See :class:`Clock`."""
        return self._engines[engine].begin_ns(now_ns, ready_ns)

    def end_ns(self, engine: int, begin_ns: int, cost_ns: int) -> int:
        """See :class:`Clock`."""
        return self._engines[engine].end_ns(begin_ns, cost_ns)


class _Engine:
    def __init__(self, steps: EngineSteps) -> None:
        self._start, self._end, self._opens = steps.start_ns.tolist(), steps.end_ns.tolist(), steps.opens.tolist()
        self._starts = steps.start_ns
        self._usual = int(np.median(steps.end_ns - steps.start_ns)) if len(steps.number) else 0
        self._taken = -1  # the last recorded step that was begun

    def begin_ns(self, now: int, ready: int) -> int:
        at = int(np.searchsorted(self._starts, now))  # the first that starts now or later
        if at < len(self._start) and self._start[at] == now:
            return now
        if self._inside(at - 1, now):
            return now
        own = max(now, ready)
        if at == len(self._start):
            return own
        following: int = self._start[at]
        idle = self._opens[at] and at > 0 and now >= self._end[at - 1]
        return own if idle and own + self._usual <= following else following

    def _inside(self, at: int, now: int) -> bool:
        return at >= 0 and self._opens[at] and at > self._taken and now < self._end[at]

    def end_ns(self, begin: int, cost: int) -> int:
        at = int(np.searchsorted(self._starts, begin, side="right")) - 1
        if at >= 0 and at > self._taken and (self._start[at] == begin or self._inside(at, begin)):
            self._taken = at
            end: int = self._end[at]
            return end
        return begin + cost
