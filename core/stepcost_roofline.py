"""The roofline of a server on a platform as a step cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hoptrace.errors import InputError
from hoptrace.manifest import Server
from hoptrace.roofline import roofline_of
from hoptrace.stepcost import StepCost

__all__ = ["roofline"]


def roofline(server: Server, platform: Mapping[str, Any]) -> StepCost:
    """The least time that the platform's arithmetic and memory allow a step: the larger of the two, plus a constant overhead.

    Arithmetic: 2 × parameters FLOP per token (less the embeddings, which are looked up, where the vocabulary is known), and
    4 × layers × heads × head size per pair of positions in attention (QKᵀ and its product with V). Memory: all weights once, the
    KV of every context position once, the KV of each new token once. Tensor-parallel ranks share both. The same figures as
    :class:`hoptrace.roofline.Roofline`, as integers for the kernel.

    Args:
        server: needs parameters, weight_bytes and the KV geometry.
        platform: of one device, ``flops_per_s`` and ``memory_bytes_per_s`` (attainable: peak × efficiency), and
            ``step_overhead_ns`` (0 if missing).

    Raises:
        InputError: something is missing; says what.
    """
    try:
        r = roofline_of(server, platform)
    except InputError as e:
        hint = "Name the model's file at attach, use the cost model `fitted`, or write the values into the trace's manifest."
        raise InputError(e.message, hint=hint) from None
    flop_ps = 1e12 / r.flops_per_s
    byte_ps = 1e12 / r.memory_bytes_per_s
    overhead_ps = float(platform.get("step_overhead_ns") or 0) * 1000
    token = r.token_flop * flop_ps
    pair = r.pair_flop * flop_ps
    kv = r.kv_token_bytes * byte_ps
    memory = {
        "step": r.weight_bytes * byte_ps + overhead_ps,
        "prefill_tokens": kv,
        "prefill_context_tokens": kv,
        "decode_requests": kv,
        "decode_context_tokens": kv,
    }
    compute = {
        "step": overhead_ps,
        "prefill_tokens": token,
        "prefill_attention": pair * 1000,
        "decode_requests": token,
        "decode_context_tokens": pair,
    }
    return StepCost(
        {k: round(v) for k, v in memory.items()},
        "roofline",
        compute_ps={k: round(v) for k, v in compute.items()},
        notes=("A lower bound from peak rates; not measured.", *r.notes),
    )
