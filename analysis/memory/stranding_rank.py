"""One KV space: a server's, or that of one of its data-parallel ranks; and when no request was in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from hoptrace.analysis.latency.serverstate import Samples
from hoptrace.analysis.memory.stranding_exact import Ints

__all__ = ["Rank", "merge", "occupied"]

ROWS = 1_000_000
"""Rows of `residency` that are held at once."""


@dataclass(frozen=True)
class Rank:
    """One KV space. ``basis``: counted (the engine says what is in use), derived (the contexts of those in its steps: a lower
    bound where some of them skip steps; or samples), or null.

    ``from_ns``/``to_ns``: what was recorded of it. ``capacity_tokens``: the manifest's, for steps that don't say it.
    ``occupied``: first and last steps of the stretches in which requests were there, ascending; where nobody says who was in the
    steps, ``stays`` has the moments at which requests came into the space and left it, each ascending; null: neither is known.
    ``away``: when the server was not there, or nobody recorded it.
    """

    server: str
    dp_rank: int
    name: str
    from_ns: int
    to_ns: int
    basis: str | None
    capacity_tokens: int | None
    bytes_per_token: int | None
    block_tokens: int
    slots: int | None
    budget_tokens: int | None
    occupied: tuple[Ints, Ints] | None
    stays: tuple[Ints, Ints] | None
    away: tuple[Ints, Ints]
    pp_rank: int = 0
    steps: int = 0
    samples: Samples | None = None

    @property
    def knows_gaps(self) -> bool:
        """Whether it is known who was there between two steps."""
        return self.occupied is not None or self.stays is not None

    def nobody(self, step: Ints, start: Ints, end: Ints) -> npt.NDArray[np.bool_]:
        """Whether no request was there in the gap behind each step, from ``start`` to ``end``."""
        if self.occupied is not None:
            first, last = self.occupied
            i = np.searchsorted(first, step, side="right") - 1
            return np.asarray((i < 0) | (last[np.maximum(i, 0)] <= step))
        if self.stays is None:
            return np.zeros(len(step), dtype=np.bool_)
        came, went = self.stays
        through = np.searchsorted(came, start, side="right") - np.searchsorted(went, end, side="left")
        return np.asarray(through <= 0)


def merge(first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """The union of closed intervals, ascending."""
    if not len(first):
        return first, last
    order = np.argsort(first, kind="stable")
    first, last = first[order], np.maximum.accumulate(last[order])
    begins = np.append(True, first[1:] > last[:-1])
    return first[begins], last[np.append(np.flatnonzero(begins)[1:] - 1, len(last) - 1)]


def occupied(residency: pl.LazyFrame, rows: int = ROWS) -> dict[tuple[str, int], tuple[Ints, Ints]]:
    """By (server, dp_rank): first and last steps of the stretches in which a request was in the KV space, ascending, apart.

    A request is there from the first to the last step of its runs. Who was preempted between two of them held nothing, but came
    back: the space is not called empty then.
    """
    here = residency.filter(pl.col("phase") != "preempted").with_columns(
        pl.col("dp_rank").fill_null(0), pl.col("sequence").fill_null(0)
    )
    low, high, n = here.select(pl.col("request").min(), pl.col("request").max().alias("h"), pl.len()).collect(
        engine="streaming"
    ).row(0)  # fmt: skip
    found: dict[tuple[str, int], tuple[Ints, Ints]] = {}
    if low is None:
        return {}
    batches = -(-n // rows)
    width = -(-(high - low + 1) // batches)
    for k in range(batches):
        own = pl.col("request").is_between(low + k * width, low + (k + 1) * width - 1)
        spans = (
            here.filter(own)
            .group_by("request", "sequence", "server", "dp_rank")
            .agg(pl.col("first_step").min(), pl.col("last_step").max())
            .collect(engine="streaming")
        )
        for (server, dp), mine in spans.group_by(["server", "dp_rank"]):
            was = found.get((str(server), int(str(dp))), (np.zeros(0, dtype=np.int64),) * 2)
            both = [np.concatenate([w, mine[c].to_numpy()]) for w, c in zip(was, ("first_step", "last_step"), strict=True)]
            found[str(server), int(str(dp))] = merge(both[0], both[1])
    return found
