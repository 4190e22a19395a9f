"""From a study's runs to intervals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hoptrace.comparison import STATISTICS, values
from hoptrace.metrics import request_metrics, stat
from hoptrace.replay.calibration.coverage import COVERED
from hoptrace.replay.prepare import Prepared
from hoptrace.replay.simulation import Engine
from hoptrace.replay.uncertainty.beyond import HALF, doubted
from hoptrace.replay.uncertainty.bounds import bounds
from hoptrace.replay.uncertainty.figures import Figures, statistics
from hoptrace.replay.uncertainty.result import Interval, Intervals, Key
from hoptrace.replay.uncertainty.runner import Runner
from hoptrace.replay.uncertainty.study import Study, often

__all__ = ["intervals"]

_MOST_CARRIED = 2.0  # where next to no queue was observed, a ratio says nothing
_Rows = tuple[list[Figures], list[Figures]]
"""Figures of each draw: of the same requests, and of the like."""


def intervals(
    prepared: Prepared,
    *,
    draws: int = 40,
    level: float = 0.9,
    seed: int = 0,
    engine: Engine = "auto",
    speed_sd: float | None = None,
    carry: bool = True,
    study: Study | None = None,
    progress: Callable[[float], None] | None = None,
) -> Intervals:
    """Intervals of a what-if's figures: latencies' mean, p50, p95, p99, and throughput.

    Each draw replays the trace's own policy and the one asked for with the same draw of: the step cost (fitted anew to redrawn
    steps, features chosen anew; of a cost from elsewhere its covariance), the residuals (the recorded ones in redrawn
    stretches), the machine's speed, the times outside steps, and, for random routing and acceptance, the seed.

    Args:
        draws: of each side; under 19 the interval is Student's.
        level: the share of runs that an interval is to hold.
        speed_sd: standard deviation of ln(speed) between runs, from repeats (:func:`speed_sd_of`); null: from the drift
            within the recording (:func:`drift_sd`).
        carry: whether what the own-policy interval misses of the observed figure widens the what-if's, on the same side.
        study: draws that are there already; ``draws``, ``seed`` and ``speed_sd`` are then its own.
        progress: told how far it is, 0 to 1.

    Returns:
        Without any figure, and with a note that says why, where the step cost is not a fitted one: what a roofline or a table
        does not know of a machine has no distribution, and an interval of the rest would be far too narrow.
    """
    s = study or Study(prepared, draws, seed, speed_sd)
    if s.unknown:
        return Intervals(0, level, notes=(s.unknown,))
    p, tell = prepared, progress or (lambda _: None)
    notes = list(s.notes)
    if any((c.coefficients_ps, c.pieces) != (s.base.coefficients_ps, s.base.pieces) for c in p.planned.plan.costs):
        notes.append("The what-if's step cost is made from the fitted one: what that adds of error is not in the intervals.")
    if len(s.draws) < 2:
        notes.append("One draw makes no interval: ask for two or more, better 19.")
    alone = _alone(p)
    sides, drawn = [Runner(s, p.own_work, p.own, engine)], [s.draws]
    if not alone:
        sides.append(Runner(s, p.asked_work, p.planned, engine, p.asked_parent))
        share = sides[1].extrapolated()
        drawn.append(doubted(s.draws, share))
        if share > HALF:
            said = f"{100 * share:.0f} % of the what-if's step time rests on extrapolated step costs: it has no interval."
            notes.append(said)
            sides, drawn = sides[:1], drawn[:1]
        elif share > COVERED:
            notes.append(
                f"{100 * share:.0f} % of the what-if's step time rests on extrapolated step costs, which are taken to be right "
                "within a factor of two: its intervals are wider by that."
            )
    points, rows = [], []
    for j, (runner, work) in enumerate(zip(sides, (p.own_work, p.asked_work), strict=False)):
        points.append(statistics(runner.point()))
        mine: _Rows = ([], [])
        for i, d in enumerate(drawn[j]):
            seen = runner.run(d)
            # Requests of another trace are not those that the draw counted.
            other = d.often if len(d.often) == work.n else often(work.n, np.random.default_rng(d.seed))
            mine[0].append(statistics(seen))
            mine[1].append(statistics(seen, other))
            tell((j * len(s.draws) + i + 1) / (len(sides) * len(s.draws)))
        rows.append(mine)
    own, asked = rows[0], rows[-1]
    before, after = points[0], points[-1]
    same, like = (_bounds(own[i], asked[i], before, after, level) for i in (0, 1))
    if not alone and len(sides) == 1:
        same, like = ({k: i for k, i in held.items() if k[0] == "own"} for held in (same, like))
    carried = _carried(p, same) if carry and p.observed and not alone else {}
    for held in (same, like):
        for (m, x), (low, high) in carried.items():
            if (was := held.get(("what_if", m, x))) is not None:
                held[("what_if", m, x)] = Interval(was.low * low, was.high * high)
        held.update(_pairs(held, before))
    return Intervals(len(s.draws), level, same, like, carried, s.speed_sd, s.speed_from, tuple(s.sources), tuple(notes))


def _alone(p: Prepared) -> bool:
    """Whether the what-if is the trace's own policy: one side says all."""
    if p.asked_parent is not None or not p.arrivals.same or p.until_ns is not None or "recorded_on" in p.how:
        return False
    return p.own_arrivals.kind == p.arrivals.kind and p.own.as_dict() == p.planned.as_dict()


def _bounds(own: list[Figures], asked: list[Figures], before: Figures, after: Figures, level: float) -> dict[Key, Interval]:
    """Intervals of both sides, and of the paired ratio. A figure that some draw has not (nobody finished) has none."""
    found: dict[Key, Interval] = {}

    def put(side: str, key: tuple[str, str], drawn: list[float], point: float | None) -> None:
        i = bounds(drawn, level, point) if len(drawn) == len(own) else None
        if i is not None:
            found[(side, *key)] = i

    for key in dict.fromkeys([*before, *after]):
        put("own", key, [r[key] for r in own if key in r], before.get(key))
        put("what_if", key, [r[key] for r in asked if key in r], after.get(key))
        ratios = [b[key] / a[key] for a, b in zip(own, asked, strict=True) if key in b and a.get(key, 0.0) > 0]
        was, now = before.get(key), after.get(key)
        put("change", key, ratios, now / was if was and now is not None else None)
    return found


def _pairs(held: dict[Key, Interval], before: Figures) -> dict[Key, Interval]:
    """The what-if's intervals as ratios to the own-policy replay, which is the recorded run as far as it can be replayed."""
    return {
        ("pair", m, x): Interval(i.low / before[(m, x)], i.high / before[(m, x)])
        for (side, m, x), i in held.items()
        if side == "what_if" and before.get((m, x), 0.0) > 0
    }


def _carried(p: Prepared, held: dict[Key, Interval]) -> dict[tuple[str, str], tuple[float, float]]:
    """Factors (low ≤ 1 ≤ high, twice at most) by which observed figures lie outside the own-policy intervals."""
    trace, found = p.parent.trace, {}
    metrics = request_metrics(trace)
    metrics = metrics.filter(metrics["request"].is_in(p.own_work.request.tolist()))
    for m in ("ttft", "itl", "tpot", "e2e", "queue"):
        known = values(m, trace, metrics).join(metrics.select("request"), on="request", how="semi")
        s = stat(known["value"])
        for x in STATISTICS:
            seen, i = getattr(s, f"{x}_ns"), held.get(("own", m, x))
            if i is None or not seen or seen < 0 or i.low <= 0 or seen in i:
                continue
            found[(m, x)] = (max(1 / _MOST_CARRIED, min(1.0, seen / i.low)), min(_MOST_CARRIED, max(1.0, seen / i.high)))
    return found
