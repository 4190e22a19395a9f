"""What a policy file may say about several servers and the ways between memories: splits, tiers, routing, links, ceilings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hoptrace.replay.policy.parts import MOST, Batching, Count, Kv, Ms, Part, Plugin, PrefixCache, Ranks, Ratio, Servers, Size

__all__ = [
    "Ceilings",
    "DecodeRouting",
    "Link",
    "Name",
    "OverheadTimes",
    "Routing",
    "ServerParts",
    "ServersPart",
    "Speculation",
    "Split",
    "Tier",
]

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=64)]
Names = Name | list[Name]
Us = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
# 10^9 GB/s: more than any link, and the engine's integers hold it.
Rate = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | Literal["infinite"]
RoutingKind = Literal["round_robin", "random", "least_load", "power_of_two", "prefix_aware", "kv_use", "session"]
Mechanism = Literal["load_store", "uncached", "dma", "memcpy", "rdma", "collective", "message", "file"]


class ServersPart(Part):
    """Equal servers behind one router, and what they run on."""

    count: Servers | None = Field(default=None, description="How many servers, each as the trace's own. 1.")
    platform: str | None = Field(
        default=None,
        description="Platform of every server (`hoptrace platforms`). As --platform; only with a cost that knows it.",
    )
    tensor_parallel: Ranks | None = Field(
        default=None, description="Tensor-parallel ranks of a server: an input of the step cost. As the trace's server."
    )


class ServerParts(Part):
    """How one kind of server of a split differs from the rest of the policy."""

    batching: Batching = Field(default_factory=Batching, description="As [batching], for these servers only.")
    kv: Kv = Field(default_factory=Kv, description="As [kv], for these servers only.")
    prefix_cache: PrefixCache = Field(default_factory=PrefixCache, description="As [prefix_cache], for these servers only.")
    platform: str | None = Field(default=None, description="Platform of these servers. As [servers] says.")
    tensor_parallel: Ranks | None = Field(default=None, description="Ranks of each of these servers. As [servers] says.")


class Split(Part):
    """Prefill/decode disaggregation: prompts on some servers, output tokens on others."""

    prefill: Servers = Field(description="How many servers compute prompts. Must be given.")
    decode: Servers = Field(description="How many servers compute output tokens. Must be given.")
    start: Literal["pull", "push"] | None = Field(
        default=None,
        description="pull: the decode server starts the transfer when it has room (vLLM's NIXL; the default). push: the prefill "
        "server starts it at the end of the prompt, if the decode server has room then (the default of per_layer).",
    )
    transfer: Literal["whole", "per_layer"] | None = Field(
        default=None,
        description="whole: all KV after the prompt (the default). per_layer: each layer's as it is computed, all but the last "
        "layer's beside the computation (push only).",
    )
    layers: Annotated[int, Field(ge=2, le=4096)] | None = Field(
        default=None, description="per_layer: how many layers. As the trace's model."
    )
    first_token: Literal["handover", "recompute"] | None = Field(
        default=None,
        description="handover: the prefill server's token is the user's first (the default). recompute: the decode server "
        "computes the last prompt token again, and the user sees its token.",
    )
    arrange_ms: Ms | None = Field(
        default=None, description="From the end of the prompt until the decode server's queue has the request. 0."
    )
    local_below_tokens: Annotated[int, Field(ge=0, le=MOST)] | None = Field(
        default=None, description="Shorter prompts are computed on a decode server, without a transfer. 0: none are."
    )
    link: Names | None = Field(
        default=None, description="Which of [links] the KV crosses; several: all of them. Given, no platform is asked."
    )
    mechanism: Name | None = Field(
        default=None,
        description="Access path of the platform by which it goes (docs/access-paths.md), instead of a link. The usual one from "
        "GPU to GPU of another host.",
    )
    prefill_server: ServerParts = Field(
        default_factory=ServerParts, description="How the prefill servers differ, see [split.prefill_server]."
    )
    decode_server: ServerParts = Field(
        default_factory=ServerParts, description="How the decode servers differ, see [split.decode_server]."
    )


class Tier(Part):
    """A place for KV blocks below the servers' own memory. They are searched in the order of the file; needs a prefix cache of
    kind pool."""

    kind: Literal["dram", "dram_pageable", "peer_hbm", "cxl_expander", "cxl_pool", "remote_dram", "nvme"] = Field(
        description="What it is: the host's memory (dram; dram_pageable if it is not pinned), another GPU's, a CXL device of one "
        "server or a pool of all, another host's memory, a disk. Must be given."
    )
    name: Name | None = Field(default=None, description="Its name. The kind, if not given.")
    capacity_tokens: Count | None = Field(
        default=None, description="Tokens of KV that one instance holds. This or capacity_bytes must be given."
    )
    capacity_bytes: Annotated[int, Field(ge=1, le=1 << 60)] | None = Field(
        default=None, description="The same in bytes; needs the KV bytes of a token."
    )
    shared: bool | None = Field(
        default=None, description="One instance for all servers, or one each. true for cxl_pool and remote_dram, else false."
    )
    write: Literal["through", "back"] | None = Field(
        default=None,
        description="through: blocks are written when they are computed (first tier only). back: when they are evicted above it. "
        "back, if not given.",
    )
    link: Names | None = Field(
        default=None, description="Which of [links] lead there; several: all of them. Given, no platform is asked."
    )
    mechanism: Name | None = Field(
        default=None,
        description="Access path of the platform by which it is reached (docs/access-paths.md), instead of a link. The usual one "
        "for its kind.",
    )


class DecodeRouting(Part):
    """Which decode server a request of a split goes to, at the end of its prompt."""

    kind: RoutingKind | Plugin | None = Field(default=None, description="As [routing]. round_robin.")
    knowledge_age_ms: Ms | None = Field(default=None, description="As [routing].")
    load_tokens: Annotated[int, Field(ge=0, le=MOST)] | None = Field(default=None, description="As [routing].")


class Routing(Part):
    """Which server a new request goes to."""

    kind: RoutingKind | Plugin | None = Field(
        default=None,
        description="round_robin (the default). random. least_load: fewest requests in flight. power_of_two: the less loaded of "
        "two drawn at random. kv_use: least KV held by requests. prefix_aware: most of the prompt's leading tokens in the "
        "server's cache, less load_tokens for each request in flight. session: all of a conversation to one server.",
    )
    knowledge_age_ms: Ms | None = Field(
        default=None, description="kv_use: the router sees it renewed only once in so long. 0: as it is."
    )
    load_tokens: Annotated[int, Field(ge=0, le=MOST)] | None = Field(
        default=None, description="prefix_aware: a request in flight weighs as much as so many cached tokens. 0."
    )
    decode: DecodeRouting | None = Field(default=None, description="The same for the decode servers of a split.")


class Speculation(Part):
    """Speculative decoding: tokens are proposed cheaply and verified in the batch."""

    tokens: Annotated[int, Field(ge=1, le=64)] = Field(description="Proposals for each request and step. Must be given.")
    acceptance: Ratio | Literal["trace"] = Field(
        description="Chance that a proposal is taken, given that those before it were; or trace: as the trace's steps show it "
        "(draft_proposed, draft_accepted). Must be given."
    )
    kind: Literal["ngram", "draft_model", "eagle", "self"] | None = Field(
        default=None,
        description="Who proposes. It decides no more than whether draft_ms_per_token has to be given (not with ngram, the "
        "default); a draft model's own KV is not modelled.",
    )
    draft_ms_per_token: Ms | None = Field(
        default=None, description="What a step takes longer for each of its `tokens` proposed positions. 0 with ngram."
    )
    off_above: Size | None = Field(default=None, description="No proposals in steps of more decoders. Always proposals.")


class OverheadTimes(Part):
    """Time outside the engine's steps. As the trace shows it."""

    before_ms: Ms | None = Field(default=None, description="From a request's arrival until a router can send it on.")
    gap_ms: Ms | None = Field(default=None, description="Host time between the end of a step and the start of the next.")
    after_ms: Ms | None = Field(default=None, description="From the last token's step until the client has the whole answer.")


class Ceilings(Part):
    """One cost taken away, to see what it amounts to: what remains is a bound, not a plan."""

    host_cost: Literal["zero"] | None = Field(
        default=None, description="No host time between steps, in them (where the trace tells it), or before the engine begins."
    )
    front_cost: Literal["zero"] | None = Field(default=None, description="Client, network, proxy and delivery take no time.")
    kv: Literal["infinite"] | None = Field(default=None, description="KV space without a limit.")
    limits: Literal["none"] | None = Field(default=None, description="No limit of places, of tokens a step, or of KV space.")
    prompts: Literal["cached"] | None = Field(
        default=None,
        description="Computing prompt tokens costs nothing, and a step has room for any of them; the step that yields the "
        "first token remains.",
    )
    links: Literal["infinite"] | None = Field(default=None, description="Every transfer takes no time at all.")


class Link(Part):
    """A link that [split] and [[tiers]] name, with figures of your own: fixed times first, then the bytes."""

    gbytes_per_s: Rate = Field(description="10^9 bytes a second in one direction; transfers at once share it. Must be given.")
    latency_us: Us | None = Field(default=None, description="Fixed time of one transfer. 0.")
    per_block_us: Us | None = Field(
        default=None, description="Fixed time for each KV block in it (descriptors of a block × cost of one). 0."
    )
    shared: bool | None = Field(
        default=None, description="One link for all servers, or one at each server. false. Directions are apart in both cases."
    )
    mechanism: Mechanism | None = Field(
        default=None, description="How the data moves, for the counts of hops. rdma between servers, else dma."
    )
