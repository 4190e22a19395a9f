"""Each figure of a prediction beside what was observed: its error with an interval, the ratio to the base policy, the sign."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hoptrace.analysis.compare.bootstrap import Bounds, Sample, ratios
from hoptrace.analysis.fidelity.noise import Floor, Noise
from hoptrace.analysis.fidelity.samples import Side, numbers, samples
from hoptrace.comparison import METRICS, Comparison, Difference, Matched

__all__ = ["Figure", "Pair", "Ratio", "Sign", "figures"]

Sign = Literal["right", "wrong", "within noise"]


@dataclass(frozen=True, slots=True)
class Ratio:
    """B ÷ A: between the two recordings, and between the two replays; null where one side does not tell.

    ``bounds``: 95 % interval of predicted ÷ observed; ``seen``: of the observed ratio, from redrawing requests.
    """

    observed: float | None
    predicted: float | None
    bounds: Bounds | None = None
    seen: Bounds | None = None

    @property
    def error_pct(self) -> float | None:
        """(predicted ratio ÷ observed ratio − 1) in %: a machine that was slower in B than in A is in it, an error of the step
        cost that both policies share is not."""
        return 100 * (self.predicted / self.observed - 1) if self.observed and self.predicted is not None else None

    def as_dict(self) -> dict[str, Any]:
        low, high = _percent(self.bounds)
        return {
            "observed": _rounded(self.observed, 6), "predicted": _rounded(self.predicted, 6),
            "error_pct": _rounded(self.error_pct), "low_pct": low, "high_pct": high,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Figure:
    """One statistic of one metric.

    Attributes:
        raw: observed, predicted, and the error as it is.
        bounds: 95 % interval of predicted ÷ observed from redrawing requests; null for throughputs and with too few requests.
        ratio: B ÷ A, predicted against observed; null of the own policy.
        at_speed_pct: the raw error with the machine's speed taken out; null where it was not replayed so.
        floor: how far runs of A stand apart in this figure; null without repeats.
        sign: whether the change from A to B goes the way that was predicted; null where nothing changed or nobody tells.
    """

    raw: Difference
    bounds: Bounds | None = None
    ratio: Ratio | None = None
    at_speed_pct: float | None = None
    floor: Floor | None = None
    sign: Sign | None = None

    @property
    def metric(self) -> str:
        return self.raw.metric

    @property
    def statistic(self) -> str:
        return self.raw.statistic

    @property
    def error_pct(self) -> float | None:
        """The headline: the ratio's error for a changed policy, else the raw one."""
        return self.raw.error_pct if self.ratio is None else self.ratio.error_pct

    @property
    def interval_pct(self) -> tuple[float | None, float | None]:
        """95 % interval of :attr:`error_pct`."""
        return _percent(self.bounds if self.ratio is None else self.ratio.bounds)

    def as_dict(self) -> dict[str, Any]:
        low, high = _percent(self.bounds)
        return {
            "metric": self.metric, "statistic": self.statistic, "unit": self.raw.unit, "observed": self.raw.observed,
            "predicted": self.raw.predicted, "n": self.raw.n, "error_pct": _rounded(self.raw.error_pct), "low_pct": low,
            "high_pct": high, "ratio": None if self.ratio is None else self.ratio.as_dict(),
            "at_speed_pct": _rounded(self.at_speed_pct),
            "noise_pct": None if self.floor is None else round(self.floor.median_pct, 3),
            "noise_largest_pct": None if self.floor is None else round(self.floor.largest_pct, 3), "sign": self.sign,
        }  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """A recording and its prediction, with how they compare and who is whose twin."""

    observed: Side
    predicted: Side
    compared: Comparison
    twins: Matched


def figures(
    own: Pair, other: Pair | None, between: Matched | None, at_speed: Comparison | None, noise: Noise | None
) -> list[Figure]:
    """All figures of ``own`` (the base policy), or of ``other`` against it. ``between``: the twins of the two recordings."""
    shown = own if other is None else other
    found: list[Figure] = []
    alone = {m: _alone(shown, m) for m in METRICS}
    against = {m: _against(own, other, between, m) for m in METRICS} if other is not None and between is not None else {}
    for d in shown.compared.differences:
        ratio = None
        if other is not None:
            ratio = against[d.metric].get(d.statistic) if d.metric in against else None
            ratio = ratio or _of_figures(own.compared.get(d.metric, d.statistic), d)
        known = alone.get(d.metric, {}).get(d.statistic)
        floor = None if noise is None else noise.get(d.metric, d.statistic)
        taken_out = None if at_speed is None else at_speed.get(d.metric, d.statistic).error_pct
        sign = None if ratio is None else _sign(ratio, floor, noise is not None)
        found.append(Figure(d, None if known is None else known[1], ratio, taken_out, floor, sign))
    return found


def _alone(pair: Pair, metric: str) -> dict[str, tuple[float, Bounds | None]]:
    """Predicted ÷ observed by statistic, with intervals."""
    (observed, predicted), groups = _both(pair, metric)
    return ratios([(predicted, groups[1])], [(observed, groups[0])])


def _both(pair: Pair, metric: str) -> tuple[list[Sample], tuple[int, int]]:
    sides = (pair.observed, pair.predicted)
    if pair.twins.paired:
        return samples(metric, sides, numbers(pair.twins, "o", "p")), (0, 0)
    return [samples(metric, (s,), s.requests.select("request"))[0] for s in sides], (0, 1)


def _against(own: Pair, other: Pair, between: Matched, metric: str) -> dict[str, Ratio]:
    """B ÷ A over the requests that all four traces know; where the two recordings do not hold the same ones, over each side's."""
    if own.twins.paired and other.twins.paired and between.paired:
        same = numbers(own.twins, "a", "a_replay").join(numbers(between, "a", "b"), on="a", maintain_order="left")
        same = same.join(numbers(other.twins, "b", "b_replay"), on="b", maintain_order="left")
        sides = (own.observed, own.predicted, other.observed, other.predicted)
        a, a_replay, b, b_replay = samples(metric, sides, same.select("a", "a_replay", "b", "b_replay"))
        g = (0, 0, 0, 0)
    else:
        (a, a_replay), first = _both(own, metric)
        (b, b_replay), second = _both(other, metric)
        g = (*first, second[0] + 2, second[1] + 2)
    error = ratios([(b_replay, g[3]), (a, g[0])], [(a_replay, g[1]), (b, g[2])])
    seen = ratios([(b, g[2])], [(a, g[0])])
    return {s: Ratio(seen[s][0], seen[s][0] * error[s][0], error[s][1], seen[s][1]) for s in error if s in seen}


def _of_figures(a: Difference, b: Difference) -> Ratio:
    """Without an interval: of throughputs, and of what is 0 somewhere."""
    observed, predicted = (
        y / x if x and y is not None else None for x, y in ((a.observed, b.observed), (a.predicted, b.predicted))
    )
    return Ratio(observed, predicted)


def _sign(ratio: Ratio, floor: Floor | None, repeated: bool) -> Sign | None:
    """Whether the change goes the predicted way, if it is larger than any between runs of one policy; without repeats, if its
    interval over the requests leaves out no change."""
    if ratio.observed is None or ratio.predicted is None:
        return None
    change = ratio.observed - 1
    if repeated:
        if floor is None:
            return None
        real = 100 * abs(change) > floor.largest_pct
    else:
        if ratio.seen is None:
            return None
        real = not ratio.seen[0] <= 1 <= ratio.seen[1]
    if not real:
        return "within noise"
    return "right" if change * (ratio.predicted - 1) > 0 else "wrong"


def _percent(bounds: Bounds | None) -> tuple[float | None, float | None]:
    return (None, None) if bounds is None else (_rounded(100 * (bounds[0] - 1)), _rounded(100 * (bounds[1] - 1)))


def _rounded(x: float | None, digits: int = 3) -> float | None:
    return None if x is None else round(x, digits)
