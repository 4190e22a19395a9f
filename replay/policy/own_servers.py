"""What a recorded trace with several servers ran under: alike ones behind a router, or prefill servers with decode servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import polars as pl

from hoptrace.errors import InputError
from hoptrace.manifest import Server
from hoptrace.reader import Trace
from hoptrace.replay.policy.link_seen import Seen, link_seen
from hoptrace.replay.policy.model import Policy
from hoptrace.replay.policy.parts import Batching, Kv, PrefixCache
from hoptrace.replay.policy.places import Link, Routing, ServerParts, ServersPart, Split

__all__ = ["Several", "ranks_as_servers", "several"]

_NAME = "as-recorded"
LINK = "recorded"
"""Name of the link that a recorded split's KV crosses."""

Role = Literal["prefill", "decode"]
# What a server is; what differs in it makes another step cost or another policy.
_IS = (
    "engine", "parameters", "layers", "heads", "kv_heads", "head_size", "hidden_size", "kv_dtype", "context_tokens",
    "block_size_tokens",
)  # fmt: skip
_LIMITS = ("max_sequences", "max_batched_tokens", "prefix_caching")
_ROOM = ("kv_capacity_tokens", "block_count")
_CONFIG = (
    "dtype", "quantization", "model_ftype", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
    "expert_parallel", "chunked_prefill", "scheduling_policy", "async_scheduling", "long_prefill_token_threshold", "speculation",
    "speculative_tokens", "n_ubatch", "cache_reuse", "kv_unified", "enable_mixed_chunk", "chunked_prefill_size",
    "schedule_policy",
)  # fmt: skip
# Servers of one kind profile their memory each for itself: their KV space differs by a little.
_ROOM_APART = 0.05


@dataclass(frozen=True)
class Several:
    """``policy`` over ``server``; ``names``: of the servers, in the order of the plan's engines; ``roles``: by name, empty where
    all do both; ``notes``: what was taken for want of knowledge."""

    policy: Policy
    server: Server
    names: tuple[str, ...]
    roles: dict[str, Role]
    notes: tuple[str, ...]


def several(servers: Sequence[Server], recorded: Trace | None) -> Several:
    """How several recorded servers share the work.

    ``recorded``: their trace, which tells roles where no configuration does, how requests were shared out, and what transfers
    took.

    Raises:
        InputError: they are neither alike, nor prefill and decode servers each alike among themselves; says what differs.
    """
    roles = _roles(servers, recorded)
    if not roles:
        return _alike(servers, recorded)
    sides = {side: [s for s in servers if roles.get(s.name) == side] for side in ("prefill", "decode")}
    other = [s.name for s in servers if s.name not in roles]
    if other or not all(sides.values()):
        told = ", ".join(f"{s.name}: {roles.get(s.name, 'both')}" for s in servers)
        raise InputError(
            f"The trace's servers do not make a prefill/decode split ({told}); a replay models alike servers, or a split.",
            hint="Capture those apart that do not work together.",
        )
    return _split(sides["prefill"], sides["decode"], recorded)


def ranks_as_servers(server: Server, ranks: int) -> Several:
    """The data-parallel ranks of one server as so many alike servers.

    Raises:
        InputError: they compute each step together (expert parallel), which is not modelled.
    """
    if server.config.get("expert_parallel"):
        raise InputError(
            f"{server.name} has {ranks} data-parallel ranks that share experts, so they take each step together; a replay models "
            "ranks that run apart.",
            hint="Record it without expert parallelism, or with one rank.",
        )
    note = (
        f"The {ranks} data-parallel ranks of {server.name} are replayed as {ranks} servers alike; a request goes to the one with "
        "the fewest in flight, as the front of vLLM does but for its weights."
    )
    policy = Policy(name=_NAME, servers=ServersPart(count=ranks), routing=Routing(kind="least_load"))
    return Several(policy, server, (), {}, (note,))


def _roles(servers: Sequence[Server], recorded: Trace | None) -> dict[str, Role]:
    """By server, where it is one of a split: as its configuration says (vLLM's kv_role, SGLang's disaggregation mode), else as
    its recorded stays do."""
    said: dict[str, Role] = {}
    for s in servers:
        word = str(s.config.get("kv_role") or s.config.get("disaggregation_mode") or s.config.get("role") or "")
        if word in ("kv_producer", "prefill"):
            said[s.name] = "prefill"
        elif word in ("kv_consumer", "decode"):
            said[s.name] = "decode"
    if said or recorded is None:
        return said
    stays = recorded.table("stages").select("server", "role").drop_nulls().unique().collect()
    for name, mine in stays.group_by("server"):
        only = mine["role"].to_list()
        if len(only) == 1 and only[0] in ("prefill", "decode"):
            said[str(name[0])] = only[0]
    return said


def _differing(servers: Sequence[Server], fields: Sequence[str], config: Sequence[str]) -> list[str]:
    first = servers[0]
    apart = [f for f in fields if any(getattr(s, f) != getattr(first, f) for s in servers)]
    return apart + [k for k in config if any(s.config.get(k) != first.config.get(k) for s in servers)]


def _refuse_unlike(servers: Sequence[Server], what: str) -> None:
    if apart := _differing(servers, (*_IS, *_LIMITS), _CONFIG):
        key = apart[0]
        values = ", ".join(f"{s.name}: {getattr(s, key) if key in Server.model_fields else s.config.get(key)}" for s in servers)
        raise InputError(
            f"{what} differ in {', '.join(apart)} ({values}); a replay models alike ones.", hint="Capture them apart."
        )


def _with_least_room(servers: Sequence[Server], notes: list[str]) -> Server:
    """The first, with the least KV space of all. InputError if they are far apart."""
    first = servers[0].model_copy(deep=True)
    for field in _ROOM:
        sizes = [getattr(s, field) for s in servers]
        if len(set(sizes)) == 1:
            continue
        known = [x for x in sizes if x is not None]
        if len(known) < len(sizes) or min(known) < (1 - _ROOM_APART) * max(known):
            told = ", ".join(f"{s.name}: {getattr(s, field)}" for s in servers)
            raise InputError(f"The servers differ in {field} ({told}); a replay models alike ones.", hint="Capture them apart.")
        setattr(first, field, min(known))
        notes.append(f"{field} differs a little ({min(known):,} to {max(known):,}): the least is taken for all.")
    return first


def _alike(servers: Sequence[Server], recorded: Trace | None) -> Several:
    _refuse_unlike(servers, f"The trace's {len(servers)} servers")
    notes: list[str] = []
    first = _with_least_room(servers, notes)
    names, said = _turns(servers, recorded)
    notes.append(said)
    if len({s.host for s in servers}) == 1 and servers[0].host is not None:
        notes.append("All servers ran on one host: what they took from each other is in the recorded steps, and stays as it was.")
    policy = Policy(name=_NAME, servers=ServersPart(count=len(servers)), routing=Routing(kind="round_robin"))
    return Several(policy, first, names, {}, tuple(notes))


def _turns(servers: Sequence[Server], recorded: Trace | None) -> tuple[tuple[str, ...], str]:
    """The servers in the order of their first requests, and how well turns tell where requests went."""
    names = tuple(s.name for s in servers)
    count = f"The trace's {len(names)} servers are replayed behind a router that sends requests by turns"
    went = _went(recorded)
    if not went:
        return names, f"{count}: how they were shared out is not told."
    order = {n: i for i, n in reversed(list(enumerate(went)))}
    names = tuple(sorted(names, key=lambda n: order.get(n, len(went))))
    met = sum(server == names[i % len(names)] for i, server in enumerate(went))
    if met == len(went):
        return names, f"{count}, as all {len(went):,} recorded ones went."
    return names, f"{count}; {met:,} of {len(went):,} recorded ones went where that sends them, so the router was another."


def _went(recorded: Trace | None) -> list[str]:
    """The servers of the requests' first stays, in the order in which they came."""
    if recorded is None:
        return []
    stays = recorded.table("stages").filter(pl.col("sequence").fill_null(0) == 0).sort("request", "attempt", "stage")
    first = stays.group_by("request", maintain_order=True).agg(pl.col("server", "enqueued_ns").first())
    came = recorded.table("requests").select("request", pl.coalesce("received_ns", "queued_ns", "arrival_ns").alias("came"))
    both = first.join(came, on="request").drop_nulls("server").sort("came", "request").collect()
    return both["server"].to_list()


def _split(prefill: list[Server], decode: list[Server], recorded: Trace | None) -> Several:
    _refuse_unlike(prefill, "The prefill servers")
    _refuse_unlike(decode, "The decode servers")
    if apart := _differing([decode[0], prefill[0]], _IS, _CONFIG):
        raise InputError(
            f"The prefill and the decode servers differ in {', '.join(apart)}; a replay models one model on one kind of engine.",
            hint="Their limits, KV space and prefix cache may differ.",
        )
    notes: list[str] = []
    base, sender = _with_least_room(decode, notes), _with_least_room(prefill, notes)
    pushes = (base.engine or "").startswith("sglang")
    seen = Seen() if recorded is None else link_seen(recorded, {s.name for s in prefill}, {s.name for s in decode})
    notes += seen.notes
    if pushes:
        notes.append("The KV is pushed at the end of the prompt, and the prefill server's token is the first (SGLang's way).")
    else:
        notes.append(
            "The decode server pulls the KV when it admits a request, and computes the last prompt token again (as vLLM does "
            "with NIXL)."
        )
    links = {} if seen.gbytes_per_s is None else {LINK: Link(gbytes_per_s=seen.gbytes_per_s, latency_us=seen.latency_us)}
    split = Split(
        prefill=len(prefill), decode=len(decode), start="push" if pushes else "pull",
        first_token="handover" if pushes else "recompute", arrange_ms=seen.arrange_ms, link=LINK if links else None,
        prefill_server=_parts(base, sender),
    )  # fmt: skip
    names = tuple(s.name for s in (*prefill, *decode))
    roles: dict[str, Role] = dict.fromkeys(names[: len(prefill)], "prefill")
    roles |= dict.fromkeys(names[len(prefill) :], "decode")
    return Several(Policy(name=_NAME, split=split, links=links), base, names, roles, tuple(notes))


def _parts(base: Server, sender: Server) -> ServerParts:
    """How the prefill servers' limits differ from the decode servers'."""

    def unlike(field: str) -> Any:
        return getattr(sender, field) if getattr(sender, field) != getattr(base, field) else None

    return ServerParts(
        batching=Batching(max_sequences=unlike("max_sequences"), max_batched_tokens=unlike("max_batched_tokens")),
        kv=Kv(capacity_tokens=unlike("kv_capacity_tokens")),
        prefix_cache=PrefixCache(enabled=unlike("prefix_caching")),
    )
