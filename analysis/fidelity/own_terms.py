"""A prediction held against a recording in the trace's own terms, which the speed of a machine does not reach: what was in the
steps, what the cache served, who was driven out, what came first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from hoptrace.analysis.fidelity.compositions import alike, matches, members
from hoptrace.analysis.fidelity.order import Order, order
from hoptrace.comparison import Matched, matched
from hoptrace.field_metrics import preemption
from hoptrace.reader import Trace
from hoptrace.reconstruct import steps_of

__all__ = ["Count", "OwnTerms", "StepsMatched", "own_terms"]


@dataclass(frozen=True, slots=True)
class Count:
    """A number of things on both sides; null where nobody tells."""

    observed: int | None
    predicted: int | None

    @property
    def error_pct(self) -> float | None:
        """(predicted ÷ observed − 1) in %; null if one is unknown, or if something is predicted where nothing was observed."""
        if self.observed is None or self.predicted is None:
            return None
        if not self.observed:
            return None if self.predicted else 0.0
        return 100 * (self.predicted / self.observed - 1)

    def as_dict(self) -> dict[str, Any]:
        pct = self.error_pct
        return {
            "observed": self.observed,
            "predicted": self.predicted,
            "error_pct": None if pct is None else round(pct, 3),
        }


@dataclass(frozen=True, slots=True)
class StepsMatched:
    """Steps, paired off one to one between the two sides.

    Attributes:
        count: steps on both sides.
        equal: pairs in which the same requests compute the same numbers of tokens; null where steps do not tell.
        shown: steps of the side that has more, of those that show who was in them.
        alike: pairs that hold as many prompts, prompt tokens and decoders; null where steps do not tell.
        origin: of the recorded steps: observed, reconstructed, replayed.
    """

    count: Count
    equal: int | None
    shown: int
    alike: int | None
    origin: str

    @property
    def equal_share(self) -> float | None:
        """``equal`` ÷ ``shown``."""
        return None if self.equal is None or not self.shown else self.equal / self.shown

    @property
    def alike_share(self) -> float | None:
        """``alike`` ÷ the steps of the side that has more."""
        most = max(self.count.observed or 0, self.count.predicted or 0)
        return None if self.alike is None or not most else self.alike / most

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.count.as_dict(),
            "origin": self.origin,
            "shown": self.shown,
            "equal": self.equal,
            "equal_share": _rounded(self.equal_share),
            "alike": self.alike,
            "alike_share": _rounded(self.alike_share),
        }


@dataclass(frozen=True)
class OwnTerms:
    """See the module.

    Attributes:
        steps: number and composition of the steps.
        cached_tokens: prompt tokens from a cache, over the ``cached_requests`` twins of which both sides tell.
        cached_equal: of how many of them the number is equal.
        preemptions: how often requests lost their place.
        first_tokens, finishes: the order of events over the twins; null where the two do not hold the same requests.
        notes: what a reader has to know.
    """

    steps: StepsMatched
    cached_tokens: Count
    cached_requests: int
    cached_equal: int
    preemptions: Count
    first_tokens: Order | None
    finishes: Order | None
    notes: tuple[str, ...] = ()

    @property
    def cached_equal_share(self) -> float | None:
        """Share of the requests with as many cached tokens as observed; null where nobody tells."""
        return self.cached_equal / self.cached_requests if self.cached_requests else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps.as_dict(),
            "cached_tokens": {
                **self.cached_tokens.as_dict(),
                "requests": self.cached_requests,
                "equal_requests": self.cached_equal,
                "equal_share": _rounded(self.cached_equal_share),
            },
            "preemptions": self.preemptions.as_dict(),
            "first_tokens": None if self.first_tokens is None else self.first_tokens.as_dict(),
            "finishes": None if self.finishes is None else self.finishes.as_dict(),
            "notes": list(self.notes),
        }


def own_terms(observed: Trace, predicted: Trace, twins: Matched | None = None) -> OwnTerms:
    """Hold two traces of the same work against each other.

    Args:
        twins: which request is which, where that is known already (:func:`hoptrace.comparison.matched`).
    """
    both = matched(observed, predicted) if twins is None else twins
    steps, notes = _steps(observed, predicted, both)
    cached, over, equal = _cached(both)
    preempted = Count(*(preemption(t, 0).preemptions for t in (observed, predicted)))
    return OwnTerms(
        steps, cached, over, equal, preempted,
        _order(both, pl.col("arrival_ns") + pl.col("ttft_ns")),
        _order(both, pl.col("finish_ns")),
        tuple(notes),
    )  # fmt: skip


def _steps(observed: Trace, predicted: Trace, both: Matched) -> tuple[StepsMatched, list[str]]:
    sides = [steps_of(t) for t in (observed, predicted)]
    numbers = [s.steps.filter(pl.col("pp_rank").fill_null(0) == 0).height if s.steps.height else None for s in sides]
    sizes = [alike(s.steps) for s in sides]
    notes: list[str] = []
    equal, shown = None, 0
    if both.paired:
        twins = _twins(observed, predicted, both.by)
        hashes = [members(s.steps, s.residency, twins[i], i) for i, s in enumerate(sides)]
        if hashes[0] is not None and hashes[1] is not None:
            unknown = [h.pop(0, 0) for h in hashes if h is not None]
            if unknown[0]:
                notes.append(f"{unknown[0]:,} recorded steps do not show who was in them; they are left out of the equal ones.")
            equal = matches(hashes[0], hashes[1])
            shown = max(sum(h.values()) for h in hashes if h is not None)
            if sides[0].origin != "observed":
                notes.append(
                    f"The recorded steps are {sides[0].origin}: who was in which of them is no surer than that, "
                    "so the share of equal steps may be too low."
                )
    size = matches(sizes[0], sizes[1]) if sizes[0] is not None and sizes[1] is not None else None
    return StepsMatched(Count(numbers[0], numbers[1]), equal, shown, size, sides[0].origin), notes


def _twins(observed: Trace, predicted: Trace, by: str) -> tuple[dict[int, int], dict[int, int]]:
    """For each side the numbers of its requests that the other one has too, finished or not, with what both call them."""
    names = [t.table("requests").select("request", pl.col(by).alias("name")).collect() for t in (observed, predicted)]
    both = names[0].join(names[1], on="name", suffix="_b").with_row_index("twin")
    return dict(both.select("request", "twin").iter_rows()), dict(both.select("request_b", "twin").iter_rows())


def _cached(both: Matched) -> tuple[Count, int, int]:
    if not both.paired:
        return Count(None, None), 0, 0
    a, b = both.observed["cached_tokens"], both.predicted["cached_tokens"]
    known = a.is_not_null() & b.is_not_null()
    a, b = a.filter(known), b.filter(known)
    if not a.len():
        return Count(None, None), 0, 0
    return Count(int(a.sum()), int(b.sum())), a.len(), int((a == b).sum())


def _order(both: Matched, event: pl.Expr) -> Order | None:
    if not both.paired:
        return None
    sides = [x.select("arrival_ns", event.alias("event")) for x in (both.observed, both.predicted)]
    known = (sides[0]["event"].is_not_null() & sides[1]["event"].is_not_null()).to_numpy()
    if not known.any():
        return None
    columns = [x[c].to_numpy()[known].astype("int64") for x in sides for c in ("arrival_ns", "event")]
    return order(*columns)


def _rounded(x: float | None) -> float | None:
    return None if x is None else round(x, 6)
