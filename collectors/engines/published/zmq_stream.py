"""A thread that reads ZeroMQ PUB sockets, stamps each message as it comes, and can ask a replay socket for what was missed.

Engines publish KV events and forward-pass metrics this way (vllm/distributed/kv_events.py, sglang/srt/observability/
forward_pass_metrics.py): three frames, topic, 8-byte big-endian sequence number, msgpack. A thread and not the event loop:
messages are stamped when they come, whatever the loop is doing, and decoding them does not hold up the proxy.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

__all__ = ["MAX_MESSAGE_BYTES", "Endpoint", "Listener", "Stream", "look", "sequence_number"]

MAX_MESSAGE_BYTES = 64 << 20
"""A larger message is no batch of events: ZeroMQ then drops the connection and makes a new one."""

_HIGH_WATER = 20_000
_POLL_MS = 100
_BURST = 500


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One publisher: ``events`` to connect to (or, with ``bind``, to bind), ``replay`` to ask, both in ZeroMQ's form."""

    events: str
    replay: str | None = None
    rank: int = 0
    bind: bool = False
    topic: str = ""

    @property
    def local(self) -> bool:
        """Whether the publisher is certain to be on this host, so that its wall clock is this host's."""
        if not self.events.startswith("tcp://"):
            return True
        host = urlsplit(self.events).hostname or ""
        return host in ("localhost", "::1") or host.startswith("127.")


class Listener(Protocol):
    """Who takes the messages of one endpoint. Called in the stream's thread; what it raises is counted and goes no further."""

    def live(self, frames: list[bytes], received_ns: int) -> None:
        """A published message; ``received_ns`` is CLOCK_MONOTONIC when it was read."""

    def replayed(self, frames: list[bytes]) -> None:
        """An answer of the replay socket, without its empty first frame."""

    def wanted(self, now_ns: int) -> int | None:
        """From which sequence number on to ask for a replay now; null for no question. Called ten times a second and after
        each burst of messages."""


def sequence_number(frame: bytes) -> int | None:
    """The 8-byte big-endian number, signed (−1 ends a replay); null if the frame is none."""
    return int.from_bytes(frame, "big", signed=True) if len(frame) == 8 else None


class Stream:
    """Reads ``endpoints`` from :meth:`start` to :meth:`close`, each message to the listener of the same place in the list."""

    def __init__(self, endpoints: list[Endpoint], listeners: list[Listener], name: str) -> None:
        self._endpoints, self._listeners = endpoints, listeners
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"hoptrace-{name}", daemon=True)
        self.faults: dict[str, int] = {}
        """Exceptions of listeners and of ZeroMQ, by what they were."""

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = 3.0) -> None:
        """Read what has already come, then stop. Blocks up to ``timeout_s``."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        import zmq

        context = zmq.Context()
        try:
            self._read(zmq, context)
        except Exception as e:
            self._fault(e)
        finally:
            context.destroy(linger=0)

    def _read(self, zmq: Any, context: Any) -> None:
        poller = zmq.Poller()
        subscribers: dict[Any, int] = {}
        replays: dict[int, Any] = {}
        for i, endpoint in enumerate(self._endpoints):
            socket = _socket(zmq, context, zmq.SUB, endpoint.events)
            socket.setsockopt(zmq.SUBSCRIBE, endpoint.topic.encode())
            (socket.bind if endpoint.bind else socket.connect)(endpoint.events)
            subscribers[socket] = i
            poller.register(socket, zmq.POLLIN)
        while True:
            last = self._stop.is_set()
            ready = dict(poller.poll(0 if last else _POLL_MS))
            for socket, i in subscribers.items():
                if socket in ready:
                    self._drain(zmq, socket, i)
            for i, socket in replays.items():
                if socket in ready:
                    self._drain_replay(zmq, socket, i)
            if last:
                return
            for i, listener in enumerate(self._listeners):
                self._ask(zmq, context, poller, replays, i, listener)

    def _drain(self, zmq: Any, socket: Any, i: int) -> None:
        for _ in range(_BURST):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            received_ns = time.monotonic_ns()
            try:
                self._listeners[i].live(frames, received_ns)
            except Exception as e:
                self._fault(e)

    def _drain_replay(self, zmq: Any, socket: Any, i: int) -> None:
        for _ in range(_BURST):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._listeners[i].replayed(frames[1:] if frames and not frames[0] else frames)
            except Exception as e:
                self._fault(e)

    def _ask(self, zmq: Any, context: Any, poller: Any, replays: dict[int, Any], i: int, listener: Listener) -> None:
        try:
            start = listener.wanted(time.monotonic_ns())
            address = self._endpoints[i].replay
            if start is None or address is None:
                return
            if i not in replays:
                replays[i] = _socket(zmq, context, zmq.DEALER, address)
                replays[i].connect(address)
                poller.register(replays[i], zmq.POLLIN)
            # As a REQ socket would: the publisher's ROUTER expects an empty frame before the number.
            replays[i].send_multipart([b"", start.to_bytes(8, "big")], zmq.NOBLOCK)
        except Exception as e:
            self._fault(e)

    def _fault(self, e: Exception) -> None:
        what = f"{type(e).__name__}: {e}"[:200] if isinstance(e, OSError) else type(e).__name__
        if what in self.faults or len(self.faults) < 50:
            self.faults[what] = self.faults.get(what, 0) + 1


def _socket(zmq: Any, context: Any, kind: int, address: str) -> Any:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.IPV6, int("[" in address))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    return socket


async def look(endpoint: Endpoint, remedy: str) -> str | None:
    """Null if the endpoint can be read, else why not. ``remedy`` says what to change where nobody publishes."""
    import asyncio

    if endpoint.bind:
        return _bindable(endpoint.events)
    if endpoint.events.startswith("ipc://"):
        path = endpoint.events[len("ipc://") :]
        return None if path.startswith("@") or Path(path).is_socket() else f"there is no socket {path}: {remedy}"
    if not endpoint.events.startswith("tcp://"):
        return f"{endpoint.events} is no tcp:// or ipc:// address: {remedy}"
    try:
        parts = urlsplit(endpoint.events)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        return f"{endpoint.events} names no host and port: {remedy}"
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), 3.0)
    except (OSError, TimeoutError):
        return f"nothing listens at {endpoint.events}: {remedy}"
    try:
        # A ZeroMQ peer greets at once: 0xFF, eight bytes, 0x7F (ZMTP 3.1, section "Greeting").
        greeting = await asyncio.wait_for(reader.readexactly(10), 3.0)
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        greeting = b""
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    if greeting[:1] == b"\xff" and greeting[9:] == b"\x7f":
        return None
    return f"what listens at {endpoint.events} is no ZeroMQ socket: {remedy}"


def _bindable(address: str) -> str | None:
    import zmq

    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    try:
        socket.bind(address)
    except zmq.ZMQError as e:
        return f"{address} cannot be bound ({e.strerror}): end what listens there, or let the server publish elsewhere"
    finally:
        socket.close(0)
        context.destroy(0)
    return None
