"""Traces whose best flag is known: requests replayed at a stated step cost, and stored as if a server had been recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
from support.workloads import MS, server, store

from hoptrace.manifest import Server
from hoptrace.reader import Trace
from hoptrace.replay.run import replay
from hoptrace.stepcost import StepCost, fixed

__all__ = ["CHEAP_BATCH", "DEAR_PROMPTS", "recorded", "requests"]

CHEAP_BATCH = fixed(step_ns=10 * MS, prefill_token_ns=10_000, decode_request_ns=200_000)
"""A step of sixteen decoders takes hardly longer than one of two: as on a GPU."""
DEAR_PROMPTS = fixed(step_ns=4 * MS, prefill_token_ns=100_000, decode_request_ns=100_000)
"""A prompt token costs as much as a decoder: long prompts hold others up, and one found again spares much."""

_TABLES = ("requests", "stages", "steps", "residency", "tokens", "waits", "coverage")


def requests(
    n: int, every_ms: float, *, prompt: int = 40, output: int = 20, shared_blocks: int = 0, block: int = 16, **more: Any
) -> pl.DataFrame:
    """``n`` requests, one every ``every_ms`` but for a steady wobble; the first ``shared_blocks`` blocks of all prompts are
    alike."""
    rows = []
    for i in range(n):
        length = prompt + (7 * i) % 11
        blocks = [1000 + j if j < shared_blocks else 10_000 * (i + 1) + j for j in range(length // block)]
        arrival = round((i * every_ms + (i * i) % 5 * every_ms / 5) * MS)
        rows.append({
            "request": i, "arrival_ns": arrival, "arrival_of": "received", "received_ns": arrival, "prompt_tokens": length,
            "output_tokens": output + (3 * i) % 7, "prefix_blocks": blocks, "hash_space": "t",
            "block_size": block, "block_unit": "tokens", "source": "t", **{k: v(i) for k, v in more.items()},
        })  # fmt: skip
    return pl.DataFrame(rows)


def recorded(folder: Path, rows: pl.DataFrame, on: Server | None = None, cost: StepCost = CHEAP_BATCH, **changes: Any) -> Trace:
    """What a server would have been recorded doing: every table of the replay, in a trace that says 'recorded'."""
    own = on or server(url="http://127.0.0.1:8000", **changes)
    log = store(folder / "log.trace", {"requests": rows}, own)
    ran = replay(log, "as-recorded", cost=cost, out=folder / "ran.trace")
    tables = {
        name: ran.table(name).collect() for name in ("requests", "stages", "steps", "residency", "tokens", "waits", "coverage")
    }
    return store(folder / "run.trace", tables, own)
