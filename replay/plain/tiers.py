"""Tiers of KV blocks below the engines' memory: looking up, writing, demoting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hoptrace.replay.outcome import MOVE_DEMOTE, MOVE_WRITE, UNLIMITED
from hoptrace.replay.plain.engine import Engine
from hoptrace.replay.plain.kv import Hits
from hoptrace.replay.plain.parts import Eviction
from hoptrace.replay.plain.requests import Request
from hoptrace.replay.plain.stored import Stored
from hoptrace.replay.plain.transfers import Network
from hoptrace.replay.plan import TierSpec

__all__ = ["Found", "Tiers"]


class _Tier:
    """One instance of a tier. ``reads``: how many transfers read a block; such a block is not evicted."""

    def __init__(self, capacity: int | None, order: Eviction) -> None:
        self.capacity = UNLIMITED if capacity is None else capacity
        self.used = 0
        self.there: dict[int, int] = {}  # id: tokens
        self.reads: dict[int, int] = {}
        self.order = order

    def touch(self, block: int) -> None:
        """It becomes the youngest."""
        self.order.remove(block)
        self.order.add(block)

    def put(self, block: int, size: int) -> list[int] | None:
        """Store a block; what was evicted for it. Null, and nothing done, if it does not fit beside what is being read."""
        if size > self.capacity - sum(self.there[b] for b in self.reads):
            return None
        evicted = []
        while self.used + size > self.capacity:
            old = self.order.oldest(self.reads)
            assert isinstance(old, int)
            self.order.remove(old)
            self.used -= self.there.pop(old)
            evicted.append(old)
        self.there[block] = size
        self.used += size
        self.order.add(block)
        return evicted


@dataclass(frozen=True)
class Found:
    """What the tiers have of a prompt beyond the device: tokens and blocks by tier, tokens through the last one, and its tier."""

    tokens: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    end: int
    last: int


class Tiers:
    """The tiers of all engines."""

    def __init__(
        self, specs: tuple[TierSpec, ...], engines: int, sizes: list[int], token_bytes: int, network: Network,
        order: Callable[[], Eviction],
    ) -> None:  # fmt: skip
        self.specs = specs
        self._sizes = sizes
        self._token_bytes = token_bytes
        self._network = network
        self._of: list[list[_Tier]] = []
        for spec in specs:
            if spec.shared:
                self._of.append([_Tier(spec.capacity_tokens, order())] * engines)
            else:
                self._of.append([_Tier(spec.capacity_tokens, order()) for _ in range(engines)])

    def look_up(self, r: Request, engine: int, device: Hits, limit: int) -> Found:
        """The prompt's next blocks after those on the device, in the tiers in their order, none beyond ``limit`` tokens."""
        tokens = [0] * len(self.specs)
        blocks: list[list[int]] = [[] for _ in self.specs]
        end, last = device.tokens, -1
        for unit in range(len(device.blocks), len(r.ids)):
            level = next((i for i, t in enumerate(self._of) if r.ids[unit] in t[engine].there), None)
            if level is None or r.ends[unit] > limit:
                break
            tokens[level] += r.ends[unit] - end
            blocks[level].append(r.ids[unit])
            end, last = r.ends[unit], level
        return Found(tuple(tokens), tuple(tuple(b) for b in blocks), end, last)

    def hold(self, level: int, blocks: tuple[int, ...], engine: int, sign: int) -> None:
        """A transfer begins (or, −1, has ended) to read blocks."""
        reads = self._of[level][engine].reads
        for block in blocks:
            reads[block] = reads.get(block, 0) + sign
            if not reads[block]:
                del reads[block]

    def ended(self, r: Request, engine: int) -> None:
        """A request has ended on an engine: the blocks that it used become the youngest, its first one the very youngest."""
        for tier in self._of:
            for block in reversed(r.ids[r.found if r.loaded else 0 :]):
                if block in tier[engine].there:
                    tier[engine].touch(block)

    def put(self, blocks: list[int], e: Engine) -> Stored:
        """Put blocks of an engine into the first tier, which may evict others."""
        return self._put(0, blocks, e.index)

    def _put(self, level: int, blocks: list[int], engine: int) -> Stored:
        tier = self._of[level][engine]
        count, tokens = 0, 0
        evicted: list[int] = []
        for block in blocks:
            if block in tier.there:
                continue
            gone = tier.put(block, self._sizes[block])
            if gone is not None:
                evicted += gone
                count += 1
                tokens += self._sizes[block]
        return Stored(count, tokens, evicted)

    def send(self, stored: Stored, e: Engine, step: int, now: int) -> None:
        """Start the transfer of what was put into the first tier."""
        if stored.count:
            self._start(0, MOVE_WRITE, self.specs[0].write[e.index], stored.tokens, e, step, now)

    def demote(self, stored: Stored, e: Engine, step: int, now: int) -> None:
        """What the first tier evicted goes to the next, and so on, one transfer each."""
        for level, spec in enumerate(self.specs[:-1], 1):
            way = spec.demote[e.index] if spec.demote else -1
            if way < 0 or not stored.evicted:
                return
            stored = self._put(level, stored.evicted, e.index)
            if stored.count:
                self._start(level, MOVE_DEMOTE, way, stored.tokens, e, step, now)

    def _start(self, level: int, kind: int, way: int, tokens: int, e: Engine, step: int, now: int) -> None:
        self._network.start(
            now, way, tokens * self._token_bytes, e.kv.blocks(tokens), request=-1, engine=e.index, kind=kind, step=step,
            tier=level, done=None,
        )  # fmt: skip
