"""Transfers that share links, compiled: docs/replay-engine.md, "Transfers", to the last bit of its float64.

A transfer first takes its fixed time, then joins the links of its way; each link's bandwidth is shared evenly by those on it,
and a transfer goes at the least of its shares. Only those on the links that one joins or leaves are looked at::

    ways, links = packed(plan)                     # int64 [ways, 3 + hops], [links, 4]
    t, left, head = transfers(ways)                # int64 [·, ·], float64 [·, 2], int64 [8]
    t, left = room(t, left, head, more)            # before starts: place for so many more
    x = start(t, head, ways, now, way, blocks, nbytes)   # its row; t[x, TAG + 0 … TAGS - 1] are the caller's
    next_ns(t, head)                               # when something happens next (an end, or a fixed part's end); NEVER
    n = due(t, left, head, ways, links, now)       # now = next_ns: t[:n, ENDED] have ended, in their order
    free(t, head, x)                               # after an end was dealt with; x may then be used anew
    alone_ns(ways, links, way, blocks, nbytes)     # how long it would take by itself

Rounding: an end is rounded up to a whole ns, and only ends and joins change shares; so with exact arithmetic law 5 (for fixed
starts a faster link, or one less, never makes an end later) holds to the ns. float64 adds errors of about 1e-16 of the bytes a
re-timing, which can move an end that falls on a whole ns by one.
"""

from __future__ import annotations

from math import ceil

import numpy as np

from hoptrace.compiling import cached_njit
from hoptrace.replay.jit import lean
from hoptrace.replay.plan import Plan

__all__ = [
    "BLOCKS", "BYTES", "ENDED", "NEVER", "START", "TAG", "TAGS", "WAY", "alone_ns", "due", "free", "next_ns", "packed", "room",
    "start", "transfers", "used",
]  # fmt: skip

NEVER = 1 << 62

START, WAY, BLOCKS, BYTES, ENDED = 0, 1, 2, 3, 4
_NUMBER, _WHEN, _PHASE, _SINCE, _PLACE, _HEAP = 5, 6, 7, 8, 9, 10
TAG, TAGS = 11, 7
_NODE = TAG + TAGS
"""Columns of ``t``. ``_WHEN``: its end, or (``_PHASE`` 1) that of its fixed part; ``_PLACE``: where it stands in the heap, whose
k-th item is ``t[k, _HEAP]``, by (when, phase, number); from ``_NODE``: for each link of its way the transfers before and after
it there."""

_LEFT, _RATE = 0, 1
_WAITING, _NUMBERS, _UNUSED, _TOP, _EVENTS = 0, 1, 2, 3, 4
"""``head``: how many are under way, started so far, first of the unused rows, first row never used, re-timings so far."""

_BASE, _PER_BLOCK, _HOPS, _LINKS = 0, 1, 2, 3
_BYTES_PER_S, _ON, _FIRST, _SEEN = 0, 1, 2, 3


def packed(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """The plan's ways (base_ns, per_block_ns, how many links, links) and links (bytes_per_s, how many are on it, first, mark)."""
    on = [tuple(dict.fromkeys(w.links)) for w in plan.ways]
    ways = np.full((len(on), _LINKS + max((len(x) for x in on), default=0)), -1, dtype=np.int64)
    for row, way, at in zip(ways, plan.ways, on, strict=True):
        row[:_LINKS] = way.base_ns, way.per_block_ns, len(at)
        row[_LINKS : _LINKS + len(at)] = at
    links = np.array([(link.bytes_per_s, 0, -1, -1) for link in plan.links], dtype=np.int64).reshape(-1, 4)
    return ways, links


@cached_njit
def transfers(ways: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """None under way."""
    head = np.zeros(8, dtype=np.int64)
    head[_UNUSED] = -1
    columns = _NODE + 2 * (ways.shape[1] - _LINKS)
    return np.empty((64, columns), dtype=np.int64), np.zeros((64, 2), dtype=np.float64), head


@cached_njit
def room(t: np.ndarray, left: np.ndarray, head: np.ndarray, more: int) -> tuple[np.ndarray, np.ndarray]:
    """The arrays, larger if there was no place for ``more`` transfers. Rows keep their numbers."""
    # Rows freed lie below _TOP: to count them all as used wastes nothing for long, since they are used first.
    want = head[_TOP] + more
    if want <= t.shape[0]:
        return t, left
    size = max(want, 2 * t.shape[0])
    bigger = np.empty((size, t.shape[1]), dtype=np.int64)
    bigger[: t.shape[0]] = t
    longer = np.zeros((size, 2), dtype=np.float64)
    longer[: t.shape[0]] = left
    return bigger, longer


@lean()
def used(head: np.ndarray) -> int:
    """How many rows are or have been used."""
    return head[_TOP]


@lean()
def _before(t: np.ndarray, x: int, y: int) -> bool:
    if t[x, _WHEN] != t[y, _WHEN]:
        return t[x, _WHEN] < t[y, _WHEN]
    if t[x, _PHASE] != t[y, _PHASE]:
        return t[x, _PHASE] < t[y, _PHASE]
    return t[x, _NUMBER] < t[y, _NUMBER]


@lean()
def _place(t: np.ndarray, n: int, x: int, i: int) -> None:
    """Put ``x`` where it belongs in the heap of ``n``, from the hole at ``i`` on, up or down."""
    while i > 0:
        y = t[(i - 1) >> 1, _HEAP]
        if _before(t, y, x):
            break
        t[i, _HEAP] = y
        t[y, _PLACE] = i
        i = (i - 1) >> 1
    while True:
        c = 2 * i + 1
        if c >= n:
            break
        if c + 1 < n and _before(t, t[c + 1, _HEAP], t[c, _HEAP]):
            c += 1
        y = t[c, _HEAP]
        if _before(t, x, y):
            break
        t[i, _HEAP] = y
        t[y, _PLACE] = i
        i = c
    t[i, _HEAP] = x
    t[x, _PLACE] = i


@lean()
def _drop(t: np.ndarray, head: np.ndarray) -> int:
    """Take the first one out of the heap."""
    x = t[0, _HEAP]
    head[_WAITING] -= 1
    n = head[_WAITING]
    if n > 0:
        _place(t, n, t[n, _HEAP], 0)
    return x


@lean()
def start(t: np.ndarray, head: np.ndarray, ways: np.ndarray, now: int, way: int, blocks: int, nbytes: int) -> int:
    """A transfer begins: its row. There must be room."""
    x = head[_UNUSED]
    if x < 0:
        x = head[_TOP]
        head[_TOP] = x + 1
    else:
        head[_UNUSED] = t[x, _SINCE]
    t[x, START], t[x, WAY], t[x, BLOCKS], t[x, BYTES], t[x, _NUMBER] = now, way, blocks, nbytes, head[_NUMBERS]
    head[_NUMBERS] += 1
    t[x, _WHEN] = now + ways[way, _BASE] + blocks * ways[way, _PER_BLOCK]
    t[x, _PHASE] = 1 if ways[way, _HOPS] > 0 else 0
    n = head[_WAITING]
    head[_WAITING] = n + 1
    _place(t, n, x, n)
    return x


@lean()
def free(t: np.ndarray, head: np.ndarray, x: int) -> None:
    """The row of a transfer that has ended may be used anew."""
    t[x, _SINCE] = head[_UNUSED]
    head[_UNUSED] = x


@lean()
def next_ns(t: np.ndarray, head: np.ndarray) -> int:
    """When the next transfer or fixed part ends; NEVER if none is under way."""
    return t[t[0, _HEAP], _WHEN] if head[_WAITING] > 0 else NEVER


@lean()
def _join(t: np.ndarray, ways: np.ndarray, links: np.ndarray, x: int) -> None:
    way = t[x, WAY]
    for h in range(ways[way, _HOPS]):
        k = ways[way, _LINKS + h]
        at = _NODE + 2 * h
        y = links[k, _FIRST]
        t[x, at], t[x, at + 1] = -1, y
        if y >= 0:
            t[y, _hop(t, ways, y, k)] = x
        links[k, _FIRST] = x
        links[k, _ON] += 1


@lean()
def _leave(t: np.ndarray, ways: np.ndarray, links: np.ndarray, x: int) -> None:
    way = t[x, WAY]
    for h in range(ways[way, _HOPS]):
        k = ways[way, _LINKS + h]
        at = _NODE + 2 * h
        p, n = t[x, at], t[x, at + 1]
        if p < 0:
            links[k, _FIRST] = n
        else:
            t[p, _hop(t, ways, p, k) + 1] = n
        if n >= 0:
            t[n, _hop(t, ways, n, k)] = p
        links[k, _ON] -= 1


@lean()
def _hop(t: np.ndarray, ways: np.ndarray, x: int, link: int) -> int:
    """The column of ``x`` for this link of its way."""
    way = t[x, WAY]
    h = 0
    while ways[way, _LINKS + h] != link:
        h += 1
    return _NODE + 2 * h


@lean()
def _retime(
    t: np.ndarray, left: np.ndarray, head: np.ndarray, ways: np.ndarray, links: np.ndarray, now: int, first: int, last: int
) -> None:
    """All on the links of ``t[first:last, ENDED]`` go on at the rates of now.

    Their order is free: each depends on itself and on how many share, and a second time at one instant changes nothing.
    """
    head[_EVENTS] += 1
    for j in range(first, last):
        x = t[j, ENDED]
        for h in range(ways[t[x, WAY], _HOPS]):
            k = ways[t[x, WAY], _LINKS + h]
            if links[k, _SEEN] == head[_EVENTS]:
                continue
            links[k, _SEEN] = head[_EVENTS]
            y = links[k, _FIRST]
            while y >= 0:
                way, share = t[y, WAY], np.inf
                for g in range(ways[way, _HOPS]):
                    m = ways[way, _LINKS + g]
                    share = min(share, links[m, _BYTES_PER_S] / links[m, _ON])
                left[y, _LEFT] = max(0.0, left[y, _LEFT] - (now - t[y, _SINCE]) * left[y, _RATE])
                left[y, _RATE] = share / 1e9
                t[y, _SINCE] = now
                t[y, _WHEN] = now + ceil(left[y, _LEFT] / left[y, _RATE])
                _place(t, head[_WAITING], y, t[y, _PLACE])
                y = t[y, _hop(t, ways, y, k) + 1]


@lean()
def due(t: np.ndarray, left: np.ndarray, head: np.ndarray, ways: np.ndarray, links: np.ndarray, now: int) -> int:
    """All that happens to transfers at ``now`` (which is ``next_ns``): how many have ended, ``t[:n, ENDED]``.

    All whose end is now leave at once, in the order of their start; again while there are such; then those whose fixed part
    ends now join; from the top until nothing is due.
    """
    n = 0
    while next_ns(t, head) == now:
        last = n
        if t[t[0, _HEAP], _PHASE] == 0:
            while next_ns(t, head) == now and t[t[0, _HEAP], _PHASE] == 0:
                x = _drop(t, head)
                _leave(t, ways, links, x)
                t[last, ENDED] = x
                last += 1
            _retime(t, left, head, ways, links, now, n, last)
            n = last
        else:
            while next_ns(t, head) == now:
                x = t[0, _HEAP]
                t[x, _PHASE], t[x, _WHEN], t[x, _SINCE] = 0, NEVER, now
                left[x, _LEFT], left[x, _RATE] = t[x, BYTES], 0.0
                _place(t, head[_WAITING], x, 0)
                _join(t, ways, links, x)
                t[last, ENDED] = x
                last += 1
            _retime(t, left, head, ways, links, now, n, last)
    return n


@lean()
def alone_ns(ways: np.ndarray, links: np.ndarray, way: int, blocks: int, nbytes: int) -> int:
    """How long a transfer takes if nobody else is on its links."""
    fixed = ways[way, _BASE] + blocks * ways[way, _PER_BLOCK]
    share = np.inf
    for h in range(ways[way, _HOPS]):
        share = min(share, links[ways[way, _LINKS + h], _BYTES_PER_S] / 1)
    return fixed if ways[way, _HOPS] == 0 else fixed + ceil(nbytes / (share / 1e9))
