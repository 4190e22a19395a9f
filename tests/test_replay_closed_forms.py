"""Both engines against what can be written down: queues, batches, transfers, speculation, LRU."""

from __future__ import annotations

import json
import math
import random
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.vllm_reference import ENGINES, Simulate, work_of

from hoptrace.replay import compiled, outcome
from hoptrace.replay.outcome import REQUEST, Kept
from hoptrace.replay.plan import EngineSpec, Handover, LinkSpec, Plan, Routing, Speculation, Way
from hoptrace.stepcost import fixed

MS = 1_000_000
COST = fixed(any_prefill_ns=10e6, any_decode_ns=4e6)
Ints = np.ndarray[Any, np.dtype[np.int64]]

engines = pytest.mark.parametrize("simulate", ENGINES.values(), ids=ENGINES.keys())


def ask(arrivals: Any, prompt: int = 1, output: int = 1) -> Any:
    """Requests of one length."""
    return work_of([{"arrival_ns": int(a), "prompt": prompt, "output": output} for a in arrivals], 1)


def poisson(n: int, gap_ns: float, seed: int = 0) -> Ints:
    """Arrivals, exponential gaps."""
    return np.cumsum(np.random.default_rng(seed).exponential(gap_ns, n)).astype(np.int64)


def columns(simulate: Simulate, work: Any, plan: Plan, *names: str) -> list[Ints]:
    """Columns of the requests."""
    rows = simulate(work, plan, Kept()).requests
    return [rows[:, REQUEST.index(n)] for n in names]


def moves(simulate: Simulate, work: Any, plan: Plan) -> list[dict[str, int]]:
    """The moves in the order of their request."""
    sink = Kept()
    simulate(work, plan, sink)
    found = [dict(zip(outcome.MOVE, row, strict=True)) for row in sink.rows("move").tolist()]
    return sorted(found, key=lambda m: m["request"])


def waits(simulate: Simulate, arrivals: Ints, plan: Plan) -> Ints:
    """Time in the queue, ns."""
    arrival, scheduled = columns(simulate, ask(arrivals), plan, "arrival_ns", "scheduled_ns")
    return scheduled - arrival


def servers(n: int, kind: Any = "round_robin") -> Plan:
    """``n`` servers, each of which serves one request at a time in 10 ms."""
    return Plan(tuple(EngineSpec(f"e{i}", max_sequences=1) for i in range(n)), (COST,), routing=Routing(kind))


@engines
@pytest.mark.parametrize("n", [1, 4])
def test_a_queue_is_lindleys_and_kiefer_wolfowitzs(simulate: Simulate, n: int) -> None:
    # Service is constant, so that "next free of n" (one queue, n servers) is the same as taking turns.
    arrivals = poisson(1500, 10 * MS / n / 0.9)
    free, expected = [0] * n, []
    for a in arrivals.tolist():
        at = free.index(min(free))
        start = max(a, free[at])
        free[at] = start + 10 * MS
        expected.append(start - a)
    assert waits(simulate, arrivals, servers(n)).tolist() == expected


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_mean_wait_of_m_d_1_is_pollaczek_khinchines(load: float) -> None:
    found = [waits(compiled.simulate, poisson(40_000, 10 * MS / load, seed), servers(1)).mean() for seed in range(8)]
    error = 3 * np.std(found, ddof=1) / len(found) ** 0.5
    assert abs(np.mean(found) - load * 10 * MS / (2 * (1 - load))) < error
    assert error < 0.1 * np.mean(found)


def test_mean_wait_of_m_d_4_is_crommelins() -> None:
    # Crommelin (1932), service time 1: W = Σ_k≥1 E[(N_k − kc)⁺] / (λ k), N_k Poisson of mean λ k: arrivals in k services.
    c, load = 4, 0.8
    total = 0.0
    for k in range(1, 400):
        mean = k * c * load
        j = np.arange(k * c + 1, k * c + 400)
        logs = -mean + j * math.log(mean) - np.array([math.lgamma(x + 1) for x in j.tolist()])
        total += float(((j - k * c) * np.exp(logs)).sum()) / k
    expected = total / (c * load) * 10 * MS
    found = [waits(compiled.simulate, poisson(40_000, 10 * MS / (c * load), seed), servers(c)).mean() for seed in range(8)]
    assert abs(np.mean(found) - expected) < 3 * np.std(found, ddof=1) / len(found) ** 0.5


@engines
def test_d_d_1(simulate: Simulate) -> None:
    assert waits(simulate, np.arange(50) * 10 * MS, servers(1)).max() == 0
    assert waits(simulate, np.arange(50) * 5 * MS, servers(1)).tolist() == [i * 5 * MS for i in range(50)]


@engines
def test_more_choice_waits_less(simulate: Simulate) -> None:
    arrivals = poisson(3000, 10 * MS / 8 / 0.9)
    mean = {k: waits(simulate, arrivals, servers(8, k)).mean() for k in ("random", "power_of_two", "least_load")}
    assert mean["least_load"] < mean["power_of_two"] < mean["random"] / 2


@engines
def test_a_static_batch_lasts_as_long_as_its_longest(simulate: Simulate) -> None:
    outputs = [3, 9, 5, 2, 7, 4, 6]
    work = work_of([{"arrival_ns": 0, "prompt": 8, "output": o} for o in outputs], 1)
    plan = Plan((EngineSpec("e", mode="static", max_sequences=3),), (COST,))
    (last,) = columns(simulate, work, plan, "last_token_ns")
    starts = [0, 10 + 8 * 4, 10 + 8 * 4 + 10 + 6 * 4]
    assert last.tolist() == [(starts[i // 3] + 10 + (o - 1) * 4) * MS for i, o in enumerate(outputs)]


@engines
def test_speculation_yields_what_leviathan_et_al_say(simulate: Simulate) -> None:
    k, alpha = 4, 0.7
    work = ask([0], prompt=1, output=20_000)
    plan = Plan((EngineSpec("e"),), (COST,), speculation=Speculation(k, round(alpha * 1e6)))
    sink = Kept()
    simulate(work, plan, sink)
    steps = len(sink.rows("step")) - 1
    # Leviathan, Kalman, Matias (ICML 2023), equation 1: (1 − α^(k+1)) / (1 − α) tokens a step; its variance gives the error.
    p = [(1 - alpha) * alpha**j if j < k else alpha**k for j in range(k + 1)]
    mean = sum((j + 1) * q for j, q in enumerate(p))
    assert mean == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))
    spread = sum((j + 1 - mean) ** 2 * q for j, q in enumerate(p)) ** 0.5
    assert abs(19_999 / steps - mean) < 4 * spread / steps**0.5


def pair(**more: Any) -> Plan:
    """A prefill and a decode engine, 1 GB/s between them, 0.5 ms and 0.1 ms a block first; 1000 bytes a token."""
    sides = (EngineSpec("p", role="prefill", block_size_tokens=16), EngineSpec("d", role="decode", block_size_tokens=16))
    way = Way(links=(0,), base_ns=MS // 2, per_block_ns=MS // 10)
    links = (LinkSpec("link", 1_000_000_000),)
    return Plan(sides, (COST,), links=links, ways=(way,), handover=Handover(((0,),), **more), kv_token_bytes=1000)


@engines
@pytest.mark.parametrize("first", ["handover", "recompute"])
@pytest.mark.parametrize("start", ["pull", "push"])
def test_one_hand_over(simulate: Simulate, start: Any, first: Any) -> None:
    plan = pair(start=start, first_token=first, arrange_ns=3 * MS)
    work = ask([0], prompt=100, output=5)
    (move,) = moves(simulate, work, plan)
    # 100 tokens are 7 blocks; their bytes take 0.1 ms.
    arrived = 10 * MS + 3 * MS + MS // 2 + 7 * MS // 10 + MS // 10
    assert (move["start_ns"], move["end_ns"], move["bytes"], move["blocks"]) == (13 * MS, arrived, 100_000, 7)
    found, last = (int(c[0]) for c in columns(simulate, work, plan, "first_token_ns", "last_token_ns"))
    assert (found, last) == ((10 * MS, arrived + 16 * MS) if first == "handover" else (arrived + 4 * MS, arrived + 20 * MS))


@engines
@pytest.mark.parametrize("tokens", [2000, 4000])
def test_per_layer_only_the_last_layer_is_exposed(simulate: Simulate, tokens: int) -> None:
    # 2 or 4 MB: 2 or 4 ms over the link; 80 layers: 79 go while the prompt is computed (10 ms), the last one after.
    way = Way(links=(0,), base_ns=MS // 2)
    work = ask([0], prompt=tokens, output=5)
    (whole,) = moves(simulate, work, replace(pair(start="push"), ways=(way,)))
    parts = moves(simulate, work, replace(pair(start="push", layers=80), ways=(way,)))
    assert sum(m["bytes"] for m in parts) == whole["bytes"] == 1000 * tokens
    assert whole["end_ns"] - 10 * MS == MS // 2 + 1000 * tokens
    assert max(m["end_ns"] for m in parts) - 10 * MS == MS // 2 + 1000 * tokens // 80


@engines
@pytest.mark.parametrize("first", ["handover", "recompute"])
def test_per_layer_sends_each_byte_once(simulate: Simulate, first: Any) -> None:
    plan = pair(start="push", layers=80, first_token=first)
    small = (replace(plan.engines[0], max_batched_tokens=512), plan.engines[1])
    work = ask([0, 1, 2], prompt=2000, output=5)
    parts = moves(simulate, work, replace(plan, engines=small))
    for r in range(3):
        assert sum(m["bytes"] for m in parts if m["request"] == r) == 2_000_000
    (sent,) = columns(simulate, work, replace(plan, engines=small), "handover_tokens")
    assert sent.tolist() == [2000] * 3


@engines
@pytest.mark.parametrize("n", [2, 3, 7])
def test_n_transfers_share_a_link(simulate: Simulate, n: int) -> None:
    plan = pair()
    plan = replace(plan, ways=(Way(links=(0,)),))
    found = moves(simulate, ask([0] * n, prompt=1000, output=2), plan)
    assert [(m["start_ns"], m["end_ns"]) for m in found] == [(10 * MS, 10 * MS + n * MS)] * n


@engines
def test_lru_hits_are_those_of_a_list(simulate: Simulate) -> None:
    # The Mooncake slice, one request after another, full blocks of 512; a request's first block is the youngest when it has left.
    path = Path(__file__).parent / "data" / "reference" / "mooncake_slice.jsonl"
    lines = [json.loads(x) for x in path.read_text().splitlines()]
    asked = [
        {
            "arrival_ns": i * 100 * MS,
            "prompt": q["input_length"],
            "output": 1,
            "blocks": q["hash_ids"][: q["input_length"] // 512],
        }
        for i, q in enumerate(lines)
    ]
    work = work_of(asked, 512)
    for capacity in (400, 1000, 100_000):
        cache: OrderedDict[int, None] = OrderedDict()
        expected = []
        for q in asked:
            ids: list[int] = q["blocks"]  # type: ignore[assignment]
            hits = 0
            while hits < len(ids) and ids[hits] in cache and (hits + 1) * 512 < q["prompt"]:
                hits += 1
            expected.append(hits * 512)
            held = ids[:hits]
            for b in held:
                del cache[b]
            # What it computes needs room: the partial block too, which is free again when it leaves.
            need = -(-q["prompt"] // 512) - hits
            while len(cache) + len(held) + need > capacity:
                cache.popitem(last=False)
            for b in reversed(ids):
                cache.pop(b, None)
                cache[b] = None
        rules = {"max_sequences": 1, "capacity_tokens": capacity * 512, "block_size_tokens": 512, "cache": "pool"}
        (cached,) = columns(simulate, work, Plan((EngineSpec("e", **rules),), (COST,)), "cached_tokens")
        assert cached.tolist() == expected
        assert sum(expected) > 0


@engines
def test_the_order_of_service_keeps_the_mean_wait_of_equal_requests(simulate: Simulate) -> None:
    # Kleinrock's conservation: with equal service the order cannot change the mean.
    from hoptrace.replay.plan import Order

    arrivals = poisson(400, 10 * MS / 0.9)
    keys = np.array(random.Random(0).choices(range(5), k=400), dtype=np.int64)
    ordered = replace(servers(1), order=Order(key=keys, from_arrival=False, requeue=True))
    assert waits(simulate, arrivals, ordered).sum() == waits(simulate, arrivals, servers(1)).sum()
