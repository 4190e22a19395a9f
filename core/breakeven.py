"""Reuse or recompute: how fast a prefix must be loaded for that to take less time than computing it."""

from __future__ import annotations

from hoptrace.stepcost import StepCost

__all__ = ["break_even_bytes_per_s"]


def break_even_bytes_per_s(cost: StepCost, kv_token_bytes: int, tokens: int, context_tokens: int = 0) -> float:
    """Bandwidth above which loading ``tokens`` of KV is faster than computing them, over ``context_tokens`` that are there.

    Bytes of the tokens ÷ what the step that computes them takes beyond one of a single token (Mooncake, FAST'25, equation 2,
    with the step cost in place of its count of FLOP). Infinite where computing takes no time.
    """
    extra_ns = cost.cost_ns(prefill_tokens=tokens, prefill_context_tokens=context_tokens) - cost.cost_ns(
        prefill_tokens=1, prefill_context_tokens=context_tokens + tokens - 1
    )
    return tokens * kv_token_bytes * 1e9 / extra_ns if extra_ns > 0 else float("inf")
