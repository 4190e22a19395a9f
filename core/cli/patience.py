"""Work that may have to wait for a server: says so when it takes long, and ends when it is asked to."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import click

__all__ = ["patiently"]

T = TypeVar("T")
_PATIENCE_S = 6.0


async def patiently(work: Coroutine[Any, Any, T], urls: Sequence[str], *, quiet: bool, stop: asyncio.Event | None = None) -> T:
    """The result of ``work``, which asks ``urls`` who they are. CancelledError if ``stop`` is set before it is there."""
    task = asyncio.ensure_future(work)
    told = asyncio.ensure_future(stop.wait()) if stop is not None else None
    both = [task] if told is None else [task, told]
    try:
        done, _ = await asyncio.wait(both, timeout=_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            if not quiet:
                click.echo(
                    f"Waiting for {', '.join(urls)} to say what is there (slow, or still loading a model). Ctrl-C stops.",
                    err=True,
                )
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise asyncio.CancelledError
        return task.result()
    finally:
        if told is not None:
            told.cancel()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
