"""The replay engine and a peer on one trace: requests per CPU-second of both.

The peer is the mocker replay of NVIDIA's Dynamo (``ai-dynamo-runtime`` on the package registry), installed into a virtual
environment that is deleted afterwards. Both get the trace of ``replay_rate.py`` and the same costs (50 ms a step with prompt
tokens, 12 ms with decoders), 2,048 tokens a step, 128 sequences, 7,000 blocks of 64; engine alone, CPU seconds of its process,
median of five.
Run: ``python benchmarks/replay_peer.py [REQUESTS]``.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import polars as pl
from support.azure_requests import requests

from hoptrace import schema
from hoptrace.replay.compiled import simulate
from hoptrace.replay.outcome import REQUEST, Kept
from hoptrace.replay.plan import EngineSpec, Plan
from hoptrace.replay.workload import from_frame
from hoptrace.stepcost import fixed

PEER = "ai-dynamo-runtime==1.6.1"
REPEATS = 5
THEIRS = """
import json, sys, time
from dynamo import _core
engine = {"num_gpu_blocks": 7000, "block_size": 64, "max_num_seqs": 128, "max_num_batched_tokens": 2048,
          "enable_prefix_caching": False, "timing_model": {"type": "fixed", "prefill_ms": 50.0, "decode_ms": 12.0}}
times = []
for _ in range(int(sys.argv[2])):
    start = time.process_time()
    found = _core.run_mocker_trace_replay([sys.argv[1]], extra_engine_args={"engine": engine}, trace_block_size=512)
    times.append(time.process_time() - start)
print(json.dumps({"times": times, "mean_ttft_ms": found.summary["mean_ttft_ms"]}))
"""


def theirs(frame: pl.DataFrame, folder: Path) -> tuple[float, float]:
    """Median CPU seconds of the peer, and its mean TTFT in ms; SystemExit with a sentence if it cannot be had."""
    trace, used = folder / "trace.jsonl", 0
    with trace.open("w") as f:
        for at, prompt, output in frame.select("arrival_ns", "prompt_tokens", "output_tokens").iter_rows():
            ids = list(range(used, used + -(-prompt // 512)))
            used += len(ids)
            f.write(json.dumps({"timestamp": at / 1e6, "input_length": prompt, "output_length": output, "hash_ids": ids}) + "\n")
    venv.create(folder / "peer", with_pip=True)
    python = str(folder / "peer" / "bin" / "python")
    try:
        subprocess.run([python, "-m", "pip", "install", "-q", PEER], check=True, capture_output=True, text=True, timeout=600)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as e:
        said = (getattr(e, "stderr", "") or str(e)).strip().splitlines()
        raise SystemExit(f"The peer ({PEER}) cannot be had here: {said[-1] if said else e}") from None
    done = subprocess.run([python, "-c", THEIRS, str(trace), str(REPEATS)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"The peer ({PEER}) does not run here: {done.stderr.strip().splitlines()[-1]}")
    found = json.loads(done.stdout)
    return statistics.median(found["times"]), found["mean_ttft_ms"]


def ours(frame: pl.DataFrame) -> tuple[float, float]:
    """Median CPU seconds of our engine (compiled before), and its mean TTFT in ms."""
    none = pl.from_arrow(schema.REQUESTS.arrow.empty_table())
    assert isinstance(none, pl.DataFrame)
    work = from_frame(pl.concat([none, frame], how="diagonal"))
    rules = EngineSpec("engine", max_sequences=128, max_batched_tokens=2048, capacity_tokens=7000 * 64, block_size_tokens=64)
    plan = Plan((rules,), (fixed(any_prefill_ns=50e6, any_decode_ns=12e6),))
    rows = simulate(work, plan, Kept()).requests
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        simulate(work, plan, Kept())
        times.append(time.process_time() - start)
    ttft = rows[:, REQUEST.index("first_token_ns")] - rows[:, REQUEST.index("arrival_ns")]
    return statistics.median(times), float(ttft.mean()) / 1e6


def main(n: int) -> None:
    """Measure and print."""
    frame = requests(n)
    with tempfile.TemporaryDirectory() as folder:
        peer, peer_ttft = theirs(frame, Path(folder))
    own, own_ttft = ours(frame)
    print(f"replay engine: {n / own:,.0f} requests per CPU-second (mean TTFT {own_ttft:.3f} ms)")
    print(f"{PEER}, mocker replay: {n / peer:,.0f} requests per CPU-second (mean TTFT {peer_ttft:.3f} ms)")
    print(f"ratio: {peer / own:.1f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
