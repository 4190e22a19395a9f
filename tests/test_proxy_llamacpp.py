"""The proxy before a real llama.cpp server: each of its APIs, streamed and not, counted as the server counts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop
from support.raw import Seen, between

from hoptrace.demo_server import DemoServer

pytestmark = pytest.mark.server

N = 12
TEXT = "Tell me a long story about a hare, a tortoise and their race. " * 6
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": N, "ignore_eos": True}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    with DemoServer(model, slots=4, log=tmp_path_factory.mktemp("llama") / "server.log") as one:
        yield one


async def _ask(url: str, path: str, body: dict[str, Any]) -> bytes:
    async with aiohttp.ClientSession() as client, client.post(url + path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.read()


CASES = {
    "completions": ("/v1/completions", {"prompt": TEXT, "max_tokens": N, "ignore_eos": True} | STREAM),
    "chat": ("/v1/chat/completions", CHAT | STREAM),
    "timings": ("/v1/chat/completions", CHAT | STREAM | {"timings_per_token": True, "return_progress": True}),
    "native": ("/completion", {"prompt": TEXT, "n_predict": N, "ignore_eos": True, "stream": True, "return_progress": True}),
    "messages": ("/v1/messages", CHAT | {"stream": True}),
    "responses": ("/v1/responses", {"input": TEXT, "max_output_tokens": N, "ignore_eos": True, "stream": True}),
    "whole": ("/v1/chat/completions", CHAT),
}


async def _all(server: DemoServer, folder: Path) -> tuple[dict[str, dict[str, Any]], dict[str, list[dict[str, Any]]], Seen]:
    async with between(server.url, folder) as seen:
        for path, body in CASES.values():
            got = await _ask(seen.proxy.url, path, body)
            assert got
        await seen.quiet()
        rows = sorted(seen.rows("requests"), key=lambda r: r["request"])
        tokens = seen.rows("tokens")
        by_case = dict(zip(CASES, rows, strict=True))
        return by_case, {n: [t for t in tokens if t["request"] == r["request"]] for n, r in by_case.items()}, seen


def test_every_api_is_counted_as_the_server_counts(server: DemoServer, tmp_path: Path) -> None:
    rows, tokens, seen = uvloop.run(_all(server, tmp_path))
    stats = seen.recorder.stats
    assert (stats.faults, stats.failed, stats.finished) == (0, 0, len(CASES)), stats
    assert seen.writer.manifest.rows_dropped == {}
    for name, row in rows.items():
        assert row["error"] is None, name
        assert row["output_tokens"] == N, (name, row)
        assert row["prompt_tokens"] > 60, name
        assert row["max_tokens"] == N, name
        if name != "whole":
            emitted = sorted(tokens[name], key=lambda t: t["index"])
            assert row["first_token_ns"] == emitted[0]["time_ns"] and row["last_token_ns"] == emitted[-1]["time_ns"], name
            assert row["received_ns"] < row["first_token_ns"] <= row["finish_ns"], name
    for name in ("native", "timings"):
        assert sum(t["count"] for t in tokens[name]) == N, name
        assert rows[name]["received_ns"] <= rows[name]["scheduled_ns"] <= rows[name]["first_token_ns"], name


def test_a_client_that_leaves_frees_the_slot_at_once(server: DemoServer, tmp_path: Path) -> None:
    async def run() -> None:
        async with between(server.url, tmp_path) as seen, aiohttp.ClientSession() as client:
            body = {"prompt": TEXT, "n_predict": 2000, "ignore_eos": True, "stream": True}
            async with client.post(seen.proxy.url + "/completion", json=body) as answer:
                await answer.content.readany()
                answer.close()
            for _ in range(100):
                async with client.get(server.url + "/slots") as slots:
                    if not any(s["is_processing"] for s in json.loads(await slots.read())):
                        break
                await asyncio.sleep(0.05)
            else:
                raise AssertionError("the server still works for a client that left")
            await seen.quiet()
            assert seen.recorder.stats.cancelled == 1

    asyncio.run(run())


def test_the_text_is_the_servers(server: DemoServer, tmp_path: Path) -> None:
    body = {"prompt": "1 2 3 4 5 6", "n_predict": 8, "temperature": 0, "seed": 1, "cache_prompt": False}

    async def run() -> None:
        async with between(server.url, tmp_path) as seen:
            direct, proxied = [json.loads(await _ask(url, "/completion", body)) for url in (server.url, seen.proxy.url)]
            assert direct["content"] == proxied["content"]

    asyncio.run(run())
