"""The workload that other simulators were measured on, as rows of `requests`, and its server.

Lengths drawn (seed 0) from the Azure 2023 conversation trace, prompts capped at 3,500 and totals at 4,096 tokens, Poisson
arrivals at 5 a second.
"""

from __future__ import annotations

import numpy as np
import polars as pl

import hoptrace
from hoptrace.manifest import Server
from hoptrace.samples import sample

__all__ = ["SERVER", "requests"]

_RATE_PER_S = 5.0
SERVER = Server(
    name="engine", max_sequences=128, max_batched_tokens=2048, kv_capacity_tokens=7000 * 64, block_size_tokens=64,
    context_tokens=4096, prefix_caching=False,
)  # fmt: skip


def requests(n: int) -> pl.DataFrame:
    """``n`` rows of the table `requests`."""
    rng = np.random.default_rng(0)
    lengths = hoptrace.open(sample("azure-2023-conv")).table("requests").select("prompt_tokens", "output_tokens").collect()
    drawn = lengths[rng.integers(0, lengths.height, n)]
    prompt = np.minimum(drawn["prompt_tokens"].to_numpy(), 3500)
    output = np.minimum(drawn["output_tokens"].to_numpy(), 4096 - prompt)
    arrival = np.rint(np.cumsum(rng.exponential(1e9 / _RATE_PER_S, n))).astype(np.int64)
    return pl.DataFrame(
        {"request": np.arange(n), "arrival_ns": arrival, "received_ns": arrival, "prompt_tokens": prompt, "output_tokens": output}
    ).with_columns(pl.lit("received").alias("arrival_of"), pl.lit("benchmark").alias("source"))
