"""One GPU's state once a second: memory and whose it is, energy, throttled time, links that go down, errors.

Tested here against a compiled stub of the library only: no GPU was lent to this project's machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hoptrace.collectors.hardware.nvidia.fields import Batch, Slot, link_slots
from hoptrace.collectors.hardware.nvidia.links import c2c_links, nvlinks
from hoptrace.collectors.hardware.nvidia.owners import Owners
from hoptrace.collectors.hardware.nvidia.per_gpu import PerGpu
from hoptrace.collectors.hardware.nvidia.seat import Seat
from hoptrace.collectors.hardware.nvidia.table import C2C, LINK_ERRORS, LINK_STATE, ONCE_A_SECOND, throttle_times
from hoptrace.collectors.hardware.sink import Sink, Status
from hoptrace.collectors.hardware.source import Found

__all__ = ["StateSource"]

_MEMORY_CLOCK = 2
"""NVML_CLOCK_MEM."""
_MEMORY_V2 = 0x02000028


class StateSource(PerGpu):
    """Entities ``gpu:UUID``, ``pcie:BDF``, ``nvlink:UUID/LINK``, ``c2c:UUID/LINK``; ``process:PID/gpu:UUID`` for the servers' own
    processes."""

    kind = "-state"
    answers = "this GPU's memory and whose it is, energy, time at reduced clocks, links that went down, errors"
    every_s = 1.0

    def __init__(self, seat: Seat, owners: Owners) -> None:
        super().__init__(seat)
        self._owners = owners
        self._batch = Batch(self._nvml, (), "")
        self._held: dict[int, int] = {}

    def _found(self, handle: Any) -> Found:
        memory = self._memory(handle)
        total = next((v for n, v, _ in memory if n == "total" and v is not None), None)
        return Found("ok", sees=None if total is None else f"{self._gpu.name}, {total / 2**30:.0f} GiB")

    def _begin(self, handle: Any, out: Sink) -> None:
        gpu = self._gpu
        links = nvlinks(self._nvml, handle)
        places = {"gpu": gpu.entity} | ({"pcie": f"pcie:{gpu.bdf}"} if gpu.bdf else {})
        fields = (*ONCE_A_SECOND, *throttle_times(self._nvml.driver_version))
        slots = [Slot(f, places[f.of]) for f in fields if f.of in places]
        slots += link_slots((*LINK_STATE, *LINK_ERRORS), gpu.uuid, links)
        slots += [Slot(f, f"c2c:{gpu.uuid}/{n}", n) for n in c2c_links(self._nvml, handle) for f in C2C]
        self._batch = Batch(self._nvml, slots, self._seat.incarnation)

    def _read(self, handle: Any, out: Sink) -> None:
        gpu = self._gpu
        self._batch.read(handle, out)
        before = out.now_ns()
        memory = self._memory(handle)
        out.at(before, out.now_ns())
        for part, value, why in memory:
            self._put(out, gpu.entity, f"memory_{part}_bytes", "bytes", value, why)
        before = out.now_ns()
        clock, why = self._ask("nvmlDeviceGetClockInfo", handle, _MEMORY_CLOCK)
        use, why_use = self._ask("nvmlDeviceGetUtilizationRates", handle)
        link = [(what, *self._ask(f"nvmlDeviceGetCurrPcieLink{what}", handle)) for what in ("Generation", "Width")]
        out.at(before, out.now_ns())
        self._put(out, gpu.entity, "memory_clock_mhz", "MHz", clock, why)
        # The share of time with a kernel on the GPU, over a window that the driver chooses: no measure of load.
        self._put(out, gpu.entity, "kernel_active_percent", "%", None if use is None else int(use.gpu), why_use)
        if gpu.bdf:
            for what, value, why in link:
                self._put(out, f"pcie:{gpu.bdf}", f"link_{what.lower()}", "1", value, why)
        self._processes(handle, out)

    def _declared(self) -> list[int]:
        return [*super()._declared(), *self._batch.numbers]

    def _memory(self, handle: Any) -> list[tuple[str, int | None, Status]]:
        """Name, bytes, why not. The older call counts what the driver keeps for itself as used: that has a name of its own."""
        told, why = self._ask("nvmlDeviceGetMemoryInfo", handle, self._nvml.constant("nvmlMemory_v2", _MEMORY_V2))
        if told is not None:
            return [(part, int(getattr(told, part)), "ok") for part in ("total", "reserved", "used", "free")]
        told, why = self._ask("nvmlDeviceGetMemoryInfo", handle)
        if told is None:
            return [(part, None, why) for part in ("total", "used", "free")]
        return [("total", int(told.total), "ok"), ("used_and_reserved", int(told.used), "ok"), ("free", int(told.free), "ok")]

    def _processes(self, handle: Any, out: Sink) -> None:
        gpu = self._gpu
        before = out.now_ns()
        running, why = self._ask("nvmlDeviceGetComputeRunningProcesses_v3", handle)
        drawing, _ = self._ask("nvmlDeviceGetGraphicsRunningProcesses_v3", handle)
        out.at(before, out.now_ns())
        if running is None:
            self._put(out, gpu.entity, "other_processes", "processes", None, why)
            return
        starts = self._owners.starts()
        present: dict[int, int] = {}
        others: list[int | None] = []
        used = self._by_process(running)
        # One that computes through Vulkan is listed as one that draws; one that does both is listed twice, with the same memory.
        used = self._by_process(drawing or ()) | used
        for pid, value in used.items():
            if value is None:
                out.drop("memory of processes without a value (all ones)")
            if (start := starts.get(pid)) is None:
                others.append(value)
                continue
            present[pid] = start
            self._of_process(out, pid, start, value, "absent")
        for pid, start in self._held.items():
            if pid not in present:
                self._of_process(out, pid, start, None, "lost")
        self._held = present
        known = [v for v in others if v is not None]
        total = sum(known) if len(known) == len(others) else None
        self._put(out, gpu.entity, "other_processes", "processes", len(others))
        self._put(out, gpu.entity, "other_processes_memory_bytes", "bytes", total, "absent")

    @staticmethod
    def _by_process(listed: Iterable[Any]) -> dict[int, int | None]:
        """Bytes by process number. In several instances of a GPU (MIG) one has several entries: their sum, null if one is not
        told."""
        bytes_of: dict[int, int | None] = {}
        for process in listed:
            pid, more = int(process.pid), process.usedGpuMemory
            before = bytes_of.get(pid, 0)
            bytes_of[pid] = None if more is None or before is None else before + int(more)
        return bytes_of

    def _of_process(self, out: Sink, pid: int, start: int, value: int | None, why: Status) -> None:
        incarnation, entity = f"{self._seat.boot}/{start}", f"process:{pid}/{self._gpu.entity}"
        self._put(out, entity, "gpu_memory_bytes", "bytes", value, why, incarnation=incarnation)
