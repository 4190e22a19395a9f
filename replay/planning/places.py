"""Tiers and hand-over of a plan: which way leads from where to where."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from hoptrace.errors import InputError
from hoptrace.kv import geometry
from hoptrace.manifest import Server
from hoptrace.paths import PathCost
from hoptrace.replay.plan import EngineSpec, Handover, TierSpec
from hoptrace.replay.planning.paths import Machine, join, joins, platform_way
from hoptrace.replay.planning.ways import Leg, Ways
from hoptrace.replay.policy.checks import SHARED, link_names
from hoptrace.replay.policy.model import Policy
from hoptrace.replay.policy.places import Tier

__all__ = ["Places", "handover_of", "tiers_of"]


@dataclass(frozen=True)
class Places:
    """What ways connect.

    Attributes:
        machines: of each engine; null where no platform is given for it.
        token_bytes: KV of one token; null: unknown.
    """

    engines: tuple[EngineSpec, ...]
    machines: tuple[Machine | None, ...]
    token_bytes: int | None
    ways: Ways


def handover_of(policy: Policy, places: Places, server: Server) -> Handover | None:
    """[split] in numbers, with a way from each prefill engine to each decode engine. ``server``: a decode server."""
    s = policy.split
    if s is None:
        return None
    layers = 1
    if s.transfer == "per_layer":
        shape = geometry(server)
        layers = s.layers or (shape.layers if shape is not None else server.layers) or 1
        if layers < 2:
            raise InputError(
                'transfer = "per_layer": how many layers the model has is not known.', hint="Set split.layers, or name a model."
            )
    senders = [i for i, e in enumerate(places.engines) if e.role == "prefill"]
    receivers = [i for i, e in enumerate(places.engines) if e.role == "decode"]
    return Handover(
        ways=tuple(tuple(_between(policy, places, p, d) for d in receivers) for p in senders),
        start=s.start or ("push" if layers > 1 else "pull"),
        layers=layers,
        first_token=s.first_token or "handover",
        arrange_ns=round((s.arrange_ms or 0) * 1e6),
        local_below_tokens=s.local_below_tokens or 0,
    )


def _between(policy: Policy, places: Places, sender: int, receiver: int) -> int:
    assert policy.split is not None
    a, b = places.engines[sender].name, places.engines[receiver].name
    src, dst = f"memory:{a}", f"memory:{b}"
    names = link_names(policy.split.link)
    if names:
        return places.ways.over(names, (Leg(a, "out"), Leg(b, "in")), src, dst, "rdma")
    if places.ways.free:
        return places.ways.none(src, dst, "rdma")
    here, there = places.machines[sender], places.machines[receiver]
    if here is None or there is None:
        raise _no_link("[split]")
    # Its blocks are counted as the receiver has them.
    if (here.block_bytes, here.block_size_tokens) != (there.block_bytes, there.block_size_tokens):
        here = replace(here, block_bytes=there.block_bytes, block_size_tokens=there.block_size_tokens, joined={})
    costs = _read_or_write(policy, here, there)
    if here.platform != there.platform or here.ranks != there.ranks:
        costs = (_of_two(costs[0], _read_or_write(policy, there, here)[0]),)
        places.ways.notes.append("Both ends of a transfer have their own links; its fixed times are those of the slower one.")
    return platform_way(places.ways, costs, src, dst, (a, b), a)


def _read_or_write(policy: Policy, at: Machine, far: Machine) -> tuple[PathCost, ...]:
    """What the split's transfer costs on a machine: the receiver reads (pull) or the sender writes (push)."""
    assert policy.split is not None
    s = policy.split
    remote = f"remote_{far.place}"
    pulled = (s.start or ("push" if s.transfer == "per_layer" else "pull")) == "pull"
    asked = s.mechanism
    if asked is None:
        return join(at, remote, at.place, "rdma_read") if pulled else join(at, at.place, remote, "rdma_write")
    for src, dst in ((at.place, remote), (remote, at.place), (at.place, "peer_hbm")):
        if joins(asked, src, dst):
            return join(at, src, dst, asked)
    return join(at, at.place, remote, asked)


def _of_two(a: PathCost, b: PathCost) -> PathCost:
    """The sender's path with the receiver's links at its end."""
    links = tuple(k for k in a.links if k.end != "dst") + tuple(k for k in b.links if k.end == "dst")
    return replace(
        a, links=links, base_ns=max(a.base_ns, b.base_ns), per_block_ns=max(a.per_block_ns, b.per_block_ns),
        notes=tuple(dict.fromkeys((*a.notes, *b.notes))),
    )  # fmt: skip


def tiers_of(policy: Policy, places: Places) -> tuple[TierSpec, ...]:
    """[[tiers]] in numbers, with the ways of each engine to and from each."""
    if not policy.tiers:
        return ()
    if all(e.cache is None for e in places.engines):
        raise InputError(
            "[[tiers]] keep prefix blocks, and the trace's server reuses none.", hint="Set prefix_cache.enabled = true."
        )
    if any(e.cache == "slot" for e in places.engines):
        raise InputError(
            "[[tiers]] keep blocks, and the trace's server keeps prompts in slots.", hint='Set prefix_cache.kind = "pool".'
        )
    n = len(places.engines)
    block = min(e.block_size_tokens for e in places.engines)
    for t in policy.tiers:
        if (held := _tokens(t, places)) is not None and held < block:
            places.ways.notes.append(
                f"Tier {t.name or t.kind} holds {held:,} tokens, less than one KV block: nothing is kept in it."
            )
    first = tuple(_tier_way(places, policy.tiers[0], i, "out") for i in range(n))
    demote = [tuple(_demotion(places, a, b, i) for i in range(n)) for a, b in pairwise(policy.tiers)]
    return tuple(
        TierSpec(
            name=t.name or t.kind,
            kind=t.kind,
            capacity_tokens=_tokens(t, places),
            shared=_shared(t),
            read=tuple(_tier_way(places, t, i, "in") for i in range(n)),
            # Only what the tier above evicts is written to the others.
            write=first if j == 0 else demote[j - 1],
            demote=demote[j] if j < len(demote) else (-1,) * n,
            policy=t.write or "back",
        )
        for j, t in enumerate(policy.tiers)
    )


def _shared(tier: Tier) -> bool:
    return tier.shared if tier.shared is not None else tier.kind in SHARED


def _node(tier: Tier, engine: EngineSpec) -> str:
    """Where a tier's blocks lie, as the moves have it."""
    name = f"{tier.kind}:{tier.name or tier.kind}"
    return name if _shared(tier) else f"{name}@{engine.name}"


def _owner(tier: Tier, engine: EngineSpec) -> str:
    """Whose the links at a tier's end are: the server's, where it lies in it."""
    inside = tier.kind in ("dram", "dram_pageable", "cxl_expander", "nvme") and not _shared(tier)
    return engine.name if inside else _node(tier, engine)


def _tier_way(places: Places, tier: Tier, engine: int, direction: Literal["out", "in"]) -> int:
    e = places.engines[engine]
    memory, node = f"memory:{e.name}", _node(tier, e)
    src, dst = (memory, node) if direction == "out" else (node, memory)
    if (found := _described(places, tier, Leg(e.name, direction), src, dst)) is not None:
        return found
    machine = _machine(places, tier, engine)
    ends = (machine.place, tier.kind) if direction == "out" else (tier.kind, machine.place)
    asked = tier.mechanism
    # A mechanism that leads one way only (rdma_read) is asked for that way; the other goes by the usual one.
    if asked is not None and not joins(asked, ends[0], ends[1]) and joins(asked, ends[1], ends[0]):
        asked = None
    far = _owner(tier, e)
    owners = (e.name, far) if direction == "out" else (far, e.name)
    return platform_way(places.ways, join(machine, ends[0], ends[1], asked), src, dst, owners, e.name)


def _demotion(places: Places, tier: Tier, below: Tier, engine: int) -> int:
    """From a tier to the next one: by that one's own link, or the path between the two places."""
    e = places.engines[engine]
    src, dst = _node(tier, e), _node(below, e)
    if (found := _described(places, below, Leg(e.name, "out"), src, dst)) is not None:
        return found
    machine = _machine(places, below, engine)
    owners = (_owner(tier, e), _owner(below, e))
    return platform_way(places.ways, join(machine, tier.kind, below.kind, None), src, dst, owners, e.name)


def _described(places: Places, tier: Tier, leg: Leg, src: str, dst: str) -> int | None:
    """The way over links of the policy's own; null if it names none."""
    usual = {"cxl_expander": "load_store", "cxl_pool": "load_store", "remote_dram": "rdma", "nvme": "file"}.get(tier.kind, "dma")
    names = link_names(tier.link)
    if names:
        return places.ways.over(names, (leg,), src, dst, usual)
    return places.ways.none(src, dst, usual) if places.ways.free else None


def _machine(places: Places, tier: Tier, engine: int) -> Machine:
    machine = places.machines[engine]
    if machine is None:
        raise _no_link(f"Tier {tier.name or tier.kind}")
    return machine


class NoPlatform(InputError):
    """Something names no link, and there is no platform whose access paths could tell one."""


def _no_link(what: str) -> NoPlatform:
    return NoPlatform(
        f"{what} names no link, and no platform is given that tells one.",
        hint="Name one of [links] in it, or give --platform.",
    )


def _tokens(tier: Tier, places: Places) -> int | None:
    if tier.capacity_bytes is None:
        return None if tier.capacity_tokens in (None, "unlimited") else tier.capacity_tokens  # type: ignore[return-value]
    if not places.token_bytes:
        raise InputError(
            f"Tier {tier.name or tier.kind}: capacity_bytes is given, and the KV bytes of a token are not known.",
            hint="Set kv.bytes_per_token, or capacity_tokens.",
        )
    return tier.capacity_bytes // places.token_bytes
