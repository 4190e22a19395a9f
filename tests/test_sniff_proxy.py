"""Sniffer and proxy on the same run, before a real llama.cpp server: the same requests and tokens, at the same times."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.sniffing import needs_right, sniffing

import hoptrace
from hoptrace.collectors.engines.streams.hashing import HashKey
from hoptrace.collectors.engines.streams.proxy import Proxy, listen
from hoptrace.collectors.engines.streams.record import Recorder
from hoptrace.demo_server import DemoServer
from hoptrace.manifest import Manifest
from hoptrace.writer import TraceWriter

pytestmark = [pytest.mark.server, needs_right]
KEY = HashKey("test", b"k" * 32)
EQUAL = (
    "request_id",
    "model",
    "prompt_tokens",
    "output_tokens",
    "max_tokens",
    "prompt_chars",
    "prefix_blocks",
    "finish_reason",
    "error",
)
REQUESTS = 16


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[DemoServer]:
    with DemoServer(model, slots=4, log=tmp_path / "server.log") as s:
        yield s


async def ask(client: aiohttp.ClientSession, url: str, number: int) -> None:
    await asyncio.sleep(0.05 * number)
    text = f"Story {number}. " + "Once upon a time there was a small house by the sea. " * (number % 5)
    body: dict[str, Any] = {"max_tokens": 8 + number, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    chat = number % 2 == 0
    body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    async with client.post(url + ("/v1/chat/completions" if chat else "/v1/completions"), json=body) as answer:
        assert answer.status == 200
        await answer.read()


def table(trace: hoptrace.Trace, name: str, *by: str) -> list[dict[str, Any]]:
    return trace.table(name).collect().sort(by).to_dicts()


async def test_both_see_the_same(server: DemoServer, tmp_path: Path) -> None:
    async with sniffing(server.url, tmp_path, key=KEY) as s:
        beat = asyncio.create_task(beats(s.sniffer))
        with TraceWriter(tmp_path / "proxied.trace", Manifest(origin="recorded"), clock=s.writer.clock) as writer:
            proxy = Proxy(server.url, Recorder(writer, "toy", KEY), writer.clock.now_ns)
            await proxy.start(listen("127.0.0.1", 0))
            async with aiohttp.ClientSession() as client:
                await asyncio.gather(*(ask(client, proxy.url, i) for i in range(REQUESTS)))
            await proxy.close()
        beat.cancel()
    proxied, sniffed = hoptrace.open(tmp_path / "proxied.trace"), hoptrace.open(tmp_path / "sniffed.trace")
    a, b = table(proxied, "requests", "request_id"), table(sniffed, "requests", "request_id")
    assert len(a) == len(b) == REQUESTS and s.recorder.stats.finished == REQUESTS
    for mine, its in zip(a, b, strict=True):
        assert {c: mine[c] for c in EQUAL} == {c: its[c] for c in EQUAL}
    assert s.sniffer.lost_bytes == s.sniffer.dropped == 0 and s.writer.manifest.rows_dropped == {}

    # Requests are told apart by the server's identifier: their numbers are in the order in which they came.
    number = {r["request"]: r["request_id"] for r in b}
    same = {r["request"]: r["request_id"] for r in a}
    ours = [
        (number[t["request"]], t["sequence"], t["index"], t["count"], t["time_ns"])
        for t in table(sniffed, "tokens", "request", "index")
    ]
    theirs = [
        (same[t["request"]], t["sequence"], t["index"], t["count"], t["time_ns"])
        for t in table(proxied, "tokens", "request", "index")
    ]
    ours.sort()
    theirs.sort()
    assert [t[:4] for t in ours] == [t[:4] for t in theirs] and len(ours) > 200
    order_ns = [abs(x[4] - y[4]) for x, y in zip(ours, theirs, strict=True)]
    report(order_ns, "tokens")
    asked = [abs(x["enqueued_ns"] - y["enqueued_ns"]) for x, y in zip(stays(proxied), stays(sniffed), strict=True)]
    report(asked, "handed to the engine")
    # Within 1 ms where it is calm: docs/sniff.md has the figures. A busy machine delays the reads, not the stamps of the kernel.
    for found in (order_ns, asked):
        assert statistics.median(found) < 5_000_000 and sorted(found)[int(0.95 * len(found))] < 50_000_000


def stays(trace: hoptrace.Trace) -> list[dict[str, Any]]:
    return table(trace, "stages", "engine_request_id")


def report(found: list[int], of: str) -> None:
    found = sorted(found)
    figures = ", ".join(
        f"p{round(q * 100)} {found[min(int(q * len(found)), len(found) - 1)] / 1e3:.0f} µs" for q in (0.5, 0.95, 0.99, 1.0)
    )
    print(f"|sniffed − proxied| of {len(found)} {of}: {figures}")


async def beats(sniffer: Any) -> None:
    while True:
        await sniffer.sample()
        await asyncio.sleep(0.1)
