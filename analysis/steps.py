"""The steps of a trace, stored or reconstructed."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from hoptrace.reader import Trace

__all__ = ["Found", "steps_of"]


@dataclass(frozen=True)
class Found:
    steps: pl.DataFrame
    residency: pl.DataFrame
    origin: str
    note: str | None


def steps_of(trace: Trace) -> Found:
    steps = trace.table("steps").collect()
    origins = steps["origin"].drop_nulls().unique().sort().to_list()
    return Found(steps, trace.table("residency").collect(), ", ".join(origins) or "observed", None)
