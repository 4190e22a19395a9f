"""A small continuous-batching engine in plain Python, and the trace that the proxy would write of it: inputs whose truth is
known.

It follows llama.cpp's loop: requests are picked up between iterations into free slots; an iteration takes one token of every
slot that generates, then prompt tokens slot by slot up to the batch; its tokens are sent when it is done.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

import hoptrace
from hoptrace.manifest import Manifest, Server
from hoptrace.reader import Trace
from hoptrace.stepcost import StepCost, fixed
from hoptrace.writer import TraceWriter

__all__ = ["COST", "Synthetic", "synthetic_trace"]

START_NS = 1_700_000_000_000_000_000
# About what SmolLM2-135M costs in llama.cpp on one core, in ns.
COST = fixed(step_ns=4e6, prefill_token_ns=6e6, decode_request_ns=10e6, decode_context_token_ns=5e3, any_prefill_ns=20e6)


@dataclass
class _Request:
    number: int
    arrival: int
    prompt: int
    output: int
    cached: int
    done: int = 0  # prompt tokens in the KV cache
    picked_up: int | None = None
    emitted: list[tuple[int, int]] = field(default_factory=list)  # (true time, step)


@dataclass(frozen=True)
class Synthetic:
    """``trace`` as the proxy would write it; ``steps`` and ``residency`` as they truly were (columns of the schema that are
    known)."""

    trace: Trace
    steps: pl.DataFrame
    residency: pl.DataFrame


def synthetic_trace(
    path: Path,
    *,
    requests: int = 40,
    slots: int = 4,
    seed: int = 0,
    cost: StepCost = COST,
    rate_per_s: float = 1.0,
    prompt: tuple[int, int] = (5, 200),
    output: tuple[int, int] = (1, 60),
    cached: int = 0,
    batch: int = 2048,
    jitter_ns: float = 0,
    noise: float = 0,
    timings: bool = True,
    chunk: int = 1,
    store_steps: bool = False,
) -> Synthetic:
    """Run the engine and write ``path``.

    Args:
        rate_per_s: Poisson arrivals. prompt, output: uniform lengths, both ends included. cached: prompt tokens that each
        request finds cached. jitter_ns: mean of an exponential delay of each token on its way (a request's tokens stay in order).
        noise: relative standard deviation of each step's time (log-normal).
        timings: whether the server tells when it began (``stages.scheduled_ns``).
        chunk: tokens held back and sent together, as one emission of that count.
        store_steps: write the true steps and residency into the trace, as observed.
    """
    rng = random.Random(seed)
    at, queue = START_NS, []
    for i in range(requests):
        at += int(rng.expovariate(rate_per_s) * 1e9)
        queue.append(_Request(i, at, rng.randint(*prompt), rng.randint(*output), 0))
    for r in queue:
        r.cached = r.done = min(cached, r.prompt - 1)
    steps, runs = _engine(queue, slots, cost, batch, noise, rng)
    server = Server.model_validate(
        {
            "name": "engine", "engine": "synthetic", "max_sequences": slots, "max_batched_tokens": batch, "layers": 30,
            "heads": 9, "kv_heads": 3, "head_size": 64, "kv_dtype": "f16", "parameters": 134_515_008, "weight_bytes": 96_576_768,
        }
    )  # fmt: skip
    with TraceWriter(path, Manifest(origin="recorded", servers=[server]), background=False) as writer:
        last = START_NS
        for r in queue:
            last = max(last, _write(writer, r, rng, jitter_ns, timings, chunk))
        for table in ("requests", "stages", "tokens"):
            writer.append(
                "coverage", [{"table": table, "from_ns": START_NS, "to_ns": last, "fraction": 1.0, "source": "synthetic"}]
            )
        if store_steps:
            writer.append("steps", [{**row, "origin": "observed", "source": "synthetic"} for row in steps])
            writer.append("residency", [{**row, "source": "synthetic"} for row in runs])
    return Synthetic(hoptrace.open(path), pl.DataFrame(steps), pl.DataFrame(runs))


def _engine(
    queue: list[_Request], slots: int, cost: StepCost, batch: int, noise: float, rng: random.Random
) -> tuple[list[dict], list[dict]]:
    now, arrived = START_NS, 0
    waiting: list[_Request] = []
    place: list[_Request | None] = [None] * slots
    steps: list[dict] = []
    runs: list[dict] = []
    open_run: dict[int, dict] = {}
    while arrived < len(queue) or waiting or any(place):
        if not waiting and not any(place):
            now = max(now, queue[arrived].arrival)
        while arrived < len(queue) and queue[arrived].arrival <= now:
            waiting.append(queue[arrived])
            arrived += 1
        for i in range(slots):
            if place[i] is None and waiting:
                place[i] = waiting.pop(0)
                place[i].picked_up = now
        number, active = len(steps), [r for r in place if r is not None]
        decoding = [r for r in active if r.emitted]
        left, chunks = batch - len(decoding), []
        for r in active:
            if not r.emitted and left > 0:
                n = min(r.prompt - r.done, left)
                chunks.append((r, n, r.done))
                left -= n
        row = {
            "server": "engine", "dp_rank": 0, "pp_rank": 0, "step": number, "start_ns": now, "prefill_requests": len(chunks),
            "prefill_tokens": sum(n for _, n, _ in chunks),
            "prefill_context_tokens": sum(c for _, _, c in chunks),
            "decode_requests": len(decoding), "decode_tokens": len(decoding),
            "decode_context_tokens": sum(r.prompt + len(r.emitted) - 1 for r in decoding), "running": len(active),
            "waiting": len(waiting),
        }  # fmt: skip
        duration = cost.cost_ns_array(pl.DataFrame([row]))[0]
        now += max(int(duration * rng.lognormvariate(0, noise)) if noise else int(duration), 1)
        steps.append({**row, "end_ns": now})
        for r in decoding:
            run = open_run.get(r.number)
            if run is None:
                run = open_run[r.number] = _run(r, number, "decode", 1, r.prompt + len(r.emitted) - 1)
                runs.append(run)
            run["last_step"] = number
            r.emitted.append((now, number))
        for r, n, context in chunks:
            run = open_run.get(r.number)
            if run is None or run["tokens_per_step"] != n:
                run = open_run[r.number] = _run(r, number, "chunk", n, context)
                runs.append(run)
            run["last_step"] = number
            r.done += n
            if r.done == r.prompt:
                r.emitted.append((now, number))
                del open_run[r.number]
        for i, r in enumerate(place):
            if r is not None and len(r.emitted) == r.output:
                place[i] = None
    return steps, sorted(runs, key=lambda x: (x["request"], x["first_step"]))


def _run(r: _Request, step: int, phase: str, tokens: int, context: int) -> dict:
    return {
        "request": r.number, "sequence": 0, "server": "engine", "dp_rank": 0, "first_step": step, "last_step": step,
        "phase": phase, "tokens_per_step": tokens, "context_at_start": context,
    }  # fmt: skip


def _write(writer: TraceWriter, r: _Request, rng: random.Random, jitter_ns: float, timings: bool, chunk: int) -> int:
    times, before = [], 0
    for t, _ in r.emitted:
        before = max(before + 1, t + (int(rng.expovariate(1 / jitter_ns)) if jitter_ns else 0))
        times.append(before)
    first = r.emitted[0][0]
    assert r.picked_up is not None
    rows, i = [], 0
    while i < len(times):
        # The first token comes alone; a held-back group comes with its last.
        n = 1 if i == 0 else min(chunk, len(times) - i)
        rows.append(
            {"request": r.number, "sequence": 0, "index": i, "time_ns": times[i + n - 1], "count": n, "coalesced": False,
             "vantage": "proxy", "source": "synthetic"}
        )  # fmt: skip
        i += n
    finish = times[-1] + 100_000
    writer.append(
        "requests",
        [{
            "request": r.number, "request_id": f"r{r.number}", "received_ns": r.arrival, "arrival_ns": r.arrival,
            "arrival_of": "received", "first_token_ns": times[0], "first_visible_ns": times[0], "last_token_ns": times[-1],
            "finish_ns": finish,
            "prompt_tokens": r.prompt, "output_tokens": r.output, "max_tokens": r.output, "finish_reason": "length",
            "source": "synthetic",
        }],
    )  # fmt: skip
    writer.append(
        "stages",
        [{
            "request": r.number, "sequence": 0, "attempt": 0, "stage": 0, "server": "engine", "role": "both",
            "enqueued_ns": r.arrival,
            # As the proxy does: the time it saw the first token less the server's own prompt_ms.
            "scheduled_ns": times[0] - (first - r.picked_up) if timings else None, "end_ns": finish, "end_reason": "done",
            "cached_tokens": r.cached, "source": "synthetic",
        }],
    )  # fmt: skip
    writer.append("tokens", rows)
    return finish
