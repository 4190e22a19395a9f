"""What a collector is: it can say whether it can record here, take one sample, and stop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["Collector", "Finding", "ServerAway"]


class ServerAway(Exception):
    """The server can't be reached at present. The session waits for it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a probe found. ``reason`` says why there is nothing to record, and ``remedy`` (or the reason itself) what would change
    that; ``sees``: what it reads, in a few words; ``status``: of what is not there, whether it is absent, unsupported, denied …
    (of the machine's sources)."""

    available: bool
    reason: str | None = None
    remedy: str | None = None
    sees: str | None = None
    status: str | None = None


class Collector(Protocol):
    """One source. Methods run in the session's event loop and never hold it up; none of them may harm what is observed."""

    @property
    def name(self) -> str:
        """The name that its rows bear as ``source``."""

    @property
    def tables(self) -> tuple[str, ...]:
        """Tables it fills."""

    async def probe(self) -> Finding:
        """Look whether the source is there, without recording."""

    async def start(self) -> None:
        """Begin: called once, after a probe that found the source and before the first sample. Open sockets and files here."""

    async def sample(self) -> int:
        """Take one sample, or what has come since the last one, and hand over its rows; gives their number.

        Raises ServerAway if the source is away for now.
        """

    def restarted(self) -> None:
        """What is observed has been restarted: cumulative counters begin anew."""

    async def close(self) -> None:
        """Stop."""
