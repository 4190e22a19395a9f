"""Tiers and hand-over of a plan: which way leads from where to where."""

from __future__ import annotations

from dataclasses import dataclass

from hoptrace.errors import InputError
from hoptrace.kv import geometry
from hoptrace.manifest import Server
from hoptrace.replay.plan import EngineSpec, Handover, TierSpec
from hoptrace.replay.planning_ways import Leg, Ways
from hoptrace.replay.policy_checks import SHARED, link_names
from hoptrace.replay.policy_model import Policy
from hoptrace.replay.policy_places import Tier

__all__ = ["Places", "handover_of", "tiers_of"]


@dataclass(frozen=True)
class Places:
    """What ways connect: of each engine its spec, platform and server; KV bytes of a token (null: unknown); the ways so far."""

    engines: tuple[EngineSpec, ...]
    platforms: tuple[str | None, ...]
    servers: tuple[Server, ...]
    token_bytes: int | None
    ways: Ways


def handover_of(policy: Policy, places: Places) -> Handover | None:
    """[split] in numbers, with a way from each prefill engine to each decode engine."""
    s = policy.split
    if s is None:
        return None
    layers = 1
    if s.transfer == "per_layer":
        shape = geometry(places.servers[-1])
        layers = s.layers or (shape.layers if shape is not None else places.servers[-1].layers) or 1
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
    raise _no_link("[split]")


def tiers_of(policy: Policy, places: Places, notes: list[str]) -> tuple[TierSpec, ...]:
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
    write = [tuple(_tier_way(places, t, i, "out") for i in range(n)) for t in policy.tiers]
    return tuple(
        TierSpec(
            name=t.name or t.kind,
            kind=t.kind,
            capacity_tokens=_tokens(t, places),
            shared=_shared(t),
            read=tuple(_tier_way(places, t, i, "in") for i in range(n)),
            write=write[j],
            demote=tuple(_demotion(places, t, policy.tiers[j + 1], i) for i in range(n)) if j + 1 < len(write) else (-1,) * n,
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


def _tier_way(places: Places, tier: Tier, engine: int, direction: str) -> int:
    e = places.engines[engine]
    memory, node = f"memory:{e.name}", _node(tier, e)
    src, dst = (memory, node) if direction == "out" else (node, memory)
    return _way_to(places, tier, Leg(e.name, "out" if direction == "out" else "in"), src, dst)


def _demotion(places: Places, tier: Tier, below: Tier, engine: int) -> int:
    """From a tier to the next one: by that one's own link, as from the server."""
    e = places.engines[engine]
    return _way_to(places, below, Leg(e.name, "out"), _node(tier, e), _node(below, e))


def _way_to(places: Places, tier: Tier, leg: Leg, src: str, dst: str) -> int:
    usual = {"cxl_expander": "load_store", "cxl_pool": "load_store", "remote_dram": "rdma", "nvme": "file"}.get(tier.kind, "dma")
    names = link_names(tier.link)
    if names:
        return places.ways.over(names, (leg,), src, dst, usual)
    if places.ways.free:
        return places.ways.none(src, dst, usual)
    raise _no_link(f"Tier {tier.name or tier.kind}")


def _no_link(what: str) -> InputError:
    return InputError(
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
