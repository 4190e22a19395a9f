"""Which policy wins, and where it turns: what others measured and published, in the replay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.vllm_reference import Simulate, work_of

from hoptrace.replay import outcome, plain
from hoptrace.replay.outcome import REQUEST, Kept
from hoptrace.replay.plan import EngineSpec, Handover, LinkSpec, Plan, Routing, Speculation, TierSpec, Way
from hoptrace.stepcost import StepCost

SIMULATE: Simulate = plain.simulate
MS = 1_000_000
Floats = np.ndarray[Any, np.dtype[np.float64]]


def ask(rate: float, n: int, prompt: int, output: int, seed: int = 0, spread: float = 0.0) -> Any:
    """Poisson arrivals of ``rate`` requests a second; lengths log-normal around these where ``spread``."""
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(1e9 / rate, n)).astype(np.int64)
    size = np.exp(rng.normal(0, spread, (n, 2))) if spread else np.ones((n, 2))
    lengths = [(max(1, int(prompt * p)), max(2, int(output * o))) for p, o in size]
    return work_of([{"arrival_ns": int(a), "prompt": p, "output": o} for a, (p, o) in zip(at, lengths, strict=True)], 1)


class Run:
    """What a replay gives, in ms."""

    def __init__(self, work: Any, plan: Plan) -> None:
        sink = Kept()
        self.rows = SIMULATE(work, plan, sink).requests
        self.steps = sink.rows("step")
        self.runs = sink.rows("run")
        self.output = work.output_tokens

    def of(self, name: str) -> Floats:
        """A column of the requests."""
        column = self.rows[:, REQUEST.index(name)]
        return column / 1e6 if name.endswith("_ns") else column.astype(float)

    @property
    def ttft(self) -> Floats:
        """From arrival to the first token."""
        return self.of("first_token_ns") - self.of("arrival_ns")

    @property
    def itl(self) -> Floats:
        """Mean time between tokens of each request."""
        return (self.of("last_token_ns") - self.of("first_token_ns")) / (self.output - 1)

    def gaps(self, engine: int = 0) -> Floats:
        """Every time between two tokens of every request that decodes on an engine, from the runs and the steps."""
        steps = self.steps[self.steps[:, 0] == engine]
        end = steps[:, outcome.STEP.index("end_ns")]
        tokens: dict[int, list[int]] = {}
        for request, where, first, last, phase, _, _, emitted in self.runs.tolist():
            if where == engine and emitted:
                span = range(first, last + 1) if phase == outcome.DECODE else (last,)
                tokens.setdefault(request, []).extend(span)
        return np.concatenate([np.diff(end[sorted(t)]) for t in tokens.values()]) / 1e6


COST = StepCost({"step": 12_000_000_000, "prefill_tokens": 100_000_000, "decode_requests": 60_000_000}, "fixed")
"""12 ms a step, 0.1 ms a prompt token, 0.06 ms a decoder: about Qwen3-235B on four MI300X."""


def test_a_split_trades_ttft_for_quiet_decoding() -> None:
    # P7, MORI-IO (vLLM blog, 2026-04-07), 2048/512 at 4 requests/s, two servers against 1P1D: TTFT 310 → 1112, its p99
    # 721 → 2726, ITL 25.74 → 17.06, its p99 294.89 → 19.72 ms. All signs, and how far the p99 of ITL falls.
    work = ask(4, 400, 2048, 512)
    whole = Run(work, Plan((EngineSpec("a", max_batched_tokens=8192), EngineSpec("b", max_batched_tokens=8192)), (COST,)))
    sides = (EngineSpec("p", role="prefill", max_batched_tokens=8192), EngineSpec("d", role="decode", max_batched_tokens=8192))
    split = Run(
        work,
        Plan(
            sides, (COST,), links=(LinkSpec("xgmi", 50_000_000_000),), ways=(Way(links=(0,)),), handover=Handover(((0,),)),
            kv_token_bytes=100_000,
        ),
    )  # fmt: skip
    assert split.ttft.mean() > 2 * whole.ttft.mean()
    assert np.percentile(split.ttft, 99) > 2 * np.percentile(whole.ttft, 99)
    assert split.itl.mean() < 0.8 * whole.itl.mean()
    assert np.percentile(split.gaps(1), 99) < np.percentile(whole.gaps(0), 99) / 5


def test_chunks_without_decoding_between_stall_longest() -> None:
    # P12 (tenstorrent plug-in, pull 119): four prompts of eight chunks; worst gap of a decoder 1853 ms with whole prompts, 11 152
    # with chunks and no decoding between, 899 with it. There a whole prompt takes more than one chunk's time and less than eight.
    asked = [{"arrival_ns": 0, "prompt": 8, "output": 100}]
    asked += [{"arrival_ns": 300 * MS, "prompt": 8 * 2048, "output": 2} for _ in range(4)]
    work = work_of(asked, 1)
    worst = {}
    for name, mode, chunked, budget in (
        ("whole", "mixed", False, 8 * 2048 + 8), ("alone", "prefill_first", True, 2048), ("between", "mixed", True, 2048),
    ):  # fmt: skip
        engine = EngineSpec("e", mode=mode, chunked_prefill=chunked, max_batched_tokens=budget)  # type: ignore[arg-type]
        worst[name] = Run(work, Plan((engine,), (COST,))).gaps().max()
    assert worst["alone"] > 3.5 * worst["whole"]
    assert worst["between"] < 0.5 * worst["whole"]


def test_stale_knowledge_of_kv_use_costs_the_tail() -> None:
    # P26 (inference-sim, pull 433): knowledge 100 ms old instead of 1 ms raises the p99 TTFT by 242 … 548 % when routing by KV
    # use, and by 0.0 % when routing by the requests in flight.
    work = ask(160, 3000, 512, 24, seed=3, spread=0.5)
    cost = StepCost({"step": 2_000_000_000, "prefill_tokens": 40_000_000, "decode_requests": 20_000_000}, "fixed")
    servers = tuple(EngineSpec(f"e{i}", max_batched_tokens=2048, capacity_tokens=200_000, block_size_tokens=16) for i in range(8))

    def tail(kind: Any, age_ns: int) -> float:
        run = Run(work, Plan(servers, (cost,), routing=Routing(kind, age_ns=age_ns)))
        return float(np.percentile(run.ttft, 99))

    assert tail("kv_use", 100 * MS) > 2 * tail("kv_use", MS)
    assert tail("least_load", 100 * MS) == tail("least_load", MS)


def test_a_little_less_memory_costs_much_of_the_tail() -> None:
    # P27 (inference-sim, pull 298): 2200 → 2100 → 2000 blocks, preempted 0 → 0.11 → 0.51 of the requests, p99 TTFT
    # 461 → 2175 → 3048 ms.
    work = ask(8, 400, 512, 256, seed=1, spread=0.3)
    plain_plan = Plan((EngineSpec("e", max_batched_tokens=2048, capacity_tokens=10**7, block_size_tokens=16),), (COST,))
    peak = int(Run(work, plain_plan).steps[:, outcome.STEP.index("kv_used_tokens")].max()) // 16
    found = []
    for share in (1.0, 0.9, 0.8):
        engine = replace(plain_plan.engines[0], capacity_tokens=int(peak * share) * 16)
        run = Run(work, replace(plain_plan, engines=(engine,)))
        found.append((run.of("preemptions").sum(), float(np.percentile(run.ttft, 99)), float(run.of("last_token_ns").max())))
    assert found[0][0] == 0 < found[1][0] < found[2][0]
    assert found[0][1] < found[1][1] < found[2][1]
    assert found[2][1] > 3 * found[0][1]
    assert found[2][2] >= found[0][2]


def test_speculation_helps_at_low_load_and_hurts_at_high() -> None:
    # P14 (vLLM blog, 2024-10-17): at 1 request/s 1.5 × faster with a draft model; at high rates 1.4 … 1.8 × slower. A step of one
    # decoder is bound by memory (20 ms); each token in it costs 0.25 ms, and a draft 1 ms.
    cost = StepCost({"step": 20_000_000_000, "prefill_tokens": 250_000_000, "decode_requests": 250_000_000}, "fixed")
    off = Plan((EngineSpec("e", max_sequences=256, max_batched_tokens=2048),), (cost,))
    on = replace(off, speculation=Speculation(4, 600_000, draft_ns=MS))
    low, high = ask(0.5, 60, 100, 200), ask(60, 1500, 100, 200)
    gain = Run(low, off).itl.mean() / Run(low, on).itl.mean()
    assert 1.3 < gain < 2.8
    assert Run(high, on).itl.mean() > 1.3 * Run(high, off).itl.mean()


def test_loading_from_the_host_beats_computing_again() -> None:
    # P18 (vLLM blog, 2026-01-08), Llama-3.1-8B on one H100 with a host tier: TTFT 2 … 22 × lower, more for longer prompts.
    # 131 072 bytes a token at 55 GB/s; prompts at 0.03 ms a token and, for attention, more as they grow.
    cost = StepCost({"step": 6_000_000_000, "prefill_tokens": 30_000_000, "prefill_attention": 2_000_000}, "fixed")
    gains = []
    for blocks in (4, 16, 64):
        asked = [
            {
                "arrival_ns": i * 20_000 * MS,
                "prompt": blocks * 512 + 1,
                "output": 1,
                "blocks": [which * 1000 + j for j in range(blocks)],
            }
            for i, which in enumerate((0, 1, 0))
        ]
        engine = EngineSpec("e", capacity_tokens=(blocks + 1) * 512, block_size_tokens=512, cache="pool")
        way = Way(links=(0,), base_ns=50_000)
        host = TierSpec("host", "host", None, False, read=(0,), write=(0,), demote=(-1,), policy="through")
        none = Plan((engine,), (cost,), links=(LinkSpec("pcie", 55_000_000_000),), ways=(way,), kv_token_bytes=131_072)
        work = work_of(asked, 512)
        gains.append(float(Run(work, none).ttft[2] / Run(work, replace(none, tiers=(host,))).ttft[2]))
    assert gains[0] < gains[1] < gains[2]
    assert gains[0] > 2
    assert 10 < gains[2] < 30


@pytest.mark.parametrize("kind", ["random", "round_robin", "power_of_two", "least_load"])
def test_every_router_serves_all(kind: Any) -> None:
    work = ask(50, 400, 100, 20)
    run = Run(work, Plan(tuple(EngineSpec(f"e{i}", max_sequences=16) for i in range(4)), (COST,), routing=Routing(kind)))
    assert run.of("generated_tokens").sum() == work.output_tokens.sum()
    share = np.bincount(run.of("engine").astype(int), minlength=4)
    # Even, within five standard deviations of chance.
    assert np.abs(share - 100).max() <= (5 * (400 * 0.25 * 0.75) ** 0.5 if kind == "random" else 40)
