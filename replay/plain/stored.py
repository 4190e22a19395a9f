"""What a tier has taken."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Stored"]


@dataclass
class Stored:
    """Blocks that a tier took (id: tokens), and those that it evicted for them, in order."""

    blocks: dict[int, int] = field(default_factory=dict)
    evicted: list[int] = field(default_factory=list)

    def add(self, blocks: dict[int, int], evicted: list[int]) -> None:
        """It took more."""
        self.blocks.update(blocks)
        self.evicted += evicted
