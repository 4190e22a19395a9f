"""The workload that other simulators were measured on, as rows of `requests`, and its server.

Lengths drawn (seed 0) from the Azure 2023 conversation trace, prompts capped at 3,500 and totals at 4,096 tokens, Poisson
arrivals at 5 a second.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

import hoptrace
from hoptrace.manifest import Server
from hoptrace.samples import sample

__all__ = ["RATE_PER_S", "SERVER", "drawn", "requests"]

_Ints = np.ndarray[Any, np.dtype[np.int64]]

RATE_PER_S = 5.0
SERVER = Server(
    name="engine", max_sequences=128, max_batched_tokens=2048, kv_capacity_tokens=7000 * 64, block_size_tokens=64,
    context_tokens=4096, prefix_caching=False,
)  # fmt: skip


def drawn(rng: np.random.Generator, n: int, rate_per_s: float) -> tuple[_Ints, _Ints, _Ints]:
    """(arrival_ns, prompt_tokens, output_tokens) of ``n`` requests, int64."""
    lengths = hoptrace.open(sample("azure-2023-conv")).table("requests").select("prompt_tokens", "output_tokens").collect()
    some = lengths[rng.integers(0, lengths.height, n)]
    prompt = np.minimum(some["prompt_tokens"].to_numpy(), 3500).astype(np.int64)
    output = np.minimum(some["output_tokens"].to_numpy(), 4096 - prompt).astype(np.int64)
    return np.rint(np.cumsum(rng.exponential(1e9 / rate_per_s, n))).astype(np.int64), prompt, output


def requests(n: int) -> pl.DataFrame:
    """``n`` rows of the table `requests`."""
    arrival, prompt, output = drawn(np.random.default_rng(0), n, RATE_PER_S)
    return pl.DataFrame(
        {"request": np.arange(n), "arrival_ns": arrival, "received_ns": arrival, "prompt_tokens": prompt, "output_tokens": output}
    ).with_columns(pl.lit("received").alias("arrival_of"), pl.lit("benchmark").alias("source"))
