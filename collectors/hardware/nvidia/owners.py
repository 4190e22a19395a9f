"""Which processes are the capture's servers' own: memory on a GPU is told by process, in the host's numbers."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from hoptrace.collectors.hardware.source import Server
from hoptrace.collectors.hardware.tree import tree_of

__all__ = ["Owners"]

_EVERY_S = 5.0


class Owners:
    """The servers' processes with their starts (clock ticks since boot), looked up every five seconds for all GPUs together."""

    def __init__(self, servers: Sequence[Server], proc: Path) -> None:
        self._servers, self._proc = servers, proc
        self._lock = threading.Lock()
        self._found: dict[int, int] = {}
        self._due_s = 0.0

    def starts(self) -> dict[int, int]:
        """Start by process number."""
        with self._lock:
            if self._servers and time.monotonic() >= self._due_s:
                self._due_s = time.monotonic() + _EVERY_S
                pids = [found.pid for s in self._servers if (found := s.find()).pid is not None]
                self._found = {p.pid: p.start_ticks for pid in pids for p in tree_of(pid, self._proc)}
            return self._found
