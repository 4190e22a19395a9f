"""What one hidden kind of carrying is shown as: its figures, each with its basis, the rows behind them, and a plain sentence."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from hoptrace.analysis.latency.accounting import Accounting
from hoptrace.manifest import Manifest
from hoptrace.reader import Trace

__all__ = ["Figure", "Seen", "View", "best_known", "int_sum", "sentence"]


def int_sum(values: pl.Series) -> int | None:
    """Sum of few integers in Python's; null without any, where one is unknown, or where the sum is no int64."""
    if not values.len() or values.null_count():
        return None
    total = sum(values.to_list())
    return total if -(1 << 63) <= total < 1 << 63 else None


def best_known(rows: pl.DataFrame) -> tuple[pl.DataFrame, str | None, bool]:
    """Of rows of several bases those of the best known one, which it is, and whether others are left out: what was counted,
    derived and assumed is never added up."""
    have = set(rows["basis"].to_list())
    best = next((b for b in ("counted", "derived", "assumed", "unstated") if b in have), None)
    return rows.filter(pl.col("basis").eq_missing(best)), best, len(have) > 1


def sentence(said: list[str], otherwise: str) -> str:
    """What was said as one sentence, or what is said where nothing is known."""
    text = "; ".join(said)
    return f"{text[:1].upper()}{text[1:]}." if text else otherwise


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure. ``value`` null: unknown, and ``why`` says what would have to be recorded. ``basis``: counted, derived, assumed.
    ``source``: the columns that it comes from. ``at_least``: not all of it was recorded."""

    name: str
    what: str
    value: float | int | None
    unit: str
    basis: str | None = None
    source: str = ""
    at_least: bool = False
    why: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.value, float) and not math.isfinite(self.value):
            object.__setattr__(self, "value", None)
        # One rule for all: what is unknown has a reason and no basis, what is known has a basis and no reason.
        if self.value is None:
            for name, value in (("basis", None), ("at_least", False), ("why", self.why or "the recorded rows do not tell")):
                object.__setattr__(self, name, value)
        else:
            object.__setattr__(self, "why", None)

    def as_dict(self) -> dict[str, Any]:
        value = round(self.value, 6) if isinstance(self.value, float) else self.value
        return {
            "what": self.what,
            "value": value,
            "unit": self.unit,
            "basis": self.basis,
            "source": self.source,
            "at_least": self.at_least,
            "why_unknown": self.why,
        }


@dataclass(frozen=True)
class View:
    """One of the five kinds.

    Attributes:
        name, title: split, confirm, unlike, shared, remote; and in words.
        figures: see :class:`Figure`.
        time_ns, time_basis, time_of: the time that can be told, over the whole trace, what it is made of; null where none can.
        share: that time ÷ Σ e2e of the finished requests; null where it is not part of requests' latency.
        rows: the few aggregated rows behind the figures.
        sentence: what it means here.
        unseen: what cannot be seen of it, in sentences.
    """

    name: str
    title: str
    figures: list[Figure]
    sentence: str
    rows: pl.DataFrame
    time_ns: int | None = None
    time_basis: str | None = None
    time_of: str = ""
    share: float | None = None
    unseen: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.time_ns is None:
            for name, value in (("time_basis", None), ("time_of", ""), ("share", None)):
                object.__setattr__(self, name, value)

    def figure(self, name: str) -> Figure:
        """The figure of that name; KeyError."""
        for f in self.figures:
            if f.name == name:
                return f
        raise KeyError(name)

    @property
    def seen(self) -> bool:
        """Whether anything of it is known, be it a true 0."""
        return any(f.value is not None for f in self.figures)

    def as_dict(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "sentence": self.sentence,
            "time_ns": self.time_ns,
            "time_basis": self.time_basis,
            "time_of": self.time_of,
            "share_of_latency": None if self.share is None else round(self.share, 6),
            "figures": {f.name: f.as_dict() for f in self.figures},
            "rows": self.rows.to_dicts(),
            "unseen": self.unseen,
        }


@dataclass(frozen=True)
class Seen:
    """What the five views share: read once.

    ``totals``: sums over the steps; ``waits``: recorded waits by kind; ``confirm``: those of them that belong to a transfer of
    state (``hidden_confirm``); ``tokens``: output tokens of all requests, null if unknown; ``finished``, ``finished_tokens``,
    ``e2e_ns``: requests with a latency, their output tokens and Σ e2e.
    """

    trace: Trace
    accounting: Accounting
    totals: pl.DataFrame
    waits: pl.DataFrame
    confirm: pl.DataFrame
    tokens: int | None
    finished: int
    finished_tokens: int | None
    e2e_ns: int | None

    @property
    def manifest(self) -> Manifest:
        return self.trace.manifest

    def mean_ns(self, part: str) -> float | None:
        """Mean ns of a finished request in a part of latency; null where no request shows it."""
        whole = self.accounting.compositions.get("all")
        return None if whole is None else whole.parts.get(part)

    def sum_ns(self, *parts: str) -> int | None:
        """Σ ns over the finished requests in these parts; null where none of them is shown."""
        whole = self.accounting.compositions.get("all")
        known = [v for p in parts if (v := self.mean_ns(p)) is not None]
        return round(sum(known) * whole.requests) if whole is not None and known else None

    def share_of(self, ns: int | None) -> float | None:
        """A time of the requests ÷ Σ e2e."""
        return None if ns is None or not self.e2e_ns else ns / self.e2e_ns

    def per_token(self, value: float | None) -> float | None:
        return None if value is None or not self.tokens else value / self.tokens

    def step_sum(self, column: str) -> float | None:
        """Sum of a column of ``totals`` over servers and origins; null where none is known."""
        known = self.totals[column].drop_nulls()
        return float(known.sum()) if known.len() else None

    @property
    def steps(self) -> int:
        return int(self.totals["steps"].sum())

    @property
    def steps_basis(self) -> str:
        """How the steps are known: counted only where all were observed."""
        origins = self.totals["origin"].unique().to_list()
        return "counted" if origins == ["observed"] else "derived"
