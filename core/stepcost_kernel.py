"""The integer arithmetic of the step cost, compiled by numba, for the replay's event kernel.

:mod:`hoptrace.stepcost` computes the same with numpy (so that a report need not wait for numba); a property test holds the two
equal to the last bit, which integer arithmetic makes possible.

A step costs the larger of two sums of non-negative terms, `Σ vector[i] × feature[i]` and `Σ vector[9 + i] × feature[i]`: a fitted
cost leaves the second at zero, a roofline puts memory time in the first and compute time in the second.
"""

from __future__ import annotations

import numpy as np

from hoptrace.compiling import cached_njit

__all__ = ["HEAD", "LINEAR", "ROOFLINE", "attention", "cost_ns", "cost_ps", "step_ns"]

LINEAR = 0
ROOFLINE = 1

_N = 9
_ATTENTION = 5  # position of prefill_attention in FEATURES; its coefficient is per 1000 token²


@cached_njit
def attention(prefill_requests: int, prefill_tokens: int, prefill_context_tokens: int) -> int:
    """Σ tokens × (context + tokens ÷ 2) in token², the tokens and contexts shared evenly among the prefills, rounded down."""
    if prefill_requests <= 0:
        return 0
    return (prefill_tokens * (2 * prefill_context_tokens + prefill_tokens)) // (2 * prefill_requests)


@cached_njit
def cost_ps(vector: np.ndarray, kind: int, features: np.ndarray) -> int:
    """Cost of one step in ps. ``vector``: int64[18] from ``StepCost.as_vector()``; ``kind``: ``StepCost.kind``;
    ``features``: int64[9] in the order of ``stepcost.FEATURES``."""
    first = 0
    for i in range(_N):
        first += vector[i] * features[i] // 1000 if i == _ATTENTION else vector[i] * features[i]
    if kind == LINEAR:
        return first
    second = 0
    for i in range(_N):
        second += vector[_N + i] * features[i] // 1000 if i == _ATTENTION else vector[_N + i] * features[i]
    return max(first, second)


@cached_njit
def cost_ns(
    vector: np.ndarray,
    kind: int,
    prefill_requests: int,
    prefill_tokens: int,
    prefill_context_tokens: int,
    decode_requests: int,
    decode_context_tokens: int,
) -> int:
    """Cost of one step in whole ns (rounded, halves up) from its composition, without allocating. 0 for a step without work."""
    if prefill_tokens == 0 and decode_requests == 0:
        return 0
    pairs = attention(prefill_requests, prefill_tokens, prefill_context_tokens)
    best = 0
    for side in range(2 if kind == ROOFLINE else 1):
        o = side * _N
        ps = vector[o]
        if prefill_tokens > 0:
            ps += vector[o + 1] + vector[o + 3] * prefill_tokens + vector[o + 4] * prefill_context_tokens
            ps += vector[o + 5] * pairs // 1000
        if decode_requests > 0:
            ps += vector[o + 2] + vector[o + 6] * decode_requests + vector[o + 7] * decode_context_tokens
        if prefill_tokens + decode_requests > 1:
            ps += vector[o + 8]
        best = max(best, ps)
    return (best + 500) // 1000


HEAD = 3
"""Numbers before a packed cost's coefficients: kind, how many residuals, how long it is in all."""


@cached_njit
def step_ns(
    costs: np.ndarray,
    at: int,
    draw: int,
    prefill_requests: int,
    prefill_tokens: int,
    prefill_context_tokens: int,
    decode_requests: int,
    decode_context_tokens: int,
    extra_tokens: int,
) -> int:
    """How long one step takes, in ns; at least 1.

    Args:
        costs: int64, packed costs (:func:`hoptrace.stepcost_pack.pack`); at: where this one begins.
        draw: a random number in [0, 2^62): chooses the residual, in millionths of the cost; without residuals it changes nothing.
        extra_tokens: tokens computed besides (proposals verified), priced as prompt tokens without the fixed part of a prompt.
    """
    kind, residuals = costs[at], costs[at + 1]
    v = costs[at + HEAD :]
    best = 0
    pairs = attention(prefill_requests, prefill_tokens, prefill_context_tokens)
    for side in range(2 if kind == ROOFLINE else 1):
        o = side * _N
        ps = v[o] + v[o + 3] * extra_tokens
        if prefill_tokens > 0:
            ps += v[o + 1] + v[o + 3] * prefill_tokens + v[o + 4] * prefill_context_tokens + v[o + 5] * pairs // 1000
        if decode_requests > 0:
            ps += v[o + 2] + v[o + 6] * decode_requests + v[o + 7] * decode_context_tokens
        if prefill_tokens + decode_requests + extra_tokens > 1:
            ps += v[o + 8]
        best = max(best, ps)
    ns = (best + 500) // 1000
    if residuals > 0:
        ns += ns * v[2 * _N + draw % residuals] // 1_000_000
    return max(1, ns)
