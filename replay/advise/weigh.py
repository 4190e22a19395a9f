"""From runs to verdicts: how much a change gains, how sure that is, and what becomes worse."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hoptrace.replay.advise.model import Change, Outlook, Verdict
from hoptrace.replay.advise.objective import SHOWN, Figures, Objective, name_of
from hoptrace.replay.advise.trials import Point
from hoptrace.replay.uncertainty.bounds import bounds

__all__ = ["LEVEL", "WORSE", "gains", "middle", "verdict"]

LEVEL = 0.9
WORSE = 0.03
"""What becomes worse by less than this is not told: runs of a real server differ by more."""

_TIMES = 3.0

Draws = Sequence[tuple[Figures, Figures]]


def gains(objective: Objective, draws: Draws) -> list[float]:
    """The gain on each draw; empty if it is unknown on any."""
    found = [objective.gain(own, other) for own, other in draws]
    known = [g for g in found if g is not None]
    return known if len(known) == len(found) else []


def middle(values: Sequence[float]) -> float | None:
    """The median; null without values."""
    return float(np.median(values)) if len(values) else None


def verdict(objective: Objective, changes: Sequence[Change], own: Point, point: Point, draws: Draws) -> Verdict:
    """What the changes come to. Without draws the gain is that of the one run, and has no interval."""
    drawn = gains(objective, draws)
    gain = middle(drawn) if drawn else objective.gain(own.figures, point.figures)
    # A gain has either sign: its own bounds are those of 1 − gain, which is a ratio, so the small sample's logarithm is right.
    shifted = objective.name != "goodput"
    held = bounds([1 - g for g in drawn] if shifted else [2 - g for g in drawn], LEVEL) if drawn else None
    low = high = None
    if held is not None:
        top = 1.0 if shifted else 2.0
        low, high = top - held.high, top - held.low
    figures = {name_of(k): o for k in SHOWN if (o := _outlook(k, own, point, draws)) is not None}
    notes = [n for c in changes for n in c.notes]
    notes += [n for n in point.planned.notes if n not in own.planned.notes]
    return Verdict(
        changes=tuple(changes),
        gain=gain,
        low=low,
        high=high,
        figures=figures,
        worse=_worse(figures),
        extrapolated=point.extrapolated,
        beyond=point.beyond,
        lost=max(0, point.undone - own.undone),
        notes=tuple(dict.fromkeys(notes)),
    )


def _outlook(key: tuple[str, str], own: Point, point: Point, draws: Draws) -> Outlook | None:
    """what-if ÷ own of one figure; null where it is not known."""
    pairs = [(a[key], b[key]) for a, b in draws if key in a and key in b]
    if pairs and len(pairs) == len(draws) and all(a > 0 for a, _ in pairs):
        ratios = [b / a for a, b in pairs]
        held = bounds(ratios, LEVEL)
        return Outlook(middle(ratios), None if held is None else held.low, None if held is None else held.high)
    before, after = own.figures.get(key), point.figures.get(key)
    return Outlook(after / before, None, None) if before and after is not None else None


def _worse(figures: dict[str, Outlook]) -> tuple[str, ...]:
    """Figures that become worse by more than WORSE and beyond the scatter, the worst first, as in ``TTFT p95 +44 %``."""
    found = []
    for name, o in figures.items():
        if o.ratio is None:
            continue
        rate = name == name_of(("throughput", ""))
        off = 1 - o.ratio if rate else o.ratio - 1
        sure = o.low is None or o.high is None or (o.high < 1 if rate else o.low > 1)
        if off > WORSE and sure:
            found.append((off, f"{name} ×{o.ratio:.1f}" if o.ratio >= _TIMES else f"{name} {100 * (o.ratio - 1):+.0f} %"))
    return tuple(text for _, text in sorted(found, reverse=True))
