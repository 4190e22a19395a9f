"""What a status line of a running capture shows."""

from __future__ import annotations

from dataclasses import dataclass, field

from hoptrace.collectors.engines.streams.record import Stats

__all__ = ["Status"]


@dataclass(slots=True)
class Status:
    """What a status line shows. ``away``: a server can't be reached at present."""

    elapsed_s: float = 0.0
    requests: Stats = field(default_factory=Stats)
    samples: dict[str, int] = field(default_factory=dict)
    missed: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    away: bool = False
