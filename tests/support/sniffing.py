"""A sniffer before whatever a test sets up, and what it recorded."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import hoptrace
from hoptrace.collectors.context import Context
from hoptrace.collectors.engines.http import Api
from hoptrace.collectors.engines.streams.capture import Frame
from hoptrace.collectors.engines.streams.place import WIRE
from hoptrace.collectors.engines.streams.record import Recorder
from hoptrace.collectors.engines.streams.sniff import Sniffer
from hoptrace.manifest import Manifest, Server
from hoptrace.writer import TraceWriter

__all__ = ["Played", "Sniffed", "needs_right", "sniffing"]


def _has_right() -> bool:
    try:
        socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0).close()
    except (OSError, AttributeError):
        return False
    return True


needs_right = pytest.mark.skipif(not _has_right(), reason="needs CAP_NET_RAW: run the tests as root to try a real capture")


@dataclass
class Played:
    """A capture that gives the packets it was given, in place of a socket."""

    packets: list[tuple[bytes, int]] = field(default_factory=list)
    drops: int = 0
    closed: bool = False
    kind = "played"

    def frames(self) -> Iterator[Frame]:
        while self.packets:
            data, real_ns = self.packets.pop(0)
            yield Frame(data, 0, len(data), 0, real_ns)

    def dropped(self) -> int:
        drops, self.drops = self.drops, 0
        return drops

    def close(self) -> None:
        self.closed = True


@dataclass
class Sniffed:
    """The sniffer, and its rows so far."""

    sniffer: Sniffer
    recorder: Recorder
    writer: TraceWriter

    def rows(self, table: str, *by: str) -> list[dict[str, Any]]:
        self.recorder.flush()
        self.writer.flush()
        frame = hoptrace.open(self.writer.path).table(table).collect()
        return (frame.sort(by) if by else frame).to_dicts()

    async def until(self, ended: int) -> None:
        """Sample as a session does, until that many requests have ended."""
        for _ in range(300):
            await asyncio.sleep(0.05)
            await self.sniffer.sample()
            s = self.recorder.stats
            if s.finished + s.failed + s.cancelled >= ended:
                return
        raise AssertionError(f"requests did not end: {self.recorder.stats}")


@asynccontextmanager
async def sniffing(
    url: str, path: Path, *, iface: str = "lo", port: int | None = None, key: Any = None
) -> AsyncIterator[Sniffed]:
    """A sniffer at work beside ``url``; closed at the end, the trace too."""
    with TraceWriter(path / "sniffed.trace", Manifest(origin="recorded")) as writer:
        recorder = Recorder(writer, "toy", key, place=WIRE)
        ctx = Context(Api(url), Server(name="toy", url=url), "host", writer)
        sniffer = Sniffer(ctx, recorder, iface, port or int(url.rsplit(":", 1)[1]))
        try:
            await sniffer.start()
            yield Sniffed(sniffer, recorder, writer)
            await sniffer.close()
        finally:
            await ctx.api.close()
