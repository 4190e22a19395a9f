"""What latency is made of: of all requests, around a percentile, and in the tail against the median."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import polars as pl

from hoptrace.analysis.parts import CLASSES, PARTS

__all__ = ["Composition", "Tail", "compositions", "tail_of"]

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


def compositions(parts: pl.DataFrame, *, by: str = "e2e", errors: pl.DataFrame | None = None) -> dict[str, Composition]:
    """`all`, `p50`, `p95`, `p99`. ``by``: "e2e" for parts up to the finish, "ttft" for those up to the first token.
    ``errors``: standard errors by request (``Accounting.interference_se``).

    A percentile's requests are those whose rank by it lies within its window: ±5 % of the requests around the median, ±1 %
    around p95, ±0.5 % around p99; at least the one at the nearest rank.
    """
    if not parts.height:
        return {}
    ranked = _with_errors(parts, errors).sort(f"{by}_ns", "request")
    out = {"all": _mean("all", ranked, by)}
    for name, (q, half) in _WINDOWS.items():
        out[name] = _mean(name, _window(ranked, q, half), by)
    return out


def tail_of(parts: pl.DataFrame, *, by: str = "e2e", errors: pl.DataFrame | None = None) -> Tail | None:
    """The tail against the median, null with fewer than two requests. ``by``, ``errors`` as in :func:`compositions`."""
    if parts.height < 2:
        return None
    ranked = _with_errors(parts, errors).sort(f"{by}_ns", "request")
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
    errors = {e: _mean_of(rows[f"{e}_se_ns"]) for e in _ERRORS if f"{e}_se_ns" in rows.columns}
    return Composition(name, n, length, means, by, errors)


def _mean_of(values: pl.Series) -> float | None:
    known = values.drop_nulls()
    return float(known.sum()) / known.len() if known.len() else None


def _with_errors(parts: pl.DataFrame, errors: pl.DataFrame | None) -> pl.DataFrame:
    return parts if errors is None else parts.join(errors, on="request", how="left", maintain_order="left")
