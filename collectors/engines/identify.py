"""Which server answers at a URL, and what it says of itself without being asked twice."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from hoptrace.collectors.engines.http import Api, Reply
from hoptrace.errors import EnvironmentProblem
from hoptrace.manifest import Server

__all__ = ["identify"]

_OWNERS = {"llamacpp": "llama.cpp", "vllm": "vllm", "sglang": "sglang"}
_LOADING_S = 120.0


async def identify(api: Api, *, loading_s: float = _LOADING_S) -> Server:
    """The server at ``api.url``: engine and model as far as ``/v1/models`` and ``/version`` tell.

    Waits up to ``loading_s`` for a server that says that it is still loading its model.

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
    if not (models.ok and _lists_models(listed)) and models.status not in (401, 403):
        # Routes that only take POST answer 405 (or 400) to a GET; a server that has no such route answers 404.
        chat = await api.get("/v1/chat/completions")
        if chat.status not in (400, 401, 403, 405, 415, 422):
            raise EnvironmentProblem(
                f"{api.url} answers, but it is not an OpenAI-compatible server: no /v1/models and no /v1/chat/completions.",
                hint="Give the URL of the inference server itself (llama-server, vLLM, SGLang …).",
            )
    engine = _OWNERS.get(str(first.get("owned_by"))) or ("llama.cpp" if "llama.cpp" in models.server else None)
    version = None
    if engine != "llama.cpp":
        told = (await api.get("/version")).json()
        version = told.get("version") if isinstance(told, Mapping) else None
    model = first["id"] if isinstance(first.get("id"), str) else ""
    context = first.get("max_model_len")
    return Server(
        name=(engine or "server").replace(".", ""),
        url=api.url,
        engine=engine,
        engine_version=version if isinstance(version, str) else None,
        model=model.rsplit("/", 1)[-1] if model.startswith("/") else model or None,
        max_sequences=None,
        context_tokens=context if type(context) is int else None,
    )


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
