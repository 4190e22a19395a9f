"""A server whose truth is known: its steps cost what is stated, scatter, and drift as a shared machine does. Its runs are
recorded traces to everything that reads them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
from support.memory import MemoryTrace

from hoptrace.manifest import Manifest, Server
from hoptrace.replay.memory_trace import FramesTrace
from hoptrace.replay.policy import Policy, load_policy, with_settings
from hoptrace.replay.run import predict
from hoptrace.stepcost import RESIDUALS, StepCost

__all__ = ["TRUTH", "drift", "ran", "traffic"]

TRUTH = StepCost(
    {
        "step": 8_000_000_000,
        "prefill_tokens": 200_000_000,
        "decode_requests": 900_000_000,
        "decode_context_tokens": 1_500_000,
    },
    "fixed",
)
"""8 ms a step, 0.2 ms a prompt token, 0.9 ms a decoder, 1.5 µs a token of its context."""
_SERVER = Server(name="s", engine="vllm", max_sequences=8, max_batched_tokens=256)
_SCALES = (1 / 64, 1 / 8, 1.0, 8.0)
_POINTS = 1024


def traffic(n: int, rate: float, seed: int) -> MemoryTrace:
    """Requests alone: Poisson arrivals of ``rate`` a second, prompts and outputs log-normal around 60 and 16 tokens."""
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(1e9 / rate, n)).astype(np.int64)
    prompt = np.clip(np.exp(rng.normal(4.0, 0.6, n)), 4, 1500).astype(int)
    output = np.clip(np.exp(rng.normal(2.7, 0.6, n)), 2, 400).astype(int)
    rows = [
        {"request": i, "arrival_ns": int(at[i]), "arrival_of": "sent", "sent_ns": int(at[i]), "received_ns": int(at[i]),
         "prompt_tokens": int(prompt[i]), "output_tokens": int(output[i])}
        for i in range(n)
    ]  # fmt: skip
    return MemoryTrace({"requests": rows}, Manifest(origin="recorded", servers=[_SERVER], closed=True), name="asked")


def drift(runs: int, sd: float, rng: np.random.Generator) -> list[np.ndarray[Any, np.dtype[np.float64]]]:
    """ln of the machine's slowness over so many runs one after the other, at evenly spaced moments of each: a sum of AR(1) of
    correlation times from a 64th of a run to eight runs, ``sd`` together (near flicker noise)."""
    n = runs * _POINTS
    total = np.zeros(n)
    for scale in _SCALES:
        a = np.exp(-1 / (scale * _POINTS))
        x = np.empty(n)
        x[0] = rng.normal()
        kicks = rng.normal(0, np.sqrt(1 - a * a), n)
        for i in range(1, n):
            x[i] = a * x[i - 1] + kicks[i]
        total += x
    total *= sd / np.sqrt(len(_SCALES))
    return [total[i * _POINTS : (i + 1) * _POINTS] for i in range(runs)]


def ran(
    asked: MemoryTrace, settings: tuple[str, ...], slow: np.ndarray[Any, Any], scatter: float, rng: np.random.Generator
) -> FramesTrace:
    """A run of the known server under its own policy with ``settings`` (KEY=VALUE), as a recorded trace.

    ``slow``: ln of the slowness over the run; ``scatter``: standard deviation of each step's own. The run's steps are counted in
    a run without either, so that each kind of step meets the drift of its time.
    """
    policy = with_settings(load_policy("as-recorded"), settings)
    steps = _predicted(asked, policy, TRUTH).table("steps").collect()
    prefill, decode = steps["prefill_tokens"] > 0, steps["decode_requests"] > 0
    tables = {}
    for kind, rows in zip(RESIDUALS, (~prefill & decode, prefill & ~decode, prefill & decode), strict=True):
        at = np.flatnonzero(rows.to_numpy()) / steps.height
        at = np.concatenate([at, np.linspace(0.5, 1, 40, endpoint=False)])  # the drifting run may have some more of a kind
        logs = slow[(at * len(slow)).astype(int)] + rng.normal(0, scatter, len(at))
        tables[kind] = tuple(np.rint((np.exp(logs) - 1) * 1e6).astype(int).tolist())
    found = _predicted(asked, policy, replace(TRUTH, residuals=tables))
    # What a recorder saw of it: no policy, no step cost, nothing replayed.
    frames = {name: f.with_columns(pl.lit("test").alias("source")) for name, f in found.frames.items()}
    frames["steps"] = frames["steps"].with_columns(pl.lit("observed").alias("origin"))
    limits = {s.partition("=")[0].partition(".")[2]: int(s.partition("=")[2]) for s in settings}
    server = _SERVER.model_copy(update=limits)
    return FramesTrace(frames, Manifest(origin="recorded", servers=[server], closed=True), "known")


def _predicted(asked: MemoryTrace, policy: Policy, cost: StepCost) -> FramesTrace:
    found = predict(asked, policy, cost=cost, check=False, engine="plain").trace
    assert isinstance(found, FramesTrace)
    return found
