"""From a plan to the state that a simulation begins with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hoptrace.errors import InputError
from hoptrace.replay.outcome import Sink
from hoptrace.replay.plain.builtin import ROUTERS, LastAdmitted, Lru, WorstRank
from hoptrace.replay.plain.engine import Engine
from hoptrace.replay.plain.kv import KvSpace
from hoptrace.replay.plain.parts import PREFIX, Eviction, KeyOf, Parts, Victim, Watched, guarded, load, name_of
from hoptrace.replay.plain.requests import Request
from hoptrace.replay.plain.routing import Dispatcher
from hoptrace.replay.plain.rows import Rows
from hoptrace.replay.plain.slots import Slots
from hoptrace.replay.plain.tiers import Tiers
from hoptrace.replay.plain.transfers import Network
from hoptrace.replay.plain.world import World
from hoptrace.replay.plan import Plan, Routing
from hoptrace.stepcost_pack import pack

if TYPE_CHECKING:
    from hoptrace.replay.workload import Workload

__all__ = ["build"]


def build(
    work: Workload, plan: Plan, requests: list[Request], sink: Sink, parts: Parts
) -> tuple[World, tuple[str, KeyOf] | None]:
    """The world before anything has happened, and the plug-in that orders the queue, if one does."""
    sizes = work.block_tokens.tolist()
    rows = Rows(sink)
    network = Network(plan.links, plan.ways, rows)
    eviction = _eviction(parts.eviction)
    engines = []
    for i, spec in enumerate(plan.engines):
        kv = KvSpace(
            spec.capacity_tokens, spec.block_size_tokens, spec.cache == "pool", spec.cache_capacity_tokens, sizes, eviction()
        )
        places = min(spec.max_sequences or 0, len(requests))
        engines.append(Engine(i, spec, kv, Slots(places) if spec.cache == "slot" else None))
    tiers = None
    if plan.tiers:
        order = _eviction(parts.tier_eviction)
        tiers = Tiers(plan.tiers, len(engines), sizes, plan.kv_token_bytes, network, order)
    victim_name, victim = _victim(plan, parts.victim)
    entry = _dispatcher(plan, plan.routing, parts.router, [engines[i] for i in plan.entry], 0)
    decode = None
    if plan.decoders:
        decode = _dispatcher(plan, plan.decode_routing, parts.decode_router, [engines[i] for i in plan.decoders], 2)
    costs, at = pack(plan.costs)
    world = World(
        plan=plan, requests=requests, engines=engines, network=network, tiers=tiers, rows=rows, entry=entry, decode=decode,
        victim=victim, victim_name=victim_name, costs=costs, cost_at=[int(at[e.spec.cost]) for e in engines], clock=parts.clock,
        cached=parts.cached,
    )  # fmt: skip
    return world, None if parts.order is None else _fit(parts.order, "key")


def _dispatcher(
    plan: Plan, routing: Routing, given: Callable[[Routing], Any] | None, engines: list[Engine], shift: int
) -> Dispatcher:
    kind: str = routing.kind
    make: Callable[[Routing], Any]
    if given is not None:
        name, make = name_of(given), given
    elif kind.startswith(PREFIX):
        name, make = kind, load(kind)
    else:
        name, make = kind, ROUTERS[kind]
    router = _made(name, "choose", lambda: make(routing))
    return Dispatcher(name, router, engines, routing.age_ns, plan.seed, shift)


def _eviction(given: Callable[[], Eviction] | None) -> Callable[[], Eviction]:
    if given is None:
        return Lru
    name = name_of(given)
    return lambda: Watched(name, _made(name, "oldest", given))


def _victim(plan: Plan, given: Victim | None) -> tuple[str, Victim]:
    if given is not None:
        return _fit(given, "victim")
    return ("worst", WorstRank()) if plan.order.requeue else ("last", LastAdmitted())


def _made(name: str, method: str, make: Callable[[], Any]) -> Any:
    part = guarded(name, "being made", make)
    if not callable(getattr(part, method, None)):
        raise InputError(f"The plug-in {name} has no {method}(), which its place asks for.", hint="docs/replay-plugins.md")
    return part


def _fit(part: Any, method: str) -> tuple[str, Any]:
    name = name_of(part)
    return name, _made(name, method, lambda: part)
