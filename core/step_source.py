"""Steps and residency of a trace without holding them: lazy frames, and the part of them that a span of time or requests needs.

:func:`hoptrace.reconstruct.steps_of` gives the same rows in memory, which a replay wants. A report on a long trace reads here.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from hoptrace.metrics import arrivals_known
from hoptrace.reader import Trace
from hoptrace.reconstruct import Steps, noted, steps_of

__all__ = ["StepSource", "step_source"]


@dataclass(frozen=True)
class StepSource:
    """``steps`` and ``residency``: lazy, all columns of the schema, unsorted where the trace's files are. ``origin`` and ``note``
    as in :class:`hoptrace.reconstruct.Steps`. ``stored``: both are the trace's own tables, row for row."""

    steps: pl.LazyFrame
    residency: pl.LazyFrame
    origin: str
    note: str | None = None
    stored: bool = False

    @classmethod
    def of(cls, steps: Steps) -> StepSource:
        """From steps in memory."""
        return cls(steps.steps.lazy(), steps.residency.lazy(), steps.origin, steps.note)


def step_source(trace: Trace) -> StepSource:
    """The steps of any trace: scanned where they are stored with their residency, else reconstructed in memory."""
    if not trace.has("steps"):
        return StepSource.of(steps_of(trace))
    steps, residency = trace.table("steps"), trace.table("residency")
    kinds = steps.select("server", "origin").unique().collect(engine="streaming")
    told = residency.select("server").unique().collect(engine="streaming")["server"].to_list()
    bare = kinds.filter((pl.col("origin") == "observed") & ~pl.col("server").is_in(told))
    if bare.height and trace.has("tokens") and arrivals_known(trace):
        return StepSource.of(steps_of(trace))  # who was in these steps is told by the tokens
    origin = ", ".join(sorted(kinds["origin"].drop_nulls().unique().to_list()))
    return StepSource(steps, residency, origin, " ".join(noted(trace.manifest.notes)) or None, stored=True)
