"""The KV space of one engine: room in tokens, and the blocks that are kept in it for reuse, as in vLLM.

Each token of room is free, private to a request, or in a cached block; a cached block is held by requests or evictable. A
request's *units* are its prompt blocks with ids, then the tokens after them in blocks of the engine. A unit that is full when its
request leaves stays in the cache: under its id, or under (request, unit), which nobody else can find.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hoptrace.replay.outcome import UNLIMITED
from hoptrace.replay.plain.parts import Block, Eviction
from hoptrace.replay.plain.requests import Request

__all__ = ["Hits", "KvSpace", "Room"]


@dataclass
class Room:
    """What a request has in a KV space. ``held``: its units in the cache; ``following``: the next of its ids to enter it."""

    private: int = 0
    shared: int = 0
    following: int = 0
    held: dict[int, Block] = field(default_factory=dict)


@dataclass(frozen=True)
class Hits:
    """Leading units found in the cache, and the tokens in them.

    ``shared``: tokens of room that they take; ``evictable``: of these, held by nobody.
    """

    blocks: tuple[Block, ...] = ()
    tokens: int = 0
    shared: int = 0
    evictable: int = 0


class KvSpace:
    """Room and cache of one engine.

    Args:
        capacity: tokens, or null. block: tokens of an engine's block. cached: whether blocks are kept (``pool``).
        cache_capacity: tokens of kept blocks at most, or null. sizes: room that the block of each id takes.
        order: which evictable block goes first.
    """

    def __init__(
        self, capacity: int | None, block: int, cached: bool, cache_capacity: int | None, sizes: list[int], order: Eviction
    ) -> None:
        self.capacity = UNLIMITED // block * block if capacity is None else capacity // block * block
        self.block = block
        self.cached = cached
        self.free = self.capacity
        self.evictable = 0
        self.resident = 0
        self.evicted: list[int] = []  # ids, since they were last taken away for a tier
        self.rooms: dict[int, Room] = {}
        self._cache_capacity = UNLIMITED if cache_capacity is None else cache_capacity
        self._keeps_own = cached and cache_capacity is None
        self._sizes = sizes
        self._holders: dict[Block, int] = {}
        self._own: dict[tuple[int, int], int] = {}  # sizes of blocks without an id
        self._order = order

    @property
    def used(self) -> int:
        """Tokens of room that requests hold."""
        return self.capacity - self.free - self.evictable

    def rounded(self, tokens: int) -> int:
        """Tokens in whole blocks."""
        return -(-tokens // self.block) * self.block

    def blocks(self, tokens: int) -> int:
        """Blocks that tokens fill, rounded up."""
        return -(-tokens // self.block)

    def of(self, r: Request) -> Room:
        """What a request has here."""
        found = self.rooms.get(r.number)
        if found is None:
            found = self.rooms[r.number] = Room()
        return found

    def need(self, r: Request, tokens: int) -> int:
        """Room that a request lacks for so many tokens."""
        room = self.rooms.get(r.number)
        if room is None:
            return self.rounded(tokens)
        return max(0, max(0, self.rounded(tokens) - room.shared) - room.private)

    def available(self, hits: Hits | None = None) -> int:
        """Room that can be had, if these hits are held."""
        return self.free + self.evictable - (hits.evictable if hits is not None else 0)

    def resident_prefix(self, r: Request) -> int:
        """Tokens of a prompt's leading blocks that are here."""
        tokens = 0
        for b, end in zip(r.ids, r.ends, strict=True):
            if b not in self._holders:
                break
            tokens = end
        return tokens

    def look_up(self, r: Request, limit: int, own: bool) -> Hits:
        """Leading blocks that are here, none beyond ``limit`` tokens. ``own``: also those that only this request can know."""
        if not self.cached:
            return Hits()
        blocks: list[Block] = []
        tokens = shared = evictable = 0
        unit = 0
        while True:
            end = self._end(r, unit)
            block = self._known(r, unit, own)
            if end > limit or block is None:
                return Hits(tuple(blocks), tokens, shared, evictable)
            size = self._size(r, unit)
            blocks.append(block)
            tokens = end
            shared += size
            evictable += size if self._holders[block] == 0 else 0
            unit += 1

    def _end(self, r: Request, unit: int) -> int:
        n = len(r.ids)
        if unit < n:
            return r.ends[unit]
        return (r.ends[-1] if n else 0) + (unit - n + 1) * self.block

    def _size(self, r: Request, unit: int) -> int:
        return self._sizes[r.ids[unit]] if unit < len(r.ids) else self.block

    def _known(self, r: Request, unit: int, own: bool) -> Block | None:
        if unit < len(r.ids) and r.ids[unit] in self._holders:
            return r.ids[unit]
        return (r.number, unit) if own and (r.number, unit) in self._holders else None

    def admit(self, r: Request, hits: Hits, tokens: int) -> None:
        """Give a request its hits and private room for the rest of ``tokens``; the caller has seen that there is enough."""
        room = self.of(r)
        for unit, block in enumerate(hits.blocks):
            if self._holders[block] == 0:
                self._order.remove(block)
                self.evictable -= self._size(r, unit)
            self._holders[block] += 1
            room.held[unit] = block
        room.shared = hits.shared
        room.following = min(len(hits.blocks), len(r.ids))
        self.grow(r, tokens)

    def grow(self, r: Request, tokens: int) -> None:
        """Give a request private room until it has enough for ``tokens``."""
        want = self.need(r, tokens)
        while self.free < want:
            self._evict()
        self.free -= want
        self.of(r).private += want

    def _evict(self) -> None:
        block = self._order.oldest(())
        self._order.remove(block)
        del self._holders[block]
        size = self._sizes[block] if isinstance(block, int) else self._own.pop(block)
        self.free += size
        self.evictable -= size
        self.resident -= size
        if isinstance(block, int):
            self.evicted.append(block)

    def enter(self, r: Request, tokens: int) -> list[int]:
        """Put the blocks with ids that end within ``tokens`` into the cache, if they are not there; which units did enter."""
        entered: list[int] = []
        if not self.cached:
            return entered
        room = self.of(r)
        while room.following < len(r.ids) and r.ends[room.following] <= tokens:
            unit = room.following
            room.following += 1
            block, size = r.ids[unit], self._size(r, unit)
            if block in self._holders or room.private < size:
                continue
            while self.resident + size > self._cache_capacity and self.evictable > 0:
                self._evict()
            if self.resident + size > self._cache_capacity:
                continue
            self._holders[block] = 1
            room.held[unit] = block
            self.resident += size
            room.private -= size
            room.shared += size
            entered.append(unit)
        return entered

    def undo(self, r: Request, units: list[int]) -> None:
        """Take back what a request has just entered."""
        room = self.of(r)
        for unit in units:
            size = self._size(r, unit)
            del self._holders[room.held.pop(unit)]
            self.resident -= size
            room.private += size
            room.shared -= size
        if units:
            room.following = units[0]

    def leave(self, r: Request, computed: int) -> None:
        """A request gives up its room. Its full units stay as evictable blocks, the last one the oldest of them, as in vLLM."""
        room = self.rooms.pop(r.number, None)
        if room is None:
            return
        units = set(room.held)
        if self._keeps_own:
            n = len(r.ids)
            units |= {u for u in range(n) if r.ends[u] <= computed}
            units |= set(range(n, n + max(0, computed - (r.ends[-1] if n else 0)) // self.block))
        for unit in sorted(units, reverse=True):
            size = self._size(r, unit)
            if unit in room.held:
                block = room.held[unit]
                self._holders[block] -= 1
                if self._holders[block] == 0:
                    self._order.add(block)
                    self.evictable += size
            elif room.private >= size:
                self._keep_own(r, unit, size, room)
        self.free += room.private

    def _keep_own(self, r: Request, unit: int, size: int, room: Room) -> None:
        block = (r.number, unit)
        if block in self._holders:
            if self._holders[block] == 0:
                self._order.remove(block)
                self._order.add(block)
            return
        room.private -= size
        self._holders[block] = 0
        self._own[block] = size
        self._order.add(block)
        self.evictable += size
        self.resident += size
