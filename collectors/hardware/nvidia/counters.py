"""What crosses one GPU's links, ten times a second: PCIe and NVLink bytes; and what a step's time hangs on (clock, power).

Tested here against a compiled stub of the library only: no GPU was lent to this project's machine.
"""

from __future__ import annotations

import time
from typing import Any

from hoptrace.collectors.hardware.nvidia.fields import Batch, Slot, link_slots
from hoptrace.collectors.hardware.nvidia.links import nvlinks, pcie_bytes_per_s
from hoptrace.collectors.hardware.nvidia.per_gpu import PerGpu
from hoptrace.collectors.hardware.nvidia.seat import Seat
from hoptrace.collectors.hardware.nvidia.table import ALL_LINKS, LINK_BYTES, PCIE_BYTES, POWER
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found

__all__ = ["CountersSource"]

_SM = 1
"""NVML_CLOCK_SM."""
_REASONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
"""The second is its name until driver 535."""


class CountersSource(PerGpu):
    """Entities ``pcie:BDF``, ``nvlink:UUID/LINK`` (``/all`` where links are not told one by one), ``gpu:UUID``."""

    answers = "what crossed this GPU's PCIe link and NVLinks; its clock, power, and why the clock is held down"

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self._batch = Batch(self._nvml, (), "")
        self._links: list[int] = []
        self._pcie_bytes_per_s: float | None = None
        self._last_s: float | None = None
        self._warned = False

    def _found(self, handle: Any) -> Found:
        links = nvlinks(self._nvml, handle)
        many = f", {len(links)} NVLinks" if links else ", no NVLink"
        return Found("ok", sees=f"{self._gpu.name} at {self._gpu.bdf}{many}")

    def _begin(self, handle: Any, out: Sink) -> None:
        self._links = nvlinks(self._nvml, handle)
        self._pcie_bytes_per_s = pcie_bytes_per_s(self._nvml, handle)
        self._last_s = None
        slots = [Slot(f, self._gpu.entity) for f in POWER]
        if self._gpu.bdf:
            slots += [Slot(f, f"pcie:{self._gpu.bdf}") for f in PCIE_BYTES]
        slots += link_slots(LINK_BYTES, self._gpu.uuid, self._links)
        self._batch = Batch(self._nvml, slots, self._seat.incarnation)
        if self._links:
            now = out.now_ns()
            out.at(now, now)
            self._batch.read(handle, out)
            if not self._batch.there(LINK_BYTES):
                slots += link_slots(LINK_BYTES, self._gpu.uuid, [ALL_LINKS])
                self._batch = Batch(self._nvml, slots, self._seat.incarnation)

    def _read(self, handle: Any, out: Sink) -> None:
        now_s = time.monotonic()
        self._batch.read(handle, out)
        before = out.now_ns()
        clock, why = self._ask("nvmlDeviceGetClockInfo", handle, _SM)
        mask, why_mask = self._ask(_REASONS[0], handle)
        if mask is None:
            mask, why_mask = self._ask(_REASONS[1], handle)
        out.at(before, out.now_ns())
        self._put(out, self._gpu.entity, "sm_clock_mhz", "MHz", clock, why)
        self._put(out, self._gpu.entity, "throttle_reasons", "bits", mask, why_mask)
        if not self._warned:
            self._warn(now_s, out)
        self._last_s = now_s

    def _declared(self) -> list[int]:
        return [*super()._declared(), *self._batch.numbers]

    def _warn(self, now_s: float, out: Sink) -> None:
        """Told once, when two readings were so far apart that a byte counter can have gone round in between."""
        counted = [s for s in self._batch.there(PCIE_BYTES) if s.width is not None and s.width < 64]
        if not counted or self._last_s is None or not self._pcie_bytes_per_s:
            return
        rate, range_bytes = self._pcie_bytes_per_s, 1 << (counted[0].width or 32)
        if rate * (now_s - self._last_s) > range_bytes:
            self._warned = True
            out.event(
                "ambiguous wrap",
                f"pcie:{self._gpu.bdf}: raw_bytes wrap at {counted[0].width} bits, at the link's full rate "
                f"({rate / 1e9:.3g} GB/s) every {range_bytes / rate * 1e3:.3g} ms, and are read every "
                f"{(now_s - self._last_s) * 1e3:.0f} ms: what it carried in between is known only where something else bounds it",
            )
