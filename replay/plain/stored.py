"""What a tier has taken."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Stored"]


@dataclass(frozen=True)
class Stored:
    """What a tier took: how many blocks, of how many tokens, and what it evicted for them, in order."""

    count: int
    tokens: int
    evicted: list[int]
