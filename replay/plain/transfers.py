"""Transfers over shared links: a fixed time, then bytes at an even share of each link on the way."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush

from hoptrace.replay.plain.rows import Rows
from hoptrace.replay.plan import LinkSpec, Way

__all__ = ["Network", "Transfer"]


class Transfer:
    """One transfer: ``left`` bytes as of ``since``, ``rate`` in bytes per ns, ``ends_ns`` if its links stay as they are."""

    __slots__ = ("done", "ends_ns", "left", "links", "number", "rate", "row", "since", "start_ns")

    def __init__(self, number: int, start_ns: int, links: tuple[int, ...], size: int, row: list[int]) -> None:
        self.number = number
        self.start_ns = start_ns
        self.links = links
        self.left = float(size)
        self.since = start_ns
        self.rate = 0.0
        self.ends_ns = -1
        self.row = row
        self.done: Callable[[int], None] | None = None


class Network:
    """All links of a plan and what is on them."""

    def __init__(self, links: tuple[LinkSpec, ...], ways: tuple[Way, ...], rows: Rows) -> None:
        self._bytes_per_s = [link.bytes_per_s for link in links]
        self._on: list[dict[int, Transfer]] = [{} for _ in links]
        self._ways = ways
        self._rows = rows
        self._count = 0
        self._ends: list[tuple[int, int, int, Transfer]] = []
        self._joins: list[tuple[int, int, int, Transfer]] = []

    def start(
        self, now: int, way: int, size: int, blocks: int, *, request: int, engine: int, kind: int, step: int, tier: int,
        done: Callable[[int], None] | None, fixed_blocks: int | None = None,
    ) -> None:  # fmt: skip
        """Start a transfer of ``size`` bytes in ``blocks`` blocks; ``done(now)`` is called when it has ended."""
        w = self._ways[way]
        fixed = w.base_ns + (blocks if fixed_blocks is None else fixed_blocks) * w.per_block_ns
        links = tuple(dict.fromkeys(w.links))
        t = Transfer(self._count, now, links, size, [now, -1, request, engine, kind, way, size, blocks, step, tier])
        t.done = done
        self._count += 1
        if links:
            heappush(self._joins, (now + fixed, now, t.number, t))
        else:
            t.ends_ns = now + fixed
            heappush(self._ends, (t.ends_ns, now, t.number, t))

    def alone_ns(self, way: int, size: int, blocks: int) -> int:
        """How long a transfer takes on links that carry nothing else."""
        w = self._ways[way]
        fixed = w.base_ns + blocks * w.per_block_ns
        if not w.links:
            return fixed
        return fixed + math.ceil(float(size) / (min(self._bytes_per_s[i] for i in w.links) / 1e9))

    def next_ns(self) -> int | None:
        """When something happens here next; null: never."""
        while self._ends and self._ends[0][0] != self._ends[0][3].ends_ns:
            heappop(self._ends)  # it was timed anew
        times = [h[0][0] for h in (self._ends, self._joins) if h]
        return min(times) if times else None

    def go_on(self, now: int) -> bool:
        """End and join what is due; whether anything was."""
        any_at_all = False
        while True:
            due = self._due(now)
            if due:
                self._end(due, now)
            elif self._joins and self._joins[0][0] <= now:
                while self._joins and self._joins[0][0] <= now:
                    self._join(heappop(self._joins)[3], now)
            else:
                return any_at_all
            any_at_all = True

    def _due(self, now: int) -> list[Transfer]:
        due = []
        while self._ends and self._ends[0][0] <= now:
            at, _, _, t = heappop(self._ends)
            if at == t.ends_ns:
                t.ends_ns = -1
                due.append(t)
        return sorted(due, key=lambda t: (t.start_ns, t.number))

    def _end(self, due: list[Transfer], now: int) -> None:
        """They leave their links together, before the others are timed anew: equal ones begun together end together."""
        for t in due:
            for link in t.links:
                del self._on[link][t.number]
        others = self._on_links([link for t in due for link in t.links])
        self._settle(others, now)
        self._time(others, now)
        for t in due:
            t.row[1] = now
            self._rows.add("move", t.row, now)
            if t.done is not None:
                t.done(now)

    def _join(self, t: Transfer, now: int) -> None:
        others = self._on_links(list(t.links))
        self._settle(others, now)
        for link in t.links:
            self._on[link][t.number] = t
        t.since = now
        self._time([*others, t], now)

    def _on_links(self, links: list[int]) -> list[Transfer]:
        found = {n: t for link in links for n, t in self._on[link].items()}
        return [found[n] for n in sorted(found)]

    def _settle(self, transfers: list[Transfer], now: int) -> None:
        for t in transfers:
            t.left = max(0.0, t.left - (now - t.since) * t.rate)
            t.since = now

    def _time(self, transfers: list[Transfer], now: int) -> None:
        for t in transfers:
            t.rate = min(self._bytes_per_s[link] / len(self._on[link]) for link in t.links) / 1e9
            t.ends_ns = now + math.ceil(t.left / t.rate)
            heappush(self._ends, (t.ends_ns, t.start_ns, t.number, t))
