"""How far replays stand from what was observed: each trace under its own policy, and pairs of traces under each other's.

    python benchmarks/own_policy.py                                # the captures in this repository
    python benchmarks/own_policy.py A.trace A2.trace               # others
    python benchmarks/own_policy.py A.trace:B.trace                # A's cost and work under B's policy, against B

Of each figure the error in percent of the observed: with seed 0 (the recorded scatter in its order), the median over the other
seeds, and in brackets the least and the greatest. Of a pair: A's work under B's policy against B, the machine as fast as in B
(``speed``: time that B's steps took ÷ what A's cost gives them, against the same of A), so that its drift from run to run is not
in it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

import polars as pl

import hoptrace
from hoptrace.comparison import speed
from hoptrace.metrics import request_metrics, stat
from hoptrace.reader import Trace
from hoptrace.reconstruct import steps_of
from hoptrace.replay.against import against
from hoptrace.replay.outcome import Kept
from hoptrace.replay.planning import Planned
from hoptrace.replay.rows.requests import times
from hoptrace.replay.simulation import simulation
from hoptrace.replay.workload import Workload
from hoptrace.stepcost import StepCost

ROOT = Path(__file__).parents[1]
TRACES = [
    ROOT / "sample_traces/llamacpp-four-slots.trace",
    ROOT / "sample_traces/llamacpp-one-slot.trace",
    ROOT / "tests/data/vllm_traces/steady.trace",
    ROOT / "tests/data/vllm_traces/preempted.trace",
]
FIGURES = [(m, s) for m in ("ttft", "tpot", "e2e") for s in ("mean", "p50", "p95")]


def observed(trace: Trace) -> pl.DataFrame:
    """request, ttft, tpot, e2e (ns) of the finished requests."""
    return request_metrics(trace).select(
        "request", *(pl.col(f"{m}_ns").cast(pl.Float64).alias(m) for m in ("ttft", "tpot", "e2e"))
    )


def predicted(work: Workload, planned: Planned, seed: int) -> pl.DataFrame:
    """The same of a replay."""
    outcome = simulation("auto")(work, replace(planned.plan, seed=seed), Kept())
    t = times(work, outcome, planned.overheads)
    return t.select(
        "request",
        (pl.col("first_token_ns") - pl.col("arrival_ns")).cast(pl.Float64).alias("ttft"),
        pl.when(pl.col("output_tokens") > 1)
        .then((pl.col("last_token_ns") - pl.col("first_token_ns")) / (pl.col("output_tokens") - 1))
        .alias("tpot"),
        (pl.col("finish_ns") - pl.col("arrival_ns")).cast(pl.Float64).alias("e2e"),
    )


def figures(frame: pl.DataFrame) -> list[float]:
    found = []
    for m, s in FIGURES:
        value = getattr(stat(frame[m].drop_nulls()), f"{s}_ns")
        found.append(float("nan") if value is None else float(value))
    return found


def twins(a: pl.DataFrame, b: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Only values that both sides know."""
    both = a.join(b, on="request", suffix="_b")
    out = []
    for end in ("", "_b"):
        out.append(
            both.select(
                pl.when(pl.col(m).is_not_null() & pl.col(f"{m}_b").is_not_null()).then(f"{m}{end}").alias(m)
                for m in ("ttft", "tpot", "e2e")
            )
        )
    return out[0], out[1]


def at_speed(planned: Planned, speed: float) -> Planned:
    """With every step so many times as long."""
    return replace(planned, plan=replace(planned.plan, costs=tuple(slower(c, speed) for c in planned.plan.costs)))


def slower(c: StepCost, speed: float) -> StepCost:
    ps = {k: round(v * speed) for k, v in c.coefficients_ps.items()}
    return replace(c, coefficients_ps=ps, pieces=tuple(p.scaled(speed) for p in c.pieces))


def line(name: str, errors: list[list[float]], more: str) -> str:
    columns = []
    for i in range(len(FIGURES)):
        values = [e[i] for e in errors]
        columns.append(f"{values[0]:+6.1f} {median(values[1:] or values):+6.1f} [{min(values):+3.0f} {max(values):+3.0f}]")
    return f"{name:26.26} {' '.join(columns)}  {more}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", help="A.trace, or A.trace:B.trace")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--no-steps", action="store_true", help="as if the engine had told no steps: reconstructed ones only")
    parser.add_argument("--cost", default=None)
    a = parser.parse_args()
    print(f"{'':26} " + " ".join(f"{m + ' ' + s:>23}" for m, s in FIGURES))
    for given in a.traces or [str(t) for t in TRACES]:
        one, _, other = given.partition(":")
        trace = hidden(hoptrace.open(one)) if a.no_steps else hoptrace.open(one)
        b = hoptrace.open(other) if other else None
        p = against(trace, trace if b is None else b, cost=a.cost)
        cost = p.own.plan.costs[0]
        # Stalls are in the steps and not in the cost: a replay draws those of A.
        speed_b = 1.0 if b is None else (speed(steps_of(b).steps, cost) or 1.0) / (speed(p.seen.steps, cost) or 1.0)
        seen = observed(trace)
        found = []
        for seed in range(a.seeds):
            mine = predicted(p.own_work, p.own, seed)
            if b is None:
                o, r = twins(seen, mine)
                found.append([100 * (y / x - 1) if x else float("nan") for x, y in zip(figures(o), figures(r), strict=True)])
            else:
                ob, rb = twins(observed(b), predicted(p.asked_work, at_speed(p.planned, speed_b), seed))
                found.append([100 * (y / x - 1) for x, y in zip(figures(ob), figures(rb), strict=True)])
        p50, p95 = (100 * float(cost.error.get(q, 0)) for q in ("p50", "p95"))
        more = f"steps {p.seen.origin}; cost error p50 {p50:.1f} p95 {p95:.1f} %"
        if b is not None:
            more = f"speed {speed_b:.3f}"
        name = Path(one).stem + (f" > {Path(other).stem}" if other else "")
        print(line(name, found, more), flush=True)


def hidden(trace: Trace) -> Trace:
    """What a proxy alone would have recorded of it."""
    from hoptrace.replay.memory_trace import FramesTrace
    from hoptrace.schema import TABLES

    frames = {n: trace.table(n).collect() for n in TABLES if n not in ("steps", "residency") and trace.has(n)}
    inside = {
        "requests": ("queued_ns", "scheduled_ns", "engine_first_token_ns"),
        "stages": ("enqueued_ns", "scheduled_ns", "end_ns", "cached_tokens"),
    }
    for name, columns in inside.items():
        some = [c for c in columns if c in frames[name].columns]
        frames[name] = frames[name].with_columns(pl.lit(None, dtype=frames[name].schema[c]).alias(c) for c in some)
    return FramesTrace(frames, trace.manifest, trace.name)


if __name__ == "__main__":
    sys.exit(main())
