"""Which request continues which: the next turn of a chat begins with the messages of the turn before, and its answer.

Messages are only kept as chained keyed hashes. A continuation is told only where it is certain: the turn before is over, and no
other request with the same messages is (in the same conversation, where the client names it): whose answer was taken up, nobody
could tell.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from hoptrace.collectors.engines.streams.hashing import HashKey, keyed

__all__ = ["Past", "Sessions"]

_KNOWN = 50_000
_SPOKEN = ("assistant\x1f", "function_call\x1f", "reasoning\x1f", "message\x1f")


@dataclass(slots=True, eq=False)
class Past:
    """A request that may be continued. ``session`` is null until it is known to belong to one."""

    number: int
    session: str | None
    told: bool = False
    finish_ns: int | None = None


class Sessions:
    """What is known of the chats of one capture. Memory is bounded: the oldest is forgotten."""

    def __init__(self) -> None:
        self._by_talk: OrderedDict[tuple[str | None, bytes], list[Past]] = OrderedDict()
        self._by_answer: OrderedDict[str, Past] = OrderedDict()

    def asked(self, past: Past, messages: Sequence[str], key: HashKey, arrival_ns: int) -> Past | None:
        """A chat's request has come at ``arrival_ns``; gives the one that it continues, if that is certain."""
        chain = b"talk"
        found: Past | None = None
        ambiguous = False
        scope = past.session if past.told else None
        for at, message in enumerate(messages):
            chain = blake2b(chain + message.encode("utf-8", "surrogatepass"), digest_size=16, key=key.key).digest()
            if at + 1 < len(messages) and messages[at + 1].startswith(_SPOKEN):
                over = [p for p in self._by_talk.get((scope, chain), ()) if p.finish_ns is not None and p.finish_ns <= arrival_ns]
                if over:  # the longest that fits counts: a shorter one is its parent
                    ambiguous = len(over) > 1
                    found = over[0]
        known = self._by_talk.setdefault((scope, chain), [])
        if len(known) < 2:  # two are enough to know that it is not certain
            known.append(past)
        self._by_talk.move_to_end((scope, chain))
        while len(self._by_talk) > _KNOWN:
            self._by_talk.popitem(last=False)
        return None if ambiguous else found

    def answered(self, past: Past, answer_id: str | None, finish_ns: int) -> None:
        """Its answer is whole."""
        past.finish_ns = finish_ns
        if answer_id is not None:
            self._by_answer[answer_id] = past
            while len(self._by_answer) > _KNOWN:
                self._by_answer.popitem(last=False)

    def by_answer(self, answer_id: str) -> Past | None:
        """The request whose answer has this identifier."""
        return self._by_answer.get(answer_id)

    def join(self, past: Past, parent: Past, key: HashKey) -> str:
        """``past`` continues ``parent``: gives the name of their conversation."""
        if parent.session is None:
            parent.session = keyed(key, "session", f"request {parent.number}")
        if past.session is None:
            past.session = parent.session
        return parent.session
