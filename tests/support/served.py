"""One engine serves a workload: the compiled engine's rows as frames, as the kernel's tests read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from hoptrace.replay.compiled import simulate
from hoptrace.replay.outcome import DONE, REFUSED, REQUEST, RUN, STEP, Kept
from hoptrace.replay.plan import EngineSpec, Plan
from hoptrace.replay.refusals import refusals
from hoptrace.replay.workload import Workload
from hoptrace.stepcost import StepCost

__all__ = ["Served", "finishes_ms", "first_tokens_ms", "serve"]


@dataclass(frozen=True)
class Served:
    """``work``: the served requests only, in order; ``steps``, ``runs`` (``request`` is a position in ``work``), ``of_request``;
    ``token_step`` [Σ output]: the step of each token; ``refused``: request, arrival_ns, error."""

    work: Workload
    ready_ns: np.ndarray[Any, Any]
    steps: pl.DataFrame
    runs: pl.DataFrame
    of_request: pl.DataFrame
    token_step: np.ndarray[Any, Any]
    token_ptr: np.ndarray[Any, Any]
    refused: pl.DataFrame


def serve(
    work: Workload, engine: EngineSpec, cost: StepCost, *, before_ns: int = 0, gap_ns: int = 0, separate: bool = False
) -> Served:
    """Run the workload through one engine."""
    from dataclasses import replace

    plan = Plan(engines=(replace(engine, gap_ns=gap_ns),), costs=(cost,), before_ns=before_ns)
    kept = Kept()
    outcome = simulate(work, plan, kept, separate=separate)
    status = outcome.requests[:, REQUEST.index("status")]
    out = np.flatnonzero(status == REFUSED)
    keep = np.flatnonzero(status == DONE)
    assert len(out) + len(keep) == work.n
    why = refusals(work, plan, out)
    served = work.take(keep)
    place = np.full(work.n, -1, dtype=np.int64)
    place[keep] = np.arange(len(keep))
    runs = kept.rows("run")
    runs[:, 0] = place[runs[:, 0]]
    runs = runs[np.lexsort((runs[:, 2], runs[:, 0]))]
    tokens: list[int] = []
    for _, _, first, last, phase, _, _, emitted in runs.tolist():
        tokens += ([last] * emitted) if phase == 0 else [s for s in range(first, last + 1) for _ in range(emitted)]
    return Served(
        work=served,
        ready_ns=served.arrival_ns + before_ns,
        steps=pl.DataFrame(dict(zip(STEP, kept.rows("step").T, strict=True)), schema=dict.fromkeys(STEP, pl.Int64)),
        runs=pl.DataFrame(dict(zip(RUN, runs.T, strict=True)), schema=dict.fromkeys(RUN, pl.Int64)),
        of_request=pl.DataFrame(
            dict(zip(REQUEST, outcome.requests[keep].T, strict=True)), schema=dict.fromkeys(REQUEST, pl.Int64)
        ),
        token_step=np.array(tokens, dtype=np.int64),
        token_ptr=np.concatenate([[0], np.cumsum(served.output_tokens)]).astype(np.int64),
        refused=pl.DataFrame(
            [(int(work.request[i]), int(work.arrival_ns[i]), why[int(i)]) for i in out],
            schema={"request": pl.Int64, "arrival_ns": pl.Int64, "error": pl.String},
            orient="row",
        ),
    )


def first_tokens_ms(served: Served) -> list[float]:
    """When each served request's first token came, in ms."""
    return [e / 1e6 for e in served.of_request["first_token_ns"]]


def finishes_ms(served: Served) -> list[float]:
    """When each served request's last token came, in ms."""
    return [e / 1e6 for e in served.of_request["last_token_ns"]]
