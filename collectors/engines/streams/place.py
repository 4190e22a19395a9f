"""Where requests are seen: in the proxy, or on the wire before the server. What differs between the two is only here."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

__all__ = ["PROXY", "WIRE", "Place"]


@dataclass(frozen=True, slots=True)
class Place:
    """``source`` and ``vantage`` of its rows; ``between``: nodes that bytes cross between client and server."""

    source: str
    vantage: str
    between: tuple[str, ...] = ()

    def links(self, server: str, client: str = "client") -> list[str]:
        """Links from client to server, in that order."""
        return [f"{a}-{b}" for a, b in pairwise((client, *self.between, f"server:{server}"))]


PROXY = Place("proxy", "proxy", ("proxy",))
WIRE = Place("sniff", "wire")
