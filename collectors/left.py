"""Clients that left before the server's answer had named the request: which of the requests that the engine aborted was theirs.

A whole (not streamed) answer tells the server's identifier at its end, a stream with its first chunk. Who leaves before, and gave
no identifier either, is seen twice: by proxy or sniffer without a name, in the engine under a name that nobody claims.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Aborted", "Left", "pairs"]

_EARLY_NS = 1_000_000
_LATE_NS = 5_000_000_000
"""An engine stops soon after the connection is closed; never before (two readings of one clock)."""


@dataclass(frozen=True, slots=True)
class Left:
    """As seen from outside: request ``number`` went to ``server`` at ``from_ns``, and its client left at ``to_ns``."""

    number: int
    server: str | None
    from_ns: int
    to_ns: int
    prompt_tokens: int | None = None
    max_tokens: int | None = None


@dataclass(slots=True)
class Aborted:
    """As the engine tells it, of all sequences of one request."""

    server: str | None = None
    queued_ns: int | None = None
    end_ns: int | None = None
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    cancelled: bool = False

    def tell(self, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Take what is needed of rows (table, row)."""
        for table, row in rows:
            if table == "requests":
                for name in ("queued_ns", "prompt_tokens", "max_tokens"):
                    if row.get(name) is not None:
                        setattr(self, name, row[name])
            elif table == "stages":
                self.server = row.get("server", self.server)
                self.end_ns = row.get("end_ns") or self.end_ns
                self.cancelled |= row.get("end_reason") == "cancelled"

    def may_be(self, left: Left) -> bool:
        """Whether all that both tell agrees."""
        if not self.cancelled or self.server != left.server or self.queued_ns is None or self.end_ns is None:
            return False
        if not left.from_ns - _EARLY_NS <= self.queued_ns <= left.to_ns:
            return False
        if not left.to_ns - _EARLY_NS <= self.end_ns <= left.to_ns + _LATE_NS:
            return False
        told = ((self.prompt_tokens, left.prompt_tokens), (self.max_tokens, left.max_tokens))
        return all(a is None or b is None or a == b for a, b in told)


def pairs(lefts: Iterable[Left], aborted: Mapping[str, Aborted]) -> list[tuple[Left, str]]:
    """Those of which each has no other that it may be: (left, name)."""
    lefts = list(lefts)
    found = {name: [left for left in lefts if a.may_be(left)] for name, a in aborted.items()}
    times: dict[int, int] = {}
    for those in found.values():
        for left in those:
            times[left.number] = times.get(left.number, 0) + 1
    return [(those[0], name) for name, those in found.items() if len(those) == 1 and times[those[0].number] == 1]
