"""Servers and clients that speak raw bytes, for what a proxy must leave as it is."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

import hoptrace
from hoptrace.collectors.engines.streams.proxy import Proxy, listen
from hoptrace.collectors.engines.streams.record import Recorder
from hoptrace.manifest import Manifest
from hoptrace.writer import TraceWriter

__all__ = ["Handler", "Seen", "between", "both_loops", "connect", "raw_server", "until"]

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Seen:
    """A proxy and its trace."""

    def __init__(self, proxy: Proxy, recorder: Recorder, writer: TraceWriter) -> None:
        self.proxy, self.recorder, self.writer = proxy, recorder, writer

    async def quiet(self) -> None:
        """Wait until no client is there and everything is looked into."""
        await until(lambda: not self.proxy.clients and not self.recorder.busy)

    def rows(self, table: str) -> list[dict[str, Any]]:
        self.recorder.flush()
        self.writer.flush()
        return hoptrace.open(self.writer.path).table(table).collect().to_dicts()


@asynccontextmanager
async def raw_server(handler: Handler, host: str = "127.0.0.1", port: int = 0, **more: Any) -> AsyncIterator[int]:
    """A server whose every connection is ``handler``'s; gives its port."""

    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await handler(reader, writer)
        with suppress(Exception):
            writer.close()

    server = await asyncio.start_server(guarded, host, port, **more)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@asynccontextmanager
async def between(upstream: str, path: Path, host: str = "127.0.0.1") -> AsyncIterator[Seen]:
    """A proxy before ``upstream``."""
    writer = TraceWriter(path / "t.trace", Manifest(origin="recorded"))
    recorder = Recorder(writer, "raw", None)
    proxy = Proxy(upstream, recorder, writer.clock.now_ns)
    await proxy.start(listen(host, 0))
    try:
        yield Seen(proxy, recorder, writer)
    finally:
        await proxy.close()
        writer.close()


async def connect(port: int, host: str = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client's connection."""
    return await asyncio.open_connection(host, port, limit=1 << 26)


async def until(true: Callable[[], object], within_s: float = 10.0) -> None:
    """Wait until ``true()`` is; AssertionError if it never becomes so."""
    for _ in range(int(within_s * 100)):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never became so")


def both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test on asyncio's loop and on uvloop's."""

    def run(loop: str, **given: Any) -> None:
        (uvloop.run if loop == "uvloop" else asyncio.run)(test(**given))

    found = inspect.signature(test)
    added = inspect.Parameter("loop", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = found.replace(parameters=[*found.parameters.values(), added], return_annotation=None)  # type: ignore[attr-defined]
    run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
    marked: Callable[..., None] = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])(run)
    return marked
