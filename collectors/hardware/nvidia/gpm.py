"""GPU performance monitoring (Hopper and later): how busy SMs and memory were, and rates of the links, between two samples.

nvml.h: samples have to be more than 100 ms apart, so it is five a second at most. Percent are made ratios, MiB/s bytes a second.
Where protocol is in a rate the header does not say: DCGM, which reads the same counters, says headers and payload, so they are
called raw. Tested here against a compiled stub of the library only: no GPU was lent to this project's machine.
"""

from __future__ import annotations

import math
import time
from typing import Any

from hoptrace.collectors.hardware.nvidia.errors import INVALID, NvmlError, status_of_code
from hoptrace.collectors.hardware.nvidia.per_gpu import PerGpu
from hoptrace.collectors.hardware.nvidia.seat import Seat
from hoptrace.collectors.hardware.sink import Direction, Sink, Status
from hoptrace.collectors.hardware.source import Found

__all__ = ["GpmSource"]

_MIB = 1 << 20
_LEAST_S = 0.1
_RATIOS = {
    1: "graphics_active_ratio", 2: "sm_active_ratio", 3: "sm_occupancy_ratio", 5: "tensor_active_ratio",
    10: "memory_active_ratio", 160: "host_memory_cache_hit_ratio", 162: "peer_memory_cache_hit_ratio", 164: "cache_hit_ratio",
}  # fmt: skip
# id (NVML_GPM_METRIC_* of nvml.h): whose, name, direction. NVLink's total comes receive first.
_RATES: dict[int, tuple[str, str, Direction]] = {
    20: ("pcie", "raw_bytes_per_s", "tx"), 21: ("pcie", "raw_bytes_per_s", "rx"),
    60: ("nvlink", "raw_bytes_per_s", "rx"), 61: ("nvlink", "raw_bytes_per_s", "tx"),
    100: ("c2c", "raw_bytes_per_s", "tx"), 101: ("c2c", "raw_bytes_per_s", "rx"),
    102: ("c2c", "data_bytes_per_s", "tx"), 103: ("c2c", "data_bytes_per_s", "rx"),
}  # fmt: skip
_FIRST_IDS = 98
"""One more than the last id of drivers until 550: what came later may make an older one refuse the whole list."""


class GpmSource(PerGpu):
    """Entities ``gpu:UUID``, ``pcie:BDF``, ``nvlink:UUID/all``, ``c2c:UUID``: rates over `window_ns`, to the next 100 ms."""

    kind = "-gpm"
    answers = "how busy this GPU's SMs, tensor cores and memory were, and its links (C2C too)"
    every_s = 0.2

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        gpu = seat.gpu
        self._places = {"nvlink": f"nvlink:{gpu.uuid}/all", "c2c": f"c2c:{gpu.uuid}"}
        if gpu.bdf:
            self._places["pcie"] = f"pcie:{gpu.bdf}"
        self._samples: list[Any] = []
        self._of_start = -1
        self._taken_s: list[float] = []
        self._ids: list[int] = []
        self._lacking: set[int] = set()
        self._get: Any = None

    def _found(self, handle: Any) -> Found:
        if not self._nvml.call("nvmlGpmQueryDeviceSupport", handle).isSupportedDevice:
            return Found(
                "unsupported", f"{self._gpu.name} has no performance monitoring through NVML", "Hopper or later; else DCGM"
            )
        return Found("ok")

    def _begin(self, handle: Any, out: Sink) -> None:
        self._lacking = set()
        self._ids = [*_RATIOS, *(m for m, (place, _, _) in _RATES.items() if place in self._places)]
        self._get = self._nvml.module.c_nvmlGpmMetricsGet_t()
        self._get.version = self._nvml.constant("NVML_GPM_METRICS_GET_VERSION", 1)

    def _read(self, handle: Any, out: Sink) -> None:
        now_s = time.monotonic()
        if self._of_start != self._nvml.generation:
            # Buffers of a start of the library that is over are not freed: whether they may be nvml.h does not say.
            self._samples = [self._nvml.call("nvmlGpmSampleAlloc") for _ in range(2)]
            self._of_start, self._taken_s = self._nvml.generation, []
        if self._taken_s and now_s - self._taken_s[-1] <= _LEAST_S:
            return
        before = out.now_ns()
        self._nvml.call("nvmlGpmSampleGet", handle, self._samples[len(self._taken_s) % 2])
        after = out.now_ns()
        self._taken_s.append(now_s)
        if len(self._taken_s) < 2:
            return
        out.at(before, after)
        window_ns = max(1, round((self._taken_s[-1] - self._taken_s[-2]) * 10)) * 100_000_000
        for metric in self._metrics(window_ns, out):
            self._one(metric, window_ns, out)
        self._ids = [i for i in self._ids if i not in self._lacking]
        if len(self._taken_s) > 3:
            del self._taken_s[:2]  # two, so that the buffers keep their turn

    def _metrics(self, window_ns: int, out: Sink) -> list[Any]:
        get, n = self._get, len(self._taken_s)
        get.sample1, get.sample2 = self._samples[n % 2], self._samples[(n + 1) % 2]
        get.numMetrics = len(self._ids)
        for i, metric in enumerate(self._ids):
            get.metrics[i].metricId = metric
        try:
            self._nvml.call("nvmlGpmMetricsGet", get)
        except NvmlError as e:
            if e.code != INVALID or max(self._ids, default=0) < _FIRST_IDS:
                raise
            self._lacking.update(i for i in self._ids if i >= _FIRST_IDS)
            for number in sorted(self._lacking):
                self._say(number, None, "unsupported", window_ns, out)
            return []
        return [get.metrics[i] for i in range(len(self._ids))]

    def _one(self, metric: Any, window_ns: int, out: Sink) -> None:
        number, code, value = int(metric.metricId), int(metric.nvmlReturn), float(metric.value)
        status = status_of_code(code) if code else "ok"
        if status == "unsupported":
            self._lacking.add(number)
        told = None if code or not math.isfinite(value) or value < 0 else value
        if told is None and status == "ok":
            status = "error"
            out.drop("metrics without a value (no number, or below zero)")
        self._say(number, told, status, window_ns, out)

    def _say(self, number: int, value: float | None, status: Status, window_ns: int, out: Sink) -> None:
        """Percent or MiB/s of one metric. A mean over the window; equal ones are a rate's, each says something new."""
        if number in _RATIOS:
            told = None if value is None else value / 100
            self._put(out, self._gpu.entity, _RATIOS[number], "ratio", told, status, semantics="rate", window_ns=window_ns)
            return
        place, name, way = _RATES[number]
        told = None if value is None else value * _MIB
        self._put(
            out, self._places[place], name, "bytes/s", told, status, semantics="rate", direction=way, window_ns=window_ns
        )  # fmt: skip
