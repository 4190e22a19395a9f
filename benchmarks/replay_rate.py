"""How many requests and engine steps the replay does in a second of CPU, on one core.

The workload that other simulators were measured on: lengths drawn (seed 0) from the Azure 2023 conversation trace, prompts capped
at 3,500 and totals at 4,096 tokens, Poisson arrivals at 5 a second and server. Costs: 50 ms a step with prompt tokens plus 12 ms
for one with decoders; 2,048 tokens a step, 128 sequences, 7,000 blocks of 64. Two settings:

- *batching*: continuous batching with chunked prefill, requests dealt out to the servers in turn;
- *full*: prefill and decode servers in pairs, each server with 5 requests a second, prefix caches, a tier of 2,000,000 tokens
  below each (write-through), least-loaded routing on both sides, pulls and tier traffic over contending links. A prompt begins
  with up to 24 blocks of one of 200 shared beginnings.

Run: ``python benchmarks/replay_rate.py [MOST REQUESTS]``: from 10,000 requests on, ten times as many each time, on one server
(pair) and on 256. Times are CPU seconds of this process after the engine has been compiled; rows are counted and thrown away.
The last figures are those of the whole command on 10,000 requests.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from support.azure_requests import RATE_PER_S, SERVER, drawn, requests

from hoptrace.manifest import Manifest
from hoptrace.replay.compiled import simulate
from hoptrace.replay.outcome import DONE, REQUEST
from hoptrace.replay.plan import EngineSpec, Handover, LinkSpec, Plan, Routing, TierSpec, Way
from hoptrace.replay.workload import Workload
from hoptrace.stepcost import fixed
from hoptrace.writer import TraceWriter

_REPEATS = 3
_BLOCK = 64
_COST = fixed(any_prefill_ns=50e6, any_decode_ns=12e6)
_ENGINE = EngineSpec(
    "engine", max_sequences=128, max_batched_tokens=2048, capacity_tokens=7000 * _BLOCK, block_size_tokens=_BLOCK,
    context_tokens=4096,
)  # fmt: skip


class _Count:
    """A sink that counts the steps."""

    def __init__(self) -> None:
        self.steps = 0

    def take(self, kind: str, rows: np.ndarray) -> None:
        """See :class:`hoptrace.replay.outcome.Sink`."""
        self.steps += len(rows) if kind == "step" else 0


def work(n: int, rate_per_s: float, *, shared: bool = False) -> Workload:
    """``n`` requests. ``shared``: prompts have blocks, and begin alike."""
    rng = np.random.default_rng(0)
    arrival, prompt, output = drawn(rng, n, rate_per_s)
    blocks = prompt // _BLOCK if shared else np.zeros(n, dtype=np.int64)
    ptr = np.concatenate([[0], np.cumsum(blocks)]).astype(np.int64)
    row = np.repeat(np.arange(n), blocks)
    j = np.arange(ptr[-1]) - ptr[row]
    alike, group = rng.integers(0, 25, n), rng.integers(0, 200, n)
    ids = np.where(j < alike[row], group[row] * 32 + j, 200 * 32 + np.arange(len(j)))
    _, ids = np.unique(ids, return_inverse=True)
    size = np.full(int(ids.max(initial=-1)) + 1, _BLOCK, dtype=np.int64)
    return Workload(np.arange(n), arrival, prompt, output, ptr, ids.astype(np.int64), (j + 1) * _BLOCK, size)


def batching(servers: int) -> Plan:
    """Continuous batching with chunked prefill on so many servers."""
    return Plan(engines=(_ENGINE,) * servers, costs=(_COST,))


def full(pairs: int) -> Plan:
    """Prefix cache, tiers, a split and contending links together, on so many pairs of servers."""
    engines, links, ways = [], [], []
    for role in ("prefill", "decode"):
        for i in range(pairs):
            spec = {"max_sequences": 128, "max_batched_tokens": 2048, "capacity_tokens": 7000 * _BLOCK}
            engines.append(EngineSpec(f"{role}-{i}", role=role, block_size_tokens=_BLOCK, cache="pool", **spec))  # type: ignore[arg-type]
    for i in range(2 * pairs):
        for name, rate in (("out", 50), ("in", 50), ("down", 25), ("up", 25)):
            links.append(LinkSpec(f"{name}-{i}", rate * 10**9))

    def way(*on: int) -> int:
        ways.append(Way(links=on, base_ns=5000, per_block_ns=100))
        return len(ways) - 1

    between = tuple(tuple(way(4 * i, 4 * (pairs + j) + 1) for j in range(pairs)) for i in range(pairs))
    read, write = (tuple(way(4 * i + side) for i in range(2 * pairs)) for side in (3, 2))
    tier = TierSpec("dram", "dram", 2_000_000, False, read, write, (-1,) * (2 * pairs), "through")
    return Plan(
        engines=tuple(engines), costs=(_COST,), links=tuple(links), ways=tuple(ways), handover=Handover(between), tiers=(tier,),
        routing=Routing("least_load"), decode_routing=Routing("least_load"), kv_token_bytes=131_072,
    )  # fmt: skip


def measure(name: str, asked: Workload, plan: Plan) -> None:
    """Run it a few times and print the middle one."""
    times, steps = [], 0
    for _ in range(_REPEATS if asked.n < 1_000_000 else 1):
        count = _Count()
        start = time.process_time()
        outcome = simulate(asked, plan, count)
        times.append(time.process_time() - start)
        steps = count.steps
        assert (outcome.requests[:, REQUEST.index("status")] == DONE).all()
    engine = sorted(times)[len(times) // 2]
    print(f"{name}: {asked.n / engine:,.0f} requests per CPU-second", flush=True)
    print(f"{name} steps: {steps / engine:,.0f} steps per CPU-second", flush=True)


def command() -> None:
    """The whole command."""
    n = 10_000
    frame = requests(n)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.trace"
        with TraceWriter(log, Manifest(origin="imported", servers=[SERVER]), background=False) as w:
            w.append_arrow("requests", frame.to_arrow())
        whole = []
        for i in range(3):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            out = str(Path(folder) / f"{i}.trace")
            line = [sys.executable, "-m", "hoptrace", "replay", str(log), "--cost", "fixed:50,12", "-q", "-o", out]
            subprocess.run(line, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            whole.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        cpu = sorted(whole)[1]
        size = sum(f.stat().st_size for f in Path(out).rglob("*") if f.is_file())
    print(f"replay command, start and writing of a full trace included: {n / cpu:,.0f} requests per CPU-second")
    print(f"replay command CPU: {cpu:.2f} s")
    print(f"replay trace size: {size / n:,.0f} bytes per request")


def main(most: int) -> None:
    """Measure and print."""
    for plan, shared in ((batching(1), False), (full(1), True)):
        simulate(work(100, RATE_PER_S, shared=shared), plan, _Count())  # compiles
    n = 10_000
    while n <= most:
        for servers in (1, 256):
            asked = work(n, RATE_PER_S * servers)
            measure(f"replay engine, batching, {n:,} requests, {servers} servers", asked, batching(servers))
        for pairs in (1, 128):
            asked = work(n, RATE_PER_S * pairs, shared=True)
            measure(f"replay engine, full, {n:,} requests, {2 * pairs} servers", asked, full(pairs))
        n *= 10
    print(f"replay engine memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MB at most")
    command()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
