"""A trace of one server whose steps are given by hand: requests that share every step, one after another in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from support.memory import MemoryTrace

from hoptrace.manifest import Manifest, Server

__all__ = ["LLAMA70", "MS", "engine_trace"]

MS = 1_000_000

# Llama-2-70B in 16 bits on eight ranks: 69e9 parameters, 138 GB; 80 layers, 64 heads, 8 KV heads of 128.
LLAMA70 = Server(
    name="s", model="llama2-70b", parameters=69_000_000_000, weight_bytes=138_000_000_000, layers=80, heads=64, kv_heads=8,
    head_size=128, kv_dtype="f16", max_sequences=64, config={"tensor_parallel_size": 8},
)  # fmt: skip


def engine_trace(
    steps: Sequence[Mapping[str, Any]],
    *,
    server: Server = LLAMA70,
    gap_ns: int = 0,
    requests: int = 1,
    residency: bool = True,
    wait_ns: int = 0,
    platform: dict[str, Any] | None = None,
) -> MemoryTrace:
    """``steps``: columns of `steps` and ``took_ns``; the first is the prompt, the others decode. All ``requests`` are in all
    steps and arrive ``wait_ns`` before the first, in the queue with room."""
    rows, at = [], 1_000 * MS
    for i, step in enumerate(steps):
        took = step["took_ns"]
        rows.append(
            {"server": "s", "dp_rank": 0, "pp_rank": 0, "step": i, "start_ns": at, "end_ns": at + took, "origin": "observed"}
            | {k: v for k, v in step.items() if k != "took_ns"}
        )
        at += took + gap_ns
    first, end = rows[0]["start_ns"], rows[-1]["end_ns"]
    last = len(rows) - 1
    runs, stages, asked = [], [], []
    for r in range(requests):
        common = {"request": r, "sequence": 0, "server": "s", "dp_rank": 0}
        runs.append(common | {"first_step": 0, "last_step": 0, "phase": "chunk", "tokens_per_step": 512, "context_at_start": 0})
        if last:
            runs.append(
                common | {"first_step": 1, "last_step": last, "phase": "decode", "tokens_per_step": 1, "context_at_start": 512}
            )
        stages.append(
            common
            | {"attempt": 0, "stage": 0, "role": "both", "enqueued_ns": first - wait_ns, "scheduled_ns": first, "end_ns": end,
               "end_reason": "done"}
        )  # fmt: skip
        asked.append(
            {"request": r, "arrival_ns": first - wait_ns, "arrival_of": "received", "received_ns": first - wait_ns,
             "queued_ns": first - wait_ns, "scheduled_ns": first, "first_token_ns": rows[0]["end_ns"], "last_token_ns": end,
             "finish_ns": end, "prompt_tokens": 512, "output_tokens": len(rows)}
        )  # fmt: skip
    tables: dict[str, Any] = {"requests": asked, "stages": stages, "steps": rows}
    if residency:
        tables["residency"] = runs
    return MemoryTrace(tables, Manifest(origin="recorded", servers=[server], closed=True, platform=platform or {}))
