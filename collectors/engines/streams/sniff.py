"""Requests and tokens from the wire: the server's plaintext HTTP is captured beside the data path.

What is recorded is what the proxy records (the same conversations), with the kernel's stamp of each packet as its time. Neither
clients nor server notice: if hoptrace is too slow, packets are dropped for hoptrace, counted, and their requests marked.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

from hoptrace.collectors.base import Finding
from hoptrace.collectors.context import Context
from hoptrace.collectors.engines.streams.capture import RETIRE_MS, Capture, Plain, StampClock, open_capture
from hoptrace.collectors.engines.streams.conversation import Conversation
from hoptrace.collectors.engines.streams.packets import OTHER, segment
from hoptrace.collectors.engines.streams.record import Recorder
from hoptrace.collectors.engines.streams.wire import Wire
from hoptrace.collectors.urls import port_of
from hoptrace.errors import UsageError

__all__ = ["ANY", "Sniffer", "parse_target"]

ANY = "any"
_SLICE_NS = 2_000_000
_SAMPLE_NS = 500_000_000
_EVERY = 16
_LOOK_NS = 1_000_000_000
_HOW = "give --sniff INTERFACE:PORT, like --sniff eth0:8000, --sniff lo:8000 or --sniff any:8000"


def parse_target(text: str) -> tuple[str, int]:
    """Interface and port. A port alone means all interfaces, as does ``any``: only packets of the URL's host are taken anyway.

    Raises:
        UsageError: it is not INTERFACE:PORT.
    """
    interface, _, port = text.strip().rpartition(":")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise UsageError(f"{text!r} names no port to capture.", hint=f"Write it as {_HOW[5:]}.")
    if not interface and text.strip().startswith(":"):
        interface = ANY
    interface = interface or ANY
    if len(interface) > 15 or not interface.isprintable() or any(c in "/ :" for c in interface):
        raise UsageError(f"{interface!r} can't be a network interface's name.", hint=f"Write it as {_HOW[5:]}.")
    return interface, int(port)


class Sniffer:
    """Captures ``port`` on ``iface`` (``any``: all) and tells conversations of ``recorder`` what it saw.

    Only connections to the host of the context's URL are taken (to any address of this machine if the URL is this machine's), so
    that a port number that several servers share does not mix them.
    """

    name = "sniff"
    tables = ("requests", "stages", "tokens", "moves")

    def __init__(self, ctx: Context, recorder: Recorder | None, iface: str, port: int) -> None:
        self._ctx = ctx
        self._recorder = recorder
        self.iface = iface
        self.port = port
        parts = urlsplit(ctx.api.url)
        self._tls = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._url_port = port_of(parts)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._addresses: set[bytes] = set()
        self._capture: Capture | None = None
        self._wire = Wire(self._talk, self._ours)
        self._refused: Counter[str] = Counter()
        self._told_gaps = self._told_bytes = 0
        self._noted = False
        self._rows = self._mark = self._index = self._looked_ns = 0
        self.packets = 0
        self.dropped = 0

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return self._wire.connections

    @property
    def lost_bytes(self) -> int:
        """Bytes of requests and answers that were not captured."""
        return self._wire.lost_bytes

    @property
    def kind(self) -> str:
        """How packets come: ``ring`` or ``socket``; empty before the start."""
        return self._capture.kind if self._capture is not None else ""

    def notes(self) -> list[str]:
        """What whoever uses the rows must know."""
        wire, out = self._wire, []
        if wire.joined:
            out.append(
                f"sniff: {wire.joined} connections were seen from their middle on: a request that was under way on them is not "
                "recorded, the next ones are."
            )
        if wire.gaps:
            out.append(f"sniff: {wire.lost_bytes} bytes were not captured, in {wire.gaps} gaps: the requests there are marked.")
        if self.dropped:
            out.append(f"sniff: the kernel dropped {self.dropped} packets since hoptrace did not read them fast enough.")
        if wire.tls:
            out.append(f"sniff: {wire.tls} connections are TLS, which can't be read: capture behind its end, or use --proxy.")
        if wire.forgotten:
            out.append(f"sniff: {wire.forgotten} connections were given up (too many at once, or silent for an hour).")
        if wire.elsewhere:
            listed = ", ".join(_address(a) for a, _ in wire.elsewhere.most_common(3))
            out.append(
                f"sniff: {sum(wire.elsewhere.values())} packets were for port {self.port} of other hosts than "
                f"{self._host} ({listed}): to record one, attach to its URL."
            )
        if fragments := sum(n for why, n in self._refused.items() if why != OTHER):
            out.append(f"sniff: {fragments} packets could not be read (IP fragments, broken headers).")
        return out

    # -- collector ----------------------------------------------------------------------------------------------------

    async def probe(self) -> Finding:
        """Open what a capture needs, and close it again."""
        return await asyncio.to_thread(self._probe)

    async def start(self) -> None:
        """Begin to capture."""
        await asyncio.to_thread(self._find_addresses)
        assert self._ctx.writer is not None
        self._stamps = StampClock(self._ctx.writer.clock.utc_offset_ns)
        self._capture = await self._open()

    async def sample(self) -> int:
        """Read what has come; other tasks have their turn every 2 ms."""
        if self._capture is None or self._recorder is None or self._ctx.writer is None:
            return 0
        self._rows = 0
        await self._drain(self._capture)
        now_ns = self._ctx.writer.clock.now_ns()
        self._wire.tick(now_ns)
        self._count(now_ns)
        await self._work()
        if self.iface != ANY and now_ns - self._looked_ns > _LOOK_NS:
            self._looked_ns = now_ns
            await self._look(now_ns)
        return self._rows

    def restarted(self) -> None:
        """Nothing to do: the connections of the old server were closed, or will be missed."""

    async def close(self) -> None:
        """Take what is still in the ring, cut what is open."""
        capture, self._capture = self._capture, None
        if capture is None or self._recorder is None or self._ctx.writer is None:
            return
        await asyncio.sleep(2 * RETIRE_MS / 1000)  # the block that is being filled
        try:
            await self._drain(capture)
            self._count_dropped(capture)
        finally:
            capture.close()
        now_ns = self._ctx.writer.clock.now_ns()
        self._wire.close(now_ns)
        self._count(now_ns)
        await self._work()
        notes = self.notes()
        if notes and not self._noted:
            self._noted = True
            self._ctx.writer.update(lambda manifest: manifest.notes.extend(notes))

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _drain(self, capture: Capture) -> None:
        assert self._recorder is not None
        self._mark = self._recorder.stats.rows
        self._stamps.batch()
        began = due = time.monotonic_ns()
        due += _SLICE_NS
        wire, refused, port, trace_ns = self._wire, self._refused, self.port, self._stamps.trace_ns
        left = _EVERY
        for frame in capture.frames():
            self.packets += 1
            found = segment(frame.data, frame.at, frame.end, frame.beyond, port)
            if isinstance(found, str):
                refused[found] += 1
            else:
                wire.feed(found, trace_ns(frame.real_ns))
            left -= 1
            if not left:
                left = _EVERY
                now = time.monotonic_ns()
                if now > due:
                    if now - began > _SAMPLE_NS:
                        break
                    await self._turn()
                    due = time.monotonic_ns() + _SLICE_NS
        self._count_dropped(capture)

    async def _open(self) -> Capture:
        self._index = _index(self.iface)
        return await asyncio.to_thread(open_capture, "" if self.iface == ANY else self.iface, self.port)

    async def _look(self, now_ns: int) -> None:
        """An interface that is made anew (a container's, when it is restarted) is another one, though its name is the same."""
        index = _index(self.iface)
        if index == self._index:
            return
        if index:
            await asyncio.to_thread(self._find_addresses)
            before, self._capture = self._capture, await self._open()
            if before is not None:
                before.close()
            self._event(now_ns, f"the interface {self.iface} is there again")
        else:
            self._index = 0
            self._event(now_ns, f"the interface {self.iface} is gone: nothing is seen")

    def _event(self, now_ns: int, detail: str) -> None:
        assert self._ctx.writer is not None
        row = {"time_ns": now_ns, "host": self._ctx.host, "server": self._ctx.server.name, "source": self.name}
        self._ctx.writer.append("events", [row | {"kind": "gap", "detail": detail}])

    async def _work(self) -> None:
        assert self._recorder is not None
        while self._recorder.work():
            await self._turn()
        await self._turn()

    async def _turn(self) -> None:
        """Let others have theirs. The recorder's figures may be those of several servers: rows are counted up to here."""
        assert self._recorder is not None
        stats = self._recorder.stats
        self._rows += stats.rows - self._mark
        await asyncio.sleep(0)
        self._mark = stats.rows

    def _count_dropped(self, capture: Capture) -> None:
        if n := capture.dropped():
            self.dropped += n
            assert self._ctx.writer is not None
            self._ctx.writer.drop("sniff: packets dropped by the kernel, hoptrace was too slow", n)

    def _count(self, now_ns: int) -> None:
        """Tell of gaps: one event for all since the last time."""
        gaps, lost = self._wire.gaps - self._told_gaps, self._wire.lost_bytes - self._told_bytes
        if not gaps:
            return
        self._told_gaps, self._told_bytes = self._wire.gaps, self._wire.lost_bytes
        assert self._ctx.writer is not None
        self._ctx.writer.drop("sniff: gaps in captured connections", gaps)
        self._event(now_ns, f"{lost} bytes in {gaps} gaps of captured connections are missing")

    def _talk(self) -> Conversation:
        assert self._recorder is not None
        return Conversation(self._recorder, self._prefix)

    def _ours(self, address: bytes) -> bool:
        return address in self._addresses or (self._here and _loopback(address))

    def _find_addresses(self) -> None:
        import psutil

        local = {_packed(a.address) for found in psutil.net_if_addrs().values() for a in found} - {b""}
        try:
            told = {_packed(str(info[4][0])) for info in socket.getaddrinfo(self._host, None, type=socket.SOCK_STREAM)}
        except OSError:
            told = set()
        here = any(a in local or _loopback(a) or a in (bytes(4), bytes(16)) for a in told)
        self._addresses = told | local if here else told
        self._here = here

    # -- whether it can be --------------------------------------------------------------------------------------------

    def _probe(self) -> Finding:
        if not sys.platform.startswith("linux") or not hasattr(socket, "AF_PACKET"):
            return Finding(False, "capturing packets needs Linux: run hoptrace on the server's machine, or use --proxy")
        if self._tls:
            return Finding(
                False,
                f"{self._ctx.api.url} is TLS, what passes can't be read: give the URL and port of the plain HTTP server behind "
                "what ends the TLS, or use --proxy",
            )
        names = [name for _, name in socket.if_nameindex()]
        if self.iface != ANY and self.iface not in names:
            listed = ", ".join(sorted(names)[:12])
            return Finding(False, f"there is no network interface {self.iface} here: choose one of {listed}, or {ANY}")
        try:
            self._find_addresses()
            Plain("" if self.iface == ANY else self.iface, self.port).close()
        except PermissionError:
            return Finding(False, _no_right())
        except OSError as e:
            if e.errno in (errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT, errno.ESOCKTNOSUPPORT):
                return Finding(False, "this kernel or sandbox has no packet sockets (AF_PACKET): use --proxy")
            return Finding(False, f"{self.iface} can't be captured ({e.strerror or e})")
        if not self._addresses:
            return Finding(False, f"the host {self._host} has no address that is known here: give the URL with an address")
        return Finding(True, self._doubts())

    def _doubts(self) -> str | None:
        """What may make it see nothing, or another server, though it can capture."""
        if self.port != self._url_port:
            return f"packets of port {self.port} are read, the URL's port is {self._url_port}: is that where clients connect?"
        if not self._here:
            return f"{self._host} is another machine: only packets that pass through this one are seen"
        try:
            state = Path(f"/sys/class/net/{self.iface}/operstate").read_text().strip()
        except OSError:
            return None
        if state == "down":
            return f"the interface {self.iface} is down"
        if self.iface == "lo":
            return f"only clients on this machine use lo: --sniff {ANY}:{self.port} sees others too"
        return None


def _index(interface: str) -> int:
    """Number of an interface; 0 if there is none of that name, or for all."""
    try:
        return 0 if interface == ANY else socket.if_nametoindex(interface)
    except OSError:
        return 0


def _no_right() -> str:
    python = Path(sys.executable).resolve()
    return (
        "capturing packets needs the right CAP_NET_RAW: run hoptrace with sudo, or give it to this Python once "
        f"(sudo setcap cap_net_raw+ep {python}); in Docker --cap-add NET_RAW, in Kubernetes "
        "securityContext.capabilities.add: [NET_RAW]"
    )


def _loopback(address: bytes) -> bool:
    return len(address) == 4 and address[0] == 127


def _packed(address: str) -> bytes:
    try:
        return ipaddress.ip_address(address.split("%")[0]).packed
    except ValueError:  # a hardware address
        return b""


def _address(server: bytes) -> str:
    host = ipaddress.ip_address(server[:-2])
    port = int.from_bytes(server[-2:])
    return f"[{host}]:{port}" if host.version == 6 else f"{host}:{port}"
