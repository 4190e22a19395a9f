"""One request on its way through the replay: what it asks for, and where it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from hoptrace.replay.outcome import REQUEST
from hoptrace.replay.plan import Order

if TYPE_CHECKING:
    from hoptrace.replay.workload import Workload

__all__ = ["ROW", "Request", "Step", "requests_of"]

ROW = {name: i for i, name in enumerate(REQUEST)}
_ZERO = ("resumed_tokens", "recomputed_tokens", "preemptions", "generated_tokens", "prefill_preemptions")


class Step(Protocol):
    """Where a run stands; see :class:`hoptrace.replay.plain.rows.Run`."""

    last: int


class Request:
    """A request and its state.

    Attributes (those that a plug-in may read come first):
        number: position in the work. arrival_ns: −1 before it is known. session: its number, −1 without. priority: 0 unknown.
        ids, ends: prefix blocks and the prompt tokens through each one's end. generated: output tokens so far.
        computed: tokens in the KV of the engine that has it. share: tokens in the step. emitted: output tokens of the step.
        key: of the waiting queue, without the arrival. decoding: past its prompt. driven_out: at least once, on this engine.
        row: the REQUEST columns.
    """

    __slots__ = (
        "arrival_ns", "coming", "computed", "decode_at", "decoding", "driven_out", "emitted", "ends", "engine", "entered",
        "generated", "handed", "ids", "joined", "key", "load_seq", "number", "offered", "output_tokens", "padding",
        "pending", "priority", "prompt_step", "prompt_tokens", "rest", "row", "run", "session", "share", "started",
        "streaming", "streams", "used",
    )  # fmt: skip

    def __init__(self, number: int, prompt: int, output: int, ids: list[int], ends: list[int], session: int, key: int) -> None:
        self.number = number
        self.prompt_tokens = prompt
        self.output_tokens = output
        self.ids = ids
        self.ends = ends
        self.session = session
        self.key = key
        self.priority = 0
        self.arrival_ns = -1
        self.generated = 0
        self.computed = 0
        self.share = 0
        self.emitted = 0
        self.decoding = False
        self.driven_out = False
        self.padding = False
        self.engine = -1  # position among all engines, of the one that has it in running, front or queue
        self.decode_at = -1  # the decode engine chosen for it
        self.handed = False  # its prompt was computed on a prefill engine
        self.joined = False  # it is in the decode engine's queue, or was
        self.offered = 0  # its first unit that the first tier was not offered yet
        self.used: set[int] = set()  # blocks that it put into tiers, found there, or read from there
        self.load_seq = -1  # when its load began, among all loads
        self.pending = 0  # transfers under way for it
        self.streaming = False  # per layer: it has room on the decode engine and sends while it computes
        self.streams = 0  # counts the givings up of that room, so that late transfers are known as such
        self.started = False  # per layer: something was sent, or need not be
        self.coming = 0  # per layer: the token that it will know when its prompt has ended
        self.rest = -1  # per layer: bytes to be sent at the end of the step, −1: nothing
        self.prompt_step = -1  # the step that ended its prompt on the prefill engine
        self.entered: list[int] = []  # units that entered the cache in the pass
        self.run: Step | None = None
        self.row = [-1] * len(REQUEST)
        for name in _ZERO:
            self.row[ROW[name]] = 0

    @property
    def whole(self) -> int:
        """Tokens that are known: prompt and output so far."""
        return self.prompt_tokens + self.generated

    @property
    def rank(self) -> tuple[int, int, int]:
        """Its place in a waiting queue: the least comes first."""
        return self.key, self.arrival_ns, self.number

    def put(self, name: str, value: int) -> None:
        """Set a column of its row."""
        self.row[ROW[name]] = value

    def first(self, name: str, value: int) -> None:
        """Set a column of its row unless it is set."""
        if self.row[ROW[name]] < 0:
            self.row[ROW[name]] = value

    def add(self, name: str, value: int) -> None:
        """Add to a column of its row; −1 counts as nothing."""
        self.row[ROW[name]] = max(0, self.row[ROW[name]]) + value


def requests_of(work: Workload, order: Order) -> list[Request]:
    """The requests of a work, none of them arrived. Keys are without the arrival, which is not known yet."""
    ptr, ids, ends = work.block_ptr.tolist(), work.block_id.tolist(), work.block_end.tolist()
    sessions = work.session_id.tolist() if work.session_id is not None else [-1] * work.n
    keys = np.zeros(work.n, dtype=np.int64).tolist() if order.key is None else order.key.tolist()
    made = [
        Request(i, p, o, ids[ptr[i] : ptr[i + 1]], ends[ptr[i] : ptr[i + 1]], sessions[i], keys[i])
        for i, (p, o) in enumerate(zip(work.prompt_tokens.tolist(), work.output_tokens.tolist(), strict=True))
    ]
    if work.priority is not None:
        for r, priority in zip(made, work.priority.tolist(), strict=True):
            r.priority = priority
    return made
