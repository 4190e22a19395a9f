"""Where NVML shows no GPU, or not one that there is: says why, and tells if that changes during a capture."""

from __future__ import annotations

from collections.abc import Callable

from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found, Pace

__all__ = ["Nothing"]


class Nothing:
    """A driver that is loaded later is told of as an event; its GPUs are recorded by the next capture: each has its own sources,
    which are listed at the start. ``again`` looks for the driver; null where only a new start of the library can find more."""

    answers = "what crossed NVIDIA GPUs' PCIe and NVLinks; their memory, clocks, throttling, energy, errors"
    pace: Pace = "own"
    every_s = 60.0

    def __init__(self, found: Found, again: Callable[[], Found] | None = None, name: str = "nvml") -> None:
        self.name = name
        self._found, self._again = found, again
        self._probed = False

    def probe(self) -> Found:
        if not self._probed or self._again is None:
            self._probed = True
            return self._found
        found = self._again()
        return found if not found.available else Found("ok", "the driver came after the capture began: begin another one")

    def open(self, out: Sink) -> None:
        out.event("device", "NVIDIA's driver is there now; its GPUs are recorded by captures that begin from here on")

    def sample(self, out: Sink) -> None:
        return None

    def close(self) -> None:
        return None
