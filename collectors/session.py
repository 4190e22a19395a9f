"""A capture of one live server: probe, record, bear the server's death and return, close.

Use it in a program that is asynchronous::

    async with Session("http://127.0.0.1:8000", "run.trace", proxy=("127.0.0.1", 0)) as session:
        ... send requests to session.proxy_url

A program that is not asynchronous uses :func:`attached`.

Nothing in here may harm the server: a collector that fails is counted and tried again, one that is slow skips samples.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from urllib.parse import urlsplit

from hoptrace.collectors.base import Collector, Finding, ServerAway
from hoptrace.collectors.coverage import Coverage
from hoptrace.collectors.engines import llamacpp
from hoptrace.collectors.engines.hashing import HashKey, load_key
from hoptrace.collectors.engines.http import Api
from hoptrace.collectors.engines.identify import identify
from hoptrace.collectors.engines.proxy import Proxy, listen
from hoptrace.collectors.engines.record import Recorder, Stats
from hoptrace.collectors.hardware.listener import Found, find_listener
from hoptrace.collectors.hardware.process import ProcessCollector, fixed, own_host
from hoptrace.errors import HoptraceError, UsageError
from hoptrace.manifest import CollectorInfo, Manifest, Server
from hoptrace.writer import TraceWriter

__all__ = ["PROXY_TABLES", "Session", "Status", "attached", "finder"]

PROXY_TABLES = ("requests", "stages", "tokens", "moves", "waits")
_WATCH_S, _SOURCE = 1.0, "session"


@dataclass(slots=True)
class Status:
    """What a status line shows. ``away``: the server can't be reached at present."""

    elapsed_s: float = 0.0
    requests: Stats = field(default_factory=Stats)
    samples: dict[str, int] = field(default_factory=dict)
    missed: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    away: bool = False


class Session:
    """Records ``url`` into the trace ``out`` from entering to leaving.

    Args:
        proxy: (host, port) to listen on (port 0: a free one), or null: then no request and no token is seen.
        pid: the server's process, "auto" to look for it, or null not to record it.
        every_s: time between two samples of counters.
        hashes: whether prompts' prefixes are hashed; ``group`` names the key, ``hash_key`` gives it.
        key: the server's API key, for the session's own questions. It is not recorded.

    Entering raises:
        UsageError: ``out`` is already there, or ``url`` is no URL.
        EnvironmentProblem: nothing listens there, it is not OpenAI-compatible, or the proxy's port is taken. Nothing is left.
    """

    def __init__(
        self,
        url: str,
        out: Path | str,
        *,
        proxy: tuple[str, int] | None = None,
        pid: int | Literal["auto"] | None = "auto",
        every_s: float = 0.1,
        hashes: bool = True,
        group: str = "default",
        hash_key: HashKey | None = None,
        key: str | None = None,
        title: str | None = None,
    ) -> None:
        self.out = Path(out)
        self._api = Api(url, key)
        self._listen = proxy
        self._find = finder(pid, self._api.url) if pid is not None else None
        self._every_s = every_s
        self._hashes, self._group, self._hash_key = hashes, group, hash_key
        self._title = title
        self._host = own_host()
        self._tasks: list[asyncio.Task[None]] = []
        self._renewed: set[str] = set()
        self._stop = asyncio.Event()
        self._status = Status()
        self._began = 0.0
        self._ended: float | None = None
        self._proxy: Proxy | None = None
        self.server: Server | None = None
        self._known: Server | None = None
        self.findings: dict[str, Finding] = {}
        self.steps_note: str | None = None

    @property
    def proxy_url(self) -> str:
        """Where to send requests so that they are recorded. RuntimeError without a proxy."""
        if self._proxy is None:
            raise RuntimeError("this session has no proxy")
        return self._proxy.url

    @property
    def url(self) -> str:
        """The server's URL."""
        return self._api.url

    def status(self) -> Status:
        """Live figures; those of the end after it."""
        self._status.elapsed_s = (self._ended or time.monotonic()) - self._began
        self._status.dropped = dict(self._writer.manifest.rows_dropped)
        return self._status

    # -- begin --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Probe and begin to record. See the class for what it raises."""
        if self.out.exists():
            raise UsageError(f"{self.out} is already there.", hint="Choose another name after -o, or remove it first.")
        sock = None
        try:
            server = self.server = await identify(self._api)
            notes = await llamacpp.describe(self._api, server, self._find) if server.engine == "llama.cpp" else []
            sock = listen(*self._listen) if self._listen is not None else None
            self._writer = TraceWriter(self.out, self._manifest(server, notes))
        except BaseException:
            if sock is not None:
                sock.close()
            await self._api.close()
            raise
        try:
            await self._begin(server, sock)
        except BaseException:
            await self._halt()
            self._writer.close(clean=False)
            shutil.rmtree(self.out, ignore_errors=True)
            raise

    async def _begin(self, server: Server, sock: Any) -> None:
        self._began = time.monotonic()
        self._coverage = Coverage(self._writer)
        self._coverage.begin("events", _SOURCE, None)
        self._event("start", f"attached to {server.engine or 'a server'}")
        collectors = self._collectors(server)
        for c in collectors:
            self.findings[c.name] = await c.probe()
        if isinstance(process := collectors[-1], ProcessCollector) and process.pid is not None:
            server.pid, server.host = process.pid, self._host
        if sock is not None:
            key = (self._hash_key or load_key(self._group)) if self._hashes else None
            recorder = Recorder(self._writer, server.name, key)
            self._status.requests = recorder.stats
            self._proxy = Proxy(self._api.url, recorder, self._writer.clock.now_ns)
            await self._proxy.start(sock)
            self.findings["proxy"] = Finding(True)
            for table in PROXY_TABLES:
                self._coverage.begin(table, "proxy", server.name)
        else:
            self.findings["proxy"] = Finding(False, "no --proxy was given: requests and tokens are not seen")
        self._writer.update(self._note_findings)
        self._running = [c for c in collectors if self.findings[c.name].available]
        self._tasks = [asyncio.create_task(self._run(c)) for c in self._running]
        self._tasks.append(asyncio.create_task(self._watch()))

    def _collectors(self, server: Server) -> list[Collector]:
        found: list[Collector] = []
        if server.engine == "llama.cpp":
            found.append(llamacpp.MetricsCollector(self._api, server.name, self._host, self._writer))
            found.append(llamacpp.SlotsCollector(self._api, server.name, self._host, self._writer))
        if self._find is None:
            self.findings["process"] = Finding(False, "turned off by --pid none")
        else:
            found.append(ProcessCollector(self._find, self._host, self._writer))
        return found

    def _manifest(self, server: Server, notes: list[str]) -> Manifest:
        name = f"server:{server.name}"
        nodes = [{"name": "client"}, {"name": "proxy"}, {"name": name}]
        links = [{"name": "client-proxy", "a": "client", "b": "proxy"}, {"name": f"proxy-{name}", "a": "proxy", "b": name}]
        return Manifest(
            origin="recorded",
            title=self._title,
            hosts=[{"name": self._host, "clock": "CLOCK_MONOTONIC", "lead": True}],
            servers=[server],
            platform={"nodes": nodes, "links": links} if self._listen is not None else {},
            notes=notes,
        )

    def _note_findings(self, manifest: Manifest) -> None:
        manifest.collectors = [
            CollectorInfo(name=name, available=f.available, reason=f.reason) for name, f in sorted(self.findings.items())
        ]

    # -- run ----------------------------------------------------------------------------------------------------------

    async def _run(self, collector: Collector) -> None:
        """Sample on a fixed beat; beats that a slow source misses are counted and skipped."""
        name, every = collector.name, self._every_s
        server = self.server.name if self.server else None
        due = time.monotonic()
        faults = 0
        while not self._stop.is_set():
            try:
                rows = await collector.sample()
                self._status.samples[name] = self._status.samples.get(name, 0) + rows
                for table in collector.tables:
                    self._coverage.begin(table, name, server)
                faults = 0
                if not self._status.away:
                    self._renewed.discard(name)
            except ServerAway:
                self._coverage.end(name)
                if faults == 0:
                    # Now, not when the watch has seen it: no sample of the new server may count on from the old one's totals.
                    collector.restarted()
                    self._renewed.add(name)
                faults = min(faults + 1, 4)
            except Exception as e:
                self._writer.drop(f"{name}: {type(e).__name__}", 1)
                faults = min(faults + 1, 6)
            due += every * 2**faults
            late = time.monotonic() - due
            if late > 0:
                skipped = int(late / every) + 1
                self._status.missed[name] = self._status.missed.get(name, 0) + skipped
                due += skipped * every
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), max(0.0, due - time.monotonic()))

    async def _watch(self) -> None:
        """Note when the server goes and when it is back, and keep the coverage up."""
        parts = urlsplit(self._api.url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        while not self._stop.is_set():
            try:
                there = await _answers(host, port)
                if not there and not self._status.away:
                    self._status.away = True
                    self._event("stop", "the server's port is closed")
                elif there and self._status.away and await self._back():
                    self._status.away = False
                self._coverage.extend()
            except Exception as e:
                self._writer.drop(f"{_SOURCE}: {type(e).__name__}", 1)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _WATCH_S)

    async def _back(self) -> bool:
        """Something listens again: is it the server, and is it set as it was?"""
        try:
            server = await identify(self._api, loading_s=0.0)
        except HoptraceError:
            return False
        if server.engine == "llama.cpp":
            await llamacpp.describe(self._api, server, self._find)
        for c in self._running:
            if c.name not in self._renewed:
                c.restarted()
        self._renewed.clear()
        self._event("restart", "the server answers again")
        # Against what it was before this restart, not at the start: 4 slots, then 2, then 4 again are two changes.
        before = self._known or self.server
        assert before is not None
        changed = [n for n in Server.model_fields if n not in ("pid", "host") and getattr(server, n) != getattr(before, n)]
        if changed:
            told = "; ".join(f"{name}: {getattr(before, name)} -> {getattr(server, name)}" for name in changed)
            self._event("configuration change", told[:500])
        self._known = server
        return True

    def _event(self, kind: str, detail: str) -> None:
        row = {"time_ns": self._writer.clock.now_ns(), "host": self._host, "kind": kind, "detail": detail, "source": _SOURCE}
        self._writer.append("events", [row | {"server": self.server.name if self.server else None}])

    # -- end ----------------------------------------------------------------------------------------------------------

    async def close(self) -> Path:
        """Stop, reconstruct the engine's steps from what was seen, close. EnvironmentProblem if the disk refused rows."""
        self._ended = time.monotonic()
        await self._halt()
        self._event("stop", "detached")
        self._coverage.extend()
        self._writer.update(self._note_end)
        if self._status.requests.finished:
            self.steps_note = await asyncio.to_thread(_store_steps, self._writer)
        return await asyncio.to_thread(self._writer.close)

    async def _halt(self) -> None:
        self._stop.set()
        if self._proxy is not None:
            await self._proxy.close()
        for task in self._tasks:
            # A question to the server may be under way, and may wait for a long prompt.
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._api.close()

    def _note_end(self, manifest: Manifest) -> None:
        rows = self._status.samples | {"proxy": self._status.requests.rows}
        manifest.collectors = [
            # A beat that was missed is a sample that was never taken: no row was dropped.
            CollectorInfo.model_validate(
                i.model_dump() | {"rows": rows.get(i.name, 0), "beats_missed": self._status.missed.get(i.name, 0)}
            )
            for i in manifest.collectors
        ]
        manifest.notes += self._status.requests.notes()

    async def __aenter__(self) -> Session:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            await self.close()
        except HoptraceError as e:
            if error is None:
                raise
            error.add_note(str(e))


def finder(pid: int | Literal["auto"], url: str) -> Callable[[], Found]:
    """How the process collector finds the server's process."""
    return partial(find_listener, url) if pid == "auto" else fixed(pid, url)


async def _answers(host: str, port: int) -> bool:
    """Whether something accepts connections; asks nothing, so a busy engine is no matter."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), 5.0)
    except TimeoutError:
        return True  # no refusal: the backlog is full, or the network slow
    except OSError:
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return True


def _store_steps(writer: TraceWriter) -> str | None:
    """Reconstruct the engine's iterations from what was recorded and store them with the rest; why not, if that can't be done."""
    writer.flush()
    try:
        # Polars takes half a second to import: not while a capture is to begin.
        from hoptrace.reader import open_trace
        from hoptrace.reconstruct import steps_of, store_steps

        steps = steps_of(open_trace(writer.path))
        store_steps(writer, steps)
    except Exception as e:  # what was recorded is worth more than what can be derived from it, now or later
        return f"steps could not be reconstructed ({type(e).__name__}: {e})"
    return None if steps.steps.height else steps.note


@contextmanager
def attached(url: str, out: Path | str, **options: Any) -> Iterator[Session]:
    """A :class:`Session` in a thread with an event loop of its own, for programs that have none. Same arguments, same errors."""
    loop = asyncio.new_event_loop()
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
