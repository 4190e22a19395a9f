"""Times outside steps that the recorded requests could have given as well."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import polars as pl

from hoptrace.reader import Trace
from hoptrace.reconstruct import Steps
from hoptrace.replay.overheads import Overheads, overheads

__all__ = ["HALVES", "halves", "outside"]

HALVES = 12
"""Half samples at most; more draws take turns with them."""
_FEWEST = 8
_SERVER = ("received_to_enqueued_ns", "enqueued_to_ready_ns", "between_steps_ns", "step_to_token_ns")
"""Work of the server's own processes: as slow as the machine is. The others are the network's and the client's."""


class _Half(Trace):
    """A trace of which only some requests are there."""

    def __init__(self, whole: Trace, keep: pl.Series) -> None:
        super().__init__(whole.path, whole.manifest)
        self._whole, self._keep = whole, keep

    def table(self, name: str) -> pl.LazyFrame:
        """See :meth:`hoptrace.reader.Trace.table`."""
        rows = self._whole.table(name)
        return rows.filter(pl.col("request").is_in(self._keep.implode())) if name in ("requests", "stages") else rows


def halves(trace: Trace, seen: Steps, n: int, rng: np.random.Generator) -> tuple[Overheads, list[Overheads]]:
    """(as measured on all requests, as measured on random halves of them): a half taken without replacement lies about as far
    from the whole as the whole from the truth (the delete-half jackknife, Shao and Wu 1989). None of few requests."""
    measured = overheads(trace, seen.steps, seen.residency)
    finished = trace.table("requests").filter(pl.col("finish_ns").is_not_null() & pl.col("error").is_null())
    requests = finished.select("request").collect()["request"].sort()
    if requests.len() < _FEWEST:
        return measured, []
    found = []
    for _ in range(min(n, HALVES)):
        some = np.sort(rng.choice(requests.len(), requests.len() // 2, replace=False))
        keep = requests.gather(some)
        runs = seen.residency.filter(pl.col("request").is_in(keep.implode()))
        found.append(overheads(_Half(trace, keep), seen.steps, runs))
    return measured, found


def outside(planned: Overheads, measured: Overheads, drawn: Overheads | None, speed: float) -> Overheads:
    """``planned`` with what was measured drawn anew, and the server's own part so much slower. What a policy or a cost file set
    instead stays as it is."""
    changed: dict[str, Any] = {}
    for f in fields(Overheads):
        value = getattr(planned, f.name)
        if not f.name.endswith("_ns") or not isinstance(value, int) or value != getattr(measured, f.name):
            continue
        new = value if drawn is None else getattr(drawn, f.name)
        changed[f.name] = max(0, round(new * (speed if f.name in _SERVER else 1.0)))
    return replace(planned, **changed)
