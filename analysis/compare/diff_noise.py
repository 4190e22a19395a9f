"""How much two runs of one policy differ by chance, from repeats.

A change from one run of A to one run of B is more than run-to-run noise if it is larger than t · √(s_A² + s_B²): s² are the
variances between the runs of each policy, t the quantile of Student's distribution (Welch's degrees of freedom) at 95 %,
two-sided. Where only A was repeated, B is taken to scatter like A: as much, or relatively as much if B's figure is larger.
With a single repeat there is one degree of freedom and t at 95 % is 12.7, which would hide nearly everything: then 80 % is
used (t = 3.08; the limit is
3.08 times the range of the two runs), and said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import stdtrit

from hoptrace.analysis.compare.diff_figure import Figure
from hoptrace.analysis.text import counted

__all__ = ["Noise", "limit"]

_SURE, _SURE_OF_TWO = 0.95, 0.80


@dataclass(frozen=True)
class Noise:
    """The runs of each policy, A's and B's own included, as (name, figures)."""

    a: tuple[tuple[str, Mapping[str, Figure]], ...]
    b: tuple[tuple[str, Mapping[str, Figure]], ...]

    def limit(self, name: str) -> float | None:
        """The largest difference that chance between runs explains; null where the runs do not tell the figure."""
        a, b = self._values(self.a, name), self._values(self.b, name)
        return None if a is None or b is None else limit(a, b)

    def spread(self, name: str) -> tuple[float | None, float | None]:
        """Range ÷ mean over the runs of A and of B; null with one run, where a run does not tell it, or if the mean is 0."""
        return _relative(self._values(self.a, name)), _relative(self._values(self.b, name))

    @property
    def sure(self) -> float:
        """The confidence of the limits: 80 % with a single repeat in all, else 95 %."""
        return _SURE_OF_TWO if len(self.a) + len(self.b) == 3 else _SURE

    @property
    def said(self) -> str:
        """What the repeats are and what they are worth, in a sentence or two."""
        runs = [f"{counted(len(r), 'run')} of {w}" for w, r in (("A", self.a), ("B", self.b)) if len(r) > 1]
        text = f"Noise between runs is known from {' and '.join(runs)} ({_widest(self)})."
        if self.sure < _SURE:
            text += (
                " One repeat tells little: of chance alone one change in five would count as more than noise. Give two or more."
            )
        return text

    def as_dict(self) -> dict[str, Any]:
        return {"a": [n for n, _ in self.a], "b": [n for n, _ in self.b], "confidence": self.sure}

    @staticmethod
    def _values(runs: tuple[tuple[str, Mapping[str, Figure]], ...], name: str) -> list[float] | None:
        values = [f.value for _, figures in runs if (f := figures.get(name)) is not None and f.value is not None]
        return values if len(values) == len(runs) else None


def limit(a: Sequence[float], b: Sequence[float]) -> float | None:
    """See the module. ``a`` and ``b``: values of the runs, one at least of each; null if neither has two."""
    n = len(a), len(b)
    if max(n) < 2:
        return None
    own = [float(np.var(v, ddof=1)) if len(v) > 1 else None for v in (a, b)]
    means = [abs(float(np.mean(v))) for v in (a, b)]
    variances = []
    for i, other in ((0, 1), (1, 0)):
        known, theirs = own[i], own[other]
        if known is None:
            assert theirs is not None
            known = theirs * (max(1.0, means[i] / means[other]) ** 2 if means[other] else 1.0)
        variances.append(known)
    total = variances[0] + variances[1]
    if total == 0:
        return 0.0
    if own[0] is None or own[1] is None:
        freedom = float(max(n) - 1)
    else:
        freedom = total**2 / sum(v**2 / (k - 1) for v, k in zip(variances, n, strict=True))
    sure = _SURE_OF_TWO if sum(n) == 3 else _SURE
    return float(stdtrit(freedom, 0.5 + sure / 2) * np.sqrt(total))


def _relative(values: list[float] | None) -> float | None:
    if values is None or len(values) < 2:
        return None
    mean = sum(values) / len(values)
    return (max(values) - min(values)) / abs(mean) if mean else None


def _widest(noise: Noise) -> str:
    """The spread of the figures that people look at first."""
    named = []
    for name in ("ttft.p95", "itl.p95", "e2e.mean"):
        known = [s for s in noise.spread(name) if s is not None]
        if known:
            named.append(f"{name} spreads {max(known):.1%}")
    return ", ".join(named) if named else "no latency is known in all of them"
