"""What a reader of a replay has to know: on what its figures rest, and where they leave what was recorded."""

from __future__ import annotations

import numpy as np
import polars as pl

from hoptrace.comparison import COMPOSITION, Comparison
from hoptrace.reader import Trace
from hoptrace.reconstruct import Steps
from hoptrace.stepcost import StepCost

__all__ = ["basis", "changed", "compared", "drift", "noise", "refused"]

_DRIFT = 0.15
_NOISE = 0.1


def compared(own: Comparison | None, against: Comparison | None, cost: StepCost) -> list[str]:
    """What limits the comparison with what was observed."""
    if own is None:
        return ["The trace holds no observed latencies, so the error of this replay is unknown."]
    found = [f"Error under the trace's own policy: {n}" for n in own.notes]
    if against is not None:
        found += [f"What-if against observed: {n}" for n in against.notes if n not in own.notes]
    if cost.origin != "fitted":
        found.append("The step cost is not the recorded machine's: the error under its own policy holds that difference too.")
    return found


def refused(reasons: list[str]) -> list[str]:
    """How many were refused, and the first reason."""
    if not reasons:
        return []
    if len(reasons) == 1:
        return [f"1 request is refused: {reasons[0]}."]
    return [f"{len(reasons):,} requests are refused; the first: {reasons[0]}."]


def changed(trace: Trace) -> list[str]:
    """Whether the server's own configuration changed while it was recorded: what stays as it was is then the first one."""
    events = trace.table("events").filter(pl.col("kind") == "configuration change").sort("time_ns")
    details = events.select(pl.col("detail").fill_null("not said what")).collect()["detail"].to_list()
    if not details:
        return []
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    return [
        f"The server's configuration changed during the recording ({details[0][:200]}){more}. "
        "The replay takes the one at its start throughout, and a fitted step cost mixes both: "
        "the error under the trace's own policy holds that too."
    ]


def basis(trace: Trace, seen: Steps) -> list[str]:
    """How much of the work a fit rests on, where that is not all: steps of unknown composition, requests that no step shows."""
    said = []
    steps = seen.steps.filter(pl.col("pp_rank").fill_null(0) == 0)
    known = steps.drop_nulls(COMPOSITION)
    if known.height < steps.height:
        took, all_took = (int((s["end_ns"] - s["start_ns"]).sum()) for s in (known, steps))
        share = f", {100 * took / all_took:.0f} % of their time" if all_took > 0 else ""
        said.append(
            f"The step cost rests on {known.height} of {steps.height} recorded steps{share}: "
            "what the others held, or how long they took, is unknown."
        )
    finished = trace.table("requests").filter(pl.col("finish_ns").is_not_null() & pl.col("error").is_null())
    done = finished.select("request", pl.col("output_tokens").fill_null(0)).collect()
    shown = done.join(seen.residency.select("request").unique(), on="request", how="semi")
    if shown.height < done.height and seen.residency.height:
        tokens, all_tokens = int(shown["output_tokens"].sum()), int(done["output_tokens"].sum())
        share = f" ({100 * tokens / all_tokens:.0f} % of the output tokens)" if all_tokens else ""
        said.append(
            f"The recorded steps show {shown.height} of {done.height} finished requests{share}; "
            "what the others did in them is unknown, so the step cost may be theirs too."
        )
    return said


def noise(cost: StepCost) -> list[str]:
    """What the mean cost of a step leaves out: equal steps that took unequal time. Where residuals are drawn, nothing."""
    if cost.residuals:
        return []
    p95 = cost.error.get("p95") if cost.error else None
    if not isinstance(p95, float) or p95 <= _NOISE:
        return []
    return [
        f"Each step takes its mean time; recorded ones were up to {100 * p95:.0f} % off it (p95). That scatter is not predicted, "
        "so p95 and p99 of ITL and TPOT come out too short."
    ]


def drift(steps: pl.DataFrame, cost: StepCost) -> list[str]:
    """Whether equal steps took longer in one quarter of the recording than in another: others used the machine then.

    With the steps' scatter a replay by seed 0 has the slow phases about where the recording had them, and the error under the own
    policy tells nothing of them; without it all runs at the mean speed, and that error holds them, most of all in what queued.
    """
    frame = steps.drop_nulls(COMPOSITION).filter(pl.col("end_ns") > pl.col("start_ns")).sort("start_ns")
    if frame.height < 40:
        return []
    took = (frame["end_ns"] - frame["start_ns"]).to_numpy()
    predicted = cost.cost_ns_array(frame)
    quarters = [int(took[q].sum()) / max(1, int(predicted[q].sum())) for q in np.array_split(np.arange(len(took)), 4)]
    spread = max(quarters) / min(quarters) - 1
    if spread <= _DRIFT:
        return []
    where = "A replay runs at the mean speed."
    if cost.residuals:
        where = "A replay has such phases where the recording had them (--seed 0); another run has them elsewhere."
    return [
        f"The recorded machine was not steady: equal steps took {100 * spread:.0f} % longer in its slowest quarter than in its "
        f"fastest. {where}"
    ]
