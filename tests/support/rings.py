"""Channels of a plug-in that this process writes itself, and a context in which the collector finds them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from hoptrace.collectors.context import Context, Options
from hoptrace.collectors.engines.http import Api
from hoptrace.collectors.engines.vllm_channel import VllmChannel
from hoptrace.collectors.hardware.listener import Found
from hoptrace.collectors.inside import ring
from hoptrace.collectors.links import Links
from hoptrace.manifest import Manifest, Server
from hoptrace.reader import Trace, open_trace
from hoptrace.writer import TraceWriter

DATA = Path(__file__).parents[1] / "data" / "vllm"
encode = msgspec.msgpack.encode


@dataclass
class Recorded:
    """Frames of a real channel, as recorded: see tests/data/vllm/README.md."""

    about: dict[str, Any]
    frames: list[bytes]

    @property
    def records(self) -> list[dict[str, Any]]:
        return [msgspec.msgpack.decode(f) for f in self.frames]


def recorded(name: str) -> Recorded:
    data = msgspec.msgpack.decode((DATA / f"{name}.msgpack").read_bytes())
    return Recorded(data["about"], data["frames"])


def keep(ring_file: Path, to: Path) -> None:
    """Make a recording of a channel's file."""
    reader = ring.Reader(ring_file)
    frames = []
    while some := reader.read():
        frames += some
    about = reader.header.about
    about["config"]["model_path"] = "toy"
    to.write_bytes(encode({"about": about, "frames": frames}))
    reader.close()


@dataclass
class Plugin:
    """One process's channel, written by this process."""

    path: Path
    about: dict[str, Any]
    size: int = 8 << 20
    writer: ring.Writer = field(init=False)

    def __post_init__(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.writer = ring.Writer(self.path, self.size, ring.MSGPACK, self.about)

    def put(self, frames: Sequence[bytes | dict[str, Any]]) -> None:
        for f in frames:
            self.writer.put(f if isinstance(f, bytes) else encode(f), 1)


@dataclass
class Capture:
    """A collector at work on the channels of a folder."""

    ctx: Context
    channel: VllmChannel
    writer: TraceWriter
    links: Links
    trace: Trace | None = None


@contextmanager
def capture(
    folder: Path, *, find: Callable[[], Found] | None = None, primary: bool = False, name: str = "t", server_name: str = "vllm"
) -> Iterator[Capture]:
    """A trace in ``folder`` being written, closed afterwards (:attr:`Capture.trace`). The server: this process, or ``find``'s."""
    writer = TraceWriter(folder / f"{name}.trace", Manifest(origin="recorded", servers=[Server(name=server_name, engine="vllm")]))
    links = Links(writer)
    links.primary = primary
    server = writer.manifest.servers[0]
    find = find or (lambda: Found(os.getpid()))
    ctx = Context(Api("http://127.0.0.1:1"), server, "h", writer, links, find, None, Options(channels=folder / "channels"))
    made = Capture(ctx, VllmChannel(ctx), writer, links)
    try:
        yield made
    finally:
        links.settle()
        writer.close()
        made.trace = open_trace(writer.path)


@contextmanager
def sampling(*captures: Capture, every_s: float = 0.1) -> Iterator[None]:
    """Run the collectors as a session does, in a thread. A fault of theirs is raised at the end."""
    stop = threading.Event()
    faults: list[Exception] = []

    async def run() -> None:
        for c in captures:
            await c.channel.probe()
            await c.channel.start()
        started.set()
        while not stop.is_set():
            for c in captures:
                await c.channel.sample()
                c.links.settle(c.writer.clock.now_ns())
            await asyncio.sleep(every_s)
        for c in captures:
            await c.channel.close()

    def work() -> None:
        try:
            asyncio.run(run())
        except Exception as e:
            faults.append(e)
        finally:
            started.set()

    started = threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if faults:
        raise faults[0]
