"""The state of one engine: who runs, who waits, its KV space, its step."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappush

from hoptrace.replay.outcome import UNLIMITED
from hoptrace.replay.plain.kv import KvSpace
from hoptrace.replay.plain.requests import Request
from hoptrace.replay.plain.slots import Slots
from hoptrace.replay.plain.stored import Stored
from hoptrace.replay.plan import EngineSpec

__all__ = ["Engine", "StepSoFar"]


@dataclass
class StepSoFar:
    """The step that an engine is in: its row (STEP), and what its end writes to the first tier."""

    row: list[int]
    end_ns: int
    stored: Stored | None


@dataclass
class Engine:
    """One engine.

    Attributes:
        running: in the order of admission. arrived: loading or hand-over has ended, in the order of its begin.
        front: driven out, the last one is the next one. queue: heap by rank.
        loading: has room, waits for transfers. held: has left for a decode engine, its room here is not given back yet.
        unseen: queued since the last pass. steps: how many have begun.
        awake, ready_ns: whether it wants to try a pass, and from when on it may.
        reading: blocks that are being loaded from tiers, and for whom.
        preempted: driven out since its last step began.
        kinds: steps begun of each kind: decoders only, prompts only, both.
        waiting: [requests, prompt tokens] of those not driven out nor handed over, [requests, tokens known] of the others.
    """

    index: int
    spec: EngineSpec
    kv: KvSpace
    slots: Slots | None
    running: list[Request] = field(default_factory=list)
    arrived: list[tuple[int, int, Request]] = field(default_factory=list)
    front: list[Request] = field(default_factory=list)
    queue: list[tuple[tuple[int, int, int], Request]] = field(default_factory=list)
    loading: dict[int, Request] = field(default_factory=dict)
    held: dict[int, Request] = field(default_factory=dict)
    unseen: list[Request] = field(default_factory=list)
    steps: int = 0
    step: StepSoFar | None = None
    awake: bool = False
    ready_ns: int = -UNLIMITED
    preempted: int = 0
    reading: dict[int, int] = field(default_factory=dict)
    kinds: list[int] = field(default_factory=lambda: [0, 0, 0])
    waiting: list[int] = field(default_factory=lambda: [0, 0, 0, 0])

    @property
    def max_sequences(self) -> int:
        """Places."""
        return UNLIMITED if self.spec.max_sequences is None else self.spec.max_sequences

    @property
    def budget(self) -> int:
        """Tokens of a step."""
        return UNLIMITED if self.spec.max_batched_tokens is None else self.spec.max_batched_tokens

    @property
    def hands_over(self) -> bool:
        """Whether it is a prefill engine."""
        return self.spec.role == "prefill"

    def waits(self, r: Request, sign: int = 1) -> None:
        """A request begins (or, −1, ends) to wait here."""
        if r.driven_out or r.handed:
            self.waiting[2] += sign
            self.waiting[3] += sign * (r.whole if r.driven_out else r.prompt_tokens)
        else:
            self.waiting[0] += sign
            self.waiting[1] += sign * r.prompt_tokens

    def enqueue(self, r: Request) -> None:
        """Put a request into the queue by its rank."""
        heappush(self.queue, (r.rank, r))
        self.awake = True

    def arrive(self, r: Request) -> None:
        """What was sent to a request is here."""
        insort(self.arrived, (r.load_seq, r.number, r))
        self.awake = True

    def anybody_waits(self) -> bool:
        """Whether somebody could be admitted."""
        return bool(self.arrived or self.front or self.queue)

    def waiting_with_room(self) -> Sequence[Request]:
        """Those that load, and those that have arrived and are not admitted."""
        return [*self.loading.values(), *(r for _, _, r in self.arrived)]
