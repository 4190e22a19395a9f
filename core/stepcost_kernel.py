"""The integer arithmetic of the step cost, compiled by numba, for the replay's event kernel.

:mod:`hoptrace.stepcost` computes the same with numpy (so that a report need not wait for numba); a property test holds the two
equal to the last bit, which integer arithmetic makes possible.

A step costs the larger of two sums of non-negative terms, `Σ vector[i] × feature[i]` and `Σ vector[9 + i] × feature[i]`: a fitted
cost leaves the second at zero, a roofline puts memory time in the first and compute time in the second.
"""

from __future__ import annotations

import math

import numpy as np

from hoptrace.compiling import cached_njit
from hoptrace.stepcost_table import STALL

__all__ = ["HEAD", "IN_ORDER", "LINEAR", "PIECE", "ROOFLINE", "RUN", "attention", "cost_ns", "cost_ps", "step_ns"]

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


HEAD = 8
"""Numbers before a packed cost's coefficients: sides (1 linear, 2 roofline), length of it all, residuals of decode, prefill and
mixed steps, where they begin, how many pieces, where those begin. Places count from the cost's own beginning."""

PIECE = 9
"""Numbers of a packed piece: side, factors of steps of prefill only, of decode only, of both (millionths; 0: not in those),
times, outer and inner variable, how many outer values, where its grid begins.

A grid: the outer values, for each where its row begins, then the rows: how many, their inner values, their times in ps."""

IN_ORDER = 1 << 40
"""A draw below it is a place in the table of residuals, not a chance."""
RUN = 16
"""Steps in a row that take neighbouring residuals."""


@cached_njit
def between(x: int, x0: int, x1: int, y0: int, y1: int) -> int:
    """Whole number on the line through (x0, y0) and (x1, y1), rounded down; in two parts, so that nothing overflows."""
    m, n, d = x1 - x0, x - x0, y1 - y0
    return y0 + d // m * n + d % m * n // m


@cached_njit
def place(values: np.ndarray, at: int, n: int, x: int) -> int:
    """Left end of the stretch of ``values[at : at + n]`` (ascending, n ≥ 2) whose line holds x; beyond an end the last one."""
    low, high = 0, n - 2
    while low < high:
        middle = (low + high + 1) // 2
        if values[at + middle] <= x:
            low = middle
        else:
            high = middle - 1
    return low


@cached_njit
def row_ps(v: np.ndarray, at: int, x: int) -> int:
    """A row of a grid at x: linear between its points, and beyond its ends in the line of the last two."""
    n = v[at]
    if n == 1:
        return int(v[at + 2])
    i = at + 1 + place(v, at + 1, n, x)
    return int(between(x, v[i], v[i + 1], v[i + n], v[i + n + 1]))


@cached_njit
def grid_ps(v: np.ndarray, at: int, rows: int, outer: int, inner: int) -> int:
    """A grid at (outer, inner): each of two rows at inner, linear between them; never below 0. ``at``: index in ``v``; the rows'
    places in it count from ``at`` as well."""
    if rows == 1:
        return max(0, int(row_ps(v, at + v[at + 1], inner)))
    i = place(v, at, rows, outer)
    low, high = row_ps(v, at + v[at + rows + i], inner), row_ps(v, at + v[at + rows + i + 1], inner)
    return max(0, int(between(outer, v[at + i], v[at + i + 1], low, high)))


@cached_njit
def variable(code: int, pr: int, pt: int, pc: int, dr: int, dc: int, extra: int) -> int:
    """A variable of a grid, by its place in :data:`hoptrace.stepcost_table.VARIABLES`."""
    if code == 1:
        return pt + dr + extra
    if code == 2:
        return pt
    if code == 3:
        return pc
    if code == 4:
        return dr + extra
    if code == 5:
        return dc // (dr + extra) if dr + extra > 0 else 0
    if code == 6:
        return dc // dr if dr > 0 else 0
    if code == 7:
        return pt // pr if pr > 0 else 0
    if code == 8:
        return pc // pr if pr > 0 else 0
    if code == 9:
        return int(math.sqrt(pt * pt // pr)) if pr > 0 else 0
    if code == 10:
        return pr + dr
    return 0


@cached_njit
def pieces_ps(costs: np.ndarray, at: int, side: int, pr: int, pt: int, pc: int, dr: int, dc: int, extra: int) -> int:
    """What the grids of one side add, in ps."""
    ps = 0
    for k in range(costs[at + 6]):
        p = at + costs[at + 7] + k * PIECE
        factor = costs[p + 1] if dr + extra == 0 else (costs[p + 2] if pt == 0 else costs[p + 3])
        if costs[p] != side or factor == 0:
            continue
        outer = variable(costs[p + 5], pr, pt, pc, dr, dc, extra)
        inner = variable(costs[p + 6], pr, pt, pc, dr, dc, extra)
        value = grid_ps(costs, at + costs[p + 8], costs[p + 7], outer, inner)
        if costs[p + 4] == 1:
            value *= pr
        elif costs[p + 4] == 2:
            value *= dr
        ps += value // 1_000_000 * factor + value % 1_000_000 * factor // 1_000_000
    return ps


@cached_njit
def residual(costs: np.ndarray, at: int, draw: int, prefill: bool, decode: bool) -> int:
    """The residual of a step: millionths of its cost, or ns beyond :data:`STALL`. Tables are in the order of the recording:
    ``draw`` chooses where a run of :data:`RUN` steps begins (its upper bits), and which of the run this one is; one below
    :data:`IN_ORDER` is a position in the table, from the start again behind its end."""
    first, kind = at + costs[at + 5], (2 if decode else 1) if prefill else 0
    for k in range(kind):
        first += costs[at + 2 + k]
    n = costs[at + 2 + kind]
    if n == 0:
        return 0
    i = draw if draw < IN_ORDER else ((draw // RUN & 0xFFFFF) * n >> 20) + draw % RUN
    return int(costs[first + (i if i < n else i % n)])


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
        draw: chooses the residual (docs/replay-engine.md, Cost); −1: none. Without residuals it changes nothing.
        extra_tokens: tokens computed besides (proposals verified), priced as prompt tokens without the fixed part of a prompt;
            in a grid as more decoders over the same context.
    """
    best = 0
    pairs = attention(prefill_requests, prefill_tokens, prefill_context_tokens)
    for side in range(costs[at]):
        o = at + HEAD + side * _N
        ps = costs[o] + costs[o + 3] * extra_tokens
        if prefill_tokens > 0:
            ps += costs[o + 1] + costs[o + 3] * prefill_tokens + costs[o + 4] * prefill_context_tokens
            ps += costs[o + 5] * pairs // 1000
        if decode_requests > 0:
            ps += costs[o + 2] + costs[o + 6] * decode_requests + costs[o + 7] * decode_context_tokens
        if prefill_tokens + decode_requests + extra_tokens > 1:
            ps += costs[o + 8]
        if costs[at + 6] > 0:
            ps += pieces_ps(
                costs, at, side, prefill_requests, prefill_tokens, prefill_context_tokens, decode_requests,
                decode_context_tokens, extra_tokens,
            )  # fmt: skip
        best = max(best, ps)
    ns = (best + 500) // 1000
    if draw >= 0 and costs[at + 5] > 0:
        beyond = residual(costs, at, draw, prefill_tokens > 0, decode_requests > 0)
        ns += beyond - STALL if beyond >= STALL else ns * beyond // 1_000_000
    return max(1, ns)
