"""How much better it could get at most if one thing cost nothing. A replay answers that; the analysis is handed the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hoptrace.analysis.term import Term

__all__ = ["TERMS", "Ceiling"]


@dataclass(frozen=True)
class Ceiling:
    """A what-if under the trace's own policy with one cost taken away, against the same replay with it.

    Attributes:
        name: host, front, unlimited, cached, roofline, transfers, interference.
        question: what is asked, in words.
        throughput, e2e, ttft, tpot: how many times better than the own-policy replay: output tokens per second of the whole run,
            and the mean of each time (2 is half as long). Null where it is not known; all null where the question could not be
            asked: then ``left_out`` says why.
        taken_away: what was set to nothing, in words.
        error: relative error of the own-policy replay against what was observed, by metric (of the means); null if unknown.
        warnings: what a reader has to know, in sentences.
    """

    name: str
    question: str
    throughput: float | None = None
    e2e: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    taken_away: str = ""
    basis: str = "against the replay under the trace's own policy"
    error: Mapping[str, float] | None = None
    warnings: tuple[str, ...] = ()
    left_out: str | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Ceiling:
        """From what :func:`hoptrace.replay.ceilings.ceilings` gives."""
        known = {k: d[k] for k in cls.__dataclass_fields__ if k in d}
        return cls(**{**known, "warnings": tuple(d.get("warnings", ()))})

    @property
    def best(self) -> float | None:
        """The largest of its factors: what the whole could gain at most, in one number; null where nothing is known."""
        known = [f for f in (self.throughput, self.e2e, self.ttft, self.tpot) if f is not None]
        return max(known) if known else None

    @property
    def sentence(self) -> str:
        """`with host cost zero: 2.6 × (end to end), 2.6 × (throughput)`; or why it is left out."""
        if self.left_out is not None:
            return f"{self.question}: not asked. {self.left_out}"
        named = (("end to end", self.e2e), ("TTFT", self.ttft), ("TPOT", self.tpot), ("throughput", self.throughput))
        factors = ", ".join(f"{name} {factor_text(f)}" for name, f in named if f is not None)
        return f"{self.question}: {factors or 'unknown'}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; factors with four digits."""
        return {
            "name": self.name,
            "question": self.question,
            "throughput": _digits(self.throughput),
            "e2e": _digits(self.e2e),
            "ttft": _digits(self.ttft),
            "tpot": _digits(self.tpot),
            "taken_away": self.taken_away,
            "basis": self.basis,
            "error": None if self.error is None else dict(self.error),
            "warnings": list(self.warnings),
            "left_out": self.left_out,
            "figures": dict(self.figures),
        }


def factor_text(factor: float | None) -> str:
    """`2.6 ×`; an en dash if unknown."""
    if factor is None:
        return "–"
    return f"{factor:.2f} ×" if factor < 1.995 else f"{factor:.1f} ×" if factor < 99.5 else f"{factor:,.0f} ×"


def _digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


TERMS = (
    Term(
        "ceiling",
        "layers",
        "ceiling",
        "×",
        "figure of the own-policy replay ÷ figure of the same replay with one cost taken away",
        "How much better it could get at most if the host, the way in and out, waiting for places, computing prompts, or all but "
        "the roofline cost nothing. A replay with the trace's own policy, compared with the replay that keeps the cost: like "
        "with like. Throughput the other way round, so that more is better in all. Under recorded arrivals throughput rises "
        "only as far as requests waited.",
    ),
)
