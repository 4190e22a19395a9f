"""How many requests and passes (engine steps) a replay does in a second of CPU.

The workload that other simulators were measured on: lengths drawn (seed 0) from the Azure 2023 conversation trace, prompts capped
at 3,500 and totals at 4,096 tokens, Poisson arrivals at 5 a second, 10,000 requests. Costs: 50 ms a step with prompt tokens
plus 12 ms for one with decoders; 2,048 tokens a step, 128 sequences, 7,000 blocks of 64.
Run: ``python benchmarks/replay_rate.py [REQUESTS]``. Times are CPU seconds of this process (and of the command's), after the
kernel has been compiled.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl

import hoptrace
from hoptrace import schema
from hoptrace.manifest import Manifest, Server
from hoptrace.replay.engine import serve
from hoptrace.replay.policy import Policy, resolve
from hoptrace.replay.workload import from_frame
from hoptrace.samples import sample
from hoptrace.stepcost import fixed
from hoptrace.writer import TraceWriter

_RATE_PER_S = 5.0
_REPEATS = 5
_SERVER = Server(
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


def main(n: int) -> None:
    """Measure and print."""
    frame = requests(n)
    none = pl.from_arrow(schema.REQUESTS.arrow.empty_table())
    assert isinstance(none, pl.DataFrame)
    work = from_frame(pl.concat([none, frame], how="diagonal"))
    policy = resolve(Policy(), _SERVER)
    cost = fixed(any_prefill_ns=50e6, any_decode_ns=12e6)
    passes = serve(work, policy, cost).steps.height  # compiles
    times = []
    for _ in range(_REPEATS):
        start = time.process_time()
        serve(work, policy, cost)
        times.append(time.process_time() - start)
    engine = sorted(times)[_REPEATS // 2]
    print(f"replay engine: {n / engine:,.0f} requests per CPU-second")
    print(f"replay engine passes: {passes / engine:,.0f} passes per CPU-second")
    print(f"replay engine tokens: {int(work.output_tokens.sum()) / engine:,.0f} output tokens per CPU-second")

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.trace"
        with TraceWriter(log, Manifest(origin="imported", servers=[_SERVER]), background=False) as w:
            w.append_arrow("requests", frame.to_arrow())
        whole = []
        for i in range(3):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            out = str(Path(folder) / f"{i}.trace")
            command = [sys.executable, "-m", "hoptrace", "replay", str(log), "--cost", "fixed:50,12", "-q", "-o", out]
            subprocess.run(command, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            whole.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        cpu = sorted(whole)[1]
        size = sum(f.stat().st_size for f in Path(out).rglob("*") if f.is_file())
    print(f"replay command, start and writing of a full trace included: {n / cpu:,.0f} requests per CPU-second")
    print(f"replay command CPU: {cpu:.2f} s")
    print(f"replay trace size: {size / n:,.0f} bytes per request")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
