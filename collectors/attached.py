"""A session for programs that have no event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop

from hoptrace.collectors.session import Session

__all__ = ["attached"]


@contextmanager
def attached(url: str | Sequence[str], out: Path | str, **options: Any) -> Iterator[Session]:
    """A :class:`Session` in a thread with an event loop of its own, for programs that have none. Same arguments, same errors."""
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="hoptrace-session", daemon=True)
    thread.start()

    async def make() -> Session:
        session = Session(url, out, **options)
        await session.start()
        return session

    try:
        session = asyncio.run_coroutine_threadsafe(make(), loop).result()
        try:
            yield session
        finally:
            asyncio.run_coroutine_threadsafe(session.close(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
