"""What a path costs on a machine: its hops, fixed times, links, and the time of a transfer over it."""

from __future__ import annotations

from dataclasses import dataclass, field

from hoptrace.paths_links import PathLink

__all__ = ["HopCost", "PathCost"]


@dataclass(frozen=True, slots=True)
class HopCost:
    """One hop of a path on a machine.

    Attributes:
        kind, what, who, payload: as :class:`hoptrace.access.Hop`.
        times: how often it is taken for one block, all ranks together.
        constant: what its fixed time is called, empty if it has none. ``fixed_ns``: that time, once; null on hops that share the
            time of one before them (measured together) and where there is none.
        charged: how often the time is paid in one block (one rank's; the ranks work side by side); ``once``: it is paid once a
            transfer, however many blocks.
        bytes_per_s: at what its bytes go, null if they add no time here.
    """

    kind: str
    what: str
    who: str
    payload: bool
    times: int
    constant: str = ""
    fixed_ns: float | None = None
    charged: int = 0
    once: bool = False
    bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class PathCost:
    """A way from ``src`` to ``dst`` on a machine: what :class:`hoptrace.replay.plan.Way` is made of.

    Attributes:
        name: of the mechanism; ``mechanism``: as `moves.mechanism` has it.
        base_ns: paid once a transfer. ``per_block_ns``: paid for each block (pieces, requests, lines; a core's own copying).
        low_ns, high_ns: the same two where the figures were measured over a range.
        links: crossed by all bytes, of one direction each; ``end`` says whose link it is.
        block_bytes, pieces: of one block; ``descriptors``: pieces over all ranks.
        payload_hops, control_ops: steps of one block that carry data, and that carry none, all ranks together. Steps that a
            transfer takes once (a doorbell, a poll) are in each block's count: of a transfer of one block they are exact, of a
            longer one an upper bound.
        hops: in order. extras: what the machine adds to the mechanism's own hops: (constant, ns, times in a block, once a
            transfer). sources, notes: for the reader.
    """

    name: str
    mechanism: str
    src: str
    dst: str
    base_ns: int
    per_block_ns: int
    low_ns: tuple[int, int]
    high_ns: tuple[int, int]
    links: tuple[PathLink, ...]
    block_bytes: int
    pieces: int
    descriptors: int
    payload_hops: int
    control_ops: int
    hops: tuple[HopCost, ...]
    extras: tuple[tuple[str, float, int, bool], ...] = ()
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def bytes_per_s(self) -> int | None:
        """What the narrowest link carries, null without links."""
        return min((k.bytes_per_s for k in self.links), default=None)

    def time_ns(self, nbytes: int | None = None, blocks: int = 1) -> int:
        """Time of a transfer that has the links for itself: base + blocks × per block, then the bytes over the narrowest link.

        ``nbytes``: all its bytes; null: ``blocks`` whole ones.
        """
        return self._time(self.base_ns, self.per_block_ns, nbytes, blocks)

    def range_ns(self, nbytes: int | None = None, blocks: int = 1) -> tuple[int, int]:
        """The same with the least and the greatest of the measured figures."""
        return self._time(*self.low_ns, nbytes, blocks), self._time(*self.high_ns, nbytes, blocks)

    def _time(self, base: int, each: int, nbytes: int | None, blocks: int) -> int:
        nbytes = blocks * self.block_bytes if nbytes is None else nbytes
        rate = self.bytes_per_s
        return base + blocks * each + (-(-nbytes * 1_000_000_000 // rate) if rate is not None else 0)
