"""Puts a mechanism on a machine: walks its steps once and adds up what each costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hoptrace.paths_cost import HopCost, PathCost
from hoptrace.paths_hops import Mechanism, Step
from hoptrace.paths_links import PathLink, links_of, stage_rate
from hoptrace.paths_system import System

__all__ = ["Builder"]

_LINE_BYTES = 64


@dataclass
class Builder:
    """One walk: a mechanism between two places of a machine; the rest as the arguments of :func:`hoptrace.paths.way_of`."""

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
    used: set[str] = field(default_factory=set)
    sources: dict[str, None] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)

    def build(self) -> PathCost:
        """The path's cost. Raises as :func:`hoptrace.paths.way_of`."""
        self.system.need(self.m.constants, (self.src, self.dst))
        links = links_of(self.system, self.m, self.src, self.dst, self.ranks, self.nics)
        self.used.update(k.of for k in links)
        for source in dict.fromkeys(k.source for k in links):
            self.sources[f"{', '.join(k.name for k in links if k.source == source)}: {source}"] = None
        self.notes.update(dict.fromkeys(n for k in links for n in k.notes))
        hops, paid = [], set[str]()
        for step in self.m.steps:
            hops.append(self._hop(step, paid, links))
        self._network()
        if used := sorted(self.used & self.system.assumed):
            self.notes[f"Assumed with {self.system.name}: {', '.join(used)}."] = None
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
        self.used.add(found.of)
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
            self.used.add(constant.of)
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
