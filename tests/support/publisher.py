"""A publisher as the engines have it: PUB, and a ROUTER that replays. It follows ZmqEventPublisher's protocol; messages can be
kept off the wire, so that a gap comes about as on a real network."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import zmq

__all__ = ["Publisher"]


class Publisher:
    """Publishes (topic, number, payload). ``buffer``: messages kept for a replay; ``old``: replays without the topic (SGLang)."""

    def __init__(
        self, *, events: str = "tcp://127.0.0.1:*", replay: bool = True, buffer: int = 10_000, old: bool = False
    ) -> None:
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.XPUB)  # as PUB, and tells of subscribers
        if events.startswith("connect:"):
            self._pub.connect(events.removeprefix("connect:"))
            self.events = events.removeprefix("connect:")
        else:
            self._pub.bind(events)
            self.events = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay: str | None = None
        self._router: Any = None
        self._old = old
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self._next = 0
        self.asked: list[int] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        if replay:
            self._router = self._context.socket(zmq.ROUTER)
            self._router.bind("tcp://127.0.0.1:*")
            self.replay = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
            self._thread = threading.Thread(target=self._serve, daemon=True)
            self._thread.start()

    def wait(self, timeout_s: float = 10.0) -> None:
        """Wait until somebody has subscribed: what is published before that is lost."""
        assert self._pub.poll(int(timeout_s * 1000), zmq.POLLIN), "nobody subscribed"
        assert self._pub.recv()[:1] == b"\x01"

    def send(self, payload: bytes, *, lose: bool = False, number: int | None = None) -> int:
        """Publish one message, or only remember it (``lose``); gives its number."""
        with self._lock:
            if number is None:
                number, self._next = self._next, self._next + 1
            else:
                self._next = number + 1
            self._buffer.append((number, payload))
        if not lose:
            self._pub.send_multipart((b"", number.to_bytes(8, "big"), payload))
        return number

    def raw(self, *frames: bytes) -> None:
        self._pub.send_multipart(frames)

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5)
        self._context.destroy(linger=200)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        while not self._stop.is_set():
            if not self._router.poll(20):
                continue
            client, _, start = self._router.recv_multipart()
            first = int.from_bytes(start, "big")
            self.asked.append(first)
            topic = () if self._old else (b"",)
            with self._lock:
                kept = [(n, p) for n, p in self._buffer if n >= first]
            for n, payload in kept:
                self._router.send_multipart((client, b"", *topic, n.to_bytes(8, "big"), payload))
            self._router.send_multipart((client, b"", *topic, (-1).to_bytes(8, "big", signed=True), b""))
