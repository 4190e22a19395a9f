"""What a policy may ask for by name and does not get, with the reason: no reference is known that a test of ours meets."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["REFUSED", "Refusal", "refusal"]


@dataclass(frozen=True)
class Refusal:
    """``keys``: names of keys or tables that ask for it, ``values``: (key, value) pairs; ``what``, ``why`` and ``instead`` in
    words, without a full stop."""

    what: str
    why: str
    instead: str
    keys: tuple[str, ...] = ()
    values: tuple[tuple[str, str], ...] = ()


_NO_REFERENCE = "neither a closed form nor another simulator's or a server's output is at hand to hold it against"

REFUSED: tuple[Refusal, ...] = (
    Refusal(
        "preemption by swapping KV to the host",
        "vLLM dropped it in v1, and of the simulators none with open results swaps under known rules",
        'preemption = "recompute"; [[tiers]] of kind dram keep what is evicted',
        values=(("preemption", "swap"),),
        keys=("swap", "swap_space", "swap_space_gib"),
    ),
    Refusal(
        "eviction by frequency, cost or age alone",
        f"published caches differ in decay, ties and cost estimate; {_NO_REFERENCE}",
        'eviction = "lru"',
        values=tuple(("eviction", v) for v in ("lfu", "cost_aware", "cost-aware", "fifo", "arc", "s3fifo", "gdsf", "random")),
    ),
    Refusal(
        "prefetch from tiers before a request is scheduled",
        f"what is fetched when is each system's own rule; {_NO_REFERENCE}",
        "blocks found in a tier are loaded when the request is first considered",
        keys=("prefetch",),
    ),
    Refusal(
        "a split of encode, prefill and decode",
        "the trace does not tell an encoder's steps, so nothing could price them",
        "[split] of prefill and decode",
        keys=("encode", "encoder", "epd", "encode_server"),
    ),
    Refusal(
        "a split of attention and feed-forward layers",
        "a step is priced whole: its cost says nothing of one layer's halves or of their exchange",
        "[split] of prefill and decode",
        keys=("attention_ffn", "afd", "attention", "ffn"),
    ),
    Refusal(
        "servers that change their role over time",
        f"the rule that switches them is each system's own; {_NO_REFERENCE}",
        "[split] with fixed numbers; local_below_tokens lets decode servers take short prompts",
        keys=("role_switching", "roles", "switch", "rebalance"),
    ),
    Refusal(
        "weights kept outside the device's memory",
        "the step cost is fitted or modelled with resident weights; how loading overlaps with compute is unknown",
        "--cost with a table measured under offloading",
        keys=("weights", "weight_offload", "offload", "cpu_offload_gb"),
    ),
    Refusal(
        "sparse reading of KV",
        "which blocks a query reads depends on the model's scores, which no trace holds",
        "a model with sliding-window layers, whose shape the step cost knows",
        keys=("sparse", "top_k_blocks", "sparsity", "sliding_window"),
    ),
    Refusal(
        "KV kept as 8- or 4-bit integers",
        "the cost of converting has no reference, and it is what decides",
        'dtype = "fp8" or "bf16"; a trace whose server has an integer type keeps it',
        values=tuple(("dtype", v) for v in ("int8", "int4", "fp4", "nvfp4", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q8_1")),
    ),
    Refusal(
        "the cost of converting KV between types",
        _NO_REFERENCE,
        "[kv] dtype, which scales bytes and capacity only",
        keys=("conversion", "convert_ms", "conversion_us_per_token"),
    ),
    Refusal(
        "Lookahead decoding",
        "its n-gram pool fills from the text, which no trace holds; acceptance under it is not a chain of chances",
        'kind = "ngram" with a measured acceptance',
        values=(("kind", "lookahead"),),
        keys=("lookahead",),
    ),
    Refusal(
        "Jacobi decoding",
        "how many positions settle in a step depends on the text, which no trace holds",
        'kind = "ngram" with a measured acceptance',
        values=(("kind", "jacobi"),),
        keys=("jacobi",),
    ),
    Refusal(
        "trees of proposals",
        "acceptance of a tree is not one chance a position, and its verification cost depends on its shape",
        "chains: tokens and acceptance",
        values=(("kind", "medusa"), ("kind", "tree"), ("kind", "eagle2")),
        keys=("tree", "tree_width", "branches"),
    ),
    Refusal(
        "a draft model's own KV space",
        _NO_REFERENCE,
        "a smaller kv.capacity_tokens",
        keys=("draft_kv_tokens", "draft_kv", "draft_kv_bytes_per_token"),
    ),
    Refusal(
        "pipeline parallelism",
        "steps of pipeline stages overlap, and a replayed engine does one step at a time",
        "[servers] tensor_parallel, with a step cost that knows it",
        keys=("pipeline_parallel", "pipeline_parallel_size", "pp"),
    ),
    Refusal(
        "data-parallel ranks in lockstep, and expert parallelism over them",
        "ranks wait for each other in every layer, which a step cost of one engine does not tell",
        "[servers] count: servers that do not wait for each other",
        keys=("data_parallel", "data_parallel_size", "dp", "expert_parallel", "ep"),
    ),
    Refusal(
        "fair sharing between tenants",
        f"weights and counters are each system's own; {_NO_REFERENCE}",
        'order = "fcfs", "priority", "shortest" or "slack"',
        values=tuple(("order", v) for v in ("fair", "vtc", "wfq", "drr", "edf", "longest", "lof", "lpm", "dfs_weight")),
    ),
    Refusal(
        "a consistent-hash or tree-based router",
        f"what its tree or ring holds is each system's own; {_NO_REFERENCE}",
        'kind = "prefix_aware" (what the server\'s cache holds) or "session"',
        values=(("kind", "consistent_hash"), ("kind", "radix_tree"), ("kind", "cache_aware"), ("kind", "precise_prefix")),
    ),
    Refusal(
        "servers that come and go with the load",
        f"the rule is each system's own; {_NO_REFERENCE}",
        "[servers] count or [split], fixed for a run; `hoptrace sweep` compares numbers of them",
        keys=("autoscale", "autoscaling", "scale", "min_servers", "max_servers"),
    ),
    Refusal(
        "tiers that write to several places at once",
        f"{_NO_REFERENCE}",
        "tiers in a row: what one evicts goes to the next",
        keys=("replicate", "replicas", "mirror"),
    ),
)
"""In the order of docs/policies.md."""


def refusal(key: str, value: object = None) -> Refusal | None:
    """Why ``key``, or ``key = value``, is refused by name; null if it is not in the table."""
    for r in REFUSED:
        if value is None and key in r.keys:
            return r
        if isinstance(value, str) and (key, value.strip().lower()) in r.values:
            return r
    return None
