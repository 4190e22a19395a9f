"""The table of a recipe's cells: each error with its spread over the rounds, its noise floor, its target and the verdict."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from harness.evaluate import FIGURES, evaluate
from harness.recipe import Recipe
from harness.table_text import SHOWN, markdown

import hoptrace

__all__ = ["FORMAT", "TARGETS", "beyond_noise", "overall", "summary", "tabulate", "verdict"]

FORMAT = "fidelity-cells/1"

TARGETS: dict[str, dict[str, float]] = {
    "own": dict(zip(SHOWN, (2, 4, 2, 4, 4, 8, 2), strict=True)),
    "changed": dict(zip(SHOWN, (3, 6, 3, 6, 5, 10, 2), strict=True)),
}
"""In %, of tier 2; tier 1 has 1 % for each; with steps from the proxy alone 1.5 times as much."""

_COVERED = ("covered", "covered_repeats", "ratio_covered", "ratio_covered_repeats")
_PROXY = 1.5
_BEYOND = 2.0  # a noise floor of so many targets leaves nothing to judge


def tabulate(recipe: Recipe, cells: Sequence[str], out: Path, say: Callable[[str], None], *, void_too: bool = False) -> str:
    """Hold all runs of the cells against replays; writes ``results.json`` and ``results.md``, and gives the latter's text."""
    path = out / "results.json"
    before: dict[str, Any] = json.loads(path.read_text())["cells"] if path.exists() else {}
    found = {name: before[name] for name in before if name in recipe.cells}
    for name in cells:
        rows = evaluate(recipe, name, out, say, void_too=void_too)
        if not rows:
            continue
        cell = recipe.cells[name]
        told = {"engine": recipe.engine(name), "tier": recipe.tier, "use": cell.use, "record": cell.record, "about": cell.about}
        found[name] = told | {
            "policies": {p: summary(p, cell.policies[0], rows, recipe.tier, cell.record) for p in cell.policies},
            "gauges": _gauges(out / name), "rounds": rows,
        }  # fmt: skip
    data = {"format": FORMAT, "hoptrace": hoptrace.__version__, "cells": found}
    data["overall"] = {use: o for use in ("develop", "report") if (o := overall(found, use))}
    text = markdown(data)
    path.write_text(json.dumps(data, indent=1) + "\n")
    (out / "results.md").write_text(text)
    return text


def summary(policy: str, base: str, rows: Iterable[dict[str, Any]], tier: int, record: str) -> dict[str, Any]:
    """One policy over all rounds: of each figure the median error with its range, the noise floor, the target and the verdict."""
    rows = list(rows)
    mine = [r for r in rows if r["policy"] == policy and "figures" in r]
    bases = [r for r in rows if r["policy"] == base and "figures" in r]
    # The own policy is judged by the base policy's next run: against the one that was calibrated on, with its steps' scatter in
    # its order, next to none of the step cost's error shows.
    own = policy == base
    kind, judged, at_speed = (
        ("own", "next_at_speed_pct", "next_at_speed_pct") if own else ("changed", "error_pct", "at_speed_pct")
    )
    figures: dict[str, dict[str, Any]] = {}
    for m, s in FIGURES:
        name = f"{m} {s}"
        noise = _known(r["figures"][name]["noise_pct"] for r in bases)
        target = _target(name, kind, tier, record)
        figures[name] = {
            "error_pct": _spread(r["figures"][name][judged] for r in mine),
            "in_sample_pct": _spread(r["figures"][name]["error_pct"] for r in mine) if own else None,
            "at_speed_pct": _spread(r["figures"][name][at_speed] for r in mine),
            "noise_pct": round(median(abs(x) for x in noise), 3) if noise else None, "target_pct": target,
        }  # fmt: skip
        figures[name]["verdict"] = verdict(figures[name])
        figures[name]["beyond_noise"] = beyond_noise(figures[name])
    terms = [r["own_terms"] for r in mine]
    equal = [t["steps"]["equal_share"] for t in terms]
    largest = {n: max((abs(x) for x in _known(r["figures"][n]["noise_pct"] for r in bases)), default=None) for n in SHOWN}
    signs = [_sign(r["figures"][n], largest[n]) for r in mine for n in SHOWN]
    return {
        "kind": kind, "rounds": len(mine), "void": {r["round"]: r["why"] for r in rows if r["policy"] == policy and "why" in r},
        "figures": figures, "steps_equal": _spread(None if x is None else 100 * x for x in equal),
        "steps_pct": _spread(t["steps"]["error_pct"] for t in terms),
        "cached_tokens": [[t["cached_tokens"]["observed"], t["cached_tokens"]["predicted"]] for t in terms],
        "cached_exact": _exact([t["cached_tokens"] for t in terms]),
        "preemptions": [[t["preemptions"]["observed"], t["preemptions"]["predicted"]] for t in terms],
        "signs": {k: signs.count(k) for k in ("right", "wrong", "within noise")} if kind == "changed" else None,
        "speed": _spread(r["speed"] if kind == "changed" else r["speed_of_next"] for r in mine),
        **{k: _hits(mine, k) for k in _COVERED},
        "without_interval": sum(_observed(r["figures"][n]) and r["figures"][n]["covered"] is None for r in mine for n in SHOWN),
    }  # fmt: skip


def verdict(figure: dict[str, Any]) -> str | None:
    """*met* or *missed*; *not measured* where the noise floor leaves nothing to judge or is unknown; null without a target."""
    error, noise, target = figure["error_pct"], figure["noise_pct"], figure["target_pct"]
    if target is None:
        return None
    if error is None or noise is None or noise > _BEYOND * target:
        return "not measured"
    return "met" if abs(error["median"]) <= target else "missed"


def _observed(figure: dict[str, Any]) -> bool:
    """Whether there was a run to lie within an interval: of the base policy that is its next one, whose noise is known then."""
    return figure.get("noise_pct") is not None if "noise_pct" in figure else figure.get("observed") is not None


def _sign(figure: dict[str, Any], largest: float | None) -> str | None:
    """Whether a change goes the way that was predicted, if it is larger than the noise of every round: than that of its own
    round alone every second figure is that did not change at all. Where no noise is known, as the round's study says."""
    observed, predicted = figure.get("observed_ratio"), figure.get("predicted_ratio")
    if largest is None or observed is None or predicted is None:
        return figure.get("sign")
    if 100 * abs(observed - 1) <= largest:
        return "within noise"
    return "right" if (observed - 1) * (predicted - 1) > 0 else "wrong"


def beyond_noise(figure: dict[str, Any]) -> bool:
    """Whether a figure is *not measured* by its noise floor, and its error is beyond the target even with all of the floor taken
    off: it does not count, and must not look as if it might have been met."""
    error, noise, target = figure["error_pct"], figure["noise_pct"], figure["target_pct"]
    if figure["verdict"] != "not measured" or error is None or noise is None:
        return False
    return bool(abs(error["median"]) > target + noise)


def overall(cells: dict[str, Any], use: str) -> dict[str, Any]:
    """By kind of prediction: the median over the measured cells of each figure's |error|; coverage; signs."""
    found: dict[str, Any] = {}
    for kind in ("own", "changed"):
        policies = [
            (f"{c} {p}", s)
            for c, cell in cells.items() if cell["use"] == use
            for p, s in cell["policies"].items() if s["kind"] == kind and s["rounds"]
        ]  # fmt: skip
        if not policies:
            continue
        found[kind] = {"cells": [n for n, _ in policies], "figures": {}}
        for name in SHOWN:
            judged = [s["figures"][name] for _, s in policies if s["figures"][name]["verdict"] in ("met", "missed")]
            found[kind]["figures"][name] = {
                "error_pct": round(median(abs(f["error_pct"]["median"]) for f in judged), 3) if judged else None,
                "cells": len(judged), "not_measured": len(policies) - len(judged),
                "beyond_noise": sum(s["figures"][name].get("beyond_noise", False) for _, s in policies),
                "met": sum(f["verdict"] == "met" for f in judged),
            }  # fmt: skip
        for key in _COVERED:
            hits = [s.get(key) or [0, 0] for _, s in policies]
            found[kind][key] = [sum(h[0] for h in hits), sum(h[1] for h in hits)]
        found[kind]["without_interval"] = sum(s.get("without_interval", 0) for _, s in policies)
        exact = [s["cached_exact"] for _, s in policies if s["cached_exact"] is not None]
        found[kind]["cached_exact"] = [sum(exact), len(exact)]
        if kind == "changed":
            found[kind]["signs"] = {k: sum(s["signs"][k] for _, s in policies) for k in ("right", "wrong", "within noise")}
    return found


def _hits(rows: list[dict[str, Any]], key: str) -> list[int]:
    """How many of the shown figures lie within their interval, and how many have one."""
    told = [f[key] for r in rows for n, f in r["figures"].items() if n in SHOWN and f.get(key) is not None]
    return [sum(told), len(told)]


def _target(name: str, kind: str, tier: int, record: str) -> float | None:
    target = TARGETS[kind].get(name)
    if target is None:
        return None
    return 1.0 if tier == 1 else target * (_PROXY if record == "proxy" else 1)


def _exact(counts: list[dict[str, Any]]) -> bool | None:
    """Whether every request found as many tokens in the cache as predicted, in all rounds; null where a round does not tell."""
    if not counts or any(c["observed"] is None or c["predicted"] is None for c in counts):
        return None
    return all(c["observed"] == c["predicted"] and c["equal_requests"] == c["requests"] for c in counts)


def _gauges(folder: Path) -> dict[str, Any]:
    told = [json.loads(p.read_text()) for p in sorted(folder.glob("*.run.json"))]
    shares = {k: _spread(t[k] for t in told) for k in ("foreign_share", "steal_share", "duration_s")}
    probes = _spread(t["probe_after_ns"] / t["probe_before_ns"] - 1 for t in told)
    aside = len(list((folder / "rejected").glob("*.run.json")))
    return shares | {"probe_apart": probes, "runs": len(told), "void": sum(not t["accepted"] for t in told), "rejected": aside}


def _known(values: Iterable[float | None]) -> list[float]:
    return [v for v in values if v is not None]


def _spread(values: Iterable[float | None]) -> dict[str, float] | None:
    known = _known(values)
    if not known:
        return None
    return {"median": round(median(known), 4), "low": round(min(known), 4), "high": round(max(known), 4)}
