"""The step cost less what the host took of each step, where the recorded steps tell it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from hoptrace.replay.costs.host import HOST, host_time
from hoptrace.stepcost import FEATURES, StepCost, features_array
from hoptrace.stepcost_fit import solve

__all__ = ["HostFree", "host_free", "host_share"]


@dataclass(frozen=True)
class HostFree:
    """``cost``: null where no step tells its host time. ``share``: of the time of the steps that tell; ``told``: how many do,
    ``steps`` of how many. ``why``: null, or why there is no cost."""

    cost: StepCost | None
    share: float | None = None
    told: int = 0
    steps: int = 0
    why: str | None = None


def host_free(cost: StepCost, steps: pl.DataFrame, *, asynchronous: bool) -> HostFree:
    """``cost`` less the host's part, fitted with its own features: no coefficient grows, so no step becomes dearer.

    Host time of a step is its length less ``device_ns`` or, where that is unknown, schedule + launch + update; the latter may run
    beside the device under asynchronous scheduling, and is nothing to take away then.

    Args:
        cost: a linear step cost. steps: the recorded ones.
    """
    frame = host_time(steps, asynchronous=asynchronous)
    some = frame.filter(pl.col("_host").is_not_null())
    if not some.height:
        hidden = asynchronous and bool(frame.select(pl.any_horizontal(pl.col(c).is_not_null().any() for c in HOST)).item())
        why = (
            "host time may run beside the device under asynchronous scheduling, and device_ns is not recorded"
            if hidden
            else "the steps do not tell their host time (schedule_ns, launch_ns, update_ns, or device_ns)"
        )
        return HostFree(None, steps=frame.height, why=why)
    if cost.kind or (cost.pieces and cost.origin != "fitted"):
        what = "a roofline, which holds no host time" if cost.kind else "looked up, and its host time is not told apart"
        return HostFree(None, steps=frame.height, why=f"the step cost is {what}")
    share = float(some["_host"].sum()) / float(some["_took"].sum())
    if cost.pieces:
        # Which part of a curve is the host's is not told apart: all is lessened alike.
        ps = {k: round(v * (1 - share)) for k, v in cost.coefficients_ps.items()}
        less = replace(cost, coefficients_ps=ps, pieces=tuple(p.scaled(1 - share) for p in cost.pieces))
        return HostFree(less, share, some.height, frame.height)
    columns = [i for i, f in enumerate(FEATURES) if cost.coefficients_ps.get(f)]
    x = features_array(some).astype(np.float64)
    x[:, FEATURES.index("prefill_attention")] /= 1000
    x = x[:, columns]
    base = np.array([cost.coefficients_ps[FEATURES[i]] for i in columns], dtype=np.float64) / 1000
    # Relative to the step's predicted length, as the cost itself was fitted, so that long steps do not rule.
    expected = np.maximum(x @ base, 0.02 * float(some["_took"].median() or 1))  # type: ignore[arg-type]
    host = solve(x, some["_host"].to_numpy(), 1 / expected)
    # Right in the sum, as the cost is; and never more than there is.
    predicted = float((x @ host).sum())
    if predicted > 0:
        host *= float(some["_host"].sum()) / predicted
    left = np.clip(base - host, 0, None)
    # What one coefficient could not give is taken from all that is left, so that the sum is right again.
    wanted, total = float((x @ base).sum()) * (1 - share), float((x @ left).sum())
    if total > wanted:
        left *= wanted / total
    ps = {FEATURES[i]: round(v * 1000) for i, v in zip(columns, left, strict=True)}
    return HostFree(replace(cost, coefficients_ps={**cost.coefficients_ps, **ps}), share, some.height, frame.height)


def host_share(cost: StepCost, free: StepCost | None) -> float:
    """Of a cost with a curve of decoders, the share that :func:`host_free` took away; 0 where it took nothing."""
    if free is None or not cost.pieces:
        return 0.0
    whole, left = (sum(ps for p in c.pieces for row in p.grid.rows for _, ps in row) for c in (cost, free))
    return 1 - left / whole if whole else 0.0
