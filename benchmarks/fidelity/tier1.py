"""The figures of tier 1: the real scheduler with modelled steps against its replay, from what run.py recorded.

``python benchmarks/fidelity/tier1.py OUT [-o FILE.json]``: OUT is the folder that
``run.py recipes/tier1.toml -o OUT --no-table`` has filled. A replay is calibrated on a run of the cell's first policy: of all
that did the same work, the one during which others took least of the servers' cores. A row is a run: the errors of TTFT, TPOT
and end-to-end time without any recorded truth put in, over several seeds, predicted from that base and from the run itself (the
own policy), beside how far two runs of the base lie apart; and, with arrival at the engine and step times as recorded, how many
steps hold exactly who they held.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from harness.recipe import Recipe, read

import hoptrace
from hoptrace.analysis.fidelity.own_terms import OwnTerms, own_terms
from hoptrace.comparison import Comparison, compare
from hoptrace.metrics import request_metrics
from hoptrace.reader import Trace
from hoptrace.replay.against import against
from hoptrace.replay.played import played
from hoptrace.replay.truths import replayed_with

METRICS = ("ttft", "tpot", "e2e")
STATISTICS = ("mean", "p50", "p95", "p99")
SEEDS = range(8)
FORCED = frozenset({"arrival", "step_time"})


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    p.add_argument("runs", type=Path)
    p.add_argument("-o", "--output", dest="out", type=Path)
    p.add_argument("--recipe", type=Path, default=Path(__file__).with_name("recipes") / "tier1.toml")
    a = p.parse_args(arguments)
    found = table(read(a.recipe), a.runs)
    text = json.dumps(found, indent=1) + "\n"
    if a.out is not None:
        a.out.write_text(text)
    sys.stdout.write(lines(found))
    return 0


def table(recipe: Recipe, runs: Path) -> dict[str, Any]:
    """All rows, and the noise floor: over every two runs of a cell's base that did the same work."""
    rows: list[dict[str, Any]] = []
    bases: dict[str, list[Trace]] = {}
    quiet = _quietest(recipe, runs)
    for name, cell in recipe.cells.items():
        for round_ in range(recipe.rounds_of(name)):
            traces = {p: runs / name / f"{round_:02d}-{p}.trace" for p in cell.policies}
            base = traces[cell.policies[0]]
            if not base.exists():
                continue
            bases.setdefault(f"{cell.workload} {cell.policies[0]}", []).append(hoptrace.open(base))
            a = hoptrace.open(quiet[cell.workload, cell.policies[0]])
            for policy, path in traces.items():
                if not path.exists():
                    continue
                sys.stderr.write(f"{name} {path.stem}\n")
                told = json.loads(path.with_suffix(".run.json").read_text())
                row = {"cell": name, "use": cell.use, "policy": policy, "round": round_}
                rows.append(row | {"gauges": _gauges(told)} | _row(a, hoptrace.open(path)))
    return {"format": "fidelity-tier1/1", "rows": rows, "noise_pct": _noise(bases)}


def _quietest(recipe: Recipe, runs: Path) -> dict[tuple[str, str], Path]:
    """By workload and base policy, the run that others disturbed least."""
    found: dict[tuple[str, str], tuple[float, Path]] = {}
    for name, cell in recipe.cells.items():
        for path in sorted((runs / name).glob(f"[0-9][0-9]-{cell.policies[0]}.trace")):
            share = json.loads(path.with_suffix(".run.json").read_text())["foreign_share"]
            key = (cell.workload, cell.policies[0])
            found[key] = min(found.get(key, (share, path)), (share, path))
    return {key: path for key, (_, path) in found.items()}


def _row(a: Trace, b: Trace) -> dict[str, Any]:
    changed, first, near = _errors(a, b)
    own = changed if a.path == b.path else _errors(b, b)[0]
    held = replayed_with(against(b, b), b, FORCED, tokens=False)
    forced, known = own_terms(b, held), compare(b, held)
    return {
        "requests": b.rows("requests"),
        "steps": b.rows("steps"),
        "observed_ms": {m: {s: _ms(changed[0].get(m, s).observed) for s in STATISTICS} for m in METRICS},
        "error_pct": _figures(changed),
        "own_error_pct": _figures(own),
        "requests_within_1_pct": near,
        "steps_predicted": first.steps.count.predicted,
        "cached_tokens": {"observed": first.cached_tokens.observed, "predicted": first.cached_tokens.predicted,
                          "equal_share": first.cached_equal_share},
        "preemptions": {"observed": first.preemptions.observed, "predicted": first.preemptions.predicted},
        "forced": {
            "truths": sorted(FORCED), "equal_steps_share": forced.steps.equal_share,
            "alike_steps_share": forced.steps.alike_share, "cached_equal_share": forced.cached_equal_share,
            "preemptions": {"observed": forced.preemptions.observed, "predicted": forced.preemptions.predicted},
            "error_pct": {m: {s: _rounded(known.get(m, s).error_pct) for s in STATISTICS} for m in METRICS},
        },
    }  # fmt: skip


def _errors(a: Trace, b: Trace) -> tuple[list[Comparison], OwnTerms, dict[str, float]]:
    """What ``a`` says of ``b``, by seed; with seed 0 also in the trace's own terms and request by request."""
    found: list[Comparison] = []
    once = against(a, b)
    for seed in SEEDS:
        plan = replace(once.planned.plan, seed=seed)
        made = played(replace(once, planned=replace(once.planned, plan=plan)), tokens=False)
        found.append(compare(b, made))
        if seed == SEEDS[0]:
            terms, near = own_terms(b, made), _near(b, made)
    return found, terms, near


def _figures(errors: list[Comparison]) -> dict[str, Any]:
    found: dict[str, Any] = {m: {s: _spread([e.get(m, s).error_pct for e in errors]) for s in STATISTICS} for m in METRICS}
    return found | {"throughput": {"output tokens": _spread([e.get("throughput", "output tokens").error_pct for e in errors])}}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _spread(values: list[float | None]) -> dict[str, float] | None:
    """Seed 0 (the recording's own scatter, in its order), and mean, least and most over the seeds."""
    known = [v for v in values if v is not None]
    if not known or values[0] is None:
        return None
    return {
        "seed_0": round(values[0], 3), "mean": round(statistics.mean(known), 3), "least": round(min(known), 3),
        "most": round(max(known), 3),
    }  # fmt: skip


def _near(observed: Trace, predicted: Trace) -> dict[str, float]:
    """Share of the requests whose latency is within 1 %."""
    both = []
    for trace in (observed, predicted):
        ids = trace.table("requests").select("request", "request_id").collect()
        both.append(request_metrics(trace).join(ids, on="request"))
    pairs = both[0].join(both[1], on="request_id", suffix="_b")
    found = {}
    for m in ("ttft", "e2e"):
        error = (pairs[f"{m}_ns_b"] - pairs[f"{m}_ns"]).abs() / pairs[f"{m}_ns"]
        found[m] = round(float((error <= 0.01).mean() or 0), 4)
    return found


def _noise(bases: dict[str, list[Trace]]) -> dict[str, Any]:
    """|B ÷ A − 1| in % of every two runs of one base: median and most, by metric and statistic."""
    found: dict[str, Any] = {}
    pairs = [compare(a, b) for same in bases.values() for a, b in combinations(same, 2)]
    for m in METRICS:
        for s in STATISTICS:
            values = [abs(e) for c in pairs if (e := c.get(m, s).error_pct) is not None]
            if values:
                found.setdefault(m, {})[s] = {"median": round(statistics.median(values), 3), "most": round(max(values), 3)}
    return found | {"pairs": len(pairs)}


def _gauges(told: dict[str, Any]) -> dict[str, Any]:
    return {k: told.get(k) for k in ("duration_s", "foreign_share", "steal_share", "accepted")}


def _ms(ns: float | None) -> float | None:
    return None if ns is None else round(ns / 1e6, 3)


def lines(found: dict[str, Any]) -> str:
    """The table for the screen: mean error in % over the seeds, with its range."""
    out = []
    for r in found["rows"]:
        out.append(f"{r['cell']} {r['policy']}: {r['requests']} requests, {r['steps']} steps ({r['steps_predicted']} predicted)")
        for what, key in (("from the base", "error_pct"), ("from itself", "own_error_pct")):
            for m in METRICS:
                cells = [(s, r[key][m][s]) for s in STATISTICS]
                said = [f"{s} {e['mean']:+.2f} ({e['least']:+.2f} … {e['most']:+.2f})" for s, e in cells if e]
                out.append(f"  {what}, {m}: " + ", ".join(said))
        f, gone, free = r["forced"], r["forced"]["preemptions"], r["preemptions"]
        cached = "" if f["cached_equal_share"] is None else f", cached tokens equal in {f['cached_equal_share']:.2%} of requests"
        out.append(
            f"  arrivals and step times as recorded: {f['equal_steps_share']:.2%} of steps equal{cached}, preemptions "
            f"{gone['observed']} observed, {gone['predicted']} predicted"
        )
        c, near = r["cached_tokens"], r["requests_within_1_pct"]
        out.append(
            f"  no truths: cached tokens {c['observed']} observed, {c['predicted']} predicted; preemptions {free['observed']} "
            f"and {free['predicted']}; TTFT within 1 % in {near['ttft']:.1%} of requests, E2E in {near['e2e']:.1%}"
        )
    out.append(f"noise floor, %: {json.dumps(found['noise_pct'])}")
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    sys.exit(main())
