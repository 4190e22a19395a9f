"""Whether two URLs of a capture are one server, whose requests would be counted twice."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from urllib.parse import urlsplit

from hoptrace.collectors.hardware.listener import local_address
from hoptrace.collectors.urls import port_of
from hoptrace.errors import UsageError

__all__ = ["refuse_twice"]


@dataclass(frozen=True, slots=True)
class _Place:
    url: str
    host: str
    port: int
    path: str
    addresses: frozenset[str]

    @classmethod
    def of(cls, url: str) -> _Place:
        parts = urlsplit(url)
        host = (parts.hostname or "").rstrip(".")
        try:
            told = frozenset(str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
        except OSError:
            told = frozenset()
        return cls(url, host, port_of(parts), parts.path.rstrip("/"), told)

    def meets(self, other: _Place) -> bool:
        """Whether both lead to one listening socket, as far as names tell."""
        return self.port == other.port and (self.host == other.host or bool(self.addresses & other.addresses))


def refuse_twice(urls: Sequence[str], *, wire: bool) -> None:
    """Raise UsageError if two of ``urls`` are the same server. Looks names up, so it may block.

    Paths tell servers apart behind one gateway (``/a/v1``, ``/b/v1``), but not on the wire (``wire``): there a server is an
    address and a port, and of this machine all addresses are one (see the sniffer).
    """
    places = [_Place.of(url) for url in urls]
    for a, b in combinations(places, 2):
        if a.meets(b) and (wire or a.path == b.path):
            what = "the same server" if a.path == b.path else "at the same address and port"
            raise UsageError(
                f"{a.url} and {b.url} are {what}: each request would be counted twice.", hint="Name each server once."
            )
        if wire and a.port == b.port and local_address(a.host) and local_address(b.host):
            raise UsageError(
                f"On the wire {a.url} and {b.url} can't be told apart: each request would be counted twice.",
                hint="Name the server once, or use --proxy.",
            )
