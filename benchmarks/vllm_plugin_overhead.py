"""What vLLM's plug-in costs a step: by itself, and on a real server with the plug-in switched off and on in turn.

Prints ``NAME: VALUE UNIT`` lines. The first part times the calls that vLLM makes, in this process, on objects shaped like vLLM's.
The second needs HOPTRACE_VLLM_PYTHON: streams decode together on one server while a switch in the channels turns the plug-in off
and on every ``--block`` tokens (off on on off …); a block's step time is the mean gap between tokens of one stream, and blocks
next to each other are compared, so that what the machine does meanwhile meets both. Run it on a quiet machine:
``HOPTRACE_VLLM_PYTHON=… python benchmarks/vllm_plugin_overhead.py``.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support import vllm_fakes as fakes
from support import vllm_server

from hoptrace.collectors.engines.vllm_channel import DETAILS, SCHEDULER
from hoptrace.collectors.inside.channel import Channel
from hoptrace.collectors.inside.ring import Reader
from hoptrace.collectors.inside.vllm_record import record_of
from hoptrace.collectors.inside.vllm_steps import StepRecorder


def show(name: str, call: Any, repeats: int) -> None:
    """Median time of a call, and its mean processor time (what others do to this process is not in that)."""
    times = []
    began = time.thread_time_ns()
    for _ in range(repeats):
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)
    cpu = (time.thread_time_ns() - began) / repeats
    print(f"{name}, median: {statistics.median(times) / 1000:.1f} us")
    print(f"{name}, mean of processor time: {cpu / 1000:.1f} us")


def calls(repeats: int) -> None:
    """Time of what is done in vLLM's processes per step."""
    channel = Channel.open("api", {})
    assert channel is not None
    stats = fakes.scheduler_stats(
        num_running_reqs=8,
        kv_cache_usage=0.3,
        iteration_details=fakes.details(1, 0, 0, 8, 8, 12.0),
        prefix_cache_stats=fakes.prefix(),
    )
    iteration = fakes.IterationStats(time.time())
    iteration.num_generation_tokens = 8

    def record() -> None:
        made = record_of(stats, iteration, 0)
        assert made is not None
        channel.send(made, time.monotonic_ns())

    show("stat logger in the API server, per step", record, repeats)
    for batch in (8, 64, 256):
        show(f"scheduler in the engine, per step of {batch} requests", _step_of(batch), repeats)


def _step_of(batch: int) -> Any:
    names = [f"cmpl-0123456789abcdef-{i}-0123abcd" for i in range(batch)]
    scheduler: Any = fakes.Scheduler()
    scheduler.kv_cache_manager = SimpleNamespace(block_pool=SimpleNamespace(num_gpu_blocks=9, get_num_free_blocks=lambda: 4))
    scheduler.requests = {n: fakes.Request(n, 500) for n in names}
    scheduler.running = list(scheduler.requests.values())
    cached = SimpleNamespace(
        req_ids=names, num_computed_tokens=[700] * batch, num_output_tokens=[200] * batch, resumed_req_ids=set[str]()
    )
    output = fakes.Output(dict.fromkeys(names, 1), [], cached)
    results = [SimpleNamespace(request_id=n, new_token_ids=[5], finish_reason=None, prefill_stats=None) for n in names]
    outputs = {0: SimpleNamespace(timestamp=1000.5, outputs=results)}
    recorder = StepRecorder.of(scheduler)

    def step() -> None:
        now = time.monotonic_ns()
        recorder.scheduled(scheduler, output, now, now)
        recorder.updated(output, None, outputs, now, time.monotonic_ns(), recorder.sampled(output, None))

    return step


def stream(port: int, tokens: int, prompt: int, seen: Any) -> None:
    """One stream; ``seen(i)`` is called as each token comes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    body = {
        "model": "toy", "prompt": [prompt] * 32, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True,
        "return_token_ids": True,
    }  # fmt: skip
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    i = 0
    while line := reply.readline():
        if line.startswith(b"data: {"):
            seen(i)
            i += 1
    connection.close()


def paired(streams: int, block: int, rounds: int) -> None:
    """The plug-in off and on in turn on one server."""
    folder = Path(tempfile.mkdtemp(prefix="hoptrace-bench-"))
    env = {"HOPTRACE_CHANNELS": str(folder / "channels")}
    flags = [DETAILS, "--max-num-seqs", str(streams), "--no-enable-prefix-caching", *SCHEDULER.split()]
    server = vllm_server.start(folder, *flags, env=env)
    try:
        server.wait()
        channels = list((folder / "channels").glob("*.ring"))
        assert len(channels) == 2, channels
        server.complete([3] * 32, 300)
        steps: list[tuple[bool, float, float]] = []
        for r in range(rounds):
            steps += _round(server.port, channels, streams, block, r)
    finally:
        server.kill()
    pairs = [(a, b) if not a[0] else (b, a) for a, b in zip(steps[::2], steps[1::2], strict=False) if a[0] != b[0]]
    print(f"pairs of blocks of {block} steps: {len(pairs)} pairs")
    for what, middle in (("mean", 1), ("median", 2)):
        differences = [on[middle] - off[middle] for off, on in pairs]
        base = statistics.fmean(p[0][middle] for p in pairs)
        low, added, high = _interval(differences)
        print(f"{what} step without the plug-in, {streams} streams: {base / 1e6:.3f} ms")
        for name, value in (("", added), (", low end of 95 %", low), (", high end of 95 %", high)):
            print(f"{what} step, added by the plug-in{name}: {value / 1000:.1f} us")
            print(f"{what} step, share added{name}: {100 * value / base:.2f} %")


def _interval(values: list[float], repeats: int = 2000) -> tuple[float, float, float]:
    """Median and its bootstrap interval: a pair that the machine spoiled does not move it."""
    chance = random.Random(1)
    found = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(repeats))
    return found[repeats // 40], statistics.median(values), found[-repeats // 40]


def _round(port: int, channels: list[Path], streams: int, block: int, number: int) -> list[tuple[bool, float, float]]:
    tokens = 1500
    times: list[int] = []
    on = {0: True}
    # Every other pair the other way round, so that a drift of the machine or of the context cancels out.
    order = [False, True, True, False]

    def seen(i: int) -> None:
        times.append(time.perf_counter_ns())
        if i % block == 0:
            on[i // block] = order[(i // block + 2 * number) % 4]
            for channel in channels:
                Reader.switch(channel, off=not on[i // block])

    threads = [threading.Thread(target=stream, args=(port, tokens, 10 + s, lambda i: None)) for s in range(streams - 1)]
    for t in threads:
        t.start()
    time.sleep(0.3)
    stream(port, tokens - 200, 9, seen)
    for t in threads:
        t.join()
    made = []
    for k in range(2, len(times) // block):
        # The first steps after a switch may still be of the other kind.
        gaps = [b - a for a, b in pairwise(times[k * block + 4 : (k + 1) * block])]
        made.append((on[k], statistics.fmean(gaps), statistics.median(gaps)))
    return made if len(made) % 2 == 0 else made[:-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5000)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--block", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=6)
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HOPTRACE_CHANNELS"] = folder
        calls(told.repeats)
        del os.environ["HOPTRACE_CHANNELS"]
    if vllm_server.python() is None:
        print("HOPTRACE_VLLM_PYTHON is not set: no real server", file=sys.stderr)
        return
    paired(told.streams, told.block, told.rounds)


if __name__ == "__main__":
    main()
