"""A toy inference server on aiohttp: it sends what a test plants, byte for byte, and remembers what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.http import HttpVersion11

Step = bytes | float | str
"""Bytes to write, seconds to sleep, or one of the words "break" (close without the end) and "hang" (never go on)."""


@dataclass
class Toy:
    """The server's script and memory. ``steps`` is the answer to every POST."""

    steps: Sequence[Step] = ()
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "text/event-stream"})
    length: int | None = None
    url: str = ""
    requests: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    connections: set[object] = field(default_factory=set)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    get: Callable[[web.BaseRequest], web.StreamResponse | None] = lambda request: None

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.connections.add(request.transport)
        body = await request.read()
        self.requests.append((request.method, request.raw_path, dict(request.headers), body))
        if request.method != "POST":
            return self.get(request) or web.Response(status=404)
        out = web.StreamResponse(status=self.status, headers=self.headers)
        if self.length is not None:
            out.content_length = self.length
        elif request.version >= HttpVersion11:
            out.enable_chunked_encoding()
        else:
            out.force_close()
        try:
            await out.prepare(request)
            for step in self.steps:
                if isinstance(step, bytes):
                    await out.write(step)
                elif step == "break":
                    assert request.transport is not None
                    request.transport.close()
                    return out
                else:
                    await asyncio.sleep(3600.0 if isinstance(step, str) else step)
            await out.write_eof()
        except (asyncio.CancelledError, ConnectionError):
            self.cancelled.set()
            raise
        return out


@asynccontextmanager
async def serve(toy: Toy, port: int = 0, idle_s: float = 75.0) -> AsyncIterator[Toy]:
    """The toy on a free port of 127.0.0.1. It closes connections that are idle for ``idle_s``."""
    server = web.Server(toy.handle, handler_cancellation=True, access_log=None, keepalive_timeout=idle_s)
    runner = web.ServerRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    toy.url = site.name if port else f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield toy
    finally:
        await runner.cleanup()


def event(data: str) -> bytes:
    """One server-sent event."""
    return f"data: {data}\n\n".encode()


def token(text: str, finish: str | None = None, more: str = "") -> bytes:
    """One chunk of a completion."""
    import json

    reason = json.dumps(finish)
    return event(f'{{"id":"c1","choices":[{{"index":0,"text":{json.dumps(text)},"finish_reason":{reason}}}]{more}}}')
