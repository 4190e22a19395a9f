"""A context for one source alone: a real writer, no server behind it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl

import hoptrace
from hoptrace.collectors.context import Context
from hoptrace.collectors.engines.http import Api
from hoptrace.collectors.engines.streams.hashing import HashKey
from hoptrace.collectors.links import Links
from hoptrace.manifest import Manifest, Server
from hoptrace.writer import TraceWriter

__all__ = ["KEY", "context", "events", "rows", "run", "until"]

KEY = HashKey("test", b"k" * 32)


@contextmanager
def context(folder: Path, *, key: HashKey | None = KEY, **server: Any) -> Iterator[Context]:
    """A context that writes the trace ``folder``; closed when left."""
    it = Server(name="s", **server)
    with TraceWriter(folder, Manifest(origin="recorded", servers=[it])) as writer:
        yield Context(Api("http://127.0.0.1:9"), it, "here", writer, Links(writer), None, key)


def rows(folder: Path, table: str) -> pl.DataFrame:
    """A table of the closed trace; empty if it has none."""
    trace = hoptrace.open(folder)
    return trace.table(table).collect() if table in trace.manifest.tables else pl.DataFrame()


def events(folder: Path, kind: str) -> list[str]:
    """What the events of one kind say."""
    frame = rows(folder, "events")
    return [] if frame.is_empty() else frame.filter(pl.col("kind") == kind)["detail"].to_list()


def until(done: Callable[[], bool], timeout_s: float = 15.0) -> None:
    """Wait for what another thread does."""
    end = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


def run(coroutine: Any) -> Any:
    """In an event loop of its own."""
    return asyncio.run(coroutine)
