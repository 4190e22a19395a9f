"""Which of the watched scheduler's steps a record of the stat logger is about: the two come from two processes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

__all__ = ["Composition", "Join"]

Composition = tuple[int, int, int, int]
"""Context requests and tokens, generation requests and tokens, counted as vLLM counts them."""

_MOST = 8192


@dataclass(slots=True)
class Join:
    """Steps of one engine in order on both sides. Both number from the engine's start, but a data-parallel engine's dummy
    iterations count on one side only, and either side may have missed some: so a number counts only if the composition agrees,
    else the next step of that composition is taken and the difference of the numbers is kept.

    ``joined``: records that found their step; ``alone``: records that found none; ``skipped``: steps that no record spoke of.
    """

    joined: int = 0
    alone: int = 0
    skipped: int = 0
    _steps: deque[tuple[int, Composition, int]] = field(default_factory=deque)
    _ahead: int = 0

    def step(self, n: int, composition: Composition, number: int) -> None:
        """A step of the scheduler: its ``n`` since the engine's start, and its ``number`` in the trace."""
        self._steps.append((n, composition, number))
        if len(self._steps) > _MOST:
            self._steps.popleft()
            self.skipped += 1

    def match(self, index: int, composition: Composition) -> int | None:
        """The number of the step that a record with the iteration ``index`` is about; null if there is none."""
        expected = index - self._ahead
        later: int | None = None
        for i, (n, what, _) in enumerate(self._steps):
            if what != composition:
                continue
            if n == expected:
                later = i
                break
            if n > expected or later is None:
                later = i if later is None or self._steps[later][0] < expected else later
                if n > expected:
                    break
        if later is None:
            self.alone += 1
            return None
        for _ in range(later):
            self._steps.popleft()
        self.skipped += later
        n, _, number = self._steps.popleft()
        self._ahead = index - n
        self.joined += 1
        return number

    def restart(self) -> None:
        """The engine has begun anew."""
        self.skipped += len(self._steps)
        self._steps.clear()
        self._ahead = 0
