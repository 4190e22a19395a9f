"""A session in a process of its own, so that the proxy's stamps don't wait for the caller's Python."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hoptrace.errors import EnvironmentProblem, HoptraceError

__all__ = ["recording"]

_END_S = 120.0


@contextmanager
def recording(url: str, out: Path, **options: Any) -> Iterator[str]:
    """Record ``url`` into ``out`` while the block runs; gives the address of the recording proxy.

    ``options`` are those of :class:`hoptrace.collectors.session.Session`; the proxy takes a free port of 127.0.0.1.

    Raises:
        HoptraceError: as the session does; EnvironmentProblem if its process died.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=_run, args=(there, url, str(out), options), name="hoptrace-session")
    child.start()
    there.close()
    try:
        address = _hear(here)
        try:
            yield address
        finally:
            with suppress(OSError):
                here.send("stop")
        if here.poll(_END_S):
            _hear(here)
    finally:
        child.join(_END_S)
        if child.is_alive():
            child.kill()
        here.close()


def _hear(pipe: Connection) -> str:
    try:
        told = pipe.recv()
    except EOFError:
        raise EnvironmentProblem(
            "The recording process died.", hint="What it had written reads all the same; free some memory and run it again."
        ) from None
    if isinstance(told, HoptraceError):
        raise told
    return str(told)


def _run(tell: Connection, url: str, out: str, options: dict[str, Any]) -> None:
    import asyncio
    import signal
    import sys

    import uvloop

    from hoptrace.collectors.session import Session

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller, who then says stop
    sys.setswitchinterval(0.0005)

    async def main() -> None:
        async with Session(url, out, proxy=("127.0.0.1", 0), **options) as session:
            tell.send(session.proxy_url)
            # A closed pipe: the caller has died, and the trace is to be closed all the same.
            with suppress(EOFError, OSError):
                await asyncio.to_thread(tell.recv)

    try:
        uvloop.run(main())
        tell.send("closed")
    except HoptraceError as e:
        with suppress(OSError):
            tell.send(e)
