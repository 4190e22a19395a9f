"""What the recording proxy adds: paired direct and proxied streams, interleaved, against a toy server in a process of its own.

Prints ``NAME: VALUE UNIT`` lines. Added times are differences of a pair (proxied less direct), so that what the machine does
meanwhile meets both. Run it on a quiet machine: ``python benchmarks/proxy_overhead.py --pairs 200``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import aiohttp
from aiohttp import web

from hoptrace.collectors.engines.hashing import HashKey
from hoptrace.collectors.engines.proxy import Proxy, listen
from hoptrace.collectors.engines.record import Recorder
from hoptrace.manifest import Manifest
from hoptrace.writer import TraceWriter


def serve(tell: Connection, tokens: int, gap_s: float) -> None:
    """The toy: `tokens` chunks, `gap_s` apart, as an inference server streams them."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        out.enable_chunked_encoding()
        await out.prepare(request)
        for i in range(tokens):
            await asyncio.sleep(gap_s)
            choice = {"index": 0, "text": " token", "logprobs": None, "finish_reason": None if i + 1 < tokens else "length"}
            chunk = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "toy", "choices": [choice]}
            await out.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await out.write(b"data: [DONE]\n\n")
        await out.write_eof()
        return out

    async def run() -> None:
        runner = web.ServerRunner(web.Server(handle, access_log=None))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        tell.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


def proxy(tell: Connection, upstream: str, folder: str) -> None:
    """The proxy in a process of its own, as `hoptrace attach` runs it; answers "cpu" with its CPU time in ns."""

    async def run() -> None:
        with TraceWriter(Path(folder) / "bench.trace", Manifest(origin="recorded")) as writer:
            recorder = Recorder(writer, "toy", HashKey("bench", b"b" * 32))
            p = Proxy(upstream, recorder, writer.clock.now_ns)
            await p.start(listen("127.0.0.1", 0))
            tell.send(p.url)
            loop = asyncio.get_running_loop()
            while await loop.run_in_executor(None, tell.recv) == "cpu":
                tell.send((time.process_time_ns(), recorder.stats.tokens, recorder.stats.faults))
            await p.close()

    asyncio.run(run())


async def stream(client: aiohttp.ClientSession, url: str) -> tuple[int, list[int]]:
    """(time to the first token, gaps between reads), ns."""
    body = {"model": "toy", "prompt": "word " * 400, "stream": True, "max_tokens": 64}
    begin = time.monotonic_ns()
    at: list[int] = []
    async with client.post(url + "/v1/completions", json=body) as answer:
        while await answer.content.readany():
            at.append(time.monotonic_ns())
    return at[0] - begin, [b - a for a, b in pairwise(at)]


def quantile(values: list[int], q: float) -> float:
    """Linear between the two closest ranks."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


async def measure(direct: str, proxied: str, pairs: int, streams: int) -> tuple[list[int], list[int], list[int]]:
    """Added TTFT per pair, and the gaps of either way, ns. Which goes first alternates."""
    added: list[int] = []
    gaps: dict[str, list[int]] = {direct: [], proxied: []}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as client:
        for pair in range(pairs):
            first = {}
            for url in (direct, proxied) if pair % 2 else (proxied, direct):
                got = await asyncio.gather(*(stream(client, url) for _ in range(streams)))
                first[url] = round(statistics.median(g[0] for g in got))
                gaps[url] += [gap for g in got for gap in g[1]]
            added.append(first[proxied] - first[direct])
    return added, gaps[direct], gaps[proxied]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--streams", type=int, default=1, help="streams at once")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--gap-ms", type=float, default=5.0)
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    toy = spawn.Process(target=serve, args=(there, args.tokens, args.gap_ms / 1000), daemon=True)
    toy.start()
    direct = f"http://127.0.0.1:{here.recv()}"
    with tempfile.TemporaryDirectory() as folder:
        mine, its = spawn.Pipe()
        middle = spawn.Process(target=proxy, args=(its, direct, folder), daemon=True)
        middle.start()
        proxied = mine.recv()
        # Warm-up, with two flushes of the writer: what is imported on first use is not a cost per event.
        asyncio.run(measure(direct, proxied, 5, args.streams))
        time.sleep(1.2)
        mine.send("cpu")
        cpu_before, tokens_before, _ = mine.recv()
        added, gaps_direct, gaps_proxied = asyncio.run(measure(direct, proxied, args.pairs, args.streams))
        mine.send("cpu")
        cpu_after, tokens_after, faults = mine.recv()
        mine.send("stop")
        middle.join(30)
    toy.terminate()
    toy.join()
    expected = args.pairs * args.streams * args.tokens
    if faults or tokens_after - tokens_before != expected:
        raise SystemExit(
            f"the proxy recorded {tokens_after - tokens_before} of {expected} tokens, {faults} faults: not a measurement"
        )
    print(f"proxy added ttft p50: {quantile(added, 0.5) / 1e6:.3f} ms")
    print(f"proxy added ttft p99: {quantile(added, 0.99) / 1e6:.3f} ms")
    for name, q in (("p50", 0.5), ("p99", 0.99)):
        print(f"proxy added itl {name}: {(quantile(gaps_proxied, q) - quantile(gaps_direct, q)) / 1e6:.3f} ms")
    print(f"proxy cpu per event: {(cpu_after - cpu_before) / 1e3 / expected:.1f} us")


if __name__ == "__main__":
    main()
