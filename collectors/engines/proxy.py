"""A streaming reverse proxy that stands between clients and a server and times every read.

Bytes go on to the client before anything looks at them. All paths pass; the completion paths are recorded. Whatever the recorder
does, the stream goes on. Connections to the server are not used again: servers close idle ones after a few seconds (llama.cpp
after five), and a request sent on such a connection would be lost.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web
from aiohttp.http import HttpProcessingError, HttpVersion11
from yarl import URL

from hoptrace.collectors.engines.answer import BODY_LIMIT_BYTES
from hoptrace.collectors.engines.headers import to_client, to_server
from hoptrace.collectors.engines.record import CAPTURE_ENDED, CLIENT_LEFT, Exchange, Recorder
from hoptrace.errors import EnvironmentProblem

__all__ = ["RECORDED_PATHS", "Proxy", "listen"]

RECORDED_PATHS = ("/v1/completions", "/v1/chat/completions", "/completions", "/chat/completions", "/completion")
_LATE_NS = 5_000_000
_CONNECT_S = 30.0
_WORK_EVERY_S = 0.05
_HEADER_BYTES = 1 << 16
_Body = bytes | AsyncIterator[bytes] | aiohttp.StreamReader | None
_Outcome = tuple[aiohttp.ClientResponse | None, str | None]


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
        self._origin = f"{parts.scheme}://{parts.netloc}"
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._recorder = recorder
        self._now = now_ns
        self._runner: web.ServerRunner | None = None
        self._client: aiohttp.ClientSession | None = None
        self._working = False
        self._closing = False
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
        # No limit on connections: the proxy must not queue what the server would take.
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Content-Type", "Accept"),
            max_line_size=_HEADER_BYTES,
            max_field_size=_HEADER_BYTES,
        )
        server = web.Server(
            self._handle,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            max_line_size=_HEADER_BYTES,
            max_field_size=_HEADER_BYTES,
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.SockSite(self._runner, sock).start()

    async def close(self) -> None:
        """Stop listening; streams that still run are cut after a second and recorded as cancelled by the end of the capture."""
        self._closing = True
        if self._runner is not None:
            await self._runner.cleanup()
        while self._recorder.work():
            pass
        if self._client is not None:
            await self._client.close()

    # -- one request --------------------------------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        received_ns = self._now()
        target = request.raw_path
        if "://" in target.split("?", 1)[0]:  # absolute form: a client that takes us for a forward proxy
            parts = urlsplit(target)
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if request.method == "CONNECT" or not target.startswith(("/", "*")) or "upgrade" in request.headers:
            return _problem(501, "hoptrace's proxy forwards plain HTTP requests only")
        _continue(request)
        path = target.split("?", 1)[0].removeprefix(self._prefix)
        exchange = None
        if request.method == "POST" and path in RECORDED_PATHS:
            exchange = self._recorder.begin(received_ns, request.headers, path)
        try:
            return await self._forward(request, target, exchange)
        except asyncio.CancelledError:
            # The client went away: its handler is cancelled. (The server's errors end in `_forward`.)
            if exchange is not None:
                exchange.cancelled(self._now(), self._why())
            raise
        except (ConnectionError, aiohttp.ClientError, HttpProcessingError):
            # The client went away while it was written to, or broke off in the middle of its own request.
            if exchange is not None:
                exchange.cancelled(self._now(), self._why())
            _break_off(request)
            return web.Response(status=499)

    async def _forward(self, request: web.BaseRequest, target: str, exchange: Exchange | None) -> web.StreamResponse:
        body: _Body = None
        kept: bytes | None = None
        size = reads = 0
        if exchange is not None:
            complete = request.content.is_eof()
            kept, whole, reads = await _read(request)
            size = request.content_length or len(kept)
            body = kept if whole else _joined(kept, request.content)
            now_ns = self._now()
            # While the client sends its body the proxy waits for it, not the request for the proxy.
            exchange.forwarded(now_ns, size, reads, None if complete else now_ns)
            if not whole:
                kept = None
        elif request.body_exists:
            body = request.content
        if exchange is not None and kept is not None:
            exchange.described(kept)
            self._work_soon()
        answer, problem = await self._send(request, target, body)
        if answer is None:
            if exchange is not None:
                exchange.failed(self._now(), problem or "no answer")
            return _problem(502, problem or "no answer")
        try:
            return await self._stream(request, answer, exchange)
        finally:
            # Not released: a client that left must free the server's slot at once.
            answer.close()

    async def _send(self, request: web.BaseRequest, target: str, body: _Body) -> _Outcome:
        assert self._client is not None
        prefix = "" if not self._prefix or target.startswith(self._prefix + "/") else self._prefix
        try:
            answer = await self._client.request(
                request.method,
                URL(self._origin + prefix + target, encoded=True),
                headers=to_server(request.headers),
                data=body,
                allow_redirects=False,
            )
        except TimeoutError:
            return None, "the server did not take the connection in time"
        except aiohttp.ClientConnectorError as e:
            return None, f"the server can't be reached ({e.os_error.strerror or 'no reason given'})"
        except (aiohttp.ClientError, ValueError) as e:
            return None, f"the server broke off before it answered ({type(e).__name__})"
        return answer, None

    async def _stream(
        self, request: web.BaseRequest, answer: aiohttp.ClientResponse, exchange: Exchange | None
    ) -> web.StreamResponse:
        out = web.StreamResponse(status=answer.status, reason=answer.reason, headers=to_client(answer.headers))
        bodiless = request.method == "HEAD" or answer.status in (204, 304) or 100 <= answer.status < 200
        if not bodiless and "content-length" not in answer.headers:
            if request.version >= HttpVersion11:
                out.enable_chunked_encoding()
            else:
                out.force_close()
        if exchange is not None:
            told = answer.headers
            exchange.answered(answer.status, told.get("content-type", ""), told.get("content-encoding", ""))
        await out.prepare(request)
        content = answer.content
        late = False
        while True:
            try:
                data = await content.readany()
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as e:
                if exchange is not None:
                    exchange.failed(self._now(), f"the server broke off in the middle of its answer ({type(e).__name__})")
                _break_off(request)
                return out
            now_ns = self._now()
            if not data:
                break
            await out.write(data)
            if exchange is not None:
                # Only a client that does not read makes this write take long; what piled up meanwhile came when it came.
                blocked = self._now() - now_ns > _LATE_NS
                exchange.read(data, now_ns, late)
                late = blocked
                self._work_soon()
        await out.write_eof()
        if exchange is not None:
            exchange.finished(now_ns)
        return out

    def _work_soon(self) -> None:
        if not self._working:
            self._working = True
            asyncio.get_running_loop().call_later(_WORK_EVERY_S, self._work)

    def _work(self) -> None:
        """Let the recorder look into what was read, a little at a time: streams come first."""
        self._working = self._recorder.work()
        if self._working:
            asyncio.get_running_loop().call_soon(self._work)

    def _why(self) -> str:
        return CAPTURE_ENDED if self._closing else CLIENT_LEFT


async def _read(request: web.BaseRequest) -> tuple[bytes, bool, int]:
    """The body, or its beginning if it is larger than what is kept; whether it is whole; how many reads it took."""
    pieces: list[bytes] = []
    size = reads = 0
    while size <= BODY_LIMIT_BYTES:
        piece = await request.content.readany()
        if not piece:
            return b"".join(pieces), True, reads
        pieces.append(piece)
        size += len(piece)
        reads += 1
    return b"".join(pieces), False, reads


async def _joined(begin: bytes, rest: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    yield begin
    async for piece in rest.iter_any():
        yield piece


def _continue(request: web.BaseRequest) -> None:
    """Tell a client that waits for leave to send its body (RFC 9110, section 10.1.1) to go on."""
    asks = request.version >= HttpVersion11 and request.headers.get("expect", "").lower() == "100-continue"
    if asks and request.transport is not None and not request.content.is_eof():
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def _break_off(request: web.BaseRequest) -> None:
    """End the client's connection without the end of the message: it must see that the answer is not whole."""
    if request.transport is not None:
        request.transport.close()


def _problem(status: int, why: str) -> web.Response:
    body = {"error": {"message": f"hoptrace proxy: {why}.", "type": "proxy_error", "code": status}}
    return web.Response(status=status, body=json.dumps(body).encode(), content_type="application/json")
