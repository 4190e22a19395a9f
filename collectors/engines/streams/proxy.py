"""A transparent streaming proxy that stands between clients and a server and times every read.

Bytes go on before anything looks at them. All paths pass; those that generate text are recorded. Whatever the recorder does, the
stream goes on. It is at its fastest on uvloop (``uvloop.run``), and works on any asyncio loop.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

from hoptrace.collectors.engines.streams.record import Recorder
from hoptrace.collectors.engines.streams.relay import Client, Server
from hoptrace.collectors.engines.streams.tokens import warm
from hoptrace.collectors.urls import port_of
from hoptrace.errors import EnvironmentProblem

__all__ = ["Proxy", "listen"]

_CONNECT_S = 30.0
_WORK_EVERY_S = 0.05
_LAST_S = 1.0


def listen(host: str, port: int) -> socket.socket:
    """Take the proxy's port, before anything else is made. Port 0 takes a free one.

    Raises:
        EnvironmentProblem: the port is taken, or the address is not this machine's.
    """
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, proto, _, address = info[0]
        sock = socket.socket(family, kind, proto)
    except OSError as e:
        raise EnvironmentProblem(f"The proxy can't listen on {host}: {e.strerror or e}.", hint="Check the address.") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(1024)
    except OSError as e:
        sock.close()
        hint = "Choose another port, or stop what listens there." if port else None
        raise EnvironmentProblem(f"The proxy can't listen on {host}:{port}: {e.strerror}.", hint=hint) from None
    sock.setblocking(False)
    return sock


class Proxy:
    """Forwards to ``upstream`` (scheme, host, port and perhaps a path before ``/v1``). ``now_ns`` is the trace clock."""

    def __init__(self, upstream: str, recorder: Recorder, now_ns: Callable[[], int]) -> None:
        parts = urlsplit(upstream)
        self._tls = parts.scheme == "https"
        self._upstream = parts.hostname or "", port_of(parts)
        self.authority = parts.netloc.rpartition("@")[2]
        self.prefix = parts.path.rstrip("/").removesuffix("/v1")
        self.recorder = recorder
        self.now_ns = now_ns
        self.clients: set[Client] = set()
        self._addresses: list[str] = []
        self._context: ssl.SSLContext | None = None
        self._server: asyncio.AbstractServer | None = None
        self.working = False
        self.host = ""
        self.port = 0

    @property
    def url(self) -> str:
        """Where clients send their requests; loopback where the proxy listens on all addresses."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    async def start(self, sock: socket.socket) -> None:
        """Serve on a socket from :func:`listen`."""
        self.host, self.port = sock.getsockname()[:2]
        self._loop = asyncio.get_running_loop()
        if self._tls:
            self._context = ssl.create_default_context()
            self._context.set_alpn_protocols(["http/1.1"])
        # pyarrow looks for pandas when it first makes an array, which takes a fifth of a second: not while streams wait.
        warm(self.recorder.place)
        with suppress(OSError):
            await self._resolve()
        # A full collection of what the imports made takes a tenth of a second, in which no stream goes on: keep it out of that.
        gc.freeze()
        self._server = await self._loop.create_server(lambda: Client(self), sock=sock, backlog=1024)

    async def close(self) -> None:
        """Stop listening; streams that still run are cut after a second and recorded as cancelled by the end of the capture."""
        if self._server is None:
            return
        self._server.close()
        until = self._loop.time() + _LAST_S
        while True:
            await self._finish_work()
            for client in list(self.clients):
                if client.talk.idle or self._loop.time() >= until:
                    client.cut()
            if not self.clients or self._loop.time() >= until + 0.2:
                break
            await asyncio.sleep(0.01)
        await self._finish_work()
        self._server = None
        gc.unfreeze()

    async def _finish_work(self) -> None:
        while self.recorder.work():
            await asyncio.sleep(0)

    # -- the server ---------------------------------------------------------------------------------------------------

    async def _resolve(self) -> None:
        # Once, not for each connection: a look-up takes longer than all else that is done for one.
        host, port = self._upstream
        found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        self._addresses = list(dict.fromkeys(str(info[4][0]) for info in found))

    async def connect(self, make: Callable[[], Server]) -> tuple[Server | None, str]:
        """A connection to the server, or null and why there is none."""
        host, port = self._upstream
        why = "no address"
        try:
            async with asyncio.timeout(_CONNECT_S):
                for fresh in (False, True):
                    if fresh or not self._addresses:
                        known = self._addresses
                        await self._resolve()
                        if fresh and self._addresses == known:
                            break
                    for address in self._addresses:
                        try:
                            _, server = await self._loop.create_connection(
                                make, address, port, ssl=self._context, server_hostname=host if self._tls else None
                            )
                            return server, ""
                        except OSError as e:
                            why = _reason(e)
        except TimeoutError:
            return None, "the server did not take the connection in time"
        except OSError as e:
            why = _reason(e)
        return None, f"the server can't be reached ({why})"

    # -- the recorder -------------------------------------------------------------------------------------------------

    def work_soon(self) -> None:
        """Something was noted."""
        if not self.working:
            self.working = True
            self._loop.call_later(_WORK_EVERY_S, self._work)

    def _work(self) -> None:
        """Let the recorder look into what was noted, a little at a time: streams come first."""
        self.working = self.recorder.work()
        if self.working:
            self._loop.call_soon(self._work)


def _reason(error: OSError) -> str:
    """In the system's words, without addresses."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or 'handshake failed'}"
    if isinstance(error, socket.gaierror):
        return error.strerror or "its name is not known"
    return os.strerror(error.errno) if isinstance(error.errno, int) and error.errno > 0 else "no reason given"
