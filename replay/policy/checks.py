"""Policies that say what cannot be at once, found before anything is replayed: where, why, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hoptrace.replay.outcome import TIERS
from hoptrace.replay.policy.errors import Place
from hoptrace.replay.policy.model import Policy
from hoptrace.replay.policy.parts import Batching, PrefixCache
from hoptrace.replay.policy.places import DecodeRouting, Routing, Split, Tier

__all__ = ["SHARED", "Problem", "lacks", "link_names", "problems"]

SHARED = ("cxl_pool", "remote_dram")
"""Kinds of tier that are one for all servers, if the policy does not say."""


class Problem(NamedTuple):
    """``place``: the key to blame; ``sentence``: what is wrong; ``hint``: what to do."""

    place: Place
    sentence: str
    hint: str


def problems(policy: Policy) -> Iterator[Problem]:
    """What does not go together in ``policy``, most telling first."""
    yield from _batching(policy.batching, ("batching",))
    yield from _cache(policy.prefix_cache, ("prefix_cache",))
    yield from _split(policy)
    yield from _static(policy)
    yield from _tiers(policy)
    yield from _routing(policy)
    yield from _speculation(policy)
    yield from _ceilings(policy)
    yield from _links(policy)


def lacks(policy: Policy) -> Iterator[Problem]:
    """What decides nothing without something else, or needs it. Not of a file alone: it goes on top of what a trace ran under."""
    b, c, r = policy.batching, policy.prefix_cache, policy.routing
    if b.slo_ttft_ms is not None and b.order != "slack":
        yield _idle("batching", "slo_ttft_ms", 'order = "slack"')
    if policy.split is None and r.decode is not None:
        yield Problem(("routing", "decode"), "[routing.decode] without [split]: there are no decode servers.", "Add a [split].")
    for table, part in (("routing", r), ("routing.decode", r.decode or DecodeRouting())):
        for key, kind in (("knowledge_age_ms", "kv_use"), ("load_tokens", "prefix_aware")):
            if getattr(part, key) is not None and part.kind != kind:
                yield _idle(table, key, f'kind = "{kind}"')
    for key in ("reuse", "tier_eviction"):
        if getattr(c, key) is not None and not policy.tiers:
            yield _idle("prefix_cache", key, "[[tiers]]")
    if policy.ceilings.links is not None and policy.split is None and not policy.tiers:
        yield Problem(
            ("ceilings", "links"), "ceilings.links: nothing moves between servers or tiers, so there is nothing to take away.",
            "Add a [split] or [[tiers]], or leave it out.",
        )  # fmt: skip


def _idle(table: str, key: str, needed: str) -> Problem:
    return Problem((*table.split("."), key), f"{table}.{key} decides nothing without {needed}.", "Set that, or leave it out.")


def _batching(b: Batching, at: Place) -> Iterator[Problem]:
    if b.slo_ttft_ms is not None and b.order not in (None, "slack"):
        yield Problem(
            (*at, "slo_ttft_ms"),
            f'slo_ttft_ms decides nothing with order = "{b.order}".',
            'Set order = "slack", or leave it out.',
        )
    if b.mode == "static" and b.chunked_prefill:
        yield Problem(
            (*at, "chunked_prefill"),
            "static batching computes whole prompts.",
            "Leave chunked_prefill out, or take another mode.",
        )


def _cache(c: PrefixCache, at: Place) -> Iterator[Problem]:
    if c.kind == "slot" and c.capacity_tokens is not None:
        yield Problem(
            (*at, "capacity_tokens"),
            'prefix_cache.capacity_tokens does not go with kind = "slot": a slot keeps one prompt.',
            "Leave it out.",
        )


def _split(policy: Policy) -> Iterator[Problem]:
    s = policy.split
    if s is None:
        return
    if policy.servers.count is not None:
        yield Problem(
            ("servers", "count"), "[servers] count does not go with [split], which says how many servers of each kind there are.",
            "Leave it out.",
        )  # fmt: skip
    for key in ("platform", "tensor_parallel"):
        if getattr(policy.servers, key) is not None and all(
            getattr(part, key) is not None for part in (s.prefill_server, s.decode_server)
        ):
            yield Problem(("servers", key), f"{key} is given for both kinds of server already.", "Leave it out here.")
    if s.transfer == "per_layer":
        if s.start == "pull":
            yield Problem(
                ("split", "start"), 'start = "pull" does not go with transfer = "per_layer": layers go as they are computed.',
                'Set start = "push", or leave it out.',
            )  # fmt: skip
        if s.first_token == "recompute":
            yield Problem(
                ("split", "first_token"),
                'first_token = "recompute" does not go with transfer = "per_layer": no system that sends layers does that.',
                "Leave it out.",
            )
    elif s.layers is not None:
        yield Problem(("split", "layers"), 'layers decides nothing without transfer = "per_layer".', "Leave it out.")
    for name, part in (("prefill_server", s.prefill_server), ("decode_server", s.decode_server)):
        at = ("split", name)
        yield from _batching(part.batching, (*at, "batching"))
        yield from _cache(part.prefix_cache, (*at, "prefix_cache"))
        if part.batching.order is not None:
            yield Problem((*at, "batching", "order"), "The order is one for all servers.", "Set it in [batching].")
        if part.kv.dtype is not None or part.kv.bytes_per_token is not None:
            key = "dtype" if part.kv.dtype is not None else "bytes_per_token"
            yield Problem(
                (*at, "kv", key), "KV has one type on both sides: converting on the way is not modelled.", "Set it in [kv]."
            )
        for section, key in (
            ("prefix_cache", "reuse"),
            ("prefix_cache", "eviction"),
            ("prefix_cache", "tier_eviction"),
            ("batching", "victim"),
            ("kv", "contiguous"),
        ):
            if getattr(getattr(part, section), key) is not None:
                yield Problem((*at, section, key), f"{key} is one for all servers.", f"Set it in [{section}].")
        if "slot" in (part.prefix_cache.kind, policy.prefix_cache.kind):
            where = at if part.prefix_cache.kind == "slot" else ()
            yield Problem(
                (*where, "prefix_cache", "kind"), 'kind = "slot" does not go with [split]: slots do not hand their KV over.',
                'Set kind = "pool".',
            )  # fmt: skip


def _static(policy: Policy) -> Iterator[Problem]:
    s = policy.split
    for at, b in (
        (("batching",), policy.batching),
        (("split", "prefill_server", "batching"), s.prefill_server.batching if s else Batching()),
        (("split", "decode_server", "batching"), s.decode_server.batching if s else Batching()),
    ):
        if b.mode != "static":
            continue
        for there, what in (
            (s is not None, "[split]: a batch that stays whole cannot be handed over one by one"),
            (bool(policy.tiers), "[[tiers]]: a batch would have to wait for its loading"),
            (policy.speculation is not None, "[speculation]: what padding proposes has no reference"),
            (policy.prefix_cache.kind == "slot", 'prefix_cache.kind = "slot"'),
        ):
            if there:
                yield Problem((*at, "mode"), f'mode = "static" does not go with {what}.', 'Take mode = "mixed".')


def _tiers(policy: Policy) -> Iterator[Problem]:
    if not policy.tiers:
        return
    if policy.prefix_cache.enabled is False:
        yield Problem(("tiers", 0), "[[tiers]] keep prefix blocks, and prefix_cache.enabled = false has none.", "Enable it.")
    if policy.prefix_cache.kind == "slot":
        yield Problem(("tiers", 0), '[[tiers]] need prefix_cache.kind = "pool": slots have no blocks.', 'Set kind = "pool".')
    if len(policy.tiers) > TIERS:
        yield Problem(("tiers", TIERS), f"There are {len(policy.tiers)} tiers; {TIERS} at most.", "Leave some out.")
    names: set[str] = set()
    for i, tier in enumerate(policy.tiers):
        at = ("tiers", i)
        name = tier.name or tier.kind
        if name in names:
            yield Problem((*at, "name" if tier.name else "kind"), f"Two tiers are called {name}.", "Give each a name of its own.")
        names.add(name)
        if (tier.capacity_bytes is None) == (tier.capacity_tokens is None):
            both = tier.capacity_bytes is not None
            yield Problem(
                (*at, "capacity_bytes") if both else at,
                f"Tier {name} has {'capacity_tokens and capacity_bytes' if both else 'no capacity'}.",
                'Give one of capacity_tokens and capacity_bytes; capacity_tokens = "unlimited" for no limit.',
            )
        if tier.write == "through" and i > 0:
            yield Problem(
                (*at, "write"), f'Tier {name} is not the first, so write = "through" is not possible: only what the tier above '
                "evicts reaches it.", 'Set write = "back", or leave it out.',
            )  # fmt: skip
        if i > 0 and (tier.shared is False or (tier.shared is None and tier.kind not in SHARED)):
            above = policy.tiers[i - 1]
            if above.shared or (above.shared is None and above.kind in SHARED):
                yield Problem(
                    (*at, "shared") if tier.shared is not None else at,
                    f"Tier {name} is each server's own, and the one above it is shared: whose it would fall to is not defined.",
                    "Put shared tiers last.",
                )


def _routing(policy: Policy) -> Iterator[Problem]:
    parts: list[tuple[Place, Routing | DecodeRouting]] = [(("routing",), policy.routing)]
    if policy.routing.decode is not None:
        parts.append((("routing", "decode"), policy.routing.decode))
    for at, r in parts:
        kind = r.kind or "round_robin"
        for key, needed in (("knowledge_age_ms", "kv_use"), ("load_tokens", "prefix_aware")):
            if getattr(r, key) is not None and r.kind not in (None, needed):
                yield Problem(
                    (*at, key), f'{key} decides nothing with kind = "{kind}".', f'Set kind = "{needed}", or leave it out.'
                )
        if kind == "prefix_aware" and (policy.prefix_cache.enabled is False or policy.prefix_cache.kind == "slot"):
            yield Problem(
                (*at, "kind"), 'kind = "prefix_aware" needs a prefix cache of kind pool: it looks for blocks.',
                "Enable it, or take another kind.",
            )  # fmt: skip


def _speculation(policy: Policy) -> Iterator[Problem]:
    s = policy.speculation
    if s is not None and s.draft_ms_per_token is None and (s.kind or "ngram") != "ngram":
        yield Problem(
            ("speculation", "kind"), f'kind = "{s.kind}" needs draft_ms_per_token: a model proposes, and its time is not known.',
            "Set draft_ms_per_token, measured on the engine.",
        )  # fmt: skip


def _ceilings(policy: Policy) -> Iterator[Problem]:
    c = policy.ceilings
    for key, limits in (
        ("kv", (("kv", "capacity_tokens"),)),
        ("prompts", (("batching", "max_batched_tokens"),)),
        ("limits", (("kv", "capacity_tokens"), ("batching", "max_sequences"), ("batching", "max_batched_tokens"))),
    ):
        if getattr(c, key) is None:
            continue
        for section, name in limits:
            if getattr(getattr(policy, section), name) is not None:
                yield Problem(
                    ("ceilings", key), f"{section}.{name} sets what ceilings.{key} takes away.", "Leave one of them out."
                )
    if c.host_cost is not None and policy.overheads.gap_ms is not None:
        yield Problem(
            ("ceilings", "host_cost"), "overheads.gap_ms sets what ceilings.host_cost takes away.", "Leave one of them out."
        )
    if c.front_cost is not None and (policy.overheads.before_ms is not None or policy.overheads.after_ms is not None):
        yield Problem(
            ("ceilings", "front_cost"), "[overheads] sets what ceilings.front_cost takes away.", "Leave one of them out."
        )


def _links(policy: Policy) -> Iterator[Problem]:
    parts: list[tuple[Place, Split | Tier]] = [(("tiers", i), t) for i, t in enumerate(policy.tiers)]
    if policy.split is not None:
        parts.append((("split",), policy.split))
    for at, part in parts:
        if part.link is not None and part.mechanism is not None:
            yield Problem((*at, "mechanism"), "link and mechanism are both given.", "Leave one of them out.")
        names = link_names(part.link)
        if len(set(names)) < len(names):
            yield Problem((*at, "link"), "A link is named twice: the bytes cross each once.", "Leave one of them out.")
        for name in names:
            if name not in policy.links:
                known = ", ".join(policy.links) or "none"
                yield Problem((*at, "link"), f"There is no link {name}.", f"[links.NAME] describes one; there are: {known}.")


def link_names(link: str | list[str] | None) -> tuple[str, ...]:
    """The names that a `link` gives."""
    return () if link is None else (link,) if isinstance(link, str) else tuple(link)
