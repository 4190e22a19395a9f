"""Where the error comes from: the prediction again with one part of the recorded truth after another in place of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hoptrace.comparison import compare
from hoptrace.reader import Trace

__all__ = ["ALL", "SHOWN", "Source", "Truth", "sources"]

ALL = "all"
"""The name of the replay with every truth put in that the recording tells."""
SHOWN = tuple((m, s) for m in ("ttft", "e2e") for s in ("mean", "p50", "p95"))


@dataclass(frozen=True)
class Truth:
    """What whoever runs the replays hands in.

    Attributes:
        name: arrival, step_time, batching, cache, :data:`ALL`; null for the prediction with no truth put in, over the requests
            and the arrivals of the recording itself.
        replay: the replay with it; null where the recording does not tell it.
        why: why not, in a sentence.
        of: which truths are in it together.
    """

    name: str | None
    replay: Trace | None
    why: str | None = None
    of: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """``truth``: see :class:`Truth`, as ``of`` and ``why``. ``error_pct``: the error that is left, by metric and statistic
    (:data:`SHOWN`); null where it is unknown."""

    truth: str | None
    of: tuple[str, ...]
    why: str | None
    error_pct: dict[tuple[str, str], float | None]

    def as_dict(self) -> dict[str, Any]:
        errors: dict[str, Any] = {}
        for (metric, statistic), e in self.error_pct.items():
            errors.setdefault(metric, {})[statistic] = None if e is None else round(e, 3)
        return {"truth": self.truth, "of": list(self.of), "why_not": self.why, "error_pct": errors}


def sources(observed: Trace, truths: Sequence[Truth]) -> tuple[Source, ...]:
    """The errors that are left with each of ``truths``, in their order."""
    return tuple(Source(t.name, t.of, t.why, _errors(observed, t.replay)) for t in truths)


def _errors(observed: Trace, replay: Trace | None) -> dict[tuple[str, str], float | None]:
    if replay is None:
        return dict.fromkeys(SHOWN)
    c = compare(observed, replay)
    return {key: c.get(*key).error_pct for key in SHOWN}
