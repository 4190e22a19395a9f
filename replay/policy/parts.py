"""What a policy file may say about one server: batching, KV space, prefix cache. Defaults are the trace's own server's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "MOST",
    "MOST_SEQUENCES",
    "MOST_SERVERS",
    "Batching",
    "Count",
    "Kv",
    "Ms",
    "Part",
    "Plugin",
    "PrefixCache",
    "Ratio",
    "Size",
]

# The engine's integers have 64 bits; more than this of anything is `unlimited`.
MOST = 1 << 40
# Each place costs memory and a look at every admission, busy or not; no engine has so many.
MOST_SEQUENCES = 1 << 16
MOST_SERVERS = 4096

Size = Annotated[int, Field(ge=1, le=MOST)]
Count = Size | Literal["unlimited"]
Places = Annotated[int, Field(ge=1, le=MOST_SEQUENCES)] | Literal["unlimited"]
Servers = Annotated[int, Field(ge=1, le=MOST_SERVERS)]
Ranks = Annotated[int, Field(ge=1, le=1024)]
# Up to eleven days; more is a mistake of units.
Ms = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
# An entry point of yours (docs/replay-plugins.md).
Plugin = Annotated[str, Field(pattern=r"^python:[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=100)]
Ratio = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Part(BaseModel):
    """A table of a policy file: no other keys, no conversion of types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Batching(Part):
    """How requests are put together into steps."""

    max_sequences: Places | None = Field(
        default=None,
        description="Requests that hold a place at once: slots (llama.cpp), max-num-seqs (vLLM). As the trace's server.",
    )
    max_batched_tokens: Count | None = Field(
        default=None, description="Tokens of one step at most: n_batch, max-num-batched-tokens. As the trace's server."
    )
    mode: Literal["mixed", "prefill_first", "prompts_first", "static"] | None = Field(
        default=None,
        description="mixed: running requests first, then prompt tokens up to the budget, in one step (llama.cpp, vLLM v1; the "
        "default). prefill_first: prompts first, decoders only in steps without any prompt token. prompts_first: prompts first, "
        "decoders in the same step with what the budget leaves (Splitwise's simulator). static: a batch is filled when nothing "
        "runs, and all of it stays until its last request has ended.",
    )
    chunked_prefill: bool | None = Field(
        default=None, description="Whether a prompt may be computed in several steps. true in mixed, false in the other modes."
    )
    order: Literal["fcfs", "priority", "shortest", "slack"] | Plugin | None = Field(
        default=None,
        description="Which waiting request is admitted first. fcfs: the one that came first (the default). priority: the least "
        "`priority` of the trace, and the worst one is driven out where KV lacks (vLLM's). shortest: the shortest prompt. slack: "
        "the least time left until its first token is due, less the time to compute its prompt alone (needs slo_ttft_ms). "
        "python:NAME, here as elsewhere: a part of your own (docs/replay-plugins.md); slower.",
    )
    slo_ttft_ms: Ms | None = Field(default=None, description="order = slack: when a first token is due after the arrival.")
    preemption: Literal["recompute"] | None = Field(
        default=None, description="What happens to a request for which KV space lacks: its KV is given up and computed again."
    )
    victim: Plugin | None = Field(
        default=None,
        description="Who is driven out where KV lacks. The last admitted; with order = priority the least urgent that runs.",
    )
    watermark: Ratio | None = Field(
        default=None,
        description="Share of the KV space that an admission must leave free while others run (vLLM v0: 0.01). 0 if not given.",
    )


class Kv(Part):
    """The KV space."""

    capacity_tokens: Count | None = Field(
        default=None, description="Tokens of KV space over all requests. As the trace's server."
    )
    block_size_tokens: Size | None = Field(
        default=None, description="KV is allocated in blocks of so many tokens. As the trace's server; 1 if unknown."
    )
    context_tokens: Count | None = Field(
        default=None, description="Longest sequence, prompt and output: a slot's context, max-model-len. As the trace's server."
    )
    dtype: Literal["f32", "f16", "bf16", "fp8", "fp8_e4m3", "fp8_e5m2"] | None = Field(
        default=None,
        description="Type of K and V: scales the bytes that move, and the tokens that fit into the trace's KV space where "
        "capacity_tokens is not given. What converting costs is not modelled. As the trace's server.",
    )
    contiguous: Literal["layer_kv", "layer", "block"] | None = Field(
        default=None,
        description="What of a block lies together, where a platform's access path pays for each piece: K and V of each layer "
        "apart (layer_kv, the default; vLLM up to 0.11), both of a layer, or all layers (block, vLLM from 0.12 for connectors).",
    )
    bytes_per_token: Annotated[int, Field(ge=1, le=1 << 30)] | None = Field(
        default=None,
        description="Bytes of one token's KV over all layers and ranks, where tiers or a split move it. From the shape of the "
        "trace's model, if its manifest tells it.",
    )


class PrefixCache(Part):
    """Reuse of prompts' beginnings. Which prompts begin alike is known from the trace's prefix blocks only."""

    enabled: bool | None = Field(default=None, description="As the trace's server; false if that is unknown.")
    kind: Literal["pool", "slot"] | None = Field(
        default=None,
        description="pool: blocks stay in the KV space, least recently used evicted first (vLLM). slot: each slot keeps its last "
        "prompt (llama.cpp, without its host prompt cache). slot if the trace's engine is llama.cpp, else pool.",
    )
    capacity_tokens: Count | None = Field(
        default=None, description="pool only: tokens that cached blocks may take. Bounded by the KV space only, if not given."
    )
    eviction: Literal["lru"] | Plugin | None = Field(
        default=None, description="Which blocks of the device go first: the least recently used."
    )
    tier_eviction: Literal["lru"] | Plugin | None = Field(
        default=None, description="Which blocks of [[tiers]] go first: the least recently used."
    )
    reuse: Literal["always", "break_even"] | None = Field(
        default=None,
        description="Which blocks that [[tiers]] hold are loaded: always (the default), or only where loading them takes less "
        "time than computing them (break_even).",
    )
