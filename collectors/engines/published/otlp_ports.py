"""The two doors of the OTLP receiver: HTTP (protobuf and JSON, gzip) and gRPC. What comes in goes to one ``accept``.

https://opentelemetry.io/docs/specs/otlp/: a message that is understood is answered with success, with ``partialSuccess`` for
spans that were not kept (and must not be sent again); one that is not is a 400 or INVALID_ARGUMENT, which exporters do not retry.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from hoptrace.collectors.engines.published.otlp_wire import Malformed

if TYPE_CHECKING:
    from aiohttp import web

__all__ = ["MAX_BODY_BYTES", "Accept", "GrpcPort", "HttpPort", "taken"]

MAX_BODY_BYTES = 16 << 20
"""Of a message, after decompression. An exporter's batch of 512 spans is some 300 KB."""

Accept = Callable[[bytes, str, str], Awaitable[tuple[int, str]]]
"""(body, "protobuf" or "json", peer) → spans that were not kept, and why. Raises Malformed."""

_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_JSON, _PROTOBUF = "application/json", "application/x-protobuf"


def taken(address: tuple[str, int]) -> str | None:
    """Null if the address can be listened on, else why not."""
    try:
        _listen(address).close()
    except OSError as e:
        return e.strerror or str(e)
    return None


def _listen(address: tuple[str, int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(128)
    except BaseException:
        sock.close()
        raise
    return sock


class HttpPort:
    """POST /v1/traces."""

    def __init__(self, accept: Accept, refused: Callable[[str], None]) -> None:
        self._accept, self._refused = accept, refused
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self, address: tuple[str, int]) -> None:
        """Listen. Raises OSError."""
        from aiohttp import web

        sock = _listen(address)
        self.port = sock.getsockname()[1]
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/traces", self._traces)
        app.router.add_route("*", "/{path:.*}", self._elsewhere)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.SockSite(self._runner, sock).start()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _traces(self, request: web.Request) -> web.Response:
        from aiohttp import web

        form = {_JSON: "json", _PROTOBUF: "protobuf"}.get(request.content_type)
        if form is None:
            return self._no(415, f"{request.content_type} is neither {_PROTOBUF} nor {_JSON}", "protobuf")
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            return self._no(413, f"the message is larger than {MAX_BODY_BYTES >> 20} MiB", form)
        except Exception:  # damaged compression, a client that went away: aiohttp has a dozen errors for it
            return self._no(400, "the body cannot be read", form)
        try:
            rejected, why = await self._accept(body, form, request.remote or "")
        except Malformed as e:
            return self._no(400, str(e), form)
        if form == "json":
            told = {"partialSuccess": {"rejectedSpans": str(rejected), "errorMessage": why}} if rejected else {}
            return web.json_response(told)
        return web.Response(body=_success(rejected, why), content_type=_PROTOBUF)

    async def _elsewhere(self, request: web.Request) -> web.Response:
        from aiohttp import web

        self._refused("message to another path than /v1/traces")
        return web.Response(status=404, text="Spans are received at POST /v1/traces.\n")

    def _no(self, status: int, why: str, form: str) -> web.Response:
        from aiohttp import web

        self._refused(f"message that was refused: {why}" if status != 415 else "message of an unknown content type")
        body = json.dumps({"code": 3, "message": why}).encode() if form == "json" else _status(why)
        kind = _JSON if form == "json" else _PROTOBUF
        return web.Response(status=status, body=body, content_type=kind, headers={"Connection": "close"})


class GrpcPort:
    """TraceService/Export."""

    def __init__(self, accept: Accept, refused: Callable[[str], None]) -> None:
        self._accept, self._refused = accept, refused
        self._server: Any = None
        self.port = 0

    async def start(self, address: tuple[str, int]) -> None:
        """Listen. Raises OSError."""
        import grpc
        import grpc.aio

        export = self._export

        class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
            def service(self, details: Any) -> Any:
                # Bytes in, bytes out: what is malformed is told as such, and counted.
                return grpc.unary_unary_rpc_method_handler(export) if details.method == _EXPORT else None

        limits = [("grpc.max_receive_message_length", MAX_BODY_BYTES), ("grpc.so_reuseport", 0)]
        server = grpc.aio.server(handlers=[Handler()], options=limits)
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        try:
            self.port = server.add_insecure_port(f"{host}:{address[1]}")
        except RuntimeError as e:
            raise OSError(str(e)) from None
        if not self.port:
            raise OSError("Address already in use")
        await server.start()
        self._server = server

    async def close(self) -> None:
        if self._server is not None:
            with contextlib.suppress(Exception):
                await self._server.stop(0.5)

    async def _export(self, body: bytes, context: Any) -> bytes:
        import grpc

        try:
            rejected, why = await self._accept(body, "protobuf", _peer(context.peer()))
        except Malformed as e:
            self._refused(f"message that was refused: {e}")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(e))
        return _success(rejected, why)


def _peer(told: str) -> str:
    """The host in gRPC's `ipv4:127.0.0.1:5`, `ipv6:%5B::1%5D:5`, `unix:`."""
    kind, _, rest = told.partition(":")
    if kind == "unix":
        return "127.0.0.1"
    return rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")


def _success(rejected: int, why: str) -> bytes:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    response = ExportTraceServiceResponse()
    if rejected:
        response.partial_success.rejected_spans = rejected
        response.partial_success.error_message = why
    out: bytes = response.SerializeToString()
    return out


def _status(why: str) -> bytes:
    """google.rpc.Status with code 3 (INVALID_ARGUMENT) and a message: field 1 varint, field 2 text."""
    text = why.encode()[:120]
    return b"\x08\x03\x12" + bytes([len(text)]) + text
