"""One engine serves a workload: what can never fit is refused, the rest goes through the kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from hoptrace.errors import HoptraceError
from hoptrace.replay.policy import Resolved
from hoptrace.replay.workload import Workload
from hoptrace.stepcost import StepCost

__all__ = ["Served", "refusals", "serve"]

_Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Served:
    """What came out. ``work`` holds the served requests only, in order; ``token_step`` [Σ output] is the step of each token.

    ``steps`` has the columns of ``kernel.STEP`` and ``step``; ``runs`` those of ``kernel.RUN`` (``request`` is a position in
    ``work``); ``of_request`` those of ``kernel.REQUEST``. ``refused``: request, arrival_ns, error.
    """

    work: Workload
    ready_ns: _Ints
    steps: pl.DataFrame
    runs: pl.DataFrame
    of_request: pl.DataFrame
    token_step: _Ints
    token_ptr: _Ints
    refused: pl.DataFrame


def refusals(work: Workload, policy: Resolved) -> dict[int, str]:
    """Requests that this engine could never serve, by position, each with its reason."""
    # The last token is never computed on, so it takes no KV.
    peak = work.prompt_tokens + work.output_tokens - 1
    found: dict[int, str] = {}
    if policy.context_tokens is not None:
        limit = policy.context_tokens
        for i in np.flatnonzero(peak + 1 > limit):
            found[int(i)] = f"cannot ever fit: {peak[i] + 1} tokens, the context holds {limit}"
    if policy.capacity_tokens is not None:
        block = policy.block_size_tokens
        room = policy.capacity_tokens // block * block
        for i in np.flatnonzero(-(-peak // block) * block > room):
            found.setdefault(int(i), f"cannot ever fit: {peak[i]} tokens of KV, there is room for {room}")
    if not policy.chunked_prefill and policy.max_batched_tokens is not None:
        budget = policy.max_batched_tokens
        for i in np.flatnonzero(work.prompt_tokens > budget):
            found.setdefault(
                int(i), f"cannot ever fit: a prompt of {work.prompt_tokens[i]} tokens in a step of {budget}, without chunks"
            )
    return found


def serve(work: Workload, policy: Resolved, cost: StepCost, *, before_ns: int = 0, gap_ns: int = 0) -> Served:
    """Run the workload through one engine.

    Args:
        before_ns: time from a request's arrival until the engine may take it.
        gap_ns: time between the end of a step and the start of the next.
    """
    from hoptrace.replay import kernel

    def limit(value: int | None) -> int:
        return kernel.UNLIMITED if value is None else value

    out = refusals(work, policy)
    served = work
    if out:
        keep = np.ones(work.n, dtype=bool)
        keep[list(out)] = False
        served = work.take(keep)
    block = policy.block_size_tokens
    capacity = limit(policy.capacity_tokens)
    parameters = {
        "max_sequences": limit(policy.max_sequences),
        "max_batched_tokens": limit(policy.max_batched_tokens),
        "mode": kernel.PREFILL_FIRST if policy.mode == "prefill_first" else kernel.MIXED,
        "chunked_prefill": int(policy.chunked_prefill),
        "kv_capacity_tokens": capacity // block * block,
        "kv_block_tokens": block,
        "cache": {None: kernel.NO_CACHE, "pool": kernel.POOL, "slot": kernel.SLOT}[policy.cache],
        "cache_capacity_tokens": limit(policy.cache_capacity_tokens),
        "gap_ns": gap_ns,
        "cost_kind": cost.kind,
    }
    ready = served.arrival_ns + before_ns
    steps, runs, of_request, token_step = kernel.simulate(
        ready, served.prompt_tokens, served.output_tokens, served.block_ptr, served.block_id, served.block_end,
        served.block_tokens, np.array([parameters[p] for p in kernel.PARAMETERS], dtype=np.int64), cost.as_vector(),
    )  # fmt: skip
    if served.n and not len(steps):
        raise HoptraceError("The replay got stuck: a request can neither run nor be refused.", hint="Please report this policy.")
    step_frame = pl.DataFrame(dict(zip(kernel.STEP, steps.T, strict=True)), schema=dict.fromkeys(kernel.STEP, pl.Int64))
    return Served(
        work=served,
        ready_ns=ready,
        steps=step_frame.with_row_index("step").with_columns(pl.col("step").cast(pl.Int64)),
        runs=pl.DataFrame(dict(zip(kernel.RUN, runs.T, strict=True)), schema=dict.fromkeys(kernel.RUN, pl.Int64)),
        of_request=pl.DataFrame(
            dict(zip(kernel.REQUEST, of_request.T, strict=True)), schema=dict.fromkeys(kernel.REQUEST, pl.Int64)
        ),
        token_step=token_step,
        token_ptr=np.concatenate([[0], np.cumsum(served.output_tokens)]).astype(np.int64),
        refused=pl.DataFrame(
            [(int(work.request[i]), int(work.arrival_ns[i]), why) for i, why in sorted(out.items())],
            schema={"request": pl.Int64, "arrival_ns": pl.Int64, "error": pl.String},
            orient="row",
        ),
    )
