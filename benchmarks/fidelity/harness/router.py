"""A router before several servers: completions by turns, or (``--split``) first to the prefill server, then to the decode server
with what the first one tells of its KV (vLLM's NIXL connector).

Run: ``python router.py PORT [--split] URL URL …``.
"""

from __future__ import annotations

import argparse
import itertools
import json
from typing import Any

import aiohttp
from aiohttp import web

_HOP = {"host", "content-length", "transfer-encoding", "connection", "keep-alive", "accept-encoding", "content-encoding"}
_ASK = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
        "remote_host": None, "remote_port": None}  # fmt: skip


def application(urls: list[str], *, split: bool) -> web.Application:
    """The router as an application of aiohttp."""
    turns = itertools.cycle(urls)
    key = web.AppKey("session", aiohttp.ClientSession)

    async def started(app: web.Application) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        app[key] = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=timeout)

    async def ended(app: web.Application) -> None:
        await app[key].close()

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP}
        if not split:
            return await _passed(request, request.app[key], next(turns), body, headers)
        first = {k: v for k, v in body.items() if k != "stream_options"}
        first |= {"max_tokens": 1, "stream": False, "kv_transfer_params": _ASK}
        async with request.app[key].post(urls[0] + request.path, json=first, headers=headers) as answer:
            told = await answer.read()
            if answer.status != 200:
                return web.Response(status=answer.status, body=told, content_type="application/json")
        second = body | {"kv_transfer_params": json.loads(told).get("kv_transfer_params")}
        return await _passed(request, request.app[key], urls[1], second, headers)

    async def other(request: web.Request) -> web.StreamResponse:
        async with request.app[key].request(request.method, urls[0] + request.path_qs, data=await request.read()) as answer:
            return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)

    app = web.Application(client_max_size=1 << 28)
    app.on_startup.append(started)
    app.on_cleanup.append(ended)
    app.router.add_post("/v1/completions", complete)
    app.router.add_route("*", "/{rest:.*}", other)
    return app


async def _passed(
    request: web.Request, session: aiohttp.ClientSession, url: str, body: dict[str, Any], headers: dict[str, str]
) -> web.StreamResponse:
    async with session.post(url + request.path, json=body, headers=headers) as answer:
        out = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.headers.get("Content-Type", "text/plain")})
        await out.prepare(request)
        async for data in answer.content.iter_any():
            await out.write(data)
        await out.write_eof()
        return out


if __name__ == "__main__":
    _parser = argparse.ArgumentParser()
    _parser.add_argument("port", type=int)
    _parser.add_argument("urls", nargs="+")
    _parser.add_argument("--split", action="store_true")
    _a = _parser.parse_args()
    web.run_app(application(_a.urls, split=_a.split), host="127.0.0.1", port=_a.port, access_log=None, print=None)
