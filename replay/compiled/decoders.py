"""Decoders in the aggregate, compiled: a step in which all of them take one token costs the same for three as for three hundred.

Of the aggregated decoders of an engine only their number, the sum of their tokens and a clock are kept, which counts the steps
that they took. What one of them has computed follows from the clock. Who ends at which reading of the clock stands in a
calendar: a ring of lists. How many need a new KV block at which reading is counted by the distance to their block's boundary.
"""

from __future__ import annotations

import numpy as np

from hoptrace.replay.compiled import columns
from hoptrace.replay.compiled.columns import (
    AFTER,
    AGGREGATED,
    BLOCK,
    BOUNDARY,
    CALENDAR,
    CLOCK,
    COMPUTED,
    COUNTS,
    DECODE_CONTEXT,
    DECODERS,
    DECODING,
    DUE,
    DUE_NEXT,
    FRESH_FIRST,
    GENERATED,
    HEAD,
    LINK,
    NONE,
    OUTPUT,
    PHASE,
    PRIVATE,
    RING,
    SEQ,
    SHARED,
    SINCE,
    STATE,
)  # fmt: skip
from hoptrace.replay.jit import lean

__all__ = ["aggregate", "due_now", "separate", "tokens_of"]


@lean()
def tokens_of(s: np.ndarray, eng: np.ndarray, e: int, r: int) -> int:
    """Tokens that a running request has in the KV space."""
    if s[r, STATE] == AGGREGATED:
        return s[r, COMPUTED] + eng[e, CLOCK] - s[r, SINCE]
    return s[r, COMPUTED]


@lean(columns, forceinline=True)
def aggregate(s: np.ndarray, eng: np.ndarray, cal: np.ndarray, e: int, r: int) -> None:
    """A decoder joins at the end of a step. Its room must be what its tokens need, rounded up to blocks."""
    clock, block = eng[e, CLOCK], eng[e, BLOCK]
    s[r, STATE], s[r, SINCE] = AGGREGATED, clock
    s[r, DUE] = clock + s[r, OUTPUT] - s[r, GENERATED]
    at = eng[e, CALENDAR] + (s[r, DUE] & (eng[e, RING] - 1))
    s[r, DUE_NEXT] = cal[at]
    cal[at] = r
    s[r, PHASE] = eng[e, COUNTS] + (s[r, COMPUTED] - clock) % block
    cal[s[r, PHASE]] += 1
    eng[e, DECODERS] += 1
    eng[e, DECODE_CONTEXT] += s[r, COMPUTED]
    s[r, LINK] = eng[e, FRESH_FIRST]
    eng[e, FRESH_FIRST] = r


@lean(columns)
def _catch_up(s: np.ndarray, r: int, clock: int, block: int) -> None:
    """What a decoder did while it was aggregated."""
    passed = clock - s[r, SINCE]
    s[r, COMPUTED] += passed
    s[r, GENERATED] += passed
    s[r, PRIVATE] = (s[r, COMPUTED] + block - 1) // block * block - s[r, SHARED]
    s[r, STATE] = DECODING


@lean(columns)
def separate(s: np.ndarray, eng: np.ndarray, cal: np.ndarray, e: int) -> None:
    """Every decoder by itself again, for a step that goes through them one by one."""
    clock = eng[e, CLOCK]
    r = eng[e, HEAD]
    while r >= 0 and eng[e, DECODERS] > 0:
        if s[r, STATE] == AGGREGATED:
            _catch_up(s, r, clock, eng[e, BLOCK])
            cal[eng[e, CALENDAR] + (s[r, DUE] & (eng[e, RING] - 1))] = NONE
            cal[s[r, PHASE]] = 0
            eng[e, DECODERS] -= 1
        r = s[r, AFTER]
    eng[e, DECODE_CONTEXT], eng[e, FRESH_FIRST] = 0, NONE


@lean(columns, forceinline=True)
def due_now(s: np.ndarray, eng: np.ndarray, cal: np.ndarray, e: int) -> int:
    """All decoders have taken a step: the clock goes on. Who has ended leaves the aggregate: the first of them in the order of
    running, -1 if there is none; the others follow by ``DUE_NEXT``."""
    clock = eng[e, CLOCK] + 1
    eng[e, CLOCK] = clock
    eng[e, DECODE_CONTEXT] += eng[e, DECODERS]
    eng[e, BOUNDARY] = eng[e, BOUNDARY] - 1 if eng[e, BOUNDARY] > 0 else eng[e, BLOCK] - 1
    at = eng[e, CALENDAR] + (clock & (eng[e, RING] - 1))
    r, rest, first = cal[at], NONE, NONE
    while r >= 0:
        following = s[r, DUE_NEXT]
        if s[r, DUE] != clock:
            s[r, DUE_NEXT] = rest
            rest = r
        else:
            _catch_up(s, r, clock, eng[e, BLOCK])
            cal[s[r, PHASE]] -= 1
            eng[e, DECODERS] -= 1
            eng[e, DECODE_CONTEXT] -= s[r, COMPUTED]
            # By order of admission; mostly there is one.
            if first < 0 or s[r, SEQ] < s[first, SEQ]:
                s[r, DUE_NEXT] = first
                first = r
            else:
                k = first
                while s[k, DUE_NEXT] >= 0 and s[s[k, DUE_NEXT], SEQ] < s[r, SEQ]:
                    k = s[k, DUE_NEXT]
                s[r, DUE_NEXT] = s[k, DUE_NEXT]
                s[k, DUE_NEXT] = r
        r = following
    cal[at] = rest
    return first
