"""Tiers of KV blocks below the engines' memory: looking up, writing, demoting."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
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
    """One instance of a tier. ``held``: how many reads and steps need a block to stay; such a block is not evicted."""

    def __init__(self, capacity: int | None, order: Eviction) -> None:
        self.capacity = UNLIMITED if capacity is None else capacity
        self.used = 0
        self.there: dict[int, int] = {}  # id: tokens
        self.held: dict[int, int] = {}
        self.order = order

    def touch(self, block: int) -> None:
        """It becomes the youngest."""
        self.order.remove(block)
        self.order.add(block)

    def put(self, blocks: dict[int, int], offered: Container[int]) -> list[int] | None:
        """Store blocks (id: tokens) that are not here; what was evicted for them, in order.

        Null, and nothing done, if there is not enough to evict: blocks that are being read or written, and those ``offered``,
        are not.
        """
        want = self.used + sum(blocks.values()) - self.capacity
        evicted: list[int] = []
        if want > 0:
            kept = _Either(self.held, offered)
            if want > sum(size for b, size in self.there.items() if b not in kept):
                return None
            while want > 0:
                old = self.order.oldest(kept)
                assert isinstance(old, int)
                self.order.remove(old)
                size = self.there.pop(old)
                self.used -= size
                want -= size
                evicted.append(old)
        for block, size in blocks.items():
            self.there[block] = size
            self.used += size
            self.order.add(block)
        return evicted


class _Either:
    """What is in one of two containers."""

    def __init__(self, a: Container[int], b: Container[int]) -> None:
        self._a, self._b = a, b

    def __contains__(self, x: object) -> bool:
        return x in self._a or x in self._b


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

    def hold(self, level: int, blocks: Iterable[int], engine: int, sign: int) -> None:
        """A transfer begins (or, −1, has ended) to read blocks, or a step to compute those that it will write."""
        held = self._of[level][engine].held
        for block in blocks:
            held[block] = held.get(block, 0) + sign
            if not held[block]:
                del held[block]

    def ended(self, r: Request, engine: int) -> None:
        """A request has ended on an engine: the blocks that it used become the youngest, its first one the very youngest."""
        for tier in self._of:
            for block in reversed(r.ids):
                if block in r.used and block in tier[engine].there:
                    tier[engine].touch(block)

    def offer(self, r: Request, upto: int, e: Engine, stored: Stored) -> None:
        """Put the blocks of a request, up to a unit, into the first tier: all that it has not, or none."""
        tier = self._of[0][e.index]
        offered = r.ids[r.offered : upto]
        new = {b: self._sizes[b] for b in offered if b not in tier.there}
        r.used.update(b for b in offered if b in new or b not in stored.blocks)
        if new:
            evicted = tier.put(new, set(offered))
            if evicted is None:
                return
            self.hold(0, new, e.index, 1)
            stored.add(new, evicted)
        r.offered = max(r.offered, upto)

    def put(self, level: int, blocks: list[int], e: Engine) -> Stored:
        """Put blocks into a tier one after another; those that do not fit are left out."""
        tier = self._of[level][e.index]
        stored = Stored()
        for block in blocks:
            if block not in tier.there:
                evicted = tier.put({block: self._sizes[block]}, ())
                if evicted is not None:
                    stored.add({block: self._sizes[block]}, evicted)
        return stored

    def send(self, stored: Stored, e: Engine, step: int, now: int) -> None:
        """Start the transfer of what was put into the first tier."""
        if stored.blocks:
            self._start(0, MOVE_WRITE, self.specs[0].write[e.index], sum(stored.blocks.values()), e, step, now)

    def demote(self, stored: Stored, e: Engine, step: int, now: int) -> None:
        """What the first tier evicted goes to the next, and so on, one transfer each."""
        for level, spec in enumerate(self.specs[:-1], 1):
            way = spec.demote[e.index] if spec.demote else -1
            if way < 0 or not stored.evicted:
                return
            stored = self.put(level, stored.evicted, e)
            if stored.blocks:
                self._start(level, MOVE_DEMOTE, way, sum(stored.blocks.values()), e, step, now)

    def _start(self, level: int, kind: int, way: int, tokens: int, e: Engine, step: int, now: int) -> None:
        self._network.start(
            now, way, tokens * self._token_bytes, e.kv.blocks(tokens), request=-1, engine=e.index, kind=kind, step=step,
            tier=level, done=None,
        )  # fmt: skip
