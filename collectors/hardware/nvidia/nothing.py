"""Where NVML shows no GPU: says why, and tells if that changes during a capture."""

from __future__ import annotations

from hoptrace.collectors.hardware.nvidia.library import Nvml
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found, Pace

__all__ = ["Nothing"]


class Nothing:
    """A driver that is loaded later is told of as an event; its GPUs are recorded by the next capture: each has its own sources,
    which are listed at the start."""

    name = "nvml"
    answers = "what crossed NVIDIA GPUs' PCIe and NVLinks; their memory, clocks, throttling, energy, errors"
    pace: Pace = "own"
    every_s = 60.0

    def __init__(self, found: Found, nvml: Nvml | None) -> None:
        self._found, self._nvml = found, nvml
        self._probed = False

    def probe(self) -> Found:
        if not self._probed or self._nvml is None:
            self._probed = True
            return self._found
        found = self._nvml.start()
        return found if not found.available else Found("ok", "the driver came after the capture began: begin another one")

    def open(self, out: Sink) -> None:
        out.event("device", "NVIDIA's driver is there now; its GPUs are recorded by captures that begin from here on")

    def sample(self, out: Sink) -> None:
        return None

    def close(self) -> None:
        return None
