"""The access paths: by which hops each mechanism gets data, or word of it, from one place to another, and what each hop costs.

Every hop says who performs it, whether it carries the payload, which constant is its fixed cost (``cost``, of
:data:`hoptrace.platform_file.CONSTANTS`) and what moves its bytes (``rate``). Some costs were measured over several hops
together: those hops bear one name and are charged once. Steps that :mod:`hoptrace.access` has are taken from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from hoptrace.access import ACCESS, Hop

__all__ = ["COHERENT", "COPY", "LOAD", "PLACES", "Mechanism", "Step", "both", "copy_steps", "steps_of"]

COHERENT = ("cache_hit_rate", "cache_hit_ns", "cache_miss_ns", "cache_invalidations_per_line", "cache_invalidate_ns")
"""What the cost of a coherent access (``coherent``) is made of: hits at their share, misses at the rest, invalidations beside."""

PLACES: MappingProxyType[str, str] = MappingProxyType({
    "hbm": "the device's own memory",
    "peer_hbm": "memory of another device in reach of the scale-up link",
    "remote_hbm": "memory of a device in another server",
    "dram": "the host's memory, pinned",
    "dram_pageable": "the host's memory, pageable",
    "remote_dram": "memory of another server",
    "cxl_expander": "CXL memory of this host",
    "cxl_pool": "CXL memory that hosts share through a switch",
    "nvme": "a drive",
    "window": "the device's memory or registers as a core sees them on PCIe",
    "core": "a core's registers and cache",
})  # fmt: skip
"""Between which places data moves."""


@dataclass(frozen=True, slots=True)
class Step:
    """A hop and its cost.

    Attributes:
        cost: the constant that it costs. Steps of one ``cost`` were measured together and are charged once (``name#2`` sets a
            second time apart), as often as the step is taken or as ``@transfer`` says. Empty: no fixed cost beyond that of the
            others. ``?name`` is added only if the platform has it.
        times: how often the step is taken, a transfer or a block of it: ``transfer``, ``request`` (a list of pieces), ``piece``
            (one contiguous part of a block), ``line`` (64 bytes), ``read`` (the width of one uncached read).
        rate: ``link``: its bytes cross the links of the way; the name of a constant: they go at that rate, one core's own; empty:
            no time of its own for bytes.
    """

    hop: Hop
    cost: str = ""
    times: str = "transfer"
    rate: str = ""

    @property
    def constant(self) -> str:
        """The name of its constant, with ``?`` before it if it may be missing."""
        return self.cost.split("@")[0].split("#")[0]

    @property
    def charged(self) -> str:
        """How often its cost is charged."""
        return self.cost.partition("@")[2] or self.times


@dataclass(frozen=True, slots=True)
class Mechanism:
    """A way to move data or a message.

    Attributes:
        name: of the catalogue. ``moves``: what `moves.mechanism` calls it.
        ends: (from, to) places that it joins.
        steps: in order. ``what``: one line. ``source``: where the steps are written down.
        initiator: who starts it.
    """

    name: str
    moves: str
    what: str
    initiator: str
    ends: tuple[tuple[str, str], ...]
    steps: tuple[Step, ...]
    source: str

    @property
    def constants(self) -> tuple[str, ...]:
        """Constants that it cannot do without."""
        named = [c for s in self.steps for c in (s.constant, s.rate) if c and c not in ("link", "stage", "coherent")]
        named = [c for c in named if not c.startswith("?")]
        if any(s.cost == "coherent" for s in self.steps):
            named += COHERENT
        return tuple(dict.fromkeys(named))


def steps_of(access: str, *costs: tuple[str, str, str]) -> tuple[Step, ...]:
    """Steps of an access path of the ledger, once over one link, with (cost, times, rate) for each."""
    hops = [*ACCESS[access].hops, *ACCESS[access].per_link]
    if access in ("dma", "rdma", "file"):  # the wire lies before the completion
        payload = max(i for i, h in enumerate(ACCESS[access].hops) if h.kind == "DMA" and h.payload)
        at = payload if access == "rdma" else payload + 1
        hops = [*ACCESS[access].hops[:at], *ACCESS[access].per_link, *ACCESS[access].hops[at:]]
    assert len(hops) == len(costs), (access, len(hops))
    return tuple(Step(h, *c) for h, c in zip(hops, costs, strict=True))


def both(*pairs: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(dict.fromkeys(q for a, b in pairs for q in ((a, b), (b, a))))


COPY = "copy_ns"
LOAD = ACCESS["load_store"].per_link[0]


def copy_steps(cost: str) -> tuple[Step, ...]:
    """A copy engine's path: one measured time from the call to the completion, for every piece."""
    return steps_of("dma", *[(cost, "piece", "link" if i == 4 else "") for i in range(7)])
