"""KV events and OTLP spans of a real vLLM (toy model, CPU), against what the server itself counts.

One server exports spans over HTTP, is killed, and another one at the same addresses exports over gRPC: so the collectors also see
a restart. A scheduler class notes after each step how many blocks the prefix cache holds.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support import vllm_server
from support.context import context, events, rows

import hoptrace
from hoptrace.collectors.engines.published.kv_events import KvEvents
from hoptrace.collectors.engines.published.otlp import OtlpReceiver
from hoptrace.validate import validate

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(vllm_server.python() is None, reason="HOPTRACE_VLLM_PYTHON names no Python with vLLM"),
]

SCHEDULER = '''
import os, time
from vllm.v1.core.sched.scheduler import Scheduler

class Counting(Scheduler):
    """vLLM's own, and after each step the number of blocks that its prefix cache holds."""

    def update_from_output(self, *args, **kwargs):
        out = super().update_from_output(*args, **kwargs)
        cached = sum(block.block_hash is not None for block in self.kv_cache_manager.block_pool.blocks)
        with open(os.environ["HOPTRACE_TEST_COUNTS"], "a") as f:
            f.write(f"{time.time_ns()} {cached}\\n")
        return out
'''
BLOCKS, BLOCK = 40, 32


def _start(folder: Path, events_port: int, replay_port: int, otlp: str, protocol: str) -> vllm_server.VllmServer:
    (folder / "mod").mkdir(parents=True, exist_ok=True)
    (folder / "mod" / "hoptrace_counting.py").write_text(SCHEDULER)
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events_port}",
              "replay_endpoint": f"tcp://*:{replay_port}"}  # fmt: skip
    return vllm_server.start(
        folder, "--max-model-len", "1024", "--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", "8",
        "--max-num-batched-tokens", "256", "--enable-prefix-caching", "--kv-events-config", json.dumps(config),
        "--otlp-traces-endpoint", otlp, "--scheduler-cls", "hoptrace_counting.Counting",
        env={"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": protocol, "OTEL_BSP_SCHEDULE_DELAY": "500", "VLLM_SERVER_DEV_MODE": "1",
             "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip" if protocol == "grpc" else "none",
             "HOPTRACE_TEST_COUNTS": str(folder / "counts"), "PYTHONPATH": str(folder / "mod")},
    )  # fmt: skip


def _one(sent: list[dict[str, Any]], tokens: int, call: Callable[[], dict[str, Any]]) -> None:
    began = time.time_ns()
    answer = call()
    output = answer["usage"]["completion_tokens"]
    sent.append({"id": answer["id"], "prompt": tokens, "output": output, "began": began, "ended": time.time_ns()})


def _work(server: vllm_server.VllmServer, seed: int) -> list[dict[str, Any]]:
    """Requests with shared prefixes, more of them than the cache holds; one of two sequences, one of two prompts."""
    chance = random.Random(seed)
    shared = [chance.randrange(3, 1000) for _ in range(128)]
    sent: list[dict[str, Any]] = []
    for i in range(14):
        prompt = shared[: BLOCK * (1 + i % 4)] + [chance.randrange(3, 1000) for _ in range(20 + 37 * (i % 5))]
        more = {"n": 2, "temperature": 1.0} if i == 5 else {}
        _one(sent, len(prompt), lambda p=prompt, n=3 + i % 6 * 9, m=more: server.complete(p, n, **m))
    two = {"model": "toy", "prompt": [shared[:70], shared[:40]], "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    _one(sent, 110, lambda: server.post("/v1/completions", two))
    reset = urllib.request.Request(server.url + "/reset_prefix_cache", method="POST")
    urllib.request.urlopen(reset, timeout=30).close()
    _one(sent, 100, lambda: server.complete(shared[:100], 40))
    return sent


def _counts(folder: Path) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in (line.split() for line in (folder / "counts").read_text().splitlines())]


async def _capture(ctx: Any, folder: Path) -> list[list[dict[str, Any]]]:
    kv, replay = vllm_server.free_port(), vllm_server.free_port()
    source = KvEvents(ctx, f"tcp://127.0.0.1:{kv}", f"tcp://127.0.0.1:{replay}")
    receiver = OtlpReceiver(ctx.writer, ctx.links, ctx.host, ("127.0.0.1", 0), ("127.0.0.1", 0), servers=[ctx.server])
    await receiver.start()
    await source.start()
    rank = source._ranks[0]
    live, losing = rank.live, [False]

    def flaky(frames: list[bytes], received_ns: int) -> None:
        # Every fourth message is lost on the way: the server's own replay gives it.
        if not (losing[0] and len(frames) == 3 and int.from_bytes(frames[1], "big") % 4 == 2):
            live(frames, received_ns)

    rank.live = flaky  # type: ignore[method-assign]
    sent: list[list[dict[str, Any]]] = []
    ports = (
        ("http/protobuf", f"http://127.0.0.1:{receiver.http.port}/v1/traces"),
        ("grpc", f"http://127.0.0.1:{receiver.grpc.port}"),
    )
    stop = asyncio.Event()

    async def beat() -> None:
        while not stop.is_set():
            await receiver.sample()
            await source.sample()
            await asyncio.sleep(0.1)

    beating = asyncio.create_task(beat())
    for n, (protocol, address) in enumerate(ports):
        server = _start(folder / str(n), kv, replay, address, protocol)
        try:
            await asyncio.to_thread(server.wait)
            assert (await source.probe()).available
            losing[0] = n == 0
            sent.append(await asyncio.to_thread(_work, server, n))
            losing[0] = False
            # One more, so that a loss at the very end is noticed too.
            await asyncio.to_thread(_one, sent[-1], 50, lambda: server.complete([7] * 50, 40))  # noqa: B023
            spans = sum(len(s) + 2 for s in sent)  # one more of the second sequence, and of the second prompt
            await _spans(receiver, beating, spans)
        finally:
            await asyncio.to_thread(server.kill)
    stop.set()
    await beating
    await source.close()
    await receiver.close()
    assert source._stream is not None and source._stream.faults == {}
    assert rank.sequence.lost == 0 and rank.sequence.replayed_count > 3
    return sent


async def _spans(receiver: OtlpReceiver, beating: asyncio.Task[None], expected: int) -> None:
    """Wait until so many spans of requests have come."""
    end = time.monotonic() + 30
    while (n := sum(len(c.stays) for c in receiver._calls.calls())) < expected:
        if beating.done():
            await beating
        assert time.monotonic() < end, f"{n} of {expected}: received {receiver.received}, {receiver._calls.counts}"
        await asyncio.sleep(0.1)


def test_blocks_and_spans_of_a_real_server(tmp_path: Path) -> None:
    out = tmp_path / "t.trace"
    shape = {"layers": 1, "kv_heads": 1, "head_size": 32, "kv_dtype": "float32", "block_size_tokens": BLOCK}
    with context(out, **shape) as ctx:
        sent = asyncio.run(_capture(ctx, tmp_path))
        ctx.links.settle()  # type: ignore[union-attr]
        dropped = dict(ctx.writer.manifest.rows_dropped)  # type: ignore[union-attr]
    assert dropped == {}
    _check_blocks(out, tmp_path)
    _check_spans(out, sent)
    trace = hoptrace.open(out)
    assert not [f for f in validate(trace) if f.level == "error"]
    assert events(out, "restart") == ["the publisher of KV events of rank 0 began anew"] and not events(out, "gap")
    loading = events(out, "start-up")
    assert sum("Load weights" in e or "Load model" in e for e in loading) >= 2, loading


def _check_blocks(out: Path, folder: Path) -> None:
    """After each of the engine's steps: blocks stored less blocks evicted are what its prefix cache holds."""
    blocks = rows(out, "blocks").with_row_index("at")
    assert set(blocks["event"]) == {"stored", "evicted", "cleared"} and set(blocks["medium"]) == {"device", None}
    assert set(blocks.filter(pl.col("event") != "cleared")["bytes"]) == {BLOCK * 2 * 32 * 4}
    compared = 0
    for n in range(2):
        counts = _counts(folder / str(n))
        first, last = counts[0][0] - 10**8, counts[-1][0] + 10**9
        mine = blocks.filter(pl.col("time_ns").is_between(first, last)).to_dicts()
        held, i = 0, 0
        for at, cached in counts:
            # The publisher stamps its batch in the step, a moment before the scheduler class counts.
            while i < len(mine) and mine[i]["time_ns"] <= at:
                event = mine[i]["event"]
                held = 0 if event == "cleared" else held + (1 if event == "stored" else -1)
                i += 1
            assert held == cached, f"server {n}, at {at}: {held} by events, {cached} by the engine"
            compared += 1
        assert max(c for _, c in counts) > BLOCKS - 10, "the cache was full, so blocks were evicted"
    assert compared > 100
    parents = blocks.filter(pl.col("event") == "stored")
    assert parents["parent"].is_in(parents["hash"].implode()).sum() == parents["parent"].drop_nulls().len()


def _check_spans(out: Path, sent: list[list[dict[str, Any]]]) -> None:
    frame = rows(out, "requests")
    expected = {s["id"]: s for phase in sent for s in phase}
    assert frame.height == len(expected) == 34
    stages = rows(out, "stages")
    assert stages.height == len(expected) + 4
    for row in frame.rows(named=True):
        known = expected[row["request_id"]]
        assert row["prompt_tokens"] == known["prompt"] and row["output_tokens"] == known["output"]
        order = [row[n] for n in ("arrival_ns", "queued_ns", "scheduled_ns", "engine_first_token_ns", "finish_ns")]
        assert order == sorted(order), row
        # By the client's watch, on the same host: it began before and ended after.
        assert known["began"] - 10**6 <= row["arrival_ns"] and row["finish_ns"] <= known["ended"] + 10**6
