"""What the catalogues look at: the server's present settings in numbers, and the evidence of its own policy's run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hoptrace.errors import UsageError
from hoptrace.kv import geometry
from hoptrace.manifest import Server
from hoptrace.replay.advise.evidence import Evidence
from hoptrace.replay.advise.model import CANNOT_MATTER, NOT_JUDGED, Change, Left
from hoptrace.replay.policy.resolve import Resolved

__all__ = ["Family", "Found", "Scene", "of_share", "size_of", "whole"]


@dataclass(frozen=True)
class Scene:
    """``servers``: how many alike share the work. ``blocks_tokens``: tokens of the trace's prefix blocks at least; null: none."""

    server: Server
    resolved: Resolved
    evidence: Evidence
    servers: int = 1
    blocks_tokens: int | None = None
    speculates: bool = False

    @property
    def token_bytes(self) -> int | None:
        """KV of one token over all layers and ranks; null if the trace does not tell it."""
        shape = geometry(self.server)
        return None if shape is None else shape.bytes_per_token

    def room(self, tokens: int) -> str:
        """What so many more tokens of KV take, in words."""
        each = self.token_bytes
        return f"room for {tokens:,} more tokens of KV" if each is None else f"{of_bytes(tokens * each)} more for KV"


@dataclass
class Found:
    """What a family has to say: changes to try, and what is left out with the reason."""

    changes: list[Change] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)

    def cannot(self, flag: str, why: str) -> Found:
        """Settled by the evidence."""
        self.left.append(Left(flag, CANNOT_MATTER, why))
        return self

    def unjudged(self, flag: str, why: str) -> Found:
        """A replay cannot tell."""
        self.left.append(Left(flag, NOT_JUDGED, why))
        return self


@dataclass(frozen=True)
class Family:
    """One flag: what to try of it, and how to make a change of a value that the user names (null: none can be named)."""

    flag: str
    judge: Callable[[Scene], Found]
    make: Callable[[Scene, str], Change] | None = None


def whole(flag: str, text: str, least: int = 1) -> int:
    """A value of ``--try``. UsageError if it is no whole number of at least ``least``."""
    value = int(text) if text.isascii() and text.isdecimal() and len(text) < 13 else -1
    if value < least:
        raise UsageError(f"--try {flag}={text[:40]}: a whole number of {least} or more is wanted.")
    return value


def size_of(now: int | float | None, then: int | float) -> float:
    """Doublings between two values."""
    from math import log2

    return 1.0 if not now or not then else abs(log2(then / now))


def of_share(x: float) -> str:
    """A share in words: never 0 % where it is above 0."""
    return f"{100 * x:.0f} %" if x >= 0.005 or x == 0 else "under 1 %"


def of_bytes(n: int) -> str:
    """A size in binary units."""
    value = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"
