"""Two traces of the same work side by side: metrics and parts of latency, what changed, and whether it is more than chance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from hoptrace.analysis.accounting import Accounting, account
from hoptrace.analysis.bootstrap import STATS, Sample, interval, mean_intervals
from hoptrace.analysis.ledger import ledger
from hoptrace.analysis.parts import PARTS
from hoptrace.analysis.report import origin_note
from hoptrace.analysis.text import counted
from hoptrace.errors import InputError
from hoptrace.metrics import itl_ns, request_metrics, stat, summary
from hoptrace.reader import Trace
from hoptrace.reconstruct import steps_of

__all__ = ["SCHEMA", "Change", "Diff", "Work", "diff", "work_of"]

SCHEMA = "hoptrace.diff/1"
_LATENCIES = ("ttft", "tpot", "e2e", "queue")
_RATES = {"output_tokens_per_s": "tokens/s", "requests_per_s": "requests/s"}


@dataclass(frozen=True, slots=True)
class Change:
    """One figure in both traces; ``name`` as rules name it (``ttft.p95``). Null is unknown, in values and in what follows.

    ``low`` and ``high``: 95 % interval of B − A over requests; null where none can be given. ``lower_is_better``: null for
    figures that are neither.
    """

    name: str
    unit: str
    a: float | None
    b: float | None
    low: float | None = None
    high: float | None = None
    lower_is_better: bool | None = True

    @property
    def change(self) -> float | None:
        """B − A."""
        return None if self.a is None or self.b is None else self.b - self.a

    @property
    def relative(self) -> float | None:
        """(B − A) ÷ A; null if A is 0 and B is not."""
        if self.a is None or self.b is None:
            return None
        if self.a == 0:
            return 0.0 if self.b == 0 else None
        return (self.b - self.a) / self.a

    @property
    def within_noise(self) -> bool | None:
        """Whether the interval holds 0; null where there is none."""
        if self.low is None or self.high is None:
            return None
        return self.low <= 0 <= self.high

    @property
    def verdict(self) -> str:
        """better, worse, same, within noise, changed, or unknown."""
        c = self.change
        if c is None:
            return "unknown"
        if c == 0:
            return "same"
        if self.within_noise:
            return "within noise"
        # Without an interval nobody knows whether it is more than chance.
        if self.lower_is_better is None or self.within_noise is None:
            return "changed"
        return "better" if (c < 0) == self.lower_is_better else "worse"

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "a": self.a,
            "b": self.b,
            "change": self.change,
            "relative": None if self.relative is None else round(self.relative, 6),
            "low": None if self.low is None else round(self.low, 3),
            "high": None if self.high is None else round(self.high, 3),
            "verdict": self.verdict,
        }


@dataclass(frozen=True, slots=True)
class Work:
    """What a trace did: comparing latencies of different work tells nothing."""

    requests: int
    finished: int
    prompt_tokens: int | None
    output_tokens: int | None

    def as_dict(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "finished": self.finished,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
        }


@dataclass(frozen=True)
class Diff:
    """``metrics``, ``parts`` (mean per request) and ``moves`` (per output token) as changes, in a fixed order.

    ``paired``: the same requests were found on both sides, so chance is judged request by request. ``unequal``: why the work is
    not the same (only with ``anyway``). ``notes``: what a reader has to know.
    """

    a: str
    b: str
    a_note: str
    b_note: str
    a_work: Work
    b_work: Work
    paired: bool
    unequal: list[str]
    metrics: list[Change]
    parts: list[Change]
    moves: list[Change]
    notes: list[str]

    @property
    def changes(self) -> dict[str, Change]:
        """All figures by name."""
        return {c.name: c for c in (*self.metrics, *self.parts, *self.moves)}

    def as_dict(self) -> dict[str, Any]:
        """Plain values under :data:`SCHEMA`: fields may be added, never change or go."""
        return {
            "schema": SCHEMA,
            "a": {"trace": self.a, "origin_note": self.a_note, "work": self.a_work.as_dict()},
            "b": {"trace": self.b, "origin_note": self.b_note, "work": self.b_work.as_dict()},
            "paired": self.paired,
            "unequal_work": self.unequal,
            "metrics": [c.as_dict() for c in self.metrics],
            "parts": [c.as_dict() for c in self.parts],
            "moves": [c.as_dict() for c in self.moves],
            "notes": self.notes,
        }


def diff(a: Trace, b: Trace, *, anyway: bool = False) -> Diff:
    """Compare ``b`` against ``a``.

    Raises:
        InputError: the traces did not do the same work, and ``anyway`` is false; says what differs.
    """
    work_a, work_b = work_of(a), work_of(b)
    unequal = _unequal(work_a, work_b)
    if unequal and not anyway:
        raise InputError(
            f"{a.name} and {b.name} did not do the same work: {'; '.join(unequal)}.",
            hint="Figures of different work do not compare. Add --anyway to see them side by side nevertheless.",
        )
    rows_a, rows_b = request_metrics(a), request_metrics(b)
    paired = not unequal and _same_requests(rows_a, rows_b)
    accounts = account(a, steps=(steps_a := steps_of(a))), account(b, steps=(steps_b := steps_of(b)))
    metrics, notes = _latencies(a, b, rows_a, rows_b, paired)
    rates_a, rates_b = summary(a), summary(b)
    metrics += [Change(n, u, getattr(rates_a, n), getattr(rates_b, n), lower_is_better=False) for n, u in _RATES.items()]
    if a.sql("SELECT count(*) AS n FROM requests").item() and not rows_a.height + rows_b.height:
        notes.append("No request is known to have finished: there is no latency to compare.")
    return Diff(
        a=a.name,
        b=b.name,
        a_note=origin_note(a),
        b_note=origin_note(b),
        a_work=work_a,
        b_work=work_b,
        paired=paired,
        unequal=unequal,
        metrics=metrics,
        parts=_parts(*accounts, paired),
        moves=_moves(ledger(a, steps=steps_a).per_token(), ledger(b, steps=steps_b).per_token()),
        notes=notes,
    )


def work_of(trace: Trace) -> Work:
    """Requests, and the tokens of the finished ones; null tokens if one of them does not say."""
    requests = trace.table("requests").select("finish_ns", "error", "prompt_tokens", "output_tokens").collect()
    done = requests.filter(pl.col("finish_ns").is_not_null() & pl.col("error").is_null())

    def total(column: str) -> int | None:
        return None if done[column].null_count() else int(done[column].sum())

    return Work(requests.height, done.height, total("prompt_tokens"), total("output_tokens"))


def _unequal(a: Work, b: Work) -> list[str]:
    out = []
    for name, x, y in (
        ("requests", a.requests, b.requests),
        ("finished requests", a.finished, b.finished),
        ("prompt tokens", a.prompt_tokens, b.prompt_tokens),
        ("output tokens", a.output_tokens, b.output_tokens),
    ):
        if x != y:
            out.append(f"{_number(x)} against {_number(y)} {name}")
    return out


def _number(n: int | None) -> str:
    return "an unknown number of" if n is None else f"{n:,}"


def _same_requests(a: pl.DataFrame, b: pl.DataFrame) -> bool:
    columns = ["request", "prompt_tokens", "output_tokens"]
    return bool(a.height) and a.select(columns).equals(b.select(columns))


def _sample(rows: pl.DataFrame, column: str) -> Sample:
    known = rows.filter(pl.col(column).is_not_null())
    values = known[column].cast(pl.Float64).to_numpy()
    return Sample(values, np.arange(len(values)), len(values))


def _latencies(a: Trace, b: Trace, rows_a: pl.DataFrame, rows_b: pl.DataFrame, paired: bool) -> tuple[list[Change], list[str]]:
    """The figures, and notes on those that leave requests out: of the same requests, only those compare that both sides know."""
    out: list[Change] = []
    notes: list[str] = []

    def said(name: str, n: int) -> None:
        notes.append(f"{name} compares the {n:,} of {counted(rows_a.height, 'request')} that both traces know it for.")

    for name in _LATENCIES:
        column = name + "_ns"
        x, y = rows_a, rows_b
        if paired and not x[column].is_null().equals(y[column].is_null()):
            known = x[column].is_not_null() & y[column].is_not_null()
            if known.any():
                x, y = x.filter(known), y.filter(known)
                said(name, x.height)
        both = paired and x[column].is_null().equals(y[column].is_null())
        bounds = interval(_sample(x, column), _sample(y, column), paired=both)
        out += _of_stats(name, x[column], y[column], bounds)
    tokens_a, tokens_b = itl_ns(a), itl_ns(b)
    if paired:
        have = set(tokens_a["request"].to_list()), set(tokens_b["request"].to_list())
        if have[0] != have[1] and have[0] & have[1]:
            common = sorted(have[0] & have[1])
            tokens_a, tokens_b = (t.filter(pl.col("request").is_in(common)) for t in (tokens_a, tokens_b))
            said("itl", len(common))
    bounds = interval(_token_sample(tokens_a, rows_a), _token_sample(tokens_b, rows_b), paired=paired)
    at = 4  # after TTFT
    out[at:at] = _of_stats("itl", tokens_a["itl_ns"], tokens_b["itl_ns"], bounds)
    return out, notes


def _token_sample(tokens: pl.DataFrame, rows: pl.DataFrame) -> Sample:
    place = rows.select("request").with_row_index("at")
    joined = tokens.join(place, on="request", how="inner", maintain_order="left")
    return Sample(joined["itl_ns"].cast(pl.Float64).to_numpy(), joined["at"].cast(pl.Int64).to_numpy(), rows.height)


def _of_stats(name: str, a: pl.Series, b: pl.Series, bounds: dict[str, tuple[float, float]]) -> list[Change]:
    x, y = stat(a), stat(b)
    out = []
    for s in STATS:
        low, high = bounds.get(s, (None, None))
        out.append(Change(f"{name}.{s}", "ns", getattr(x, s + "_ns"), getattr(y, s + "_ns"), low, high))
    return out


def _parts(a: Accounting, b: Accounting, paired: bool) -> list[Change]:
    """Mean ns per request of each part that one of the traces shows; null where a trace cannot show it."""
    columns = [p.column for p in PARTS]
    # A request that cannot show a part adds nothing to its mean: the means add up to the mean of e2e.
    x, y = (s.parts.select(pl.col(columns).fill_null(0).cast(pl.Float64)).to_numpy() for s in (a, b))
    bounds = mean_intervals(x, y, paired=paired)
    out: list[Change] = []
    for i, p in enumerate(PARTS):
        seen = [s.parts[p.column].null_count() < s.parts.height for s in (a, b)]
        if not any(seen):
            continue
        means = [round(float(v[:, i].sum()) / len(v)) if known else None for v, known in zip((x, y), seen, strict=True)]
        found = bounds[i] if all(seen) else None
        low, high = found if found is not None else (None, None)
        out.append(Change(f"{p.name}.mean", "ns", means[0], means[1], low, high))
    return out


def _moves(a: pl.DataFrame, b: pl.DataFrame) -> list[Change]:
    by = [{r["basis"]: r for r in f.to_dicts()} for f in (a, b)]
    out = []
    for basis in sorted(by[0].keys() | by[1].keys()):
        for figure, unit in (("transfers", "1"), ("bytes", "bytes"), ("payload_hops", "1"), ("control_ops", "1")):
            x, y = (side.get(basis, {}).get(figure) for side in by)
            if x is not None or y is not None:
                out.append(Change(f"{figure}_per_token.{basis}", unit, x, y, lower_is_better=None))
    return out
