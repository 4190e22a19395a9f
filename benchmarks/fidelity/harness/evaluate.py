"""The runs of a cell held against replays: one round's study of its base policy and of each other policy.

Each round is calibrated on its own run of the base policy, as a user would, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness.recipe import Recipe
from harness.rounds import Folder, Run

import hoptrace
from hoptrace.cli.fidelity_run import measure
from hoptrace.errors import HoptraceError
from hoptrace.reader import Trace
from hoptrace.reconstruct import steps_of
from hoptrace.replay.against import against
from hoptrace.replay.uncertainty import Intervals, intervals, speed_sd_of

__all__ = ["FIGURES", "evaluate"]

FIGURES = (
    *((m, s) for m in ("ttft", "tpot", "itl", "e2e") for s in ("mean", "p50", "p95", "p99")),
    ("throughput", "output tokens"), ("throughput", "requests"),
)  # fmt: skip
_DRAWS = 40


def evaluate(recipe: Recipe, cell: str, out: Path, say: Callable[[str], None], *, void_too: bool = False) -> list[dict[str, Any]]:
    """One row per round and policy of a cell: errors, noise, own terms, intervals; a run that is void, or could not be replayed,
    has ``why`` instead. ``void_too``: also rounds whose runs were above the bounds.
    """
    base, *others = recipe.cells[cell].policies
    folder = Folder(out / cell)
    rounds = sorted({int(p.name[:2]) for p in folder.path.glob("*.run.json")})
    usable = {(i, p): _usable(folder, Run(i, p), void_too) for i in rounds for p in (base, *others)}
    rows: list[dict[str, Any]] = []
    for i in rounds:
        if why := usable[i, base]:
            rows.append({"round": i, "policy": base, "why": why})
            continue
        a = hoptrace.open(folder.trace(Run(i, base)))
        later = _next(folder, base, i, rounds, usable)
        # They tell how far equal steps differ between runs; the one that is predicted is none of them.
        runs = {j: hoptrace.open(folder.trace(Run(j, base))) for j in rounds if not usable[j, base]}
        say(f"{cell}: round {i}, {base}")
        rows.append({"round": i, "policy": base} | _try(partial(_own, a, later, [t for j, t in runs.items() if j != i + 1])))
        for p in others:
            if why := usable[i, p]:
                rows.append({"round": i, "policy": p, "why": why})
                continue
            say(f"{cell}: round {i}, {p}")
            b = hoptrace.open(folder.trace(Run(i, p)))
            rows.append({"round": i, "policy": p} | _try(partial(_changed, a, b, later, list(runs.values()))))
    return rows


def _usable(folder: Folder, run: Run, void_too: bool) -> str | None:
    told = folder.told(run)
    if told is None:
        return "not run"
    if told["failed"]:
        return f"{told['failed']} requests failed"
    return None if told["accepted"] or void_too else f"void: {told['why']}"


def _next(folder: Folder, base: str, i: int, rounds: list[int], usable: dict[tuple[int, str], str | None]) -> Trace | None:
    """The base policy's next run, its neighbour in time."""
    later = i + 1
    return hoptrace.open(folder.trace(Run(later, base))) if later in rounds and not usable[later, base] else None


def _try(what: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return what()
    except HoptraceError as e:
        return {"why": f"not replayed: {e}"}


def _own(a: Trace, later: Trace | None, repeats: Sequence[Trace]) -> dict[str, Any]:
    """The base policy: against the run that the replay was calibrated on, and against the next one."""
    study = measure(a, [later] if later else [], [later] if later else [], truths=())
    case = study.cases[0]
    found = _case(case) | {"figures": {}}
    after = study.cases[1] if later else None
    bounds, wider = _bounds(a, a, repeats) if later else (None, None)
    for m, s in FIGURES:
        f = case.figure(m, s)
        g = after.figure(m, s) if after else None
        found["figures"][f"{m} {s}"] = {
            "error_pct": f.raw.error_pct, "observed": f.raw.observed, "predicted": f.raw.predicted,
            "noise_pct": g.raw.observed / f.raw.observed * 100 - 100 if g and g.raw.observed and f.raw.observed else None,
            "next_error_pct": g.raw.error_pct if g else None, "next_at_speed_pct": g.at_speed_pct if g else None,
            "covered": _covered(bounds.get("own", m, s), g.raw.observed) if bounds and g else None,
            "covered_repeats": _covered(wider.get("own", m, s), g.raw.observed) if wider and g else None,
        }  # fmt: skip
    return found | {"speed_of_next": after.speed if after else None}


def _changed(a: Trace, b: Trace, later: Trace | None, repeats: Sequence[Trace]) -> dict[str, Any]:
    """Another policy: the ratio to the base policy's run beside it."""
    study = measure(a, [b], [later] if later else [], truths=())
    case = study.cases[1]
    bounds, wider = _bounds(a, b, repeats)
    found = _case(case) | {"figures": {}}
    for m, s in FIGURES:
        f = case.figure(m, s)
        found["figures"][f"{m} {s}"] = {
            "error_pct": f.error_pct, "raw_pct": f.raw.error_pct, "at_speed_pct": f.at_speed_pct, "observed": f.raw.observed,
            "predicted": f.raw.predicted, "observed_ratio": f.ratio.observed if f.ratio else None,
            "predicted_ratio": f.ratio.predicted if f.ratio else None, "sign": f.sign,
            "covered": _covered(bounds.get("what_if", m, s), f.raw.observed),
            "covered_repeats": _covered(wider.get("what_if", m, s), f.raw.observed) if wider else None,
            "ratio_covered": _covered(bounds.get("pair", m, s), f.ratio.observed if f.ratio else None),
            "ratio_covered_repeats": _covered(wider.get("pair", m, s), f.ratio.observed if f.ratio else None) if wider else None,
        }  # fmt: skip
    return found | {"uncertainty": list(bounds.notes)}


def _bounds(a: Trace, b: Trace, repeats: Sequence[Trace]) -> tuple[Intervals, Intervals | None]:
    """Intervals from ``a`` alone, and with the machine's speed between the ``repeats``; null of fewer than two."""
    prepared = against(a, b)
    plan = prepared.own.plan
    sd = speed_sd_of([steps_of(t).steps for t in repeats], plan.costs[plan.engines[0].cost])
    alone = intervals(prepared, draws=_DRAWS)
    return alone, None if sd is None else intervals(prepared, draws=_DRAWS, speed_sd=sd)


def _case(case: Any) -> dict[str, Any]:
    return {"own_terms": case.own_terms.as_dict(), "speed": case.speed, "domain": list(case.domain), "notes": list(case.notes)}


def _covered(interval: Any, observed: float | None) -> bool | None:
    return None if interval is None or observed is None else bool(observed in interval)
