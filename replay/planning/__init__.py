"""From a policy to a plan: servers, links and ways in numbers, on top of what the trace's own server had.

Everything that is taken for want of knowledge is said in ``Planned.notes``; what a plan cannot do without is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import polars as pl

from hoptrace.errors import InputError
from hoptrace.kv import geometry
from hoptrace.manifest import Server
from hoptrace.replay.overheads import Overheads
from hoptrace.replay.plan import EngineSpec, Plan, Routing
from hoptrace.replay.planning.parts import (
    is_plugin,
    order_of,
    outside_of,
    parts_of,
    speculation_of,
    without_host,
    without_prompts,
)
from hoptrace.replay.planning.paths import Machine
from hoptrace.replay.planning.places import Places, handover_of, tiers_of
from hoptrace.replay.planning.ways import Ways
from hoptrace.replay.policy.checks import lacks, problems
from hoptrace.replay.policy.model import Policy
from hoptrace.replay.policy.parts import MOST_SEQUENCES, Part
from hoptrace.replay.policy.places import DecodeRouting, ServerParts
from hoptrace.replay.policy.resolve import Resolved, resolve_server
from hoptrace.replay.workload import Workload
from hoptrace.stepcost import StepCost

if TYPE_CHECKING:
    from hoptrace.replay.plain.parts import Parts

__all__ = ["CostOf", "Planned", "RoomOf", "plan_of"]

CostOf = Callable[[Server, str | None], StepCost]
"""The step cost of a server (its configuration says the tensor-parallel size, its kv_dtype the type of its KV) on a platform
(null: the one that the cost model was given, or the recorded one)."""

RoomOf = Callable[[Server, str | None], tuple[int | None, tuple[str, ...]]]
"""The KV space of a server on a platform in tokens (null: not known), and what was assumed for it, in sentences."""

_P = TypeVar("_P", bound=Part)
Role = Literal["both", "prefill", "decode"]
# A slot cache looks at every slot at each admission.
_MOST_SLOTS = 1024


@dataclass(frozen=True)
class Planned:
    """A plan, and what a reader of its result has to know.

    Attributes:
        notes: what was taken for want of knowledge, in sentences.
        servers: of each engine, as a manifest has it; ``config["role"]`` where it is prefill or decode.
        resolved: of each engine.
        overheads: time outside the steps that the plan goes by; those that have no place in it (delivery) too.
        parts: parts of the user's own (``python:NAME``), which only :mod:`hoptrace.replay.plain` runs; null without any.
        platform: as it was given. sources: of the figures of its access paths that the plan rests on.
        taken_away: what [ceilings] take away, in words; empty without any.
    """

    plan: Plan
    notes: tuple[str, ...]
    servers: tuple[Server, ...]
    resolved: tuple[Resolved, ...]
    overheads: Overheads
    policy: Policy
    platform: Any = None
    sources: tuple[str, ...] = ()
    parts: Parts | None = None
    taken_away: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The policy in numbers, in the layout of a policy file, for a manifest; ``platform``: the one asked for paths.
        :func:`hoptrace.replay.policy.own.own_policy` reads it back."""
        found = _deep(self.policy.changes(), self.resolved[0].as_dict())
        if self.policy.split is not None:
            first = next(i for i, e in enumerate(self.plan.engines) if e.role == "decode")
            for name, at in (("prefill_server", 0), ("decode_server", first)):
                numbers = self.resolved[at].as_dict()
                for key in ("order", "slo_ttft_ms"):
                    numbers["batching"].pop(key, None)
                numbers["kv"].pop("dtype", None)
                found["split"][name] = _deep(found["split"].get(name, {}), numbers)
        if isinstance(self.platform, str | Mapping) and self.plan.ways:
            found["platform"] = self.platform if isinstance(self.platform, str) else dict(self.platform)
        if self.sources:
            found["sources"] = list(self.sources)
        return found


def _deep(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """``top`` over ``base``, table by table."""
    both = {k: _deep(base[k], v) if isinstance(v, dict) and isinstance(base.get(k), dict) else v for k, v in top.items()}
    return {**base, **both}


@dataclass(frozen=True)
class _Kind:
    """Equal servers: how many, their part of the policy in numbers, and which cost is theirs."""

    role: Role
    names: tuple[str, ...]
    server: Server
    platform: str | Mapping[str, Any] | None
    resolved: Resolved
    cost: int


def plan_of(
    policy: Policy,
    *,
    server: Server | None,
    work: Workload,
    costs: StepCost | CostOf,
    overheads: Overheads | None = None,
    platform: str | Mapping[str, Any] | None = None,
    steps: pl.DataFrame | None = None,
    room: RoomOf | None = None,
    seed: int = 0,
    clients: int | None = None,
    think_ns: int = 0,
    horizon_ns: int | None = None,
) -> Planned:
    """The plan of ``policy`` on top of the trace's own server.

    Args:
        server: the trace's own; null: nothing is known of it.
        costs: the step cost, or what gives it for each kind of server.
        overheads: time outside the steps, as measured; null: none.
        platform: name, file or content of the platform, for the access paths that the policy gives no link for.
        steps: the recorded ones, for what [speculation] and [ceilings] take from them.
        room: the KV space of each kind of server, where the trace does not tell its server's; null: it does, or nobody knows.

    Raises:
        InputError: the parts do not fit together, or something that the plan needs is not known; says what to do.
    """
    for problem in (*problems(policy), *lacks(policy)):
        raise InputError(problem.sentence, hint=problem.hint)
    own = server or Server(name="engine")
    notes: list[str] = []
    measured = overheads or Overheads()
    outside = outside_of(policy, measured)
    priced: list[StepCost] = []
    taken: list[str] = []
    kinds = []
    for role, names, parts in _kinds(policy, own):
        kinds.append(_kind(policy, own, role, names, parts, costs, room, platform, priced, notes))
    if policy.ceilings.host_cost is not None:
        for i, cost in enumerate(priced):
            priced[i], words = without_host(cost, steps, own, measured, notes)
            taken += [words] if i == 0 else []
    if policy.ceilings.prompts is not None:
        priced = [without_prompts(cost) for cost in priced]
    kinds = [replace(k, resolved=_unlimited(policy, k.resolved, work.n)) for k in kinds]
    first = kinds[0].resolved
    engines = [
        EngineSpec(
            name=name, role=k.role, cost=k.cost, gap_ns=outside.between_steps_ns, max_sequences=k.resolved.max_sequences,
            max_batched_tokens=k.resolved.max_batched_tokens, mode=k.resolved.mode,  # type: ignore[arg-type]
            chunked_prefill=k.resolved.chunked_prefill, capacity_tokens=k.resolved.capacity_tokens,
            block_size_tokens=k.resolved.block_size_tokens, context_tokens=k.resolved.context_tokens,
            watermark_tokens=k.resolved.watermark_tokens, cache=k.resolved.cache,  # type: ignore[arg-type]
            cache_capacity_tokens=k.resolved.cache_capacity_tokens,
        )
        for k in kinds
        for name in k.names
    ]  # fmt: skip
    of_engine = [k for k in kinds for _ in k.names]
    ways = Ways(policy.links, free=policy.ceilings.links is not None, notes=notes)
    token_bytes = _token_bytes(policy, kinds[-1], notes)
    machines = [_machine(policy, k, token_bytes) for k in kinds]
    machines = [m for m, k in zip(machines, kinds, strict=True) for _ in k.names]
    places = Places(tuple(engines), tuple(machines), token_bytes, ways)
    tiers = tiers_of(policy, places)
    handover = handover_of(policy, places, of_engine[-1].server)
    if ways.sources:
        on = [k.platform.get("name") if isinstance(k.platform, Mapping) else k.platform for k in kinds]
        used = ", ".join(dict.fromkeys(str(name) for name in on if name)) or "the platform given"
        notes.append(f"Transfers go by the catalogue's figures of {used}; their sources are in the manifest.")
    told = policy.kv.block_size_tokens or own.block_size_tokens
    if not told and any(w.per_block_ns for w in ways.ways) and any(k.resolved.block_size_tokens == 1 for k in kinds):
        notes.append(
            "How many tokens a KV block has is unknown: taken as one, and every block of a transfer pays its fixed time. "
            "Set kv.block_size_tokens."
        )
    _check_routing(policy, [k.resolved for k in kinds], work, notes)
    plan = Plan(
        engines=tuple(engines),
        costs=tuple(priced),
        links=tuple(ways.links),
        ways=tuple(ways.ways),
        routing=_routing(policy.routing),
        decode_routing=_routing(policy.routing.decode or DecodeRouting()),
        order=order_of(first, work, priced[kinds[0].cost]),
        handover=handover,
        tiers=tiers,
        reuse=policy.prefix_cache.reuse or "always",
        speculation=speculation_of(policy, steps, notes),
        kv_token_bytes=token_bytes or 0,
        before_ns=outside.before_ns,
        after_ns=outside.step_to_token_ns + outside.last_token_to_finish_ns,
        horizon_ns=horizon_ns,
        clients=clients,
        think_ns=think_ns,
        seed=seed,
    )
    for k in kinds:
        notes += k.resolved.notes
    return Planned(
        plan=plan,
        notes=tuple(dict.fromkeys(notes)),
        servers=tuple(_manifest_server(k, name) for k in kinds for name in k.names),
        resolved=tuple(k.resolved for k in of_engine),
        overheads=outside,
        policy=policy,
        platform=platform,
        sources=tuple(ways.sources),
        parts=parts_of(policy),
        taken_away=", ".join(taken),
    )


def _kinds(policy: Policy, own: Server) -> list[tuple[Role, tuple[str, ...], ServerParts]]:
    """The kinds of server, in the order of the engines: role, names, what is theirs alone."""
    s = policy.split
    if s is not None:
        return [
            ("prefill", tuple(f"prefill-{i}" for i in range(s.prefill)), s.prefill_server),
            ("decode", tuple(f"decode-{i}" for i in range(s.decode)), s.decode_server),
        ]
    n = policy.servers.count or 1
    return [("both", (own.name,) if n == 1 else tuple(f"{own.name}-{i}" for i in range(n)), ServerParts())]


def _kind(
    policy: Policy,
    own: Server,
    role: Role,
    names: tuple[str, ...],
    parts: ServerParts,
    costs: StepCost | CostOf,
    room: RoomOf | None,
    platform: str | Mapping[str, Any] | None,
    priced: list[StepCost],
    notes: list[str],
) -> _Kind:
    merged = policy.model_copy(
        update={
            "batching": _over(policy.batching, parts.batching),
            "kv": _over(policy.kv, parts.kv),
            "prefix_cache": _over(policy.prefix_cache, parts.prefix_cache),
        }
    )
    asked = parts.platform or policy.servers.platform
    ranks = parts.tensor_parallel or policy.servers.tensor_parallel
    if ranks is not None and own.heads and own.heads % ranks:
        raise InputError(
            f"tensor_parallel = {ranks}: the model's {own.heads} attention heads are not shared out evenly over {ranks} ranks.",
            hint=f"Take one of {', '.join(str(n) for n in range(1, min(own.heads, 64) + 1) if own.heads % n == 0)}.",
        )
    untaken = policy.ceilings.kv is None and policy.ceilings.limits is None
    if room is not None and merged.kv.capacity_tokens is None and untaken:
        tokens, said = room(_with_ranks(own, ranks), asked)
        own = own.model_copy(update={"kv_capacity_tokens": tokens, "block_count": None})
        notes += said
    resolved = resolve_server(merged, own)
    if policy.split is not None and resolved.cache == "slot":
        raise InputError(
            "[split]: the trace's server keeps prompts in slots, which are not handed over.",
            hint='Set prefix_cache.kind = "pool", or prefix_cache.enabled = false.',
        )
    if policy.split is not None and resolved.mode == "static":
        raise InputError("[split]: the trace's server batches statically, which does not go with it.", hint="Set batching.mode.")
    server = _with_ranks(resolved.on(own), ranks)
    if role != "both":
        # A cost measured on a split is one for each role.
        server = server.model_copy(update={"config": {**server.config, "role": role}})
    other_ranks = ranks is not None and ranks != (own.config.get("tensor_parallel_size") or 1)
    other_platform = asked is not None and asked != platform
    cost = costs if isinstance(costs, StepCost) else costs(server, asked)
    if (isinstance(costs, StepCost) and (other_platform or other_ranks)) or (other_ranks and cost.origin == "fitted"):
        what = f"platform {asked}" if other_platform else f"tensor_parallel = {ranks}"
        raise InputError(
            f"{what}: the step cost is that of the recorded server, and cannot tell another's.",
            hint="Use a cost model that knows both: --cost roofline, or aiconfigurator.",
        )
    if merged.kv.dtype is not None and merged.kv.dtype != own.kv_dtype and cost.origin == "fitted":
        notes.append(
            f"What a step saves or loses with KV of type {merged.kv.dtype} is not in the step cost, which is a fitted one."
        )
    if room is None and ranks is not None and merged.kv.capacity_tokens is None and resolved.capacity_tokens:
        notes.append(
            f"KV space of {resolved.capacity_tokens:,} tokens is the trace's server's; with {ranks} tensor-parallel ranks it may "
            "differ: set kv.capacity_tokens."
        )
    elif room is None and other_platform and merged.kv.capacity_tokens is None and resolved.capacity_tokens:
        notes.append(
            f"KV space of {resolved.capacity_tokens:,} tokens is the trace's server's, not that of {asked}: "
            "set kv.capacity_tokens if it differs."
        )
    if cost not in priced:
        priced.append(cost)
    return _Kind(role, names, server, asked or platform, resolved, priced.index(cost))


def _with_ranks(server: Server, ranks: int | None) -> Server:
    """The server with so many tensor-parallel ranks; null: as many as it has."""
    if ranks is None:
        return server
    return server.model_copy(update={"config": {**server.config, "tensor_parallel_size": ranks}})


def _over(base: _P, top: _P) -> _P:
    """What ``top`` sets, and the rest from ``base``."""
    return base.model_copy(update={k: v for k, v in top if v is not None})


def _unlimited(policy: Policy, r: Resolved, n: int) -> Resolved:
    """Without the limits that [ceilings] take away."""
    c = policy.ceilings
    if c.prompts is not None:
        # A prompt is one step long however long it is: without a budget it takes only one.
        r = replace(r, max_batched_tokens=None)
    if c.kv is not None:
        r = replace(r, capacity_tokens=None, watermark_tokens=0)
    if c.limits is None:
        return r
    places = min(max(n, 1), _MOST_SLOTS if r.cache == "slot" else MOST_SEQUENCES)
    if r.max_sequences is not None:
        places = max(places, r.max_sequences)
    return replace(r, max_sequences=places, max_batched_tokens=None, capacity_tokens=None, watermark_tokens=0)


def _token_bytes(policy: Policy, receiving: _Kind, notes: list[str]) -> int | None:
    """KV of one token over all layers and ranks, as a receiving server holds it; null if it is not known."""
    if policy.kv.bytes_per_token is not None:
        return policy.kv.bytes_per_token
    shape = geometry(receiving.server)
    if shape is None:
        if (policy.split is not None or policy.tiers) and policy.ceilings.links is None:
            raise InputError(
                "KV has to move, and how large it is is not known: the trace's manifest does not tell its model's shape.",
                hint="Set kv.bytes_per_token (Llama-3.1-8B in BF16: 131072), or name a model.",
            )
        return None
    if (policy.split is not None or policy.tiers) and shape.window_layers:
        notes.append("KV moves whole: what layers with a sliding window would not have to send is sent too.")
    return shape.bytes_per_token


def _machine(policy: Policy, kind: _Kind, token_bytes: int | None) -> Machine | None:
    if kind.platform is None:
        return None
    block = kind.resolved.block_size_tokens
    return Machine(kind.server, kind.platform, max(1, (token_bytes or 1) * block), block, policy.kv.contiguous)


def _routing(part: Any) -> Routing:
    kind: Any = "round_robin" if is_plugin(part.kind) else part.kind or "round_robin"
    return Routing(kind, round((part.knowledge_age_ms or 0) * 1e6), part.load_tokens or 0)


def _check_routing(policy: Policy, resolved: list[Resolved], work: Workload, notes: list[str]) -> None:
    """Whether the routers find what they go by."""
    parts = [("routing", policy.routing.kind), ("routing.decode", policy.routing.decode.kind if policy.routing.decode else None)]
    for what, kind in parts:
        if kind == "prefix_aware" and any(r.cache != "pool" for r in resolved):
            raise InputError(
                f'{what}.kind = "prefix_aware" needs a prefix cache of kind pool: it looks for the prompt\'s blocks.',
                hint='Set prefix_cache.enabled = true and prefix_cache.kind = "pool".',
            )
        if kind == "prefix_aware" and not len(work.block_id):
            notes.append(f"{what}: the trace has no prefix blocks, so prompts are in nobody's cache: least load first.")
        if kind == "session" and (work.session_id is None or not (work.session_id >= 0).any()):
            notes.append(f"{what}: the trace tells no sessions, so requests take turns.")
    if policy.tiers and not len(work.block_id):
        notes.append("The trace has no prefix blocks: nothing is found in the tiers, and nothing is written to them.")


def _manifest_server(kind: _Kind, name: str) -> Server:
    config = kind.server.config if kind.role == "both" else {**kind.server.config, "role": kind.role}
    changed = kind.resolved.on(kind.server)
    return changed.model_copy(update={"name": name, "config": {**changed.config, **config}})
