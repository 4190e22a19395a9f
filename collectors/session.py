"""A capture of live servers: probe, record, bear a server's death and return, close.

Use it in a program that is asynchronous::

    async with Session("http://127.0.0.1:8000", "run.trace", proxy=("127.0.0.1", 0)) as session:
        ... send requests to session.proxy_url

A program that is not asynchronous uses :func:`hoptrace.collectors.attached.attached`.

Nothing in here may harm a server: a collector that fails is counted and tried again, one that is slow skips samples.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal
from urllib.parse import urlsplit

from hoptrace.collectors.base import Collector, Finding
from hoptrace.collectors.beat import Beat, Source
from hoptrace.collectors.context import Options
from hoptrace.collectors.coverage import Coverage
from hoptrace.collectors.described import manifest_of
from hoptrace.collectors.engines.streams.hashing import HashKey, load_key
from hoptrace.collectors.engines.streams.place import PROXY, WIRE
from hoptrace.collectors.engines.streams.proxy import Proxy, listen
from hoptrace.collectors.engines.streams.record import Recorder
from hoptrace.collectors.engines.streams.sniff import Sniffer
from hoptrace.collectors.hardware.host import own_host
from hoptrace.collectors.hardware.topology.discover import discover
from hoptrace.collectors.links import Links
from hoptrace.collectors.machine import Machine, asked_of
from hoptrace.collectors.status import Status
from hoptrace.collectors.steps import store_steps
from hoptrace.collectors.target import Target, name_apart
from hoptrace.collectors.twice import refuse_twice
from hoptrace.collectors.urls import port_of
from hoptrace.errors import EnvironmentProblem, HoptraceError, UsageError
from hoptrace.manifest import CollectorInfo, Manifest, Server
from hoptrace.writer import TraceWriter

__all__ = ["REQUEST_TABLES", "Session"]

REQUEST_TABLES = ("requests", "stages", "tokens", "moves", "waits")
_WATCH_S, _SOURCE = 1.0, "session"
_EXACT = ("vllm-plugin",)
"""Sources that know a request's times inside its engine better than a span does."""


class Session:
    """Records the servers at ``url`` (one, or several: a prefill and a decode server, a router and its workers) into the trace
    ``out`` from entering to leaving.

    Args:
        proxy: (host, port) to listen on (port 0: a free one), or null. Several servers: the next ports for the next servers.
        sniff: (interface, port) to capture passively instead, or null. Without either no request is seen from outside.
        pid: the server's process, "auto" to look for it, or null not to record it. Several servers: auto or null.
        every_s: time between two samples of counters.
        hashes: whether prompts' prefixes are hashed; ``group`` names the key, ``hash_key`` gives it.
        key: the servers' API key, for the session's own questions. It is not recorded.

    Entering raises:
        UsageError: ``out`` is already there, ``url`` is no URL, or two URLs are one server.
        EnvironmentProblem: nothing listens there, it is not OpenAI-compatible, or the proxy's port is taken. Nothing is left.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        out: Path | str,
        *,
        proxy: tuple[str, int] | None = None,
        sniff: tuple[str, int] | None = None,
        pid: int | Literal["auto"] | None = "auto",
        every_s: float = 0.1,
        hashes: bool = True,
        group: str = "default",
        hash_key: HashKey | None = None,
        key: str | None = None,
        title: str | None = None,
        options: Options | None = None,
    ) -> None:
        self.out = Path(out)
        self._urls = [url] if isinstance(url, str) else list(url)
        if not isinstance(pid, str | None) and len(self._urls) > 1:
            raise UsageError("One --pid can't be that of several servers.", hint="Leave it out: their processes are looked for.")
        self._listen, self._sniff = proxy, sniff
        self._pid, self._every_s = pid, every_s
        self._hashes, self._group, self._hash_key = hashes, group, hash_key
        self._key, self._title = key, title
        self._options = options or Options()
        self._host = own_host()
        self._tasks: list[asyncio.Task[None]] = []
        self._sources: list[Source] = []
        self._stop = asyncio.Event()
        self._status = Status()
        self._began = 0.0
        self._ended: float | None = None
        self._proxies: list[Proxy] = []
        self._machine: Machine | None = None
        self.targets: list[Target] = []
        self.findings: dict[str, Finding] = {}
        self.machine_found: dict[str, Finding] = {}
        self.steps_note: str | None = None

    @property
    def server(self) -> Server | None:
        """The first server, once it is known."""
        return self.targets[0].server if self.targets else None

    @property
    def url(self) -> str:
        """The first server's URL."""
        return self.targets[0].ctx.api.url if self.targets else self._urls[0]

    @property
    def outside(self) -> Literal["proxy", "sniff"] | None:
        """How requests are seen from outside the engine; null if they are not."""
        return "proxy" if self._listen is not None else "sniff" if self._sniff is not None else None

    @property
    def proxy_url(self) -> str:
        """Where to send requests so that they are recorded. RuntimeError without a proxy."""
        return self.proxy_urls[0]

    @property
    def proxy_urls(self) -> list[str]:
        """One for each server. RuntimeError without a proxy."""
        if not self._proxies:
            raise RuntimeError("this session has no proxy")
        return [p.url for p in self._proxies]

    def status(self) -> Status:
        """Live figures; those of the end after it."""
        self._status.elapsed_s = (self._ended or time.monotonic()) - self._began
        self._status.dropped = dict(self._writer.manifest.rows_dropped)
        self._status.samples = {s.label: s.rows for s in self._sources}
        self._status.missed = {s.label: s.missed for s in self._sources if s.missed}
        if self._machine is not None:
            self._machine.tell(self._status)
        self._status.away = any(t.away for t in self.targets)
        return self._status

    # -- begin --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Probe and begin to record. See the class for what it raises."""
        if self.out.exists():
            raise UsageError(f"{self.out} is already there.", hint="Choose another name after -o, or remove it first.")
        socks: list[socket.socket] = []
        try:
            hashes = (self._hash_key or load_key(self._group)) if self._hashes else None
            for url in self._urls:
                found = await Target.find(url, key=self._key, pid=self._pid, options=self._options, hashes=hashes)
                self.targets.append(found)
            await asyncio.to_thread(refuse_twice, [t.ctx.api.url for t in self.targets], wire=self._sniff is not None)
            name_apart(self.targets)
            self._check_port()
            socks = self._socks()
            graph = await asyncio.to_thread(discover, self._options.roots, self._options.topo)
            shown = {"proxy": self._listen is not None, "seen": self.outside is not None}
            manifest = manifest_of(self.targets, self._host, self._title, graph, **shown)
            self._writer = TraceWriter(self.out, manifest)
        except BaseException:
            for sock in socks:
                sock.close()
            await self._close_apis()
            raise
        try:
            await self._begin(socks)
        except BaseException:
            await self._halt()
            self._writer.close(clean=False)
            shutil.rmtree(self.out, ignore_errors=True)
            raise

    def _socks(self) -> list[socket.socket]:
        if self._listen is None:
            return []
        host, port = self._listen
        socks: list[socket.socket] = []
        try:
            for i in range(len(self.targets)):
                socks.append(listen(host, port + i if port else 0))
        except BaseException:
            for sock in socks:
                sock.close()
            raise
        return socks

    async def _begin(self, socks: list[socket.socket]) -> None:
        self._began = time.monotonic()
        self._coverage = Coverage(self._writer)
        self._coverage.begin("events", _SOURCE, None)
        self._links = Links(self._writer)
        self._links.primary = bool(socks) or self._sniff is not None
        self._beat = Beat(self._writer, self._coverage, self._every_s, self._stop, self._is_away)
        for i, target in enumerate(self.targets):
            target.ctx.writer, target.ctx.links = self._writer, self._links
            self._event("start", f"attached to {target.server.engine or 'a server'}", target.name)
            collectors = target.collectors() + self._sniffers(target)
            await self._take(target, collectors)
            if socks:
                await self._proxy(target, socks[i])
        if self.outside is None:
            self.findings["proxy"] = Finding(False, "no --proxy was given: requests and tokens are not seen from outside")
        o = self._options
        asked = asked_of(o, self.targets)
        self._machine = Machine(self._writer, self._host, asked, self._every_s, o.max_overhead, self._coverage)
        self.machine_found = await self._machine.start()
        self.findings |= self.machine_found
        for target in self.targets:
            if (pid := self._machine.pid(target.name)) is not None:
                target.server.pid, target.server.host = pid, self._host
        if self._options.otlp is not None:
            await self._receive_spans(self._options.otlp)
        self._writer.update(self._note_findings)
        self._tasks = [asyncio.create_task(self._beat.run(s)) for s in self._sources]
        self._tasks.append(asyncio.create_task(self._watch()))

    async def _take(self, target: Target | None, collectors: list[Collector]) -> None:
        """Probe, start and note collectors; a source that does not start is one that is not there."""
        found = await target.probe(collectors) if target else [(c, await c.probe()) for c in collectors]
        for c, finding in found:
            if finding.available:
                try:
                    await c.start()
                except Exception as e:  # what can't begin is noted; the rest goes on
                    finding = Finding(False, f"it could not begin ({type(e).__name__}: {e})"[:300])
            label = self._label(c.name, target)
            if isinstance(c, Sniffer) and not finding.available:
                raise EnvironmentProblem(f"--sniff can't see requests here: {finding.reason}.", hint="Or use --proxy :PORT.")
            self.findings[label] = finding
            if finding.available:
                self._sources.append(Source(label, c, target.name if target else None))
        if target and target.ctx.find is None:
            self.findings[self._label("process", target)] = Finding(False, "turned off by --pid none")

    def _label(self, name: str, target: Target | None) -> str:
        return name if target is None or len(self.targets) == 1 else f"{name}@{target.name}"

    def _recorder(self, target: Target) -> Recorder:
        place = PROXY if self._sniff is None else WIRE
        recorder = Recorder(self._writer, target.name, target.ctx.key, self._links, place)
        recorder.stats = self._status.requests
        return recorder

    async def _proxy(self, target: Target, sock: socket.socket) -> None:
        proxy = Proxy(target.ctx.api.url, self._recorder(target), self._writer.clock.now_ns)
        self._proxies.append(proxy)
        await proxy.start(sock)
        self.findings[self._label("proxy", target)] = Finding(True)
        for table in REQUEST_TABLES:
            self._coverage.begin(table, "proxy", target.name)

    def _check_port(self) -> None:
        """Of several servers each is captured at its own port: a port that none of them has would be ignored silently."""
        ports = [_port(t.ctx.api.url) for t in self.targets]
        if self._sniff is not None and len(ports) > 1 and self._sniff[1] not in ports:
            raise UsageError(
                f"--sniff names port {self._sniff[1]}, and none of the URLs has it.",
                hint=f"Of several servers each is captured at its URL's port: --sniff {self._sniff[0]}:{ports[0]}.",
            )

    def _sniffers(self, target: Target) -> list[Collector]:
        if self._sniff is None:
            return []
        iface, port = self._sniff
        if len(self.targets) > 1:
            port = _port(target.ctx.api.url)
        return [Sniffer(target.ctx, self._recorder(target), iface, port)]

    async def _receive_spans(self, address: tuple[str, int]) -> None:
        # gRPC's import takes a quarter of a second: only where spans are wanted.
        from hoptrace.collectors.engines.published.otlp import OtlpReceiver

        exact = {s.server for s in self._sources if s.server and s.collector.name in _EXACT}
        servers = [t.server for t in self.targets]
        key = self.targets[0].ctx.key
        receiver = OtlpReceiver(self._writer, self._links, self._host, address, servers=servers, key=key, exact=exact)
        await self._take(None, [receiver])
        finding = self.findings[receiver.name]
        if not finding.available:
            raise EnvironmentProblem(f"--otlp can't listen: {finding.reason}.", hint="Choose another port: --otlp :4328.")

    def _note_findings(self, manifest: Manifest) -> None:
        manifest.collectors = [
            CollectorInfo(name=name, available=f.available, status=f.status, reason=f.reason, remedy=f.remedy, sees=f.sees)
            for name, f in sorted(self.findings.items())
        ]

    # -- run ----------------------------------------------------------------------------------------------------------

    def _is_away(self, source: Source) -> bool:
        return any(t.away for t in self.targets if t.name == source.server)

    async def _watch(self) -> None:
        """Note when a server goes and when it is back, and keep the coverage up."""
        while not self._stop.is_set():
            for target in self.targets:
                try:
                    await self._look(target)
                except Exception as e:
                    self._writer.drop(f"{_SOURCE}: {type(e).__name__}", 1)
            self._links.settle(self._writer.clock.now_ns())
            self._coverage.extend()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _WATCH_S)

    async def _look(self, target: Target) -> None:
        there = await target.answers()
        if not there and not target.away:
            target.away = True
            self._event("stop", "the server's port is closed", target.name)
        elif there and target.away:
            changed = await target.back()
            if changed is None:
                return
            for s in self._sources:
                if s.server == target.name:
                    if not s.renewed:
                        s.collector.restarted()
                    s.renewed = False
            self._event("restart", "the server answers again", target.name)
            if changed:
                self._event("configuration change", changed, target.name)
            target.away = False

    def _event(self, kind: str, detail: str, server: str | None) -> None:
        row = {"time_ns": self._writer.clock.now_ns(), "host": self._host, "kind": kind, "detail": detail, "source": _SOURCE}
        self._writer.append("events", [row | {"server": server}])

    # -- end ----------------------------------------------------------------------------------------------------------

    async def close(self) -> Path:
        """Stop, reconstruct the engine's steps from what was seen, close. EnvironmentProblem if the disk refused rows."""
        self._ended = time.monotonic()
        await self._halt()
        self._links.settle()
        for target in self.targets:
            self._event("stop", "detached", target.name)
        self._coverage.extend()
        self.status()
        self._writer.update(self._note_end)
        if self._status.requests.finished or any("tokens" in s.collector.tables and s.rows for s in self._sources):
            self.steps_note = await asyncio.to_thread(store_steps, self._writer)
        return await asyncio.to_thread(self._writer.close)

    async def _halt(self) -> None:
        self._stop.set()
        for proxy in self._proxies:
            await proxy.close()
        for task in self._tasks:
            # A question to the server may be under way, and may wait for a long prompt.
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._beat.last(s) for s in self._sources))
        if self._machine is not None:
            await self._machine.close()
        await self._close_apis()

    async def _close_apis(self) -> None:
        for target in self.targets:
            await target.ctx.api.close()

    def _note_end(self, manifest: Manifest) -> None:
        rows = self._status.samples | ({"proxy": self._status.requests.rows} if self._proxies else {})
        manifest.collectors = [
            # A beat that was missed is a sample that was never taken: no row was dropped.
            CollectorInfo.model_validate(
                i.model_dump() | {"rows": rows.get(i.name, 0), "beats_missed": self._status.missed.get(i.name, 0)}
            )
            for i in manifest.collectors
        ]
        manifest.notes += self._status.requests.notes()
        manifest.servers = [t.server for t in self.targets]

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


def _port(url: str) -> int:
    return port_of(urlsplit(url))
