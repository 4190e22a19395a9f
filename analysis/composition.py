"""What latency is made of: of all requests, around a percentile, and in the tail against the median."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from hoptrace.analysis.parts import CLASSES, PARTS

__all__ = ["Composition", "Tail", "compositions", "tail_of"]

# Half-width of the window of ranks around each percentile, as a share of the requests.
_WINDOWS = {"p50": (0.50, 0.05), "p95": (0.95, 0.01), "p99": (0.99, 0.005)}


@dataclass(frozen=True)
class Composition:
    """Mean over ``requests`` requests: ``e2e_ns`` and its ``parts`` (mean ns by part; null where no request shows it).

    Of the time to the first token ``e2e_ns`` is that time, ``by`` "ttft"."""

    name: str
    requests: int
    e2e_ns: float
    parts: dict[str, float | None]
    by: str = "e2e"

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
            "class_shares": {c: None if v is None else round(v, 6) for c, v in self.class_shares.items()},
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


def compositions(parts: pl.DataFrame, *, by: str = "e2e") -> dict[str, Composition]:
    """`all`, `p50`, `p95`, `p99`. ``by``: "e2e" for parts up to the finish, "ttft" for those up to the first token.

    A percentile's requests are those whose rank by it lies within its window: ±5 % of the requests around the median, ±1 %
    around p95, ±0.5 % around p99; at least the one at the nearest rank.
    """
    if not parts.height:
        return {}
    ranked = parts.sort(f"{by}_ns", "request")
    out = {"all": _mean("all", parts, by)}
    for name, (q, half) in _WINDOWS.items():
        out[name] = _mean(name, _window(ranked, q, half), by)
    return out


def tail_of(parts: pl.DataFrame, *, by: str = "e2e") -> Tail | None:
    """The tail against the median, null with fewer than two requests. ``by`` as in :func:`compositions`."""
    if parts.height < 2:
        return None
    ranked = parts.sort(f"{by}_ns", "request")
    n = max(1, parts.height // 100)
    return Tail(_mean("slowest", ranked.tail(n), by), _mean("p50", _window(ranked, *_WINDOWS["p50"]), by))


def _window(ranked: pl.DataFrame, q: float, half: float) -> pl.DataFrame:
    n = ranked.height
    nearest = min(n - 1, max(0, round(q * (n - 1))))
    low = min(nearest, -int(-(q - half) * (n - 1) // 1))
    high = max(nearest, int((q + half) * (n - 1)))
    return ranked.slice(max(0, low), min(n - 1, high) - max(0, low) + 1)


def _mean(name: str, rows: pl.DataFrame, by: str) -> Composition:
    n = rows.height
    length = float(sum(rows[f"{by}_ns"].to_list())) / n
    # An unseen part adds nothing to the mean of its request, so that the parts still add up to e2e.
    means = {
        p.name: None if rows[p.column].null_count() == n else float(rows[p.column].cast(pl.Float64).sum()) / n for p in PARTS
    }
    return Composition(name, n, length, means, by)
