"""Replays of which only the times of the requests are wanted: no table of them is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from hoptrace.reconstruct import Steps
from hoptrace.replay.outcome import DONE, REQUEST, STEP, Outcome
from hoptrace.replay.overheads import Overheads
from hoptrace.replay.planning import Planned, plan_of
from hoptrace.replay.policy.model import Policy
from hoptrace.replay.policy.own import Own, on_top
from hoptrace.replay.simulation import simulation
from hoptrace.replay.workload import Workload
from hoptrace.stepcost import StepCost
from hoptrace.stepcost_domain import Domain

__all__ = ["METRICS", "Base", "Run", "compared", "figures", "play"]

METRICS = ("e2e", "ttft", "tpot")
_C = {name: i for i, name in enumerate(REQUEST)}
_PRICED = (
    "start_ns", "end_ns", "prefill_requests", "prefill_tokens", "prefill_context_tokens", "decode_requests", "decode_tokens",
    "decode_context_tokens",
)  # fmt: skip


@dataclass(frozen=True)
class Base:
    """What all replays of one trace start from. ``least``: the roofline of a step, to hold the own policy's steps against."""

    work: Workload
    own: Own
    cost: StepCost
    overheads: Overheads
    seen: Steps
    least: StepCost | None = None
    seed: int = 0


class _Watch:
    """A sink that keeps of the steps only what the answers say of them."""

    def __init__(self, cost: StepCost, least: StepCost | None) -> None:
        self.domain = Domain(cost)
        self.most_running = 0
        self.steps = self.steps_ns = self.faster = self.faster_ns = 0
        self._least = least

    def take(self, kind: str, rows: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """See :class:`hoptrace.replay.outcome.Sink`."""
        if kind != "step" or not len(rows):
            return
        self.most_running = max(self.most_running, int(rows[:, STEP.index("running")].max()))
        frame = pl.DataFrame({c: rows[:, STEP.index(c)] for c in _PRICED})
        self.domain.add(frame)
        took = rows[:, STEP.index("end_ns")] - rows[:, STEP.index("start_ns")]
        self.steps += len(took)
        self.steps_ns += int(took.sum())
        if self._least is not None:
            # Rounding and a clock's grain apart.
            fast = took < self._least.cost_ns_array(frame) * 0.98
            self.faster += int(fast.sum())
            self.faster_ns += int(took[fast].sum())


@dataclass(frozen=True)
class Run:
    """A replay. ``of_request``: of each that was served request, e2e_ns, ttft_ns, tpot_ns, arrival_ns, finish_ns, output_tokens.

    ``outside``: where its steps leave what the step cost was measured on, in sentences. ``faster``: steps below ``Base.least``,
    with their number in all and both times.
    """

    planned: Planned
    of_request: pl.DataFrame
    outside: tuple[str, ...]
    most_running: int
    faster: tuple[int, int, int, int]


def play(base: Base, asked: Policy | None = None, *, cost: StepCost | None = None) -> Run:
    """Replay under the trace's own policy with ``asked`` on top, at another step cost if one is given.

    Raises:
        InputError: the trace does not allow what is asked.
    """
    own = base.own
    planned = plan_of(
        own.policy if asked is None else on_top(own.policy, asked), server=own.server, work=base.work, costs=cost or base.cost,
        overheads=base.overheads, platform=own.platform, steps=base.seen.steps, seed=base.seed,
    )  # fmt: skip
    watch = _Watch(planned.plan.costs[0], base.least if asked is None and cost is None else None)
    if planned.parts is not None:
        outcome = simulation("plain")(base.work, planned.plan, watch, parts=planned.parts)
    else:
        outcome = simulation("auto")(base.work, planned.plan, watch)
    return Run(
        planned, _times(base.work, outcome, planned.overheads), tuple(watch.domain.sentences()), watch.most_running,
        (watch.faster, watch.steps, watch.faster_ns, watch.steps_ns),
    )  # fmt: skip


def _times(work: Workload, outcome: Outcome, oh: Overheads) -> pl.DataFrame:
    rows = outcome.requests
    arrival, first, last = (rows[:, _C[c]] for c in ("arrival_ns", "first_token_ns", "last_token_ns"))
    finish = last + oh.step_to_token_ns + oh.last_token_to_finish_ns
    frame = pl.DataFrame(
        {
            "request": work.request,
            "arrival_ns": arrival,
            "finish_ns": finish,
            "output_tokens": work.output_tokens,
            "e2e_ns": finish - arrival,
            "ttft_ns": first + oh.step_to_token_ns - arrival,
            "between": last - first,
        }
    )
    tpot = pl.when(pl.col("output_tokens") > 1).then(pl.col("between") / (pl.col("output_tokens") - 1)).alias("tpot_ns")
    return frame.filter(pl.Series(rows[:, _C["status"]] == DONE)).with_columns(tpot).drop("between")


def figures(frame: pl.DataFrame) -> dict[str, float | None]:
    """Means in ns, and output tokens per second from the first arrival to the last finish."""
    means = {f"{m}_mean_ns": frame[f"{m}_ns"].cast(pl.Float64).mean() for m in METRICS}
    span = int(frame.select(pl.col("finish_ns").max() - pl.col("arrival_ns").min()).item() or 0)
    tokens = int(frame["output_tokens"].sum())
    found = {k: float(v) if isinstance(v, int | float) else None for k, v in means.items()}
    return {**found, "output_tokens_per_s": tokens / span * 1e9 if span > 0 else None}


def compared(own: Run, other: Run) -> tuple[Mapping[str, float | None], Mapping[str, float | None], int, int]:
    """Figures of both over the requests that both serve, how many these are, and how many only the other serves."""
    a = own.of_request.join(other.of_request, on="request", how="semi")
    b = other.of_request.join(own.of_request, on="request", how="semi")
    return figures(a), figures(b), a.height, other.of_request.height - a.height
