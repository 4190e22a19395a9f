"""What it costs to move a KV block, or a message, from one place to another: hops, fixed time, bandwidth, control operations.

:func:`way_of` puts a mechanism of :mod:`hoptrace.paths_mechanisms` on a machine: ``time = operations × cost of one + bytes ÷
bandwidth``, the operations counted from how the block really lies (:class:`hoptrace.paths_layout.Layout`). Nothing is guessed: a
cost that nobody has measured is asked for by name.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field
from typing import Literal

from hoptrace.errors import InputError, UsageError
from hoptrace.paths_collective import Collective, collective
from hoptrace.paths_hops import PLACES, Mechanism, Step
from hoptrace.paths_layout import Layout
from hoptrace.paths_links import PathLink, links_of, stage_rate
from hoptrace.paths_mechanisms import MECHANISMS
from hoptrace.paths_system import System, system_of

__all__ = [
    "Collective", "HopCost", "Layout", "PathCost", "PathLink", "System", "collective", "default_mechanism", "mechanism",
    "system_of", "way_of",
]  # fmt: skip

_LINE_BYTES = 64
_Times = Literal["transfer", "request", "piece", "line", "read"]


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
        payload_hops, control_ops: steps of one block that carry data, and that carry none, all ranks together.
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


def mechanism(name: str) -> Mechanism:
    """A mechanism by its name. Raises UsageError for one that is not there."""
    if name not in MECHANISMS:
        near = [k for k in MECHANISMS if k.startswith(name)] or difflib.get_close_matches(name, MECHANISMS, n=3)
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        raise UsageError(f"There is no mechanism {name!r}.", hint=f"{hint}`hoptrace paths` lists them: {', '.join(MECHANISMS)}.")
    return MECHANISMS[name]


def default_mechanism(system: System, src: str, dst: str) -> str:
    """What usually moves data between two places: the device's copy engine, the chip-to-chip link where there is no PCIe, RDMA …

    Raises:
        UsageError: nothing joins the two.
    """
    _ends(src, dst)
    if {src, dst} == {"hbm", "dram"} and not system.has_link("pcie") and "c2c" in system.parts.get("device", {}).get("links", {}):
        return "c2c"
    found = [m.name for m in MECHANISMS.values() if (src, dst) in m.ends]
    preferred = (
        "copy_engine", "peer_copy", "rdma_write", "rdma_read", "nt_store", "flush_read", "cxl_load_store", "dram_load_store",
        "cxl_copy", "mmio_read", "write_combining", "nvme_read", "nvme_write",
    )  # fmt: skip
    first = next((n for n in preferred if n in found), found[0] if found else None)
    if first is None:
        raise UsageError(f"No mechanism joins {src} and {dst}.", hint="Go over a place between them, as hbm, dram, nvme.")
    return first


def _ends(src: str, dst: str) -> None:
    for place in (src, dst):
        if place not in PLACES:
            near = difflib.get_close_matches(place, PLACES, n=1)
            hint = f"Did you mean {near[0]}? " if near else ""
            raise UsageError(f"There is no place {place!r}.", hint=f"{hint}There are: {', '.join(PLACES)}.")


def way_of(
    system: System,
    name: str,
    src: str,
    dst: str,
    *,
    block_bytes: int,
    pieces: int = 1,
    ranks: int = 1,
    nics: int | None = None,
    switches: int = 1,
) -> PathCost:
    """The way of a mechanism between two places of a machine.

    Args:
        system: of :func:`system_of`. name: of the mechanism. src, dst: of :data:`hoptrace.paths_hops.PLACES`.
        block_bytes: of one block, over all ranks. pieces: contiguous parts of a block on one rank (:class:`Layout` counts them).
        ranks: devices that hold a part each; they move theirs side by side, each over its own PCIe and scale-up link.
        nics: network adapters on each side; null: one for each rank. switches: between the two hosts.

    Raises:
        UsageError: no such mechanism or place, or it does not join the two. InputError: a cost or rate that it needs is unknown.
    """
    m = mechanism(name)
    _ends(src, dst)
    if (src, dst) not in m.ends:
        joined = ", ".join(f"{a} to {b}" for a, b in m.ends)
        raise UsageError(f"{name} does not lead from {src} to {dst}.", hint=f"It leads from {joined}.")
    nics = ranks if nics is None else nics
    counts = {"block_bytes": block_bytes, "pieces": pieces, "ranks": ranks, "nics": nics, "switches": switches}
    for what, value in counts.items():
        if value < 1:
            raise InputError(f"{what} must be at least 1, not {value}.")
    return _Builder(system, m, src, dst, block_bytes, pieces, ranks, nics, switches).build()


@dataclass
class _Builder:
    """Walks the steps of a mechanism once, adding up what each costs."""

    system: System
    m: Mechanism
    src: str
    dst: str
    block_bytes: int
    pieces: int
    ranks: int
    nics: int
    switches: int
    base: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    block: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    extras: list[tuple[str, float, int, bool]] = field(default_factory=list)
    sources: dict[str, None] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)

    def build(self) -> PathCost:
        self.system.need(self.m.constants, (self.src, self.dst))
        links = links_of(self.system, self.m, self.src, self.dst, self.ranks, self.nics)
        for source in dict.fromkeys(k.source for k in links):
            self.sources[f"{', '.join(k.name for k in links if k.source == source)}: {source}"] = None
        self.notes.update(dict.fromkeys(n for k in links for n in k.notes))
        hops, paid = [], set[str]()
        for step in self.m.steps:
            hops.append(self._hop(step, paid, links))
        self._network()
        base, low, high = (tuple(math.ceil(x - 1e-9) for x in pair) for pair in zip(self.base, self.block, strict=True))
        assert len(base) == len(low) == len(high) == 2
        return PathCost(
            name=self.m.name,
            mechanism=self.m.moves,
            src=self.src,
            dst=self.dst,
            base_ns=base[0],
            per_block_ns=base[1],
            low_ns=(low[0], low[1]),
            high_ns=(high[0], high[1]),
            links=links,
            block_bytes=self.block_bytes,
            pieces=self.pieces,
            descriptors=self.pieces * self.ranks,
            payload_hops=sum(h.times for h in hops if h.payload),
            control_ops=sum(h.times for h in hops if not h.payload),
            hops=tuple(hops),
            extras=tuple(self.extras),
            sources=tuple(self.sources),
            notes=tuple(self.notes),
        )

    def _hop(self, step: Step, paid: set[str], links: tuple[PathLink, ...]) -> HopCost:
        fixed, charged, name = None, 0, step.constant.lstrip("?")
        once = step.charged == "transfer"
        if step.cost and step.cost not in paid:
            paid.add(step.cost)
            charged = self._count(step.charged)
            fixed = self._charge(name, charged, once, optional=step.constant.startswith("?"))
        return HopCost(
            kind=step.hop.kind,
            what=step.hop.what,
            who=step.hop.who,
            payload=step.hop.payload,
            times=self._count(step.times) * self.ranks,
            constant=name if fixed is not None or not step.constant.startswith("?") else "",
            fixed_ns=fixed,
            charged=charged if fixed is not None else 0,
            once=once and fixed is not None,
            bytes_per_s=self._rate(step, links),
        )

    def _charge(self, name: str, times: int, once: bool, *, optional: bool = False) -> float | None:
        """Adds a constant ``times`` times to the base or to the block; its value, null if it may be missing and is."""
        places = (self.src, self.dst)
        found = self.system.find(name, places) if optional else None
        if optional and found is None:
            self.notes[f"{name} is not known and not in the time."] = None
            return None
        found = found or (self.system.find(name, places) if name == "coherent" else self.system.constant(name, places))
        assert found is not None
        into = self.base if once else self.block
        for i, value in enumerate((found.value, found.low, found.high)):
            into[i] += times * value
        self.sources[f"{name}: {found.source}"] = None
        return found.value

    def _rate(self, step: Step, links: tuple[PathLink, ...]) -> float | None:
        if not step.rate:
            return None
        if step.rate == "link":
            return min((float(k.bytes_per_s) for k in links), default=None)
        if step.rate == "stage":
            staged, source = stage_rate(self.system)
            rate = staged * self.ranks
            self.notes[
                "The copies into and out of host memory come before and after, whole; others on PCIe do not slow them."
            ] = None
        else:
            constant = self.system.constant(step.rate, (self.src, self.dst))
            rate, source = constant.value, constant.source
        for i in range(3):
            self.block[i] += self.block_bytes * 1e9 / rate
        self.sources[f"{step.rate}: {source}"] = None
        return rate

    def _count(self, times: str) -> int:
        """How often a step is taken by one rank for one block."""
        piece = -(-self.block_bytes // (self.ranks * self.pieces))
        if times == "piece":
            return self.pieces
        if times == "line":
            return self.pieces * -(-piece // _LINE_BYTES)
        if times == "read":
            return self.pieces * -(-piece // int(self.system.constant("uncached_read_bytes").value))
        if times == "request":
            return -(-self.pieces // int(self.system.constant("scatter_entries").value))
        return 1

    def _network(self) -> None:
        """What an RDMA path costs beyond a write or read between two hosts on one switch."""
        if self.m.moves != "rdma":
            return
        synced = self.m.name.endswith("_sync")
        times = self._count("request") if synced else 1
        ends = 0 if self.m.name.endswith("_staged") else sum(p in ("hbm", "remote_hbm") for p in (self.src, self.dst))
        crossings = (2 if "read" in self.m.name else 1) * (self.switches - 1)
        for name, count in (("rdma_gpu_ns", ends), ("rdma_hop_ns", crossings)):
            if count:
                value = self._charge(name, times * count, not synced)
                assert value is not None
                self.extras.append((name, value, times * count, not synced))
        if not synced:
            self.notes["Requests of one transfer are posted together; each costs the adapter's message rate, its own bound."] = (
                None
            )
        self.notes["The far end is taken to be a machine like this one."] = None
