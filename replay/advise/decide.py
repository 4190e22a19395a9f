"""One decision from all verdicts: change a flag, try it first, or keep things as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hoptrace.replay.advise.model import Outlook, Verdict
from hoptrace.replay.advise.objective import Objective, name_of

__all__ = [
    "CHANGE", "KEEP", "LEAST_GAIN", "MOST_BEYOND", "MOST_OFF", "TOO_DEAR", "TRY", "Decision", "acceptable", "decide",
    "plain_gain", "range_of",
]  # fmt: skip

CHANGE, TRY, KEEP = "change", "try", "keep"
LEAST_GAIN = 0.03
"""A gain below this is none: equal runs of a real server differ by as much."""
MOST_BEYOND = 0.2
"""From so much of the step time on that is extrapolated, a gain is a reason to try, not to change."""
MOST_OFF = 0.2
"""Likewise from such an error of the own policy's replay on, in a figure of the objective."""
_AS_GOOD = 0.02
"""A smaller change that gains all but this of the largest one's is taken instead."""
_FAR_MORE = 0.05
_GUARD = 1.02
"""Of several figures of an objective none may become worse by more."""
TOO_DEAR = 2.0
"""What makes another figure this many times as bad is not advised, but for goodput, whose limits say what matters."""
_NEEDS = 3


@dataclass(frozen=True)
class Decision:
    """``kind``: CHANGE (do it), TRY (measure it first: it rests on much that was never recorded, or has no interval), KEEP.
    ``verdict``: of what to change; null for KEEP. ``sentence``: in plain words. ``also``: further sentences."""

    kind: str
    verdict: Verdict | None
    sentence: str
    also: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        typed = [] if self.verdict is None else [t for c in self.verdict.changes for t in c.typed]
        return {"decision": self.kind, "typed": typed, "sentence": self.sentence, "also": list(self.also)}


def decide(
    objective: Objective, verdicts: Sequence[Verdict], tried: int, off: float | None = None, cost: str = "fitted"
) -> Decision:
    """The decision. ``tried``: how many changes were replayed; ``off``: the largest relative error of the own policy's replay in
    the objective's figures, null where it is not known; ``cost``: what the step cost is.

    What needs nothing that the server does not have comes first: another server is advised only where no flag gains, and even
    then only named. Of those that gain beyond doubt (interval above 0, and LEAST_GAIN or more; no figure of the objective worse;
    no request lost) that whose gain is largest, or the smallest change that is as good.
    """
    good = [v for v in verdicts if acceptable(objective, v)]
    free = [v for v in good if not v.needs]
    covered = [v for v in free if _covered(v)]
    near, far = _smallest(covered), _smallest([v for v in free if not _covered(v)])
    best = near if near is not None and not _beyond_doubt(far, near) else far
    also = _also(objective, best, good, free)
    if best is None:
        return Decision(KEEP, None, _keep(objective, verdicts, tried, cost), also)
    why = _doubts(best, off)
    return Decision(TRY if why else CHANGE, best, _sentence(objective, best, why), also)


def _beyond_doubt(far: Verdict | None, near: Verdict) -> bool:
    """Whether what is extrapolated promises so much more that even its least exceeds the other's most, by far."""
    return far is not None and (far.low or 0.0) > (near.high if near.high is not None else near.gain or 0.0) + _FAR_MORE


def acceptable(objective: Objective, v: Verdict) -> bool:
    """Whether it gains beyond doubt, at no cost in the objective's own figures and a bearable one in the others."""
    if v.gain is None or v.gain < LEAST_GAIN or v.lost or (v.low is not None and v.low <= 0):
        return False
    if objective.name != "goodput" and _dear(v):
        return False
    held = [v.figures.get(name_of(key)) for key in objective.keys] if len(objective.keys) > 1 else []
    return all(o is None or o.ratio is None or o.ratio <= _GUARD for o in held)


def _dear(v: Verdict) -> bool:
    return any(_times_as_bad(name, o) >= TOO_DEAR for name, o in v.figures.items())


def _times_as_bad(name: str, o: Outlook) -> float:
    """How many times as bad a figure becomes at the middle of the draws; 1 where that is not known."""
    if o.ratio is None or o.ratio <= 0:
        return 1.0
    return 1 / o.ratio if name == name_of(("throughput", "")) else o.ratio


def _covered(v: Verdict) -> bool:
    return v.extrapolated is None or v.extrapolated <= MOST_BEYOND


def _smallest(verdicts: Sequence[Verdict]) -> Verdict | None:
    """The smallest change that is as good as the best one."""
    if not verdicts:
        return None
    top = max(v.gain or 0.0 for v in verdicts)
    return min(
        (v for v in verdicts if (v.gain or 0.0) >= top - _AS_GOOD), key=lambda v: (len(v.changes), sum(c.size for c in v.changes))
    )


def plain_gain(objective: Objective, gain: float | None) -> str:
    """``−14 %`` of a time, ``+20 %`` of a rate, ``+31 points`` of the share of requests."""
    if gain is None:
        return "unknown"
    if objective.name == "goodput":
        return f"{100 * gain:+.1f} points"
    return f"{100 * gain:+.1f} %" if objective.name == "throughput" else f"{-100 * gain:+.1f} %"


def range_of(objective: Objective, v: Verdict) -> str:
    """The interval of the gain: ``-51.2 to -3.3 %``."""
    if v.low is None or v.high is None:
        return "no interval"
    ends = sorted((plain_gain(objective, v.low), plain_gain(objective, v.high)), key=lambda t: float(t.split()[0]))
    return f"{ends[0].split()[0]} to {ends[1]}"


def _doubts(v: Verdict, off: float | None) -> list[str]:
    """Why a gain is a reason to try a change, and not yet to make it."""
    found = []
    if v.low is None:
        found.append("it has no interval")
    if not _covered(v):
        found.append(f"{100 * (v.extrapolated or 0):.0f} % of its step time is like nothing recorded")
    if off is not None and off > MOST_OFF:
        found.append(f"the replay of what was recorded is {100 * off:.0f} % off")
    return found


def _sentence(objective: Objective, v: Verdict, doubts: Sequence[str]) -> str:
    what = f"{objective.words} {plain_gain(objective, v.gain)} ({range_of(objective, v)})"
    price = f"; worse: {', '.join(v.worse[:2])}" if v.worse else ""
    if not doubts:
        return f"Change to {v.text}: {what}{price}."
    return f"Try {v.text}, and measure before you trust it: {what}{price}, but {' and '.join(doubts)}."


def _keep(objective: Objective, verdicts: Sequence[Verdict], tried: int, cost: str) -> str:
    if not tried:
        by = "the trace's own evidence" if cost == "fitted" else f"a replay with a {cost} step cost"
        return f"Keep the flags as they are: by {by} none of those that can be judged could matter."
    best = max((v for v in verdicts if v.gain is not None and not v.needs), key=lambda v: v.gain or 0.0, default=None)
    if best is None or (best.gain or 0) <= 0:
        alone = " with what the server has" if any(v.needs for v in verdicts) else ""
        return f"Keep the flags as they are: none of {tried} changes tried betters {objective.words}{alone}."
    if best.sure and objective.name != "goodput" and _dear(best):
        worst = best.worse[0] if best.worse else "another figure twice as bad"
        return f"Keep the flags as they are: {best.text} would bring {objective.words} {_reach(objective, best)}, but at {worst}."
    said = f"{best.text} comes to {_reach(objective, best)}"
    return f"Keep the flags as they are: no change of {tried} tried betters {objective.words} beyond doubt; {said}."


def _also(objective: Objective, best: Verdict | None, good: Sequence[Verdict], free: Sequence[Verdict]) -> tuple[str, ...]:
    """What else a reader should know: more that rests on what was never recorded, what is sure instead, what would need more."""
    said = []
    more = (best.gain or 0.0) + _AS_GOOD if best is not None else 0.0
    far = _smallest([v for v in free if not _covered(v) and (v.gain or 0.0) > more])
    if best is not None and _covered(best) and far is not None:
        share = f"{100 * (far.extrapolated or 0):.0f} %"
        said.append(
            f"{far.text} promises more ({plain_gain(objective, far.gain)}), but {share} of its step time is like nothing "
            "recorded: `hoptrace calibrate --probe` widens that."
        )
    near = _smallest([v for v in free if _covered(v)])
    if best is not None and not _covered(best) and near is not None:
        said.append(f"Within what was recorded: {near.text}, {_reach(objective, near)}.")
    kinds: dict[str, list[Verdict]] = {}
    for v in good:
        if v.needs and (v.gain or 0.0) > more:
            kinds.setdefault(v.changes[0].flag, []).append(v)
    needy = [x for some in kinds.values() if (x := _smallest(some)) is not None]
    plans = [v for v in needy if not v.bound]
    bounds = [v for v in needy if v.bound and all((v.gain or 0.0) > (x.gain or 0.0) + _AS_GOOD for x in plans)]
    for v in sorted(plans, key=lambda v: -(v.gain or 0.0))[:_NEEDS] + bounds:
        said.append(f"With {v.needs}: {'at best ' if v.bound else ''}{_reach(objective, v)}, by {v.text}.")
    return tuple(said)


def _reach(objective: Objective, v: Verdict) -> str:
    return f"{plain_gain(objective, v.gain)} ({range_of(objective, v)})"
