"""What a replay simulates, in numbers: engines, links, tiers, routing. A policy file becomes a plan; both engines read plans.

:mod:`hoptrace.replay.compiled` runs a plan fast, :mod:`hoptrace.replay.plain` slowly and with parts of yours;
docs/replay-engine.md says what each field does, to the nanosecond. All numbers are integers; null is unlimited.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from hoptrace.stepcost import StepCost

__all__ = [
    "EngineSpec", "Handover", "LinkSpec", "Order", "Plan", "Routing", "Speculation", "TierSpec", "Way",
]  # fmt: skip

_Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class EngineSpec:
    """One engine: one scheduler with its own KV space (a server, or one data-parallel rank of it).

    Attributes:
        name: of the server, as the manifest has it; dp_rank: which rank of it.
        role: both, prefill or decode.
        cost: index into ``Plan.costs``.
        gap_ns: host time between the end of a step and the start of the next.
        victim: whom a lack of KV drives out: ``last`` admitted (FCFS), or ``worst`` by order key.
    """

    name: str
    role: Literal["both", "prefill", "decode"] = "both"
    dp_rank: int = 0
    cost: int = 0
    gap_ns: int = 0
    max_sequences: int | None = None
    max_batched_tokens: int | None = None
    mode: Literal["mixed", "prompts_first", "prefill_first", "static"] = "mixed"
    chunked_prefill: bool = True
    capacity_tokens: int | None = None
    block_size_tokens: int = 1
    context_tokens: int | None = None
    watermark_tokens: int = 0
    cache: Literal["pool", "slot"] | None = None
    cache_capacity_tokens: int | None = None


@dataclass(frozen=True)
class LinkSpec:
    """One direction of a link. Transfers that are on it at once share it evenly."""

    name: str
    bytes_per_s: int


@dataclass(frozen=True)
class Way:
    """How data gets from one place to another: time = base_ns + blocks × per_block_ns, then the bytes over ``links``.

    Attributes:
        links: indices into ``Plan.links``, each crossed by all the bytes; empty: no link, the fixed time alone.
        base_ns, per_block_ns: fixed cost of one transfer, and of each KV block in it (descriptors × cost of one).
        src, dst, path, mechanism, payload_hops, control_ops: for the rows of `moves`; the two counts are of one block (the unit
            transfer), the number of descriptors of it included.
        derived: the counts follow from an access path's descriptors; else they are a mechanism's usual ones.
    """

    links: tuple[int, ...] = ()
    base_ns: int = 0
    per_block_ns: int = 0
    src: str = ""
    dst: str = ""
    path: tuple[str, ...] = ()
    mechanism: str = "memcpy"
    payload_hops: int = 0
    control_ops: int = 0
    transfers_per_block: int = 1
    derived: bool = False


@dataclass(frozen=True)
class Handover:
    """Prefill/decode disaggregation: how a request gets from its prefill engine to its decode engine.

    Attributes:
        ways: [prefill engine][decode engine], by position among the engines of that role, indices into ``Plan.ways``.
        start: ``pull``: the decode engine's scheduler starts the transfer when it admits the request; ``push``: the prefill
            engine starts it at the end of the prompt, if the decode engine has room then (else as pull).
        layers: 1: the KV goes as a whole; more: per layer, overlapped with the prompt's computation (push only).
        first_token: ``handover``: the prefill engine's token is the first; ``recompute``: the decode engine computes the last
            prompt token again and the user sees its token.
        arrange_ns: from the end of the prompt until the decode engine's queue has the request (proxy, messages).
        local_below_tokens: prompts shorter than that are computed on the decode engine, with no transfer. 0: none.
    """

    ways: tuple[tuple[int, ...], ...]
    start: Literal["pull", "push"] = "pull"
    layers: int = 1
    first_token: Literal["handover", "recompute"] = "handover"
    arrange_ns: int = 0
    local_below_tokens: int = 0


@dataclass(frozen=True)
class TierSpec:
    """A place for KV blocks below the engines' own memory, in the order in which it is searched.

    Attributes:
        capacity_tokens: of one instance.
        shared: one instance for all engines, or one each.
        read, write: [engine] indices into ``Plan.ways``; ``demote``: way to the next tier from this one, -1 at the last.
        policy: ``through``: a block is written when it is computed (first tier only); ``back``: when it is evicted above.
    """

    name: str
    kind: str
    capacity_tokens: int | None
    shared: bool
    read: tuple[int, ...]
    write: tuple[int, ...]
    demote: tuple[int, ...] = ()
    policy: Literal["through", "back"] = "back"


@dataclass(frozen=True)
class Routing:
    """Which engine a request goes to.

    ``age_ns``: the router sees KV use as it was at the last multiple of this (0: as it is). ``load_tokens``: prefix_aware only: a
    request in flight weighs as much as so many cached tokens.
    """

    kind: Literal["round_robin", "random", "least_load", "power_of_two", "prefix_aware", "kv_use", "session"] = "round_robin"
    age_ns: int = 0
    load_tokens: int = 0


@dataclass(frozen=True)
class Speculation:
    """``tokens`` are proposed a step; ``accept_ppm``: chance that a proposal is taken, given that those before it were, in
    millionths. ``draft_ns`` per proposed position and step. ``off_above``: no proposals in steps of more decoders (null: always
    proposals)."""

    tokens: int
    accept_ppm: int
    draft_ns: int = 0
    off_above: int | None = None


@dataclass(frozen=True)
class Order:
    """Which waiting request comes first: the least ``key`` (plus its arrival if ``from_arrival``), then arrival, then number.

    ``key``: int64[n] by request, or null for all zero. ``requeue``: whether one that was driven out keeps its key (priority) or
    goes to the front (FCFS); the same flag chooses the victim: worst key, or last admitted.
    """

    key: _Ints | None = None
    from_arrival: bool = True
    requeue: bool = False


@dataclass(frozen=True)
class Plan:
    """A whole replay but for its requests.

    Attributes:
        before_ns: from a request's arrival until a router can send it on; after_ns: from its last token's step until the client
            has it all, after which a session goes on.
        kv_token_bytes: KV of one token over all layers and ranks; 0 if unknown (then no way may be used).
        reuse: whether what a tier holds is loaded ``always``, or only where that takes less time than computing it
            (``break_even``).
        horizon_ns: nothing happens after that; requests that are not done are unfinished. Null: until all are done.
        clients: closed loop: so many requests at once at most, the next one ``think_ns`` after one ends. Null: arrivals as the
            work has them.
    """

    engines: tuple[EngineSpec, ...]
    costs: tuple[StepCost, ...]
    links: tuple[LinkSpec, ...] = ()
    ways: tuple[Way, ...] = ()
    routing: Routing = field(default_factory=Routing)
    decode_routing: Routing = field(default_factory=Routing)
    order: Order = field(default_factory=Order)
    handover: Handover | None = None
    tiers: tuple[TierSpec, ...] = ()
    reuse: Literal["always", "break_even"] = "always"
    speculation: Speculation | None = None
    kv_token_bytes: int = 0
    before_ns: int = 0
    after_ns: int = 0
    horizon_ns: int | None = None
    clients: int | None = None
    think_ns: int = 0
    seed: int = 0

    @property
    def entry(self) -> tuple[int, ...]:
        """Engines that take new requests: all but the decode engines."""
        return tuple(i for i, e in enumerate(self.engines) if e.role != "decode")

    @property
    def decoders(self) -> tuple[int, ...]:
        """The decode engines."""
        return tuple(i for i, e in enumerate(self.engines) if e.role == "decode")
