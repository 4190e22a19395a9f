"""Puts a publisher's numbered messages in order: finds gaps and restarts, takes what a replay gives, each message once.

The protocol is that of ``ZmqEventPublisher`` in vLLM and SGLang: numbers ascend by one from 0; a replay is asked for by its first
number and answered by all that the publisher still has from there on, up to the newest, then −1.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

__all__ = ["Gap", "Message", "Restart", "Sequence"]

REPLAY_NS = 3_000_000_000
"""How long a replay may give nothing before what is missing counts as lost."""

_HELD_BYTES = 64 << 20
_HELD = 20_000
_ROUNDS = 100


@dataclass(frozen=True, slots=True)
class Message:
    number: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Gap:
    """Messages ``first`` to ``last`` are lost for good."""

    first: int
    last: int

    @property
    def count(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True, slots=True)
class Restart:
    """The publisher began anew: its memory is empty."""


Item = Message | Gap | Restart


class Sequence:
    """In: messages as they come. Out, in order: each message once, and what is lost. While a replay is awaited, later messages
    are held back (bounded)."""

    def __init__(self, can_replay: bool) -> None:
        self._can_replay = can_replay
        self._expected: int | None = None
        self._held: deque[Message] = deque()
        self._held_bytes = 0
        self._ask = False
        self._asked = self._ended = self._rounds = 0
        self._progress = False
        self._skipping = False
        self._deadline_ns = 0
        self._suspect = False
        self.lost = 0
        self.replayed_count = 0
        self.repeated = 0

    @property
    def waiting(self) -> bool:
        """Whether a replay is awaited."""
        return bool(self._held)

    def suspect_restart(self) -> None:
        """The server may have been restarted: if numbers jump now, they are those of a new publisher."""
        self._suspect = True

    def live(self, number: int, payload: bytes, now_ns: int) -> list[Item]:
        """A published message; gives what can be used now."""
        message = Message(number, payload)
        out: list[Item] = []
        if self._held:
            if number > self._held[-1].number:
                self._hold(message)
                if len(self._held) > _HELD or self._held_bytes > _HELD_BYTES:
                    out += self._give_up(now_ns)
                return out
            # It fell while a replay was awaited: the old publisher is gone, and its messages with it.
            while self._held:
                out += self._give_up(now_ns, ask=False)
        return out + self._next(message, now_ns)

    def replayed(self, number: int, payload: bytes, now_ns: int) -> list[Item]:
        """An answer to :meth:`wanted`; a negative number ends the replay."""
        if number < 0:
            self._ended += 1
            if not self._held or self._ended != self._asked:
                return []
            if not self._progress or self._rounds >= _ROUNDS:
                return self._give_up(now_ns)
            self._ask = True  # some was dropped under way (a full queue): ask for the rest
            return []
        if (
            not self._held
            or self._expected is None
            or number < self._expected
            or number >= self._held[0].number
            or self._skipping
        ):
            self.repeated += 1
            return []
        if number > self._expected and self._progress:
            self._skipping = True
            return []
        out: list[Item] = []
        if number > self._expected:
            out.append(self._gap(self._expected, number - 1))  # the publisher has no more of these
        out.append(Message(number, payload))
        self.replayed_count += 1
        self._progress = True
        self._expected = number + 1
        self._deadline_ns = now_ns + REPLAY_NS
        return out + (self._resume(now_ns) if self._expected == self._held[0].number else [])

    def wanted(self, now_ns: int) -> int | None:
        """The first number to ask a replay for, once per question."""
        if not self._ask or self._expected is None:
            return None
        self._ask = self._progress = self._skipping = False
        self._asked += 1
        self._rounds += 1
        self._deadline_ns = now_ns + REPLAY_NS
        return self._expected

    def late(self, now_ns: int) -> list[Item]:
        """Give up on a replay that does not answer."""
        return self._give_up(now_ns) if self._held and now_ns > self._deadline_ns else []

    def end(self, now_ns: int) -> list[Item]:
        """Nothing more will come: all that is held, with its gaps."""
        out: list[Item] = []
        while self._held:
            out += self._give_up(now_ns, ask=False)
        return out

    # -- inside -------------------------------------------------------------------------------------------------------

    def _next(self, message: Message, now_ns: int, *, ask: bool = True) -> list[Item]:
        out: list[Item] = []
        expected = self._expected
        if expected is not None and (message.number < expected or (self._suspect and message.number > expected)):
            out.append(Restart())
            expected = self._expected = 0
        self._suspect = False
        if expected is None or message.number == expected:
            self._expected = message.number + 1
            return [*out, message]
        if self._can_replay and ask:
            self._hold(message)
            self._ask, self._rounds, self._deadline_ns = True, 0, now_ns + REPLAY_NS
            return out
        self._expected = message.number + 1
        return [*out, self._gap(expected, message.number - 1), message]

    def _give_up(self, now_ns: int, *, ask: bool = True) -> list[Item]:
        assert self._expected is not None
        first = self._held[0].number
        out: list[Item] = [self._gap(self._expected, first - 1)] if first > self._expected else []
        self._expected = first
        return out + self._resume(now_ns, ask=ask)

    def _resume(self, now_ns: int, *, ask: bool = True) -> list[Item]:
        """Take up the held messages again; another gap among them is held again."""
        self._ask = False
        held, self._held, self._held_bytes = self._held, deque(), 0
        out: list[Item] = []
        while held:
            out += self._next(held.popleft(), now_ns, ask=ask)
            if self._held:
                for message in held:
                    self._hold(message)
                break
        return out

    def _hold(self, message: Message) -> None:
        self._held.append(message)
        self._held_bytes += len(message.payload)

    def _gap(self, first: int, last: int) -> Gap:
        self.lost += last - first + 1
        return Gap(first, last)
