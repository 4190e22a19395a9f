"""A source that is not looked at: it only says why."""

from __future__ import annotations

from hoptrace.collectors.hardware.sink import Sink, Status
from hoptrace.collectors.hardware.source import Found, Pace

__all__ = ["NotAsked"]


class NotAsked:
    """Stands in the list, so that `doctor` and the manifest say what there could be."""

    pace: Pace = "slow"
    every_s = None

    def __init__(self, name: str, answers: str, reason: str, remedy: str | None, *, status: Status = "absent") -> None:
        self.name, self.answers = name, answers
        self._found = Found(status, reason, remedy)

    def probe(self) -> Found:
        return self._found

    def open(self, out: Sink) -> None:
        return None

    def sample(self, out: Sink) -> None:
        return None

    def close(self) -> None:
        return None
