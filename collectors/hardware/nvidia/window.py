"""PCIe throughput as the driver measures it over 20 ms, once a second: each call blocks for as long: a thread of its own.

It tells whether the byte counters count at all, and is all there is where the driver has none. What crosses between two
windows is not in it. Tested here against a compiled stub of the library only: no GPU was lent to this project's machine.
"""

from __future__ import annotations

from typing import Any

from hoptrace.collectors.hardware.nvidia.per_gpu import PerGpu
from hoptrace.collectors.hardware.sink import Direction, Sink
from hoptrace.collectors.hardware.source import Found

__all__ = ["WindowSource"]

_WAYS: tuple[tuple[Direction, int], ...] = (("tx", 0), ("rx", 1))
"""NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES: tx leaves the GPU."""
_KB = 1000
"""nvml.h says KB/s, and KiB where it means that."""
_WINDOW_NS = 20_000_000


class WindowSource(PerGpu):
    """Entity ``pcie:BDF``. Whether protocol is in the bytes nvml.h does not say."""

    kind = "-pcie"
    answers = "this GPU's PCIe traffic over 20 ms of each second, as the driver measures it"
    every_s = 1.0

    def _found(self, handle: Any) -> Found:
        if not self._gpu.bdf:
            return Found("absent", "the driver does not tell the GPU's PCI address", "a newer driver")
        self._nvml.call("nvmlDeviceGetPcieThroughput", handle, _WAYS[0][1])
        return Found("ok")

    def _read(self, handle: Any, out: Sink) -> None:
        for direction, which in _WAYS:
            value, why = self._ask("nvmlDeviceGetPcieThroughput", handle, which)
            # The window ends when the call returns.
            now = out.now_ns()
            out.at(now, now)
            self._put(
                out, f"pcie:{self._gpu.bdf}", "window_bytes_per_s", "bytes/s", None if value is None else int(value) * _KB, why,
                semantics="rate", direction=direction, window_ns=_WINDOW_NS,
            )  # fmt: skip
