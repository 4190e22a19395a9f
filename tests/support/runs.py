"""Recordings of which everything is stated: requests with their times, steps with who computed how many tokens in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
from support.workloads import MS, server, store

from hoptrace.manifest import Server
from hoptrace.reader import Trace

__all__ = ["MS", "Request", "Step", "record"]

Request = tuple[int, int, int, int, int]
"""number, arrival, first token, finish (ms), output tokens"""
Step = tuple[int, int, dict[int, int]]
"""start, end (ms), tokens by request; a request's first tokens are its prompt"""


def record(
    path: Path,
    requests: Sequence[Request],
    steps: Sequence[Step] = (),
    *,
    cached: dict[int, int] | None = None,
    preempted: int | None = 0,
    on: Server | None = None,
    factor: tuple[int, int] = (1, 1),
    origin: str = "recorded",
) -> Trace:
    """A trace. Tokens come evenly from the first to the finish. ``factor``: all times × first ÷ second."""

    def at(ms: int) -> int:
        return ms * MS * factor[0] // factor[1]

    rows: list[dict[str, Any]] = []
    tokens: list[dict[str, Any]] = []
    for number, arrival, first, finish, output in requests:
        rows.append({
            "request": number, "arrival_ns": at(arrival), "arrival_of": "received", "received_ns": at(arrival),
            "scheduled_ns": at(arrival + 10), "first_token_ns": at(first), "last_token_ns": at(finish),
            "finish_ns": at(finish), "prompt_tokens": 8, "output_tokens": output, "source": "t",
        })  # fmt: skip
        for i in range(output):
            when = at(first) + (at(finish) - at(first)) * i // max(1, output - 1)
            tokens.append(
                {"request": number, "sequence": 0, "index": i, "time_ns": when, "count": 1, "vantage": "proxy", "source": "t"}
            )
    stays = [
        {"request": r[0], "sequence": 0, "attempt": 0, "stage": 0, "server": "toy", "cached_tokens": (cached or {}).get(r[0]),
         "source": "t"}
        for r in requests
    ]  # fmt: skip
    own, runs, had = [], [], dict[int, int]()
    for i, (start, end, members) in enumerate(steps):
        new = [r for r in members if r not in had]
        old = [r for r in members if r in had]
        own.append({
            "server": "toy", "dp_rank": 0, "pp_rank": 0, "step": i, "start_ns": at(start), "end_ns": at(end),
            "prefill_requests": len(new), "prefill_tokens": sum(members[r] for r in new), "prefill_context_tokens": 0,
            "decode_requests": len(old), "decode_tokens": sum(members[r] for r in old),
            "decode_context_tokens": sum(had[r] for r in old), "preempted": preempted if i == 0 or preempted is None else 0,
            "origin": "observed", "source": "t",
        })  # fmt: skip
        for r, n in members.items():
            runs.append({
                "request": r, "sequence": 0, "server": "toy", "dp_rank": 0, "first_step": i, "last_step": i,
                "phase": "chunk" if r in new else "decode", "tokens_per_step": n, "context_at_start": had.get(r, 0),
                "source": "t",
            })  # fmt: skip
            had[r] = had.get(r, 0) + n
    tables = {"requests": rows, "tokens": tokens, "stages": stays, "steps": own, "residency": runs}
    return store(path, {n: pl.DataFrame(t, infer_schema_length=None) for n, t in tables.items()}, on or server(), origin=origin)
