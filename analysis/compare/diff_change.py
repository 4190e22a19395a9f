"""One figure in two traces: the change, how far it could be chance, and what it is called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Change"]

# Rounding in the last digit is no change.
_SAME = 1e-12
# Where nothing tells how far a figure scatters, a smaller relative change than this is not called one.
_FLAT = 0.05


@dataclass(frozen=True, slots=True)
class Change:
    """One figure in both traces; ``name`` as rules name it (``ttft.p95``). Null is unknown, in values and in what follows.

    ``low`` and ``high``: 95 % interval of B − A over requests; null where none can be given. ``noise``: how large a difference
    two runs of one policy make by chance (:mod:`diff_noise`); null without repeats, or where they do not tell;
    ``repeats``: whether there were any. ``lower_is_better``: null for figures that are neither. ``basis``: counted, derived or
    assumed, of figures that have one.
    """

    name: str
    unit: str
    a: float | None
    b: float | None
    low: float | None = None
    high: float | None = None
    lower_is_better: bool | None = True
    noise: float | None = None
    repeats: bool = False
    basis: str | None = None

    @property
    def change(self) -> float | None:
        """B − A."""
        return None if self.a is None or self.b is None else self.b - self.a

    @property
    def relative(self) -> float | None:
        """(B − A) ÷ |A|; null if A is 0 and B is not."""
        if self.a is None or self.b is None:
            return None
        if self.a == 0:
            return 0.0 if self.b == 0 else None
        return (self.b - self.a) / abs(self.a)

    @property
    def is_same(self) -> bool:
        """Whether both sides are known and equal, up to rounding."""
        return self.a is not None and self.b is not None and abs(self.b - self.a) <= _SAME * max(abs(self.a), abs(self.b))

    @property
    def within_noise(self) -> bool | None:
        """Whether chance explains the change: the interval over requests holds 0, or two runs of one policy differ as much.

        Null where nobody knows: neither an interval nor repeats, or repeats that do not tell this figure.
        """
        c = self.change
        if c is None:
            return None
        requests = None if self.low is None or self.high is None else self.low <= 0 <= self.high
        runs = None if self.noise is None else abs(c) <= self.noise
        if requests or runs:
            return True
        if self.repeats:
            return None if runs is None else False
        return requests

    @property
    def verdict(self) -> str:
        """better, worse, same, within noise, changed, or unknown."""
        c = self.change
        if c is None:
            return "unknown"
        if self.is_same:
            return "same"
        if self.within_noise:
            return "within noise"
        # Without an interval nobody knows whether it is more than chance.
        if self.lower_is_better is None or self.within_noise is None:
            return "changed"
        return "better" if (c < 0) == self.lower_is_better else "worse"

    @property
    def direction(self) -> str:
        """up, down, same or unknown: same within noise, and below 5 % where nobody knows the noise."""
        c = self.change
        if c is None:
            return "unknown"
        noise = self.within_noise
        flat = noise is None and self.relative is not None and abs(self.relative) < _FLAT
        if self.is_same or noise or flat:
            return "same"
        return "up" if c > 0 else "down"

    @property
    def certainty(self) -> str:
        """How sure the direction is: beyond noise, within noise, no interval, equal, or unknown."""
        if self.change is None:
            return "unknown"
        if self.is_same:
            return "equal"
        return {True: "within noise", False: "beyond noise", None: "no interval"}[self.within_noise]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "name": self.name,
            "unit": self.unit,
            "basis": self.basis,
            "a": _digits(self.a),
            "b": _digits(self.b),
            "change": _digits(self.change),
            "relative": None if self.relative is None else round(self.relative, 6),
            "low": _digits(self.low),
            "high": _digits(self.high),
            "noise": _digits(self.noise),
            "verdict": self.verdict,
        }


def _digits(v: float | None) -> float | None:
    """Nine significant digits: more is noise of the arithmetic; whole numbers stay whole."""
    if v is None or float(v).is_integer():
        return v
    return float(f"{v:.9g}")
