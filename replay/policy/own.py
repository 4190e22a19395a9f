"""What a trace ran under: its server as the manifest has it and, of a replay, the policy that it was made with.

A what-if keeps all of that but for what its policy says, so that a replay can be replayed (law 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl
from pydantic import BaseModel, ValidationError

from hoptrace.errors import InputError
from hoptrace.manifest import Manifest, Server
from hoptrace.reader import Trace
from hoptrace.replay.policy.checks import problems
from hoptrace.replay.policy.model import Policy
from hoptrace.replay.policy.own_servers import Several, ranks_as_servers, several
from hoptrace.replay.policy.places import Split

__all__ = ["Own", "on_top", "own_policy"]

_NAME = "as-recorded"


@dataclass(frozen=True)
class Own:
    """``policy``: what the trace ran under, over ``server``; ``platform``: of its access paths (name, file, or what a file says),
    null where it needs none.

    Of a recording with several servers: ``names`` in the order of a plan's engines, ``roles`` by name where they do not all
    do the same, ``notes``: what was taken for want of knowledge.
    """

    policy: Policy
    server: Server
    platform: str | Mapping[str, Any] | None = None
    names: tuple[str, ...] = ()
    roles: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def own_policy(manifest: Manifest, recorded: Trace | None = None) -> Own:
    """The policy and the server that a trace ran under.

    ``recorded``: the trace itself; of several servers it tells more than the manifest: see
    :mod:`hoptrace.replay.policy.own_servers`.

    Raises:
        InputError: it has several servers that neither are alike nor make a prefill/decode split.
    """
    servers = manifest.servers
    said = manifest.replay.policy if manifest.replay is not None else {}
    policy = _read(said)
    if policy is None:
        if len(servers) > 1:
            return _several(several(servers, recorded))
        if servers and recorded is not None and (ranks := _ranks(recorded)) > 1:
            return _several(ranks_as_servers(servers[0], ranks))
        return Own(Policy(name=_NAME), recorded_server(servers[0]) if servers else Server(name="engine"))
    first = servers[0].model_copy(deep=True) if servers else Server(name="engine")
    if len(servers) > 1:
        first.name = "engine" if policy.split is not None else first.name.removesuffix("-0") or "engine"
    first.config.pop("role", None)
    platform = said.get("platform")
    return Own(policy, first, platform if isinstance(platform, str | Mapping) else None)


def _several(found: Several) -> Own:
    server = recorded_server(found.server)
    return Own(found.policy, server, None, found.names, found.roles, found.notes)


def _ranks(recorded: Trace) -> int:
    """Data-parallel ranks with steps of their own."""
    return int(recorded.table("steps").select(pl.col("dp_rank").n_unique()).collect(engine="streaming").item() or 1)


def recorded_server(server: Server) -> Server:
    """A recorded server, with what its engine says of its scheduling in the words that a plan goes by."""
    found = server.model_copy(deep=True)
    said = found.config.get("scheduling_policy")
    if said == "priority":  # vLLM's --scheduling-policy: fcfs or priority
        found.config.setdefault("scheduling_order", "priority")
    return found


def on_top(own: Policy, asked: Policy) -> Policy:
    """``asked`` over what the trace ran under: a table's keys one by one, a split, tiers and speculation as a whole.

    A number of servers replaces a split, and a split a number of servers. The result has ``asked``'s name.

    Raises:
        InputError: the two do not go together.
    """
    kept = own
    if asked.split is not None:
        kept = kept.model_copy(update={"servers": kept.servers.model_copy(update={"count": None})})
    elif asked.servers.count is not None:
        routing = kept.routing.model_copy(update={"decode": None})
        kept = kept.model_copy(update={"split": None, "routing": routing})
    kept = _make_way(kept, asked)
    found: Policy = _over(kept, asked)
    for problem in problems(found):
        raise InputError(f"{asked.name} on top of what the trace ran under: {problem.sentence}", hint=problem.hint)
    return found


# A key of the policy that was asked for, and what it decides anew where nothing else is said of that.
_DECIDES = (
    ("batching", "mode", ("batching", "chunked_prefill")),
    ("batching", "order", ("batching", "slo_ttft_ms")),
    ("kv", "dtype", ("kv", "capacity_tokens")),
    ("kv", "dtype", ("kv", "bytes_per_token")),
    ("prefix_cache", "kind", ("prefix_cache", "capacity_tokens")),
    ("routing", "kind", ("routing", "knowledge_age_ms")),
    ("routing", "kind", ("routing", "load_tokens")),
    ("ceilings", "kv", ("kv", "capacity_tokens")),
    ("ceilings", "prompts", ("batching", "max_batched_tokens")),
    ("ceilings", "limits", ("kv", "capacity_tokens")),
    ("ceilings", "limits", ("batching", "max_sequences")),
    ("ceilings", "limits", ("batching", "max_batched_tokens")),
)


def _make_way(own: Policy, asked: Policy) -> Policy:
    """Without what ``asked`` decides anew. A replay's split has all numbers of both kinds of server: those make way too."""
    gone = {
        (table, key)
        for table in ("batching", "kv", "prefix_cache")
        for key, value in getattr(asked, table)
        if value is not None
    }  # fmt: skip
    gone |= {there for table, key, there in _DECIDES if getattr(getattr(asked, table), key) is not None}

    def cleared(part: Any) -> Any:
        tables = {t for t, _ in gone if t in type(part).model_fields}
        update = {t: getattr(part, t).model_copy(update={k: None for g, k in gone if g == t}) for t in tables}
        return part.model_copy(update=update)

    kept: Policy = cleared(own)
    if kept.split is None:
        return kept
    both = {name: cleared(getattr(kept.split, name)) for name in ("prefill_server", "decode_server")}
    return kept.model_copy(update={"split": kept.split.model_copy(update=both)})


def _over(base: Any, top: Any) -> Any:
    """What ``top`` sets, and the rest from ``base``."""
    changed: dict[str, Any] = {}
    for key in type(top).model_fields:
        value = getattr(top, key)
        mine = getattr(base, key)
        if key in ("split", "tiers", "speculation"):
            if value:
                changed[key] = value
        elif isinstance(value, dict):
            changed[key] = {**mine, **value}
        elif isinstance(value, BaseModel) and isinstance(mine, BaseModel):
            changed[key] = _over(mine, value)
        elif value is not None:
            changed[key] = value
    return base.model_copy(update=changed)


def _read(said: Mapping[str, Any]) -> Policy | None:
    """The policy in a replay's manifest; null if there is none. What its rows show already is left out: times outside steps,
    and the ceilings that changed costs and limits."""
    kept = {k: v for k, v in said.items() if k in Policy.model_fields and k not in ("name", "description", "overheads")}
    if not kept:
        return None
    ceilings = kept.pop("ceilings", None)
    if isinstance(ceilings, Mapping) and "links" in ceilings:
        kept["ceilings"] = {"links": ceilings["links"]}
    try:
        return Policy.model_validate(_known(Policy, kept) | {"name": _NAME})
    except ValidationError as e:
        where = ".".join(str(x) for x in e.errors()[0]["loc"])
        raise InputError(f"The policy in the replay's manifest cannot be read: {where}: {e.errors()[0]['msg']}.") from None


def _known(model: type[BaseModel], data: Mapping[str, Any]) -> dict[str, Any]:
    """Without the keys that are numbers only, not a policy file's (``watermark_tokens``)."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        field = model.model_fields.get(key)
        if field is None:
            continue
        inner = field.annotation if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel) else None
        if key == "split":
            inner = Split
        found[key] = _known(inner, value) if inner is not None and isinstance(value, Mapping) else value
    return found
