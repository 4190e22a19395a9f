"""The sniffer beside a real vLLM: every token of every stream, on connections that are used again and again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from support import vllm_server
from support.sniffing import needs_right, sniffing

pytestmark = [
    pytest.mark.vllm,
    needs_right,
    pytest.mark.skipif(vllm_server.python() is None, reason="HOPTRACE_VLLM_PYTHON names no Python that has vLLM"),
]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[vllm_server.VllmServer]:
    started = vllm_server.start(tmp_path, "--max-num-seqs", "4")
    try:
        started.wait()
        yield started
    finally:
        started.kill()


async def asked(client: aiohttp.ClientSession, url: str, number: int) -> tuple[str, list[int], int]:
    """Identifier, number of tokens in each chunk, and the total that the server told."""
    body = {
        "model": "toy", "prompt": list(range(5, 50 + number)), "max_tokens": 10 + number, "ignore_eos": True, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
    }  # fmt: skip
    counts, told, name = [], 0, ""
    async with client.post(url + "/v1/completions", json=body) as answer:
        assert answer.status == 200
        async for line in answer.content:
            if line.startswith(b"data: {"):
                data = json.loads(line[6:])
                name = data["id"]
                counts += [len(c["token_ids"]) for c in data["choices"] if c.get("token_ids")]
                told = (data.get("usage") or {}).get("completion_tokens", told)
    return name, counts, told


async def test_every_token_of_a_real_vllm(server: vllm_server.VllmServer, tmp_path: Path) -> None:
    async with sniffing(server.url, tmp_path) as s:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=4)) as client:
            told = await asyncio.gather(*(asked(client, server.url, i) for i in range(16)))
        await s.until(16)
        requests = {r["request_id"]: r for r in s.rows("requests")}
        tokens = s.rows("tokens", "request", "index")
        stages = {t["request"]: t for t in s.rows("stages")}
    assert set(requests) == {name for name, _, _ in told}
    for number, (name, counts, total) in enumerate(told):
        row = requests[name]
        mine = [t for t in tokens if t["request"] == row["request"]]
        assert (row["output_tokens"], row["prompt_tokens"], row["max_tokens"], row["error"]) == (
            total,
            45 + number,
            10 + number,
            None,
        )
        assert total == 10 + number == sum(t["count"] for t in mine) and [t["count"] for t in mine] == counts
        times = [row["received_ns"], *(t["time_ns"] for t in mine), row["finish_ns"]]
        assert times == sorted(times)
        assert stages[row["request"]]["end_reason"] == "done"
    assert s.sniffer.lost_bytes == s.sniffer.dropped == s.recorder.stats.faults == 0
    assert s.writer.manifest.rows_dropped == {} and s.writer.manifest.notes == []
