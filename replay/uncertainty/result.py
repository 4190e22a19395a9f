"""What an uncertainty study gives: an interval for each figure, and on what it rests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["SIDES", "Interval", "Intervals", "Key"]

SIDES = ("own", "what_if", "change", "pair")
Key = tuple[str, str, str]
"""Side, metric, statistic."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Bounds, both included: ns for latencies, per second for rates; of ``change`` and ``pair`` ratios, what-if ÷ own."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Intervals:
    """Intervals of a what-if's figures.

    Two kinds, which answer different questions:

    * ``own`` and ``what_if`` are *predictive*: where the figure of one more run of the same requests would lie, under the trace's
      own policy and under the one asked for. Machine speed, residuals and the step cost's doubt are all in them. A real run is
      held against these.
    * ``change`` is *paired*: where what-if ÷ own policy would lie if both ran on the same machine in the same mood; draws share
      coefficients, residuals and speed, which cancel. A single pair of real runs scatters by their noise on top: ``pair`` is
      where *its* ratio would lie, the recorded run and one under the other policy.

    Attributes:
        draws: replays of each side; level: the share of runs that an interval is to hold.
        figures: of another run of the *same* requests, as `hoptrace drive` sends them.
        like: of a run of other requests of the same traffic (requests redrawn in blocks by arrival): wider where few requests
            make a percentile. Rates have none.
        carried: by metric and statistic, by how much (a factor, low and high) the ``what_if`` interval was widened since the
            own-policy interval missed what was observed: an error that none of the sources explains is carried over.
        speed_sd: of the logarithm of the machine's speed between runs; ``speed_from``: where that is from, in words.
        sources: in words, what is in the intervals. notes: what is not, and what a reader has to know.
    """

    draws: int
    level: float
    figures: dict[Key, Interval] = field(default_factory=dict)
    like: dict[Key, Interval] = field(default_factory=dict)
    carried: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    speed_sd: float = 0.0
    speed_from: str = ""
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.figures)

    def get(self, side: str, metric: str, statistic: str, *, requests: str = "same") -> Interval | None:
        """The interval of a figure, null where there is none. ``requests``: ``same``, or ``like``: see the class."""
        return (self.figures if requests == "same" else self.like).get((side, metric, statistic))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON and the manifest: ``figures`` has low and high (``like_low``, ``like_high``) of each figure."""
        rows = []
        for (side, metric, statistic), i in self.figures.items():
            row: dict[str, Any] = {"side": side, "metric": metric, "statistic": statistic, "low": _plain(i.low, side),
                                   "high": _plain(i.high, side)}  # fmt: skip
            other = self.like.get((side, metric, statistic))
            if other is not None:
                row |= {"like_low": _plain(other.low, side), "like_high": _plain(other.high, side)}
            rows.append(row)
        carried = [
            {"metric": m, "statistic": s, "low": round(low, 6), "high": round(high, 6)}
            for (m, s), (low, high) in self.carried.items()
        ]
        return {
            "draws": self.draws, "level": self.level, "figures": rows, "carried": carried,
            "speed": {"sd": round(self.speed_sd, 6), "from": self.speed_from},
            "sources": list(self.sources), "notes": list(self.notes),
        }  # fmt: skip


def _plain(value: float, side: str) -> float:
    return round(value, 6 if side in ("change", "pair") else 3)
