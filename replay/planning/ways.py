"""Links and ways of a plan, from the links that a policy describes or the access paths of a platform."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hoptrace.access import access
from hoptrace.replay.plan import LinkSpec, Way
from hoptrace.replay.policy.places import Link

__all__ = ["Leg", "Ways"]


@dataclass(frozen=True)
class Leg:
    """One end of a way: the server's name, and in which direction the data passes its links (``out``: leaves its memory)."""

    server: str
    direction: Literal["out", "in"]


@dataclass
class Ways:
    """Collects what a plan's ``links`` and ``ways`` hold; the same link asked for twice is one.

    Attributes:
        described: the policy's [links].
        free: whether every transfer takes no time at all ([ceilings] links).
        notes: grows with what a reader has to know; sources: with where a platform's figures are from.
    """

    described: Mapping[str, Link]
    free: bool = False
    notes: list[str] = field(default_factory=list)
    sources: dict[str, None] = field(default_factory=dict)
    links: list[LinkSpec] = field(default_factory=list)
    ways: list[Way] = field(default_factory=list)
    _by_name: dict[str, int] = field(default_factory=dict)
    _seen: dict[Way, int] = field(default_factory=dict)

    def link(self, name: str, bytes_per_s: int) -> int:
        """The index of a link, made if it is not there. Two paths may attain different rates on one link: it has the lower."""
        if name not in self._by_name:
            self._by_name[name] = len(self.links)
            self.links.append(LinkSpec(name, bytes_per_s))
            return self._by_name[name]
        at = self._by_name[name]
        known = self.links[at].bytes_per_s
        if known != bytes_per_s:
            low, high = sorted((known, bytes_per_s))
            self.links[at] = LinkSpec(name, low)
            kind = name.split("@")[0]
            self.notes.append(
                f"{kind}: one path attains {low / 1e9:g} GB/s on it, another {high / 1e9:g}; it is taken as the lower."
            )
        return at

    def way(self, way: Way) -> int:
        """The index of a way, made if it is not there."""
        if self.free:
            way = Way(src=way.src, dst=way.dst, path=way.path, mechanism=way.mechanism, payload_hops=way.payload_hops,
                      control_ops=way.control_ops, transfers_per_block=way.transfers_per_block, derived=way.derived)  # fmt: skip
        if way not in self._seen:
            self._seen[way] = len(self.ways)
            self.ways.append(way)
        return self._seen[way]

    def over(self, names: tuple[str, ...], legs: tuple[Leg, ...], src: str, dst: str, usual: str) -> int:
        """A way over links that the policy describes, one after another, past each of ``legs``.

        Fixed times add up over the links, each counted once. A link that is not shared lies at each leg's server, and the bytes
        cross it at every leg; a shared one is crossed once, in the first leg's direction.

        Args:
            usual: the mechanism of a link that names none.
        """
        at: list[int] = []
        path: list[str] = []
        base = block = 0.0
        mechanism = usual
        # Towards a server the links are met in the other order.
        inwards = len(legs) == 1 and legs[0].direction == "in"
        for name in reversed(names) if inwards else names:
            link = self.described[name]
            base += link.latency_us or 0
            block += link.per_block_us or 0
            mechanism = link.mechanism or mechanism
            ends = [f"{name}:{legs[0].direction}"] if link.shared else [f"{name}@{g.server}:{g.direction}" for g in legs]
            path += ends
            if link.gbytes_per_s != "infinite":
                at += [self.link(end, max(1, round(link.gbytes_per_s * 1e9))) for end in ends]
        how = access(mechanism)
        return self.way(
            Way(
                links=tuple(at), base_ns=round(base * 1000), per_block_ns=round(block * 1000), src=src, dst=dst,
                path=tuple(path), mechanism=mechanism, payload_hops=how.payload_hops(len(path)) if how else 0,
                control_ops=how.control_ops(len(path)) if how else 0,
            )
        )  # fmt: skip

    def none(self, src: str, dst: str, usual: str) -> int:
        """A way without a link, for [ceilings] links."""
        how = access(usual)
        return self.way(
            Way(src=src, dst=dst, mechanism=usual, payload_hops=how.payload_hops() if how else 0,
                control_ops=how.control_ops() if how else 0)
        )  # fmt: skip
