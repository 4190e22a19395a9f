"""What the sniffer costs server and clients: the same streams with a capture beside them and without, by turns.

Server, sniffer and clients are processes of their own. Prints ``NAME: VALUE UNIT`` lines: what a capture adds to the gaps between
tokens that clients see and to the server's CPU time (nothing, but for the kernel's copy of each packet), and the sniffer's own
CPU time. Needs CAP_NET_RAW and a quiet machine: ``python benchmarks/sniff_overhead.py --rounds 20``.
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

from hoptrace.collectors.context import Context
from hoptrace.collectors.engines.http import Api
from hoptrace.collectors.engines.streams.hashing import HashKey
from hoptrace.collectors.engines.streams.place import WIRE
from hoptrace.collectors.engines.streams.record import Recorder
from hoptrace.collectors.engines.streams.sniff import Sniffer
from hoptrace.manifest import Manifest, Server
from hoptrace.writer import TraceWriter


def serve(tell: Connection, tokens: int, gap_s: float) -> None:
    """The toy: `tokens` chunks, `gap_s` apart; answers "cpu" with its CPU time in ns."""
    choice = {"index": 0, "text": " token", "logprobs": None, "finish_reason": None}
    chunk = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "toy", "choices": [choice]}
    line = b"data: " + json.dumps(chunk).encode() + b"\n\n"

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        out.enable_chunked_encoding()
        await out.prepare(request)
        for _ in range(tokens):
            await asyncio.sleep(gap_s)
            await out.write(line)
        await out.write(b"data: [DONE]\n\n")
        await out.write_eof()
        return out

    async def run() -> None:
        runner = web.ServerRunner(web.Server(handle, access_log=None))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        tell.send(runner.addresses[0][1])
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, tell.recv) == "cpu":
            tell.send(time.process_time_ns())

    asyncio.run(run())


def sniff(tell: Connection, port: int, folder: str) -> None:
    """The sniffer, as `hoptrace attach` runs it, from "on" to "off"; then it tells its CPU time, tokens, losses."""

    async def capture(number: int) -> tuple[int, int, int]:
        url = f"http://127.0.0.1:{port}"
        with TraceWriter(Path(folder) / f"{number}.trace", Manifest(origin="recorded")) as writer:
            recorder = Recorder(writer, "toy", HashKey("bench", b"b" * 32), place=WIRE)
            ctx = Context(Api(url), Server(name="toy"), "host", writer)
            sniffer = Sniffer(ctx, recorder, "lo", port)
            await sniffer.start()
            tell.send("ready")
            began = time.process_time_ns()
            while not tell.poll():
                await sniffer.sample()
                await asyncio.sleep(0.1)
            tell.recv()
            await sniffer.close()
            recorder.flush()
            writer.flush()
            cpu = time.process_time_ns() - began
            await ctx.api.close()
        return cpu, recorder.stats.tokens, sniffer.dropped + sniffer.lost_bytes + recorder.stats.faults

    number = 0
    while tell.recv() == "on":
        tell.send(asyncio.run(capture(number)))
        number += 1


async def stream(client: aiohttp.ClientSession, url: str) -> list[int]:
    """Gaps between reads, ns."""
    at: list[int] = []
    async with client.post(url + "/v1/completions", json={"model": "toy", "prompt": "word " * 400, "stream": True}) as answer:
        while await answer.content.readany():
            at.append(time.monotonic_ns())
    return [b - a for a, b in pairwise(at)]


async def streams(url: str, n: int) -> list[int]:
    """Gaps of `n` streams at once."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        return [gap for gaps in await asyncio.gather(*(stream(client, url) for _ in range(n))) for gap in gaps]


def quantile(values: list[int], q: float) -> float:
    """By rank."""
    return sorted(values)[min(int(q * len(values)), len(values) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="each is one run with and one without a capture")
    parser.add_argument("--streams", type=int, default=8, help="streams at once")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--gap-ms", type=float, default=10.0)
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    toy_end, end = spawn.Pipe()
    toy = spawn.Process(target=serve, args=(end, args.tokens, args.gap_ms / 1000), daemon=True)
    toy.start()
    port = toy_end.recv()
    url = f"http://127.0.0.1:{port}"

    def cpu() -> int:
        toy_end.send("cpu")
        return int(toy_end.recv())

    own: list[int] = []
    gaps: dict[bool, list[int]] = {False: [], True: []}
    server: dict[bool, list[int]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        mine, its = spawn.Pipe()
        sniffer = spawn.Process(target=sniff, args=(its, port, folder), daemon=True)
        sniffer.start()
        for round_ in range(-1, args.rounds):  # the first is a warm-up
            for on in (True, False) if round_ % 2 else (False, True):
                if on:
                    mine.send("on")
                    mine.recv()
                before = cpu()
                got = asyncio.run(streams(url, args.streams))
                spent = cpu() - before
                if on:
                    mine.send("off")
                    its_cpu, tokens, lost = mine.recv()
                    if tokens != args.streams * args.tokens or lost:
                        raise SystemExit(f"{tokens} of {args.streams * args.tokens} tokens, {lost} lost: not a measurement")
                if round_ >= 0:
                    gaps[on] += got
                    server[on].append(spent)
                    if on:
                        own.append(its_cpu)
        mine.send("stop")
        sniffer.join(30)
    toy_end.send("stop")
    toy.join(30)
    events = args.streams * args.tokens
    for name, q in (("p50", 0.5), ("p99", 0.99)):
        print(f"sniff added itl {name}: {(quantile(gaps[True], q) - quantile(gaps[False], q)) / 1e6:.3f} ms")
    print(f"sniff added server cpu: {(statistics.median(server[True]) / statistics.median(server[False]) - 1) * 100:.1f} %")
    print(f"sniff cpu per event: {statistics.median(own) / 1e3 / events:.1f} us")


if __name__ == "__main__":
    main()
