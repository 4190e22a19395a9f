"""A toy server that answers GET by path, and contexts to ask it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from support.toy_server import Toy, serve

from hoptrace.collectors.context import Context, Options
from hoptrace.collectors.engines.http import Api
from hoptrace.collectors.hardware.listener import Found
from hoptrace.collectors.links import Links
from hoptrace.manifest import Server
from hoptrace.writer import TraceWriter

__all__ = ["ENGINES", "Pages", "asked", "context", "models"]

ENGINES = Path(__file__).parents[1] / "data" / "engines"

Answer = str | bytes | dict[str, Any] | list[Any] | int
"""A text, JSON, or the number of an error."""


def models(owner: str, name: str = "org/model", **more: Any) -> dict[str, Any]:
    """What /v1/models says."""
    return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": owner, **more}]}


class Pages:
    """The answers by path (with the query), which may be changed while the server runs; ``seen`` are the paths asked."""

    def __init__(self, answers: Mapping[str, Answer], headers: Mapping[str, str] | None = None) -> None:
        self.answers: dict[str, Answer] = dict(answers)
        self.headers = dict(headers or {"Server": "uvicorn"})
        self.seen: list[str] = []

    def __call__(self, request: Any) -> Any:
        self.seen.append(request.raw_path)
        answer = self.answers.get(request.raw_path, 404)
        if isinstance(answer, int):
            return web.Response(status=answer, body=b'{"detail":"no"}', headers=self.headers)
        if isinstance(answer, dict | list):
            return web.json_response(answer, headers=self.headers)
        return web.Response(body=answer.encode() if isinstance(answer, str) else answer, headers=self.headers)


@asynccontextmanager
async def asked(pages: Pages, key: str | None = None) -> AsyncIterator[Api]:
    """The pages behind an Api."""
    async with serve(Toy(get=pages)) as toy:
        api = Api(toy.url, key)
        try:
            yield api
        finally:
            await api.close()


def context(
    api: Api, writer: TraceWriter | None = None, *, server: Server | None = None, pid: int | None = None, **options: Any
) -> Context:
    """A context of one server, ``s``."""
    links = Links(writer) if writer is not None else None
    find = (lambda: Found(pid)) if pid is not None else None
    return Context(api, server or Server(name="s"), "h", writer, links, find, None, Options(**options))
