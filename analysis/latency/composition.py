"""What latency is made of: of all requests, around a percentile, and in the tail against the median."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl

from hoptrace.analysis.latency.parts import CLASSES, PARTS

__all__ = ["Composition", "Ranked", "Tail", "compositions", "tail_of"]

_ERRORS = ("interference", "prefill_interference", "decode_interference")
# Half-width of the window of ranks around each percentile, as a share of the requests.
_WINDOWS = {"p50": (0.50, 0.05), "p95": (0.95, 0.01), "p99": (0.99, 0.005)}


@dataclass(frozen=True)
class Composition:
    """Mean over ``requests`` requests: ``e2e_ns`` and its ``parts`` (mean ns by part; null where no request shows it).

    Of the time to the first token ``e2e_ns`` is that time, ``by`` "ttft". ``errors``: mean over the requests of the standard
    errors of ``prefill_interference``, ``decode_interference`` and both, ``interference`` (ns; null: nobody knows). Errors of
    requests that share steps and coefficients do not average out: the mean's own error is this at most.
    """

    name: str
    requests: int
    e2e_ns: float
    parts: dict[str, float | None]
    by: str = "e2e"
    errors: dict[str, float | None] = field(default_factory=dict)

    @property
    def part_errors(self) -> dict[str, float]:
        """Standard error (ns) of the parts that are modelled, where it is known: what is not interference is work, so both parts
        of a phase have the same. The other parts are measured."""
        out: dict[str, float] = {}
        for phase in ("prefill", "decode"):
            se = self.errors.get(f"{phase}_interference")
            if se is not None and self.parts[f"{phase}_interference"] is not None:
                out |= {phase: se, f"{phase}_interference": se}
        return out

    @property
    def class_share_errors(self) -> dict[str, float]:
        """Standard error of the classes' shares in e2e, 0 … 1, likewise: of work and of sharing."""
        se = self.errors.get("interference")
        if se is None or not self.part_errors or not self.e2e_ns:
            return {}
        return dict.fromkeys(("work", "sharing"), se / self.e2e_ns)

    @property
    def part_shares(self) -> dict[str, float | None]:
        """Share of each part in e2e, 0 … 1."""
        return {p: None if v is None else (v / self.e2e_ns if self.e2e_ns else 0.0) for p, v in self.parts.items()}

    @property
    def classes(self) -> dict[str, float | None]:
        """Mean ns by class; null where none of its parts is shown."""
        out: dict[str, float | None] = {}
        for klass in CLASSES:
            known = [v for p in PARTS if p.klass == klass and (v := self.parts[p.name]) is not None]
            out[klass] = sum(known) if known else None
        return out

    @property
    def class_shares(self) -> dict[str, float | None]:
        """Share of each class in e2e, 0 … 1; those that are known add up to 1 (all 0 where e2e is 0)."""
        return {c: None if v is None else (v / self.e2e_ns if self.e2e_ns else 0.0) for c, v in self.classes.items()}

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ns rounded to whole ones."""
        return {
            "requests": self.requests,
            f"{self.by}_ns": round(self.e2e_ns),
            "parts_ns": {p: None if v is None else round(v) for p, v in self.parts.items()},
            "parts_se_ns": {p: round(v) for p, v in self.part_errors.items()},
            "class_shares": {c: None if v is None else round(v, 6) for c, v in self.class_shares.items()},
            "class_shares_se": {c: round(v, 6) for c, v in self.class_share_errors.items()},
        }


@dataclass(frozen=True)
class Tail:
    """The slowest 1 % of requests (at least one) beside those around the median."""

    slowest: Composition
    median: Composition

    @property
    def more(self) -> list[tuple[str, float]]:
        """(part, mean ns more than at the median), largest first; only parts that are more."""
        both = ((p, (v or 0.0) - (self.median.parts[p] or 0.0)) for p, v in self.slowest.parts.items())
        return sorted((x for x in both if x[1] > 0), key=lambda x: -x[1])

    def as_dict(self) -> dict[str, Any]:
        return {
            "slowest": self.slowest.as_dict(),
            "median": self.median.as_dict(),
            "more_ns": {p: round(v) for p, v in self.more},
        }


class Ranked:
    """Requests by their length, for compositions around percentiles and of the tail. ``pieces``: give the requests piece by piece
    (request, the length and the parts, and standard errors where they are known), the same ones whenever they are asked."""

    def __init__(self, pieces: Sequence[Callable[[], pl.DataFrame]], by: str) -> None:
        self._pieces, self._by = pieces, by
        told = [p().select("request", f"{by}_ns") for p in pieces]
        length, request = (np.concatenate([_NONE, *(t[c].to_numpy() for t in told)]) for c in (f"{by}_ns", "request"))
        self._order = np.lexsort((request, length))
        self._length = length[self._order]

    @cached_property
    def _means(self) -> dict[str, Composition]:
        n = len(self._order)
        slices = {"all": slice(0, n), "slowest": self._with_ties(slice(n - max(1, n // 100), n))}
        slices |= {name: self._with_ties(_window(n, q, half)) for name, (q, half) in _WINDOWS.items()}
        sums = {name: _Sums(self._by) for name in slices}
        inside = {name: np.zeros(n, dtype=bool) for name in slices if name != "all"}
        for name, mask in inside.items():
            mask[self._order[slices[name]]] = True
        at = 0
        for piece in self._pieces:
            rows = piece()
            for name, own in sums.items():
                own.add(rows if name == "all" else rows.filter(pl.Series(inside[name][at : at + rows.height])))
            at += rows.height
        return {name: own.mean(name) for name, own in sums.items()}

    def _with_ties(self, ranks: slice) -> slice:
        """Those that took as long as the first or the last of them belong to them: which of equals comes first is chance."""
        if ranks.start >= ranks.stop:
            return ranks
        low = np.searchsorted(self._length, self._length[ranks.start], side="left")
        high = np.searchsorted(self._length, self._length[ranks.stop - 1], side="right")
        return slice(int(low), int(high))

    def compositions(self) -> dict[str, Composition]:
        """`all`, `p50`, `p95`, `p99`; empty without requests.

        A percentile's requests are those whose rank lies within its window: ±5 % of the requests around the median, ±1 % around
        p95, ±0.5 % around p99; at least the one at the nearest rank, and all that took just as long as one of them.
        """
        return {name: self._means[name] for name in ("all", *_WINDOWS)} if len(self._order) else {}

    def tail(self) -> Tail | None:
        """The tail against the median, null with fewer than two requests."""
        return Tail(self._means["slowest"], self._means["p50"]) if len(self._order) > 1 else None


def compositions(parts: pl.DataFrame, *, by: str = "e2e", errors: pl.DataFrame | None = None) -> dict[str, Composition]:
    """See :meth:`Ranked.compositions`. ``by``: "e2e" for parts up to the finish, "ttft" for those up to the first token.
    ``errors``: standard errors by request (``Accounting.interference_se``)."""
    return Ranked([lambda: _with_errors(parts, errors)], by).compositions()


def tail_of(parts: pl.DataFrame, *, by: str = "e2e", errors: pl.DataFrame | None = None) -> Tail | None:
    """See :meth:`Ranked.tail`; ``by``, ``errors`` as in :func:`compositions`."""
    return Ranked([lambda: _with_errors(parts, errors)], by).tail()


def _window(n: int, q: float, half: float) -> slice:
    """Ranks around a percentile."""
    nearest = min(n - 1, max(0, round(q * (n - 1))))
    low = min(nearest, -int(-(q - half) * (n - 1) // 1))
    high = max(nearest, int((q + half) * (n - 1)))
    return slice(max(0, low), min(n - 1, high) + 1)


class _Sums:
    """Running sums of some requests; whole nanoseconds exactly."""

    def __init__(self, by: str) -> None:
        self._by = by
        self._n = 0
        self._length = 0
        self._parts = dict.fromkeys((p.name for p in PARTS), 0)
        self._shown = dict.fromkeys(self._parts, 0)
        self._errors: dict[str, tuple[float, int]] = {}

    def add(self, rows: pl.DataFrame) -> None:
        if not rows.height:
            return
        errors = [e for e in _ERRORS if f"{e}_se_ns" in rows.columns]
        found = rows.select(
            pl.col(f"{self._by}_ns", *(p.column for p in PARTS)).cast(pl.Int128).sum(),
            *(pl.col(p.column).count().name.suffix("#") for p in PARTS),
            *(pl.col(f"{e}_se_ns").sum() for e in errors),
            *(pl.col(f"{e}_se_ns").count().name.suffix("#") for e in errors),
        ).row(0, named=True)
        self._n += rows.height
        self._length += int(found[f"{self._by}_ns"])
        for p in PARTS:
            self._parts[p.name] += int(found[p.column])
            self._shown[p.name] += found[f"{p.column}#"]
        for e in errors:
            before = self._errors.get(e, (0.0, 0))
            self._errors[e] = before[0] + float(found[f"{e}_se_ns"]), before[1] + found[f"{e}_se_ns#"]

    def mean(self, name: str) -> Composition:
        """An unseen part adds nothing to the mean of its request, so that the parts still add up to the length."""
        n = max(self._n, 1)
        means = {p: v / n if self._shown[p] else None for p, v in self._parts.items()}
        errors = {e: total / known if known else None for e, (total, known) in self._errors.items()}
        return Composition(name, self._n, self._length / n, means, self._by, errors)


_NONE = np.zeros(0, dtype=np.int64)


def _with_errors(parts: pl.DataFrame, errors: pl.DataFrame | None) -> pl.DataFrame:
    return parts if errors is None else parts.join(errors, on="request", how="left", maintain_order="left")
