"""What the driver tells by itself: XIDs, a GPU that becomes unavailable. NVML has no counter of them."""

from __future__ import annotations

import ctypes
import time
from typing import Any

from hoptrace.collectors.hardware.nvidia.errors import GONE, TIMEOUT, NvmlError, found_by_code
from hoptrace.collectors.hardware.nvidia.gpus import Gpu, handle_of
from hoptrace.collectors.hardware.nvidia.library import Nvml
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found, Pace

__all__ = ["XidSource"]

_XID = 0x8
_KINDS = {_XID: "XID", 0x4000: "unavailable", 0x8000: "recovery action"}
"""nvmlEventType… of nvml.h; which of them a driver has differs."""

_WAIT_MS, _REST_S = 400, 5.0


class XidSource:
    """An event `device error` for each, and a count by GPU: ``gpu:UUID``, `xid_errors`."""

    name = "nvml-events"
    answers = "whether a GPU had errors (XIDs) while it worked"
    pace: Pace = "events"
    every_s = None

    def __init__(self, nvml: Nvml, gpus: list[Gpu]) -> None:
        self._nvml, self._gpus = nvml, gpus
        self._set: Any = None
        self._by_handle: dict[int, Gpu] = {}
        self._generation = -1
        self._counts: dict[str, int] = {}
        self._rest_until_s = 0.0

    def probe(self) -> Found:
        try:
            with self._nvml.using(self.name):
                watched = self._register()
        except NvmlError as e:
            return found_by_code(e)
        if not watched:
            return Found("unsupported", "no GPU here tells its errors as events")
        return Found("ok", sees=f"{watched} GPUs")

    def open(self, out: Sink) -> None:
        out.at(at := out.now_ns(), at)
        for gpu in self._by_handle.values():
            self._counts[gpu.uuid] = 0
            self._count(gpu, out)

    def sample(self, out: Sink) -> None:
        wait_s = self._rest_until_s - time.monotonic()
        if wait_s > 0:
            time.sleep(min(wait_s, _WAIT_MS / 1e3))
            return
        try:
            if self._generation != self._nvml.generation:
                with self._nvml.using(self.name):
                    self._register()
            # Not within `using`: a restart of the library for a lost GPU need not wait for this.
            data = self._nvml.call("nvmlEventSetWait_v2", self._set, _WAIT_MS)
        except NvmlError as e:
            if e.code == TIMEOUT:
                return
            if e.code not in GONE:
                raise
            self._generation = -1
            self._rest_until_s = time.monotonic() + _REST_S
            return
        self._told(data, out)

    def close(self) -> None:
        return None  # freeing the set while a wait hangs in it would crash; the process ends with it

    def _register(self) -> int:
        self._set = self._nvml.call("nvmlEventSetCreate")
        self._by_handle = {}
        for gpu in self._gpus:
            try:
                handle = handle_of(self._nvml, gpu.uuid)
            except NvmlError:
                continue
            for kind in _KINDS:
                try:
                    self._nvml.call("nvmlDeviceRegisterEvents", handle, kind, self._set)
                except NvmlError:
                    continue  # a driver that does not have this kind
                self._by_handle[_address(handle)] = gpu
        self._generation = self._nvml.generation
        return len(self._by_handle)

    def _told(self, data: Any, out: Sink) -> None:
        gpu = self._by_handle.get(_address(data.device))
        who = gpu.entity if gpu else "a GPU"
        kind = _KINDS.get(int(data.eventType), f"event {int(data.eventType):#x}")
        out.event("device error", f"{who}: {kind} {int(data.eventData)}")
        if gpu is not None and int(data.eventType) == _XID:
            self._counts[gpu.uuid] = self._counts.get(gpu.uuid, 0) + 1
            out.at(at := out.now_ns(), at)
            self._count(gpu, out)

    def _count(self, gpu: Gpu, out: Sink) -> None:
        out.put(out.series(gpu.entity, "xid_errors", "errors", "cumulative", width_bits=64), self._counts[gpu.uuid])


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
