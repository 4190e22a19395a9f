"""What a simulation gives: the columns of its rows, and who takes them as they come. Both engines write exactly these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

__all__ = [
    "BUDGET", "CHUNK", "DECODE", "DONE", "KV", "MOVE", "PREEMPTED", "REFUSED", "REQUEST", "RUN", "SKIPPED", "SLOTS", "STEP",
    "TIERS", "UNFINISHED", "UNLIMITED", "Kept", "Outcome", "Sink",
    "MOVE_DEMOTE", "MOVE_HANDOVER", "MOVE_READ", "MOVE_STREAM", "MOVE_WRITE",
]  # fmt: skip

_Ints = np.ndarray[Any, np.dtype[np.int64]]

UNLIMITED = 1 << 60
TIERS = 4
"""Tiers at most, the device's own memory apart."""

SLOTS, KV, BUDGET = 1, 2, 3
"""Why the first in the queue was not admitted in a step."""

CHUNK, DECODE, SKIPPED, PREEMPTED = 0, 1, 2, 3
"""Phases, in the order of schema.PHASES."""

DONE, REFUSED, UNFINISHED = 0, 1, 2

MOVE_HANDOVER, MOVE_STREAM, MOVE_READ, MOVE_WRITE, MOVE_DEMOTE = 0, 1, 2, 3, 4

STEP = (
    "engine", "step", "start_ns", "end_ns", "prefill_requests", "prefill_tokens", "prefill_context_tokens", "decode_requests",
    "decode_tokens", "decode_context_tokens", "running", "waiting", "kv_used_tokens", "preempted", "queued_prefill_requests",
    "queued_prefill_tokens", "queued_decode_requests", "queued_decode_context_tokens", "blocked_by", "draft_proposed",
    "draft_accepted",
)  # fmt: skip
"""Columns of the steps, int64. ``step`` counts from 0 per engine; rows of one engine come in its order, engines in any.
``decode_tokens``: tokens computed for decoders, proposals included. ``waiting``: all that hold no place (queue, driven out,
loading)."""

RUN = (
    "request", "engine", "first_step", "last_step", "phase", "tokens_per_step", "context_at_start", "emitted_per_step",
)  # fmt: skip
"""Columns of the runs (residency), int64, in the order of their end. ``request``: position in the work. ``emitted_per_step``:
output tokens that each step of the run yields; of a chunk, what its *last* step yields (0 or 1)."""

REQUEST = (
    "arrival_ns", "routed_ns", "engine", "first_seen_ns", "scheduled_ns", "first_token_ns", "last_token_ns", "prefill_end_ns",
    "decode_engine", "decode_queued_ns", "decode_seen_ns", "decode_scheduled_ns", "load_start_ns", "load_end_ns",
    "handover_start_ns", "handover_end_ns", "handover_tokens", "cached_tokens", "cached_tier0_tokens", "cached_tier1_tokens",
    "cached_tier2_tokens", "cached_tier3_tokens", "decode_cached_tokens", "resumed_tokens", "recomputed_tokens", "preemptions",
    "generated_tokens", "status", "prefill_preemptions",
)  # fmt: skip
"""Columns per request, int64; -1 where it does not apply or did not happen. ``first_seen_ns``: start of the first step that could
have held it; ``cached_tokens``: on the device; ``load_*``: reading from tiers; tokens are emitted at the ends of steps;
``resumed/recomputed``: after preemptions, on both engines."""

MOVE = ("start_ns", "end_ns", "request", "engine", "kind", "way", "bytes", "blocks", "step", "tier")
"""Columns of the moves, int64, in the order of their end. ``request``: -1 where it serves several. ``start_ns``: that of the
fixed part."""


class Sink(Protocol):
    """Takes rows in blocks as they come; a block is reused after the call, so copy what you keep."""

    def take(self, kind: str, rows: _Ints) -> None:
        """``kind``: step, run or move; ``rows``: [n, columns]."""


class Kept:
    """A sink that keeps all in memory."""

    def __init__(self) -> None:
        self._parts: dict[str, list[_Ints]] = {"step": [], "run": [], "move": []}

    def take(self, kind: str, rows: _Ints) -> None:
        """See :class:`Sink`."""
        self._parts[kind].append(rows.copy())

    def rows(self, kind: str) -> _Ints:
        """All rows of a kind, in the order in which they came."""
        columns = {"step": STEP, "run": RUN, "move": MOVE}[kind]
        parts = self._parts[kind]
        return np.concatenate(parts) if parts else np.empty((0, len(columns)), dtype=np.int64)


@dataclass(frozen=True)
class Outcome:
    """``requests``: int64[n, len(REQUEST)], in the order of the work; ``steps``: per engine, how many; ``end_ns``: when the last
    thing happened."""

    requests: _Ints
    steps: _Ints
    end_ns: int
