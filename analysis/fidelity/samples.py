"""A metric of the same requests in several traces, position by position, for intervals that redraw the requests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import polars as pl

from hoptrace.analysis.compare.bootstrap import Sample, chosen
from hoptrace.comparison import Matched, values
from hoptrace.metrics import request_metrics
from hoptrace.reader import Trace

__all__ = ["Side", "numbers", "samples"]


class Side:
    """A trace and the values of its metrics, computed when they are asked for and kept."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._values: dict[str, pl.DataFrame] = {}

    @cached_property
    def requests(self) -> pl.DataFrame:
        """:func:`hoptrace.metrics.request_metrics`."""
        return request_metrics(self.trace)

    def values(self, metric: str) -> pl.DataFrame:
        """request, value (ns): :func:`hoptrace.comparison.values`."""
        if metric not in self._values:
            self._values[metric] = values(metric, self.trace, self.requests)
        return self._values[metric]


def numbers(pair: Matched, observed: str, predicted: str) -> pl.DataFrame:
    """The numbers of twins, a row each, in two columns of these names."""
    return pl.DataFrame({observed: pair.observed["request"], predicted: pair.predicted["request"]})


def samples(metric: str, sides: Sequence[Side], requests: pl.DataFrame) -> list[Sample]:
    """The metric on each side over the requests of which all sides know it, at the same positions.

    Args:
        requests: a column for each side, in their order: the numbers of the same requests, a row each.
    """
    at = [
        side.values(metric).join(
            pl.DataFrame({"request": requests[:, i], "_at": np.arange(requests.height)}), on="request", maintain_order="left"
        )
        for i, side in enumerate(sides)
    ]
    known = np.ones(requests.height, dtype=bool)
    for frame in at:
        here = np.zeros(requests.height, dtype=bool)
        here[frame["_at"].to_numpy()] = True
        known &= here
    whole = int(known.sum())
    some = chosen(whole)
    if some is not None:
        few = np.zeros_like(known)
        few[np.flatnonzero(known)[some]] = True
        known = few
    n = int(known.sum())
    position = np.cumsum(known) - 1
    found = []
    for frame in at:
        owner, value = frame["_at"].to_numpy(), frame["value"].to_numpy()
        mine = known[owner]
        found.append(Sample(value[mine].astype(np.float64), position[owner[mine]].astype(np.int64), n, whole))
    return found
