"""The proxy before a real vLLM: counts, totals and the engine's own durations of each kind of request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop
from support import vllm_server
from support.raw import between

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(vllm_server.python() is None, reason="HOPTRACE_VLLM_PYTHON names no Python with vLLM"),
]

PROMPT = list(range(5, 69))
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
IDS = {"return_token_ids": True, "ignore_eos": True}
EACH = {"include_usage": True, "continuous_usage_stats": True}
CASES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "completion": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 12} | IDS | STREAM, 64, 12),
    "continuous": (
        "/v1/completions",
        {"prompt": PROMPT, "max_tokens": 12, "stream": True, "stream_options": EACH} | IDS,
        64,
        12,
    ),
    "two": ("/v1/completions", {"prompt": PROMPT, "n": 2, "temperature": 1.0, "max_tokens": 7} | IDS | STREAM, 64, 14),
    "batch": ("/v1/completions", {"prompt": [PROMPT, PROMPT[:9]], "max_tokens": 5} | IDS | STREAM, 73, 10),
    "generate": (
        "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"max_tokens": 6, "ignore_eos": True}} | STREAM, 64, 6,
    ),
    "whole": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 4} | IDS, 64, 4),
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[vllm_server.VllmServer]:
    flags = ("--skip-tokenizer-init", "--enable-per-request-metrics", "--enable-prompt-tokens-details", "--enable-scale-out")
    one = vllm_server.start(tmp_path_factory.mktemp("vllm"), *flags)
    try:
        yield one.wait()
    finally:
        one.kill()


def test_every_kind_of_request(server: vllm_server.VllmServer, tmp_path: Path) -> None:
    async def run() -> None:
        async with between(server.url, tmp_path) as seen:
            for name, (path, body, _, _) in CASES.items():
                headers = {"X-Request-Id": f"me-{name}"}
                async with aiohttp.ClientSession() as c, c.post(seen.proxy.url + path, json=body, headers=headers) as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.read()
            await seen.quiet()
            stats = seen.recorder.stats
            assert (stats.faults, stats.finished, stats.counts_differ) == (0, len(CASES), 0), stats
            rows = {r["request_id"].removeprefix("me-"): r for r in seen.rows("requests")}
            tokens = seen.rows("tokens")
            for name, (_, _, prompt, output) in CASES.items():
                row = rows[name]
                assert (row["prompt_tokens"], row["output_tokens"], row["error"]) == (prompt, output, None), name
                mine = [t for t in tokens if t["request"] == row["request"]]
                assert sum(t["count"] for t in mine) == (0 if name == "whole" else output), name
            for name in ("completion", "continuous", "whole"):
                row = rows[name]
                times = [row[k] for k in ("received_ns", "queued_ns", "scheduled_ns", "engine_first_token_ns", "finish_ns")]
                assert times == sorted(times), (name, times)
            assert seen.recorder.links.find("cmpl-me-two-0-0123abcd") == rows["two"]["request"]

    uvloop.run(run())
