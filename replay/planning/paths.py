"""Ways of a plan by the access paths of a platform: which mechanism joins two places, on whose links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hoptrace.errors import InputError, UsageError
from hoptrace.kv import geometry
from hoptrace.manifest import Server
from hoptrace.paths import Layout, PathCost, PathLink, System, default_mechanism, mechanism, system_of, way_of
from hoptrace.replay.plan import Way
from hoptrace.replay.planning.ways import Ways

__all__ = ["Machine", "join", "joins", "platform_way"]


@dataclass(frozen=True)
class Machine:
    """What equal engines run on, and how their KV blocks lie.

    Attributes:
        block_bytes: of one KV block over all layers and ranks. contiguous: see ``kv.contiguous``. joined: paths found already.
    """

    server: Server
    platform: Any
    block_bytes: int
    block_size_tokens: int
    contiguous: str | None
    joined: dict[tuple[str, str, str | None], tuple[PathCost, ...]] = field(default_factory=dict, compare=False)

    @cached_property
    def system(self) -> System:
        """The machine. UsageError, InputError: there is no such platform."""
        return system_of(self.platform)

    @property
    def place(self) -> str:
        """Where its KV lies: the device's memory, the host's where there is no device."""
        return "hbm" if "device" in self.system.parts else "dram"

    @property
    def ranks(self) -> int:
        """Tensor-parallel ranks, which move their parts side by side."""
        told = self.server.config.get("tensor_parallel_size")
        return told if type(told) is int and told > 0 else 1

    @property
    def pieces(self) -> int:
        """Contiguous pieces of a block on one rank. InputError if the model's layers are not known."""
        how = self.contiguous or "layer_kv"
        if how == "block":
            return 1
        shape = geometry(self.server)
        if shape is not None:
            return Layout.of(shape, self.block_size_tokens, how).pieces  # type: ignore[arg-type]
        if not self.server.layers:
            raise InputError(
                "Into how many pieces a KV block falls is not known: the trace's manifest does not tell its model's layers.",
                hint='Name a model, or set kv.contiguous = "block" if a block lies in one piece.',
            )
        return self.server.layers * (2 if how == "layer_kv" else 1)


def join(at: Machine, src: str, dst: str, asked: str | None) -> tuple[PathCost, ...]:
    """What leads from place ``src`` to place ``dst`` on a machine: the mechanism asked for, or the usual one; through the host's
    memory where nothing joins the two.

    Raises:
        UsageError: no such mechanism, or it does not join them. InputError: a cost that it needs is not known.
    """

    key = (src, dst, asked)
    if key not in at.joined:
        at.joined[key] = _join(at, src, dst, asked)
    return at.joined[key]


def _join(at: Machine, src: str, dst: str, asked: str | None) -> tuple[PathCost, ...]:
    def cost(name: str, a: str, b: str) -> PathCost:
        return way_of(at.system, name, a, b, block_bytes=at.block_bytes, pieces=at.pieces, ranks=at.ranks)

    if asked is not None:
        return (cost(asked, src, dst),)
    try:
        return (cost(default_mechanism(at.system, src, dst), src, dst),)
    except UsageError:
        if "dram" in (src, dst):
            raise
    return tuple(cost(default_mechanism(at.system, a, b), a, b) for a, b in ((src, "dram"), ("dram", dst)))


def joins(name: str | None, src: str, dst: str) -> bool:
    """Whether the mechanism leads that way. UsageError if there is none of that name."""
    return name is not None and (src, dst) in mechanism(name).ends


def platform_way(
    ways: Ways, costs: Sequence[PathCost], src: str, dst: str, owners: tuple[str, str], via: str | None = None
) -> int:
    """The way of one path, or of several that follow each other: fixed times add up, the bytes cross all links.

    Args:
        src, dst: nodes, for the moves. owners: whose the links at the source's and at the destination's end are.
        via: whose the memory is that lies between two paths; null where there is one path only.
    """
    assert len(costs) == 1 or via is not None
    at: list[int] = []
    path: list[str] = []
    for i, cost in enumerate(costs):
        ends = (owners[0] if i == 0 else via or "", owners[1] if i == len(costs) - 1 else via or "")
        ways.sources.update(dict.fromkeys(cost.sources))
        ways.notes += [n for n in cost.notes if n not in ways.notes]
        for link in cost.links:
            name = _owned(link, ends)
            if name in path:
                continue
            path.append(name)
            at.append(ways.link(name, link.bytes_per_s))
    return ways.way(
        Way(
            links=tuple(at), base_ns=sum(c.base_ns for c in costs), per_block_ns=sum(c.per_block_ns for c in costs), src=src,
            dst=dst, path=tuple(path), mechanism=costs[-1].mechanism, payload_hops=sum(c.payload_hops for c in costs),
            control_ops=sum(c.control_ops for c in costs), transfers_per_block=max(1, sum(c.descriptors for c in costs)),
            derived=True,
        )
    )  # fmt: skip


def _owned(link: PathLink, owners: tuple[str, str]) -> str:
    if link.end == "shared":
        return link.name
    return f"{link.name}@{owners[0] if link.end == 'src' else owners[1]}"
