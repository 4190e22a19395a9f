"""The engines that hoptrace knows, each a module with two functions. A new engine is a new file and a line here."""

from __future__ import annotations

from typing import Protocol

from hoptrace.collectors.base import Collector
from hoptrace.collectors.context import Context
from hoptrace.collectors.engines import llamacpp

__all__ = ["ENGINES", "Engine", "describe", "sources"]


class Engine(Protocol):
    """What a module of an engine offers."""

    async def describe(self, ctx: Context) -> list[str]:
        """Fill ``ctx.server`` with the server's configuration as far as it can be read; gives notes on the rest.

        Called at the start, and again when the server is back after a restart. Asks and reads, records nothing.
        """

    def sources(self, ctx: Context) -> list[Collector]:
        """The engine's collectors, available or not: each one's probe says."""


ENGINES: dict[str, Engine] = {"llama.cpp": llamacpp}


async def describe(ctx: Context) -> list[str]:
    """As the engine's module does; no notes for an engine that is not known."""
    engine = ENGINES.get(ctx.server.engine or "")
    return await engine.describe(ctx) if engine is not None else []


def sources(ctx: Context) -> list[Collector]:
    """As the engine's module does; none for an engine that is not known."""
    engine = ENGINES.get(ctx.server.engine or "")
    return engine.sources(ctx) if engine is not None else []
