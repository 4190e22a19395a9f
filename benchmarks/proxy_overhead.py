"""What the recording proxy adds: 200 streams at once, 5,000 token events a second, direct and through the proxy, in turns.

Toy server, proxy and load are processes of their own; the proxy has one core to itself (on two cores the others share the other).
Each event bears the time at which the server wrote it; its latency is what the client's clock says less that. A round is direct,
proxied, direct again: what the machine does meanwhile meets all three, and direct against direct is the error of the method.

Prints ``NAME: VALUE UNIT`` lines. Run it on a quiet machine: ``python benchmarks/proxy_overhead.py --rounds 10``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = b'data: {"choices":[],"usage":{"prompt_tokens":500,"completion_tokens":%d}}\n\n'
STAMP = b'"written":'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def pin(core: int) -> None:
    """This process on one core; where that is not allowed, wherever it runs."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, {core % (os.cpu_count() or 1)})


class Toy(asyncio.Protocol):
    """Answers every request with ``events`` chunks, ``gap_s`` apart."""

    def __init__(self, events: int, gap_s: float, in_step: bool) -> None:
        self.events, self.gap_s, self.in_step = events, gap_s, in_step
        self.held = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        self.held += data
        head, found, body = self.held.partition(b"\r\n\r\n")
        if found and len(body) >= int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]):
            self.held = b""
            self.transport.write(HEAD)
            self.left = self.events
            # An engine's streams leave in step; else each has a phase of its own.
            now = self.loop.time()
            due = (now // self.gap_s + 1) * self.gap_s if self.in_step else now + random.random() * self.gap_s
            self.loop.call_at(due, self.tick, due)

    def tick(self, due: float) -> None:
        if self.transport.is_closing():
            return
        self.left -= 1
        stamp = b"%s%d" % (STAMP, time.monotonic_ns())
        self.transport.write(
            chunk(
                b'data: {"id":"chatcmpl-8f2b","object":"chat.completion.chunk","created":1764500000,"model":"toy","choices":'
                b'[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}],%s}\n\n' % stamp
            )
        )
        if self.left:
            self.loop.call_at(due + self.gap_s, self.tick, due + self.gap_s)
        else:
            self.transport.write(chunk(LAST % self.events) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def serve(tell: Connection, core: int, events: int, gap_s: float, in_step: bool) -> None:
    pin(core)

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(lambda: Toy(events, gap_s, in_step), "127.0.0.1", 0)
        tell.send(server.sockets[0].getsockname()[1])
        await asyncio.Event().wait()

    uvloop.run(run())


def proxy(tell: Connection, core: int, upstream: str, folder: str) -> None:
    """The proxy as `hoptrace attach` runs it; answers "cpu" with its CPU time in ns, tokens and faults."""
    from hoptrace.collectors.engines.streams.hashing import HashKey
    from hoptrace.collectors.engines.streams.proxy import Proxy, listen
    from hoptrace.collectors.engines.streams.record import Recorder
    from hoptrace.manifest import Manifest
    from hoptrace.writer import TraceWriter

    pin(core)

    async def run() -> None:
        with TraceWriter(Path(folder) / "bench.trace", Manifest(origin="recorded")) as writer:
            recorder = Recorder(writer, "toy", HashKey("bench", b"b" * 32))
            p = Proxy(upstream, recorder, writer.clock.now_ns)
            await p.start(listen("127.0.0.1", 0))
            tell.send(p.port)
            loop = asyncio.get_running_loop()
            while await loop.run_in_executor(None, tell.recv) == "cpu":
                tell.send((time.process_time_ns(), recorder.stats.tokens, recorder.stats.faults))
            await p.close()

    uvloop.run(run())


class Stream(asyncio.Protocol):
    """One request; notes the latency of each event."""

    def __init__(self, body: bytes, latencies: list[int]) -> None:
        self.body, self.latencies = body, latencies
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: toy\r\nContent-Length: %d\r\n\r\n%s" % (len(self.body), self.body)
        )

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        for piece in data.split(STAMP)[1:]:
            self.latencies.append(now - int(piece[: piece.index(b"}")]))
        if data.endswith(b"0\r\n\r\n"):
            self.transport.close()
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the stream broke off"))


def load(tell: Connection, core: int, streams: int) -> None:
    pin(core)
    text = [f"word {i} " * 250 for i in range(streams)]
    bodies = [json.dumps({"model": "toy", "stream": True, "messages": [{"role": "user", "content": t}]}).encode() for t in text]

    async def run(port: int) -> list[int]:
        loop = asyncio.get_running_loop()
        latencies: list[int] = []
        made = await asyncio.gather(
            *(loop.create_connection(lambda b=b: Stream(b, latencies), "127.0.0.1", port) for b in bodies)
        )  # type: ignore[misc]
        await asyncio.gather(*(one.done for _, one in made))
        return latencies

    while (port := tell.recv()) is not None:
        tell.send(uvloop.run(run(port)))


def quantile(values: list[int], q: float) -> float:
    """Linear between the two closest ranks."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=200, help="streams at once")
    parser.add_argument("--events", type=int, default=100, help="token events of a stream")
    parser.add_argument("--rate", type=float, default=5000.0, help="events a second, all streams together")
    parser.add_argument("--in-step", action="store_true", help="all streams' events leave together, as an engine's do")
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    cores = os.cpu_count() or 1
    mine, others = cores - 1, 0

    def start(target: Any, *more: Any) -> tuple[Any, Connection]:
        here, there = spawn.Pipe()
        process = spawn.Process(target=target, args=(there, *more), daemon=True)
        process.start()
        return process, here

    toy, toy_pipe = start(serve, others, args.events, args.streams / args.rate, args.in_step)
    direct = toy_pipe.recv()
    client, client_pipe = start(load, others if cores < 3 else 1, args.streams)
    with tempfile.TemporaryDirectory() as folder:
        middle, middle_pipe = start(proxy, mine, f"http://127.0.0.1:{direct}", folder)
        proxied = middle_pipe.recv()

        def ask(port: int) -> list[int]:
            client_pipe.send(port)
            found: list[int] = client_pipe.recv()
            return found

        ask(direct)
        ask(proxied)  # what is imported and made on first use is not a cost per event
        time.sleep(1.5)
        cpu = tokens = 0
        figures: dict[str, list[float]] = {"p50": [], "p99": [], "control p99": [], "direct p50": [], "direct p99": []}
        for _ in range(args.rounds):
            before = ask(direct)
            middle_pipe.send("cpu")
            cpu_before, tokens_before, _ = middle_pipe.recv()
            through = ask(proxied)
            time.sleep(1.2)  # the recorder and the writer finish: their work belongs to these events
            middle_pipe.send("cpu")
            cpu_after, tokens_after, faults = middle_pipe.recv()
            after = ask(direct)
            cpu += cpu_after - cpu_before
            tokens += tokens_after - tokens_before
            if faults or tokens_after - tokens_before != args.streams * args.events:
                raise SystemExit(
                    f"the proxy recorded {tokens_after - tokens_before} of {args.streams * args.events} tokens, {faults} faults"
                )
            figures["p50"].append(quantile(through, 0.5) - quantile(before + after, 0.5))
            figures["p99"].append(quantile(through, 0.99) - quantile(before, 0.99))
            figures["control p99"].append(quantile(after, 0.99) - quantile(before, 0.99))
            figures["direct p50"].append(quantile(before, 0.5))
            figures["direct p99"].append(quantile(before, 0.99))
        middle_pipe.send("stop")
        middle.join(30)
    client_pipe.send(None)
    for process in (toy, client):
        process.terminate()
        process.join()
    told = {name: statistics.median(values) / 1e6 for name, values in figures.items()}
    print(f"direct latency p50: {told['direct p50']:.3f} ms")
    print(f"direct latency p99: {told['direct p99']:.3f} ms")
    print(f"proxy added p50: {told['p50']:.3f} ms")
    print(f"proxy added p99: {told['p99']:.3f} ms")
    print(f"direct against direct p99: {told['control p99']:.3f} ms")
    print(f"proxy added p99 less direct against direct: {told['p99'] - told['control p99']:.3f} ms")
    print(f"proxy cpu per event: {cpu / 1e3 / tokens:.1f} us")
    print(f"proxy events: {tokens} events")


if __name__ == "__main__":
    main()
