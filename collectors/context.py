"""What a source gets to work with: the server, where its rows go, what the user asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hoptrace.collectors.engines.http import Api
from hoptrace.collectors.engines.streams.hashing import HashKey
from hoptrace.collectors.hardware.listener import Found
from hoptrace.collectors.hardware.source import Roots, Tracepoints
from hoptrace.collectors.links import Links
from hoptrace.manifest import Server
from hoptrace.writer import TraceWriter

__all__ = ["Context", "Options", "channel_folder"]


def channel_folder() -> Path:
    """Where plug-ins inside engines leave their channels (``HOPTRACE_CHANNELS``, else a folder of this user's under /tmp).

    /tmp and not the user's runtime folder: server and hoptrace may run in different sessions of the same user.
    """
    import os

    told = os.environ.get("HOPTRACE_CHANNELS")
    return Path(told) if told else Path(f"/tmp/hoptrace-{os.getuid()}")


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for beyond the URL. Null: found out from the server where that can be.

    roots: where the machine is looked at. tracepoints: count futex, poll, ioctl and yield calls (by thread of the server, or by
    CPU). scrape: Prometheus pages beside the servers' own. files: counters that other tools write, followed. max_overhead: what
    all sources of counters may take of one core; null: they are not held back. topo: what `nvidia-smi topo -m` printed there.
    """

    kv_events: str | None = None
    kv_events_replay: str | None = None
    forward_pass: str | None = None
    otlp: tuple[str, int] | None = None
    log: Path | None = None
    channels: Path = field(default_factory=channel_folder)
    roots: Roots = field(default_factory=Roots)
    tracepoints: Tracepoints | None = None
    scrape: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    max_overhead: float | None = 0.01
    topo: str | None = None


@dataclass(slots=True)
class Context:
    """One server of a session. ``writer`` and ``links`` are null while only asking what could be recorded (``--explain``).

    ``server`` is the manifest's entry, which ``describe`` of the engine's module fills; sources may read and complete it.
    ``key`` hashes token ids and block hashes; null turns hashes off. ``find`` tells the server's process, or is null.
    """

    api: Api
    server: Server
    host: str
    writer: TraceWriter | None = None
    links: Links | None = None
    find: Callable[[], Found] | None = None
    key: HashKey | None = None
    options: Options = field(default_factory=Options)
