"""What answers at a URL: engines, routers, proxies before them, and what is none of these."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from support.pages import ENGINES, Pages, asked, models
from support.toy_server import Toy, serve

from hoptrace.collectors.engines.http import Api
from hoptrace.collectors.engines.identify import identify
from hoptrace.errors import EnvironmentProblem

VLLM = (ENGINES / "vllm" / "metrics.prom").read_text()
SGLANG = (ENGINES / "sglang" / "metrics_0.5.10.prom").read_text()
DYNAMO = (ENGINES / "dynamo" / "frontend.prom").read_text()
TGI = (ENGINES / "tgi" / "metrics.prom").read_text()
# router/src/server.rs of TGI 3.3.7: struct Info; /v1/models names the model as its owner.
TGI_INFO = {"model_id": "org/model", "router": "text-generation-router", "version": "3.3.7", "max_total_tokens": 4096}


async def told(pages: Pages) -> Any:
    async with asked(pages) as api:
        return await identify(api)


async def test_vllm_as_it_answered() -> None:
    pages = Pages(
        {
            "/v1/models": (ENGINES / "vllm" / "models.json").read_text(),
            "/version": (ENGINES / "vllm" / "version.json").read_text(),
            "/metrics": VLLM,
        }
    )
    server = await told(pages)
    assert (server.name, server.engine, server.engine_version) == ("vllm", "vllm", "0.32.0")
    assert (server.model, server.context_tokens, server.config) == ("toy", 1024, {})
    assert len(pages.seen) == 4, pages.seen


@pytest.mark.parametrize(
    ("answers", "headers", "engine", "version"),
    [
        ({"/v1/models": models("sglang"), "/metrics": SGLANG, "/server_info": {"version": "0.5.23"}}, {}, "sglang", "0.5.23"),
        ({"/v1/models": models("sglang"), "/get_server_info": {"version": "0.4.9"}}, {}, "sglang", "0.4.9"),
        ({"/v1/models": models("tensorrt_llm"), "/version": {"version": "1.2.0"}, "/metrics": []}, {}, "tensorrt-llm", "1.2.0"),
        ({"/v1/models": models("nvidia"), "/metrics": DYNAMO}, {}, "dynamo", None),
        ({"/v1/models": models("org/model"), "/info": TGI_INFO, "/metrics": TGI}, {}, "tgi", "3.3.7"),
        ({"/v1/models": models("org/model"), "/info": TGI_INFO}, {}, "tgi", "3.3.7"),
        ({"/v1/models": models("llamacpp")}, {}, "llama.cpp", None),
        ({"/v1/models": models("me")}, {"Server": "llama.cpp"}, "llama.cpp", None),
        ({"/v1/models": models("vllm"), "/workers": {"workers": [{"url": "http://w:1"}], "total": 1}}, {}, "vllm-router", None),
        ({"/v1/models": models("sglang"), "/workers": {"workers": [], "total": 0}}, {}, "sglang-router", None),
        (
            {"/v1/models": models("vllm"), "/metrics": 'vllm:num_requests_running{server="http://w:8000"} 3\n'},
            {}, "production-stack", None,
        ),
        ({"/v1/models": models("openai")}, {"x-litellm-version": "1.80.0"}, "litellm", "1.80.0"),
        ({"/v1/models": models("someone")}, {}, None, None),
        ({"/v1/models": models("nvidia")}, {}, None, None),
    ],
    ids=["sglang", "old sglang", "trtllm", "dynamo", "tgi", "tgi without metrics", "llama.cpp", "by header", "vllm router",
         "sglang router", "production stack", "litellm", "unknown", "says nvidia, is no dynamo"],
)  # fmt: skip
async def test_engines_and_routers(answers: Any, headers: Any, engine: str | None, version: str | None) -> None:
    server = await told(Pages(answers, headers))
    assert (server.engine, server.engine_version) == (engine, version)
    assert server.name == (engine or "server").replace(".", "")


async def test_tensorrt_llm_is_not_asked_for_what_it_forgets() -> None:
    pages = Pages({"/v1/models": models("tensorrt_llm"), "/metrics": [], "/perf_metrics": []})
    await told(pages)
    assert pages.seen == ["/v1/models", "/version"]


@pytest.mark.parametrize(
    ("headers", "front"),
    [({"Server": "nginx/1.27.1"}, "nginx/1.27.1"), ({"Server": "envoy"}, "envoy"), ({"Via": "1.1 x"}, "a proxy"), ({}, None)],
)
async def test_what_stands_before_it_is_named(headers: dict[str, str], front: str | None) -> None:
    server = await told(Pages({"/v1/models": models("vllm"), "/version": {"version": "0.32.0"}}, headers))
    assert (server.engine, server.config.get("front")) == ("vllm", front)


async def test_a_key_is_wanted_and_the_engine_is_told_all_the_same() -> None:
    """vLLM keeps /version and /metrics open (recorded)."""
    server = await told(Pages({"/v1/models": 401, "/version": {"version": "0.32.0"}, "/metrics": VLLM}))
    assert (server.engine, server.engine_version, server.model) == ("vllm", "0.32.0", None)


async def test_everything_is_denied() -> None:
    denied = Pages(dict.fromkeys(("/v1/models", "/version", "/metrics", "/workers", "/info"), 403))
    server = await told(denied)
    assert server.engine is None and server.config == {"denied": True}


async def test_a_worker_that_only_has_metrics() -> None:
    server = await told(Pages({"/metrics": 'dynamo_component_uptime_seconds{dynamo_component="backend"} 3\n' + VLLM}))
    assert (server.engine, server.config["metrics_only"]) == ("dynamo", True)


async def test_several_models() -> None:
    listed = {"data": [{"id": "a", "owned_by": "vllm"}, {"id": "lora-1", "owned_by": "vllm"}]}
    server = await told(Pages({"/v1/models": listed}))
    assert (server.model, server.config["models"]) == ("a", ["a", "lora-1"])


@pytest.mark.parametrize(
    "body",
    [b"\x00\xff" * 40000, b"[" * 200_000, b'{"data": ' * 50_000, b'{"data": [{"id": 3}]}', b"null", b'"text"', b"{}"],
    ids=["binary", "deep list", "deep object", "id no text", "null", "text", "empty"],
)
async def test_hostile_answers_are_no_server(body: bytes) -> None:
    with pytest.raises(EnvironmentProblem, match="not an OpenAI-compatible server"):
        await told(Pages(dict.fromkeys(("/v1/models", "/version", "/metrics", "/info", "/workers"), body)))


async def test_an_endless_answer_is_cut() -> None:
    async def endless(request: web.BaseRequest) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Server": "uvicorn"})
        await out.prepare(request)
        try:
            while True:
                await out.write(b"x" * (1 << 20))
        except (ConnectionError, asyncio.CancelledError):
            return out

    toy = Toy()
    toy.handle = endless  # type: ignore[method-assign]
    async with serve(toy):
        api = Api(toy.url)
        reply = await api.get("/metrics")
        assert reply.cut and len(reply.body) == 16 << 20
        await api.close()


async def test_a_server_that_is_loading_is_waited_for() -> None:
    pages = Pages({"/v1/models": 503})

    async def ready() -> None:
        await asyncio.sleep(0.3)
        pages.answers["/v1/models"] = models("vllm")

    task = asyncio.create_task(ready())
    assert (await told(pages)).engine == "vllm"
    await task
    async with asked(Pages({"/v1/models": 503})) as api:
        with pytest.raises(EnvironmentProblem, match="still loading"):
            await identify(api, loading_s=0.0)
