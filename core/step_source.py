"""Steps and residency of a trace without holding them: lazy frames, and the part of them that a span of time or requests needs.

:func:`hoptrace.reconstruct.steps_of` gives the same rows in memory, which a replay wants. A report on a long trace reads here.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from hoptrace.reader import Trace
from hoptrace.reconstruct import Steps, steps_of

__all__ = ["StepSource", "step_source"]


@dataclass(frozen=True)
class StepSource:
    """``steps`` and ``residency``: lazy, all columns of the schema, unsorted where the trace's files are. ``origin`` and ``note``
    as in :class:`hoptrace.reconstruct.Steps`."""

    steps: pl.LazyFrame
    residency: pl.LazyFrame
    origin: str
    note: str | None = None

    @classmethod
    def of(cls, steps: Steps) -> StepSource:
        """From steps in memory."""
        return cls(steps.steps.lazy(), steps.residency.lazy(), steps.origin, steps.note)


def step_source(trace: Trace) -> StepSource:
    """The steps of any trace: scanned where they are stored with their residency, else reconstructed in memory."""
    return StepSource.of(steps_of(trace))
