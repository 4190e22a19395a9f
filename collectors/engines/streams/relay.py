"""The proxy's data path: each client's connection with one of its own to the server. Bytes go on first, and are noted then.

Because the two belong together, whatever one side does shows on the other as it would without us: an idle connection that the
server closes is closed to the client, a half-closed one is half-closed, a reset is a reset, and a client that leaves frees the
server's slot at once. A side that does not read stops the other from being read: memory is bounded.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hoptrace.collectors.engines.streams.conversation import Conversation
from hoptrace.collectors.engines.streams.heads import Heads
from hoptrace.collectors.engines.streams.problem import problem

if TYPE_CHECKING:
    from hoptrace.collectors.engines.streams.proxy import Proxy

__all__ = ["Client"]

_HIGH_BYTES = 1 << 18
_FULL_READ_BYTES = 1 << 16
_LINGER_S = 2.0
_NO_LINGER = struct.pack("ii", 1, 0)


class _End(asyncio.Protocol):
    """One of the two connections: what both know of writing."""

    transport: Any = None
    fd = -1

    def open(self, transport: Any) -> None:
        """The connection is there."""
        self.transport = transport
        transport.set_write_buffer_limits(high=_HIGH_BYTES)
        # uvloop writes only after all reads of its round: with hundreds of streams the first would wait for the last.
        if type(transport).__module__.startswith("uvloop") and transport.get_extra_info("sslcontext") is None:
            self.fd = transport.get_extra_info("socket").fileno()

    def send(self, data: bytes) -> None:
        """Write, at once if nothing waits before it."""
        transport = self.transport
        if self.fd < 0 or transport.get_write_buffer_size() or transport.is_closing():
            transport.write(data)
            return
        try:
            sent = os.write(self.fd, data)
        except BlockingIOError:
            sent = 0
        except OSError as e:
            self.broke(e)
            return
        if sent < len(data):
            transport.write(data[sent:])

    def broke(self, error: OSError) -> None:
        """It can't be written to."""
        raise NotImplementedError

    def reset(self) -> None:
        """End it as a broken connection ends, not as a finished one."""
        if self.transport is not None and not self.transport.is_closing():
            with suppress(OSError, AttributeError):
                self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self.transport.abort()


class Client(_End):
    """A client's connection, and what belongs to it."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.talk = Conversation(proxy.recorder, proxy.prefix)
        self.heads = Heads(proxy.authority, proxy.prefix)
        self.server: Server | None = None
        self.refused: str | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._queue: list[tuple[bytes, bytes, int]] = []
        self._queued = 0
        self._paused = False
        self._eof = False
        self.over = False

    def connection_made(self, transport: Any) -> None:
        self.open(transport)
        self.proxy.clients.add(self)
        # Before it asks anything: when its request is there, so is the connection to the server.
        self._connect()

    def _connect(self) -> None:
        self.refused = None
        self._connecting = asyncio.get_running_loop().create_task(self._connected())

    async def _connected(self) -> None:
        server, refused = await self.proxy.connect(lambda: Server(self))
        self._connecting = None
        if self.over:
            if server is not None:
                server.reset()
            return
        if server is None:
            self.refused = refused
            self._refuse()
            return
        self.server = server
        for data, out, now_ns in self._queue:
            sent_ns = self.proxy.now_ns()
            if out:
                server.send(out)
            self.talk.from_client(data, now_ns, sent_ns)
        self._queue, self._queued = [], 0
        self._resume()
        if self._eof:
            self._half_close()
        self.proxy.work_soon()

    def data_received(self, data: bytes) -> None:
        now_ns = self.proxy.now_ns()
        if self.over:
            return
        out = self.heads.feed(data)
        server = self.server
        if server is None:
            self._wait(data, out, now_ns)
            return
        # Before it is written: a busy machine may let the server work on it before we run again.
        sent_ns = self.proxy.now_ns()
        if out:
            server.send(out)
        self.talk.from_client(data, now_ns, sent_ns)
        self.proxy.work_soon()
        if self.heads.switching and self.heads.held > _HIGH_BYTES:
            self._pause()

    def _wait(self, data: bytes, out: bytes, now_ns: int) -> None:
        self._queue.append((data, out, now_ns))
        self._queued += len(data)
        if self._connecting is not None:
            if self._queued > _HIGH_BYTES:
                self._pause()
        elif self.heads.begun <= 1 and len(self._queue) == 1:
            self._connect()  # it was refused while nothing was asked: the server may be there by now
        else:
            self._refuse()

    def _refuse(self) -> None:
        """Say that the server can't be reached, once the request is whole (a client that still writes would not read it)."""
        if not self._queue:
            return
        for data, _, now_ns in self._queue:
            self.talk.from_client(data, now_ns)
        del self._queue[1:]  # one is left as the mark that something was asked
        self._queue[0] = (b"", b"", 0)
        self._queued = 0
        self._resume()
        if self.heads.ended or self.heads.expects or self.heads.raw or self._eof:
            why = self.refused or "no answer"
            self.talk.failed(self.proxy.now_ns(), why)
            self.transport.write(problem(502, why, body=self.heads.method != b"HEAD"))
            self._finish()
        self.proxy.work_soon()

    def answered(self, data: bytes) -> None:
        """The server said something while a request for another protocol was open."""
        out = self.heads.answered(data)
        self._resume()
        if out and self.server is not None:
            self.server.send(out)

    def _pause(self) -> None:
        if not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def _resume(self) -> None:
        if self._paused and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        if self.server is not None:
            self.server.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.server is not None:
            # What comes now has waited in the kernel: its times are those of the client's reading.
            self.server.late = True
            self.server.transport.resume_reading()

    def eof_received(self) -> bool:
        self._eof = True
        if not self.over:
            self.talk.client_closed(self.proxy.now_ns())
            self.proxy.work_soon()
            if self.server is not None:
                self._half_close()
            elif self._connecting is None:
                return False
        return True

    def _half_close(self) -> None:
        """It sends no more: so the server is told. Whether it still reads shows when something is written to it."""
        assert self.server is not None
        transport = self.server.transport
        if transport.get_extra_info("sslcontext") is None:
            transport.write_eof()
        else:
            # TLS here can't close one side only, and a client that left is far likelier than one that still reads.
            self.server.over = True
            transport.abort()
            self._server_ended()
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.proxy.clients.discard(self)
        if self._connecting is not None:
            self._connecting.cancel()
        if not self.over:
            self._gone(error)

    def broke(self, error: OSError) -> None:
        self._gone(error)
        self.transport.abort()

    def _gone(self, error: Exception | None) -> None:
        self.over = True
        now_ns = self.proxy.now_ns()
        for data, _, at_ns in self._queue:
            if data:
                self.talk.from_client(data, at_ns)
        self.talk.client_closed(now_ns)
        self.talk.server_closed(now_ns)
        server = self.server
        if server is not None and not server.over:
            server.over = True
            if error is not None:
                server.reset()
            else:
                server.transport.abort()
        self.proxy.work_soon()

    def _server_ended(self, reset: bool = False) -> None:
        self.over = True
        self.talk.server_closed(self.proxy.now_ns(), reset)
        self.proxy.work_soon()

    def server_ended(self, error: Exception | None) -> None:
        """The server closed its connection (or it broke: ``error``)."""
        if self.over:
            return
        self._server_ended(error is not None)
        if error is not None:
            self.reset()
        else:
            self._finish()

    def _finish(self) -> None:
        """Close, after what still has to go out. A client in the middle of its request must not lose the answer to a reset."""
        self.over = True
        if self.heads.ended < self.heads.begun and not self._eof:
            self._resume()
            if self.transport.can_write_eof():
                self.transport.write_eof()
            asyncio.get_running_loop().call_later(_LINGER_S, self.transport.close)
        else:
            self.transport.close()

    def cut(self) -> None:
        """The capture ends."""
        if not self.over:
            self.over = True
            self.talk.ended(self.proxy.now_ns())
            if self.server is not None:
                self.server.over = True
                self.server.transport.abort()
        self.transport.abort()


class Server(_End):
    """A client's connection to the server."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.late = False
        self.over = False
        self._proxy = client.proxy
        self._talk = client.talk

    def connection_made(self, transport: Any) -> None:
        self.open(transport)

    def data_received(self, data: bytes) -> None:
        now_ns = self._proxy.now_ns()
        client = self.client
        if client.over:
            return
        if client.heads.switching:
            client.answered(data)
        client.send(data)
        late = self.late
        self._talk.from_server(data, now_ns, late)
        if late and len(data) < _FULL_READ_BYTES:
            self.late = False
        if not self._proxy.working:
            self._proxy.work_soon()

    def pause_writing(self) -> None:
        self.client._pause()

    def resume_writing(self) -> None:
        self.client._resume()

    def eof_received(self) -> bool:
        self._end(None)
        return False

    def broke(self, error: OSError) -> None:
        # It takes no more; what it has said is still read, until its end is.
        return

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        if not self.over:
            self.over = True
            self.client.server_ended(error)
