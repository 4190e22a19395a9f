"""Where the error comes from: the prediction again with one part of the recorded truth after another in place of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hoptrace.comparison import Comparison, compare
from hoptrace.reader import Trace

__all__ = ["ALL", "SHOWN", "Source", "sources"]

ALL = "all"
"""The name of the replay with every truth put in."""
SHOWN = tuple((m, s) for m in ("ttft", "e2e") for s in ("mean", "p50", "p95"))


@dataclass(frozen=True)
class Source:
    """``truth``: what was taken from the recording: arrival, step_time, batching, cache, all of them, or null for the prediction
    as it is. ``error_pct``: the error that is left, by metric and statistic (:data:`SHOWN`); null where it is unknown."""

    truth: str | None
    error_pct: dict[tuple[str, str], float | None]

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for (metric, statistic), e in self.error_pct.items():
            found.setdefault(metric, {})[statistic] = None if e is None else round(e, 3)
        return {"truth": self.truth, "error_pct": found}


def sources(observed: Trace, predicted: Comparison, truths: Mapping[str, Trace]) -> tuple[Source, ...]:
    """The errors of the prediction, then with each of ``truths`` (by name), in their order. Empty without any."""
    if not truths:
        return ()
    found = [Source(None, _errors(predicted))]
    found += [Source(name, _errors(compare(observed, replay))) for name, replay in truths.items()]
    return tuple(found)


def _errors(c: Comparison) -> dict[tuple[str, str], float | None]:
    return {key: c.get(*key).error_pct for key in SHOWN}
