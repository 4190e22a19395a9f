"""Which server answers at a URL, and what it says of itself without being asked twice.

At most six short questions: ``/v1/models`` first, then what tells the candidates apart. TensorRT-LLM's ``/metrics`` forgets what
it has told, so a server that says it is TensorRT-LLM is not asked for it here.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

from hoptrace.collectors.engines.http import Api, Reply
from hoptrace.errors import EnvironmentProblem
from hoptrace.manifest import Server

__all__ = ["GATEWAYS", "first_of", "identify"]

# owned_by in /v1/models; TGI puts the model's own name there, other OpenAI-compatible servers anything.
_OWNERS = {
    "llamacpp": "llama.cpp", "vllm": "vllm", "sglang": "sglang", "tensorrt_llm": "tensorrt-llm", "nvidia": "dynamo",
}  # fmt: skip

GATEWAYS = {
    "vllm-router": "the vLLM router",
    "production-stack": "vLLM production-stack's router",
    "sglang-router": "SGLang's router",
    "litellm": "LiteLLM",
}
"""Routers that are told by their own words. Their workers have URLs of their own."""

# The first that matches decides: a router's page may hold its workers' names too.
_PAGES = (
    (re.compile(r"^dynamo_(frontend|component|router|request_plane)_", re.M), "dynamo"),
    (re.compile(r'^vllm:[a-z_]+\{[^}\n]*\bserver="', re.M), "production-stack"),
    (re.compile(r"^vllm_router_", re.M), "vllm-router"),
    (re.compile(r"^(sgl_router|smg)_", re.M), "sglang-router"),
    (re.compile(r"^vllm:", re.M), "vllm"),
    (re.compile(r"^sglang[:_]", re.M), "sglang"),
    (re.compile(r"^trtllm_", re.M), "tensorrt-llm"),
    (re.compile(r"^tgi_", re.M), "tgi"),
    (re.compile(r"^llamacpp:", re.M), "llama.cpp"),
)
_PAGE_CHARS = 1 << 20

# What stands between: by the Server header, else by a header that only it adds.
_FRONTS = re.compile(r"nginx|openresty|envoy|cloudflare|caddy|kong|apache|awselb|traefik|haproxy|google frontend|tengine", re.I)
_FRONT_HEADERS = (
    ("x-envoy-upstream-service-time", "envoy"), ("x-kong-upstream-latency", "kong"), ("cf-ray", "cloudflare"),
    ("x-amzn-trace-id", "an AWS load balancer"), ("via", "a proxy"),
)  # fmt: skip
_NO_ROUTE = (400, 401, 403, 405, 415, 422)
_LOADING_S = 120.0


async def identify(api: Api, *, loading_s: float = _LOADING_S) -> Server:
    """The server at ``api.url``: engine, version and model as far as it tells.

    A router or gateway is named as such: ``engine`` is one of :data:`GATEWAYS` or ``dynamo``; ``config["front"]`` names a proxy
    such as nginx that stands before whatever it is. Waits up to ``loading_s`` for a server that says that it is still loading.

    Raises:
        EnvironmentProblem: nothing listens there, it does not answer, or what answers is not OpenAI-compatible.
    """
    models = await api.get("/v1/models")
    waited = 0.0
    while models.status == 503 and waited < loading_s:
        await asyncio.sleep(1.0)
        waited += 1.0
        models = await api.get("/v1/models")
    if models.status is None:
        raise _no_answer(api.url, models)
    if models.status == 503:
        raise EnvironmentProblem(f"{api.url} is still loading (HTTP 503).", hint="Run hoptrace again when the server is ready.")
    listed = models.json()
    first = _first_model(listed)
    engine = _OWNERS.get(str(first.get("owned_by"))) or ("llama.cpp" if "llama.cpp" in models.server else None)
    config: dict[str, Any] = {}
    version = None
    if engine == "tensorrt-llm":
        version = _version(await api.get("/version"))
    elif engine != "llama.cpp":
        engine, version = await _look(api, engine, models)
    if not (models.ok and _lists_models(listed)) and not models.denied:
        if engine is None and (await api.get("/v1/chat/completions")).status not in _NO_ROUTE:
            # Routes that only take POST answer 405 (or 400) to a GET; a server that has no such route answers 404.
            raise EnvironmentProblem(
                f"{api.url} answers, but it is not an OpenAI-compatible server: no /v1/models and no /v1/chat/completions.",
                hint="Give the URL of the inference server itself (llama-server, vLLM, SGLang …).",
            )
        if engine is not None and models.status == 404:
            config["metrics_only"] = True
    if models.denied:
        config["denied"] = True
    if front := _front(models):
        config["front"] = front
    ids = [m["id"] for m in listed["data"]][:32] if models.ok and _lists_models(listed) else []
    if len(ids) > 1:
        config["models"] = ids
    context = first.get("max_model_len")
    model = ids[0] if ids else ""
    return Server(
        name=(engine or "server").replace(".", ""),
        url=api.url,
        engine=engine,
        engine_version=version,
        model=model.rstrip("/").rsplit("/", 1)[-1] if model.startswith("/") else model or None,
        max_sequences=None,
        context_tokens=context if type(context) is int else None,
        config=config,
    )


async def _look(api: Api, owner: str | None, models: Reply) -> tuple[str | None, str | None]:
    """Engine and version of what is neither llama.cpp nor TensorRT-LLM by its own words."""
    version, metrics, workers = await asyncio.gather(api.get("/version"), api.get("/metrics"), api.get("/workers"))
    page = metrics.text[:_PAGE_CHARS] if metrics.ok else ""
    by_page = next((name for pattern, name in _PAGES if pattern.search(page)), None)
    if by_page in GATEWAYS or by_page == "dynamo":
        return by_page, _version(version)
    told = workers.json() if workers.ok else None
    if isinstance(told, Mapping) and isinstance(told.get("workers"), list):
        # vLLM's router is a fork of SGLang's: same routes. Both hand /v1/models and /get_server_info on to a worker.
        return ("vllm-router" if owner == "vllm" else "sglang-router"), None
    if "x-litellm-version" in models.headers or "x-litellm-version" in metrics.headers:
        return "litellm", models.headers.get("x-litellm-version") or metrics.headers.get("x-litellm-version")
    engine = by_page or owner
    if engine == "dynamo" and by_page is None:
        engine = None  # others say nvidia too: Dynamo's frontend always has its metrics
    if engine in (None, "tgi"):
        info = (await api.get("/info")).json()
        if isinstance(info, Mapping) and (info.get("router") == "text-generation-router" or (engine and "model_id" in info)):
            return "tgi", _text(info.get("version"))
    if engine == "sglang":
        info = (await first_of(api, "/server_info", "/get_server_info")).json()
        return engine, _text(info.get("version")) if isinstance(info, Mapping) else None
    return engine, _version(version)


async def first_of(api: Api, *paths: str) -> Reply:
    """The first of the paths that is there; the last one's answer if none is."""
    reply = Reply(None)
    for path in paths:
        reply = await api.get(path)
        if reply.ok or reply.status is None or reply.denied:
            break
    return reply


def _text(value: object) -> str | None:
    return value[:200] if isinstance(value, str) else None


def _version(reply: Reply) -> str | None:
    told = reply.json() if reply.ok else None
    return _text(told.get("version")) if isinstance(told, Mapping) else None


def _front(reply: Reply) -> str | None:
    if _FRONTS.search(reply.server):
        return reply.server[:100]
    return next((name for header, name in _FRONT_HEADERS if header in reply.headers), None)


def _lists_models(listed: object) -> bool:
    """OpenAI's form: ``data`` is a list of objects with an ``id``."""
    data = listed.get("data") if isinstance(listed, Mapping) else None
    return isinstance(data, list) and all(isinstance(m, Mapping) and isinstance(m.get("id"), str) for m in data)


def _first_model(listed: object) -> Mapping[str, Any]:
    data = listed.get("data") if isinstance(listed, Mapping) else None
    first = data[0] if isinstance(data, list) and data else None
    return first if isinstance(first, Mapping) else {}


def _no_answer(url: str, reply: Reply) -> EnvironmentProblem:
    if reply.problem == "refused":
        return EnvironmentProblem(f"Nothing listens at {url}.", hint="Start the server, or check host and port.")
    if reply.problem == "unknown host":
        return EnvironmentProblem(f"The host of {url} is not known.", hint="Check its name.")
    if reply.problem == "timeout":
        return EnvironmentProblem(f"{url} takes the connection but does not answer.", hint="Is it stuck, or another service?")
    if reply.problem == "not HTTP":
        return EnvironmentProblem(f"What listens at {url} does not speak HTTP.", hint="Check the port, and http or https.")
    hint = "Check host, port and network."
    if url.startswith("https:"):
        hint += f" If the server speaks plain HTTP, write http{url.removeprefix('https')}."
    return EnvironmentProblem(f"{url} can't be reached: {reply.problem}.", hint=hint)
