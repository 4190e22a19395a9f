"""One server of a capture: found out, watched, recorded again when it is back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

from hoptrace.collectors.base import Collector, Finding
from hoptrace.collectors.context import Context, Options
from hoptrace.collectors.engines import catalog
from hoptrace.collectors.engines.http import Api
from hoptrace.collectors.engines.identify import identify
from hoptrace.collectors.engines.streams.hashing import HashKey
from hoptrace.collectors.hardware.host import own_host
from hoptrace.collectors.hardware.listener import Found, find_listener, fixed
from hoptrace.collectors.urls import port_of
from hoptrace.errors import HoptraceError
from hoptrace.manifest import Server

__all__ = ["Target", "finder", "name_apart"]

_SAME = ("pid", "host", "name")


@dataclass(slots=True)
class Target:
    """A server at a URL. ``server`` is its entry in the manifest, ``notes`` what could not be read."""

    ctx: Context
    notes: list[str] = field(default_factory=list)
    away: bool = False
    known: Server | None = None

    @property
    def server(self) -> Server:
        return self.ctx.server

    @property
    def name(self) -> str:
        return self.ctx.server.name

    @classmethod
    async def find(
        cls, url: str, *, key: str | None, pid: int | Literal["auto"] | None, options: Options, hashes: HashKey | None = None
    ) -> Target:
        """Ask the server who it is. Raises what :func:`identify` raises; nothing is left open then."""
        api = Api(url, key)
        find = finder(pid, api.url) if pid is not None else None
        try:
            server = await identify(api)
            ctx = Context(api, server, own_host(), find=find, key=hashes, options=options)
            return cls(ctx, await catalog.describe(ctx))
        except BaseException:
            await api.close()
            raise

    def collectors(self) -> list[Collector]:
        """The engine's sources."""
        return list(catalog.sources(self.ctx))

    async def answers(self) -> bool:
        """Whether something accepts connections; asks nothing, so a busy engine is no matter."""
        parts = urlsplit(self.ctx.api.url)
        port = port_of(parts)
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(parts.hostname or "", port), 5.0)
        except TimeoutError:
            return True  # no refusal: the backlog is full, or the network slow
        except OSError:
            return False
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        return True

    async def back(self) -> str | None:
        """Something listens again. Gives what is set otherwise than before ("" for nothing), null if it is no server yet."""
        try:
            server = await identify(self.ctx.api, loading_s=0.0)
        except HoptraceError:
            return None
        server.name = self.name
        await catalog.describe(replace(self.ctx, server=server, writer=None, links=None))
        # Against what it was before this restart, not at the start: 4 slots, then 2, then 4 again are two changes.
        before = self.known or self.server
        was, now = _settings(before), _settings(server)
        self.known = server
        changed = [n for n in {**was, **now} if was.get(n) != now.get(n)]
        return "; ".join(f"{name}: {was.get(name)} -> {now.get(name)}" for name in changed)[:500]

    async def probe(self, collectors: list[Collector]) -> list[tuple[Collector, Finding]]:
        """What each collector finds. A probe that fails is a finding too."""
        out = []
        for c in collectors:
            try:
                out.append((c, await c.probe()))
            except Exception as e:  # a fault in one source must not keep the others from recording
                out.append((c, Finding(False, f"looking for it failed ({type(e).__name__}: {e})"[:300])))
        return out


def _settings(server: Server) -> dict[str, Any]:
    """What a server is set to, by name, without what changes with every start."""
    return {n: getattr(server, n) for n in Server.model_fields if n not in (*_SAME, "config")} | server.config


def finder(pid: int | Literal["auto"], url: str) -> Callable[[], Found]:
    """How the process collector finds the server's process."""
    return partial(find_listener, url) if pid == "auto" else fixed(pid, url)


def name_apart(targets: list[Target]) -> None:
    """Give servers of one kind names of their own: vllm, vllm-2, …"""
    seen: dict[str, int] = {}
    for target in targets:
        n = seen[target.name] = seen.get(target.name, 0) + 1
        if n > 1:
            target.server.name = f"{target.name}-{n}"
