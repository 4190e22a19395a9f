"""What the driver tells by itself: XIDs, a GPU that becomes unavailable; and GPUs that do not come back from a call.

Tested here against a compiled stub of the library only: no GPU was lent to this project's machine.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

from hoptrace.collectors.hardware.nvidia.errors import GONE, INVALID, MISMATCH, TIMEOUT, NvmlError, found_by_code
from hoptrace.collectors.hardware.nvidia.gpus import Gpu, handle_of
from hoptrace.collectors.hardware.nvidia.seat import Seat
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found, Pace

__all__ = ["EventsSource"]

_XID = 0x8
_KINDS = {
    _XID: "XID", 0x2: "double-bit ECC error", 0x400: "memory retired", 0x800: "memory could not be retired",
    0x1000: "poison error", 0x2000: "fatal poison error", 0x4000: "GPU unavailable", 0x8000: "recovery action needed",
}  # fmt: skip
"""nvmlEventType… of nvml.h; which of them a driver has differs."""

# NVIDIA's catalogue of XID errors; those that explain a step that took long or a GPU that went.
_XIDS = {
    13: "graphics engine exception", 31: "GPU memory page fault", 43: "GPU stopped processing", 45: "cleanup after errors",
    48: "double-bit ECC error", 63: "row remapping recorded", 64: "row remapping failed", 74: "NVLink error",
    79: "GPU has fallen off the bus", 94: "contained memory error", 95: "uncontained memory error", 119: "GSP timeout",
}  # fmt: skip

_WAIT_MS, _FIRST_REST_S, _LONGEST_REST_S, _HANGS_S = 400, 1.0, 60.0, 5.0


class EventsSource:
    """An event `device error` for each; ``gpu:UUID`` counts XIDs since the capture began (`xid_errors`): NVML has no counter."""

    name = "nvml-events"
    answers = "whether a GPU had errors (XIDs) while it worked, or hangs"
    pace: Pace = "events"
    every_s = None

    def __init__(self, seats: Sequence[Seat]) -> None:
        self._seats = seats
        self._nvml = seats[0].nvml
        self._set: Any = None
        self._by_handle: dict[int, Gpu] = {}
        self._generation = -1
        self._lives: list[int] = []
        self._counts: dict[str, int] = {}
        self._rest_until_s, self._rest_s = 0.0, _FIRST_REST_S
        self._hanging: set[str] = set()

    def probe(self) -> Found:
        try:
            with self._nvml.using(self.name):
                self._register()
        except NvmlError as e:
            return found_by_code(e)
        if not self._by_handle:
            return Found("unsupported", "no GPU here tells its errors as events", "a driver that does; dmesg has the XIDs")
        return Found("ok", sees=f"{len(self._by_handle)} GPUs")

    def open(self, out: Sink) -> None:
        out.at(at := out.now_ns(), at)
        for gpu in self._by_handle.values():
            self._count(gpu, out, 0)

    def sample(self, out: Sink) -> None:
        self._look_for_hangs(out)
        wait_s = self._rest_until_s - time.monotonic()
        if wait_s > 0:
            time.sleep(min(wait_s, _WAIT_MS / 1e3))
            return
        try:
            # The library is not restarted under a wait.
            with self._nvml.using(self.name):
                if self._generation != self._nvml.generation or self._lives != [s.lives for s in self._seats]:
                    self._register()
                data = self._nvml.call("nvmlEventSetWait_v2", self._set, _WAIT_MS)
        except NvmlError as e:
            if e.code == TIMEOUT:
                self._rest_s = _FIRST_REST_S
                return
            if e.code not in GONE and e.code not in (MISMATCH, INVALID):
                raise
            # One that is lost makes each wait return at once: the set is made anew, without it.
            self._generation = -1
            self._rest_until_s = time.monotonic() + self._rest_s
            self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S)
            return
        self._told(data, out)

    def close(self) -> None:
        return None  # freeing the set while a wait hangs in it would crash; the process ends with it

    def _register(self) -> None:
        self._set = self._nvml.call("nvmlEventSetCreate")
        self._by_handle = {}
        for seat in self._seats:
            if seat.status != "ok":
                continue
            try:
                handle = handle_of(self._nvml, seat.gpu.uuid)
            except NvmlError:
                continue
            for kind in _KINDS:
                try:
                    self._nvml.call("nvmlDeviceRegisterEvents", handle, kind, self._set)
                except NvmlError:
                    continue  # a driver or a GPU that does not have this kind
                self._by_handle[_address(handle)] = seat.gpu
        self._generation = self._nvml.generation
        self._lives = [s.lives for s in self._seats]

    def _told(self, data: Any, out: Sink) -> None:
        gpu = self._by_handle.get(_address(data.device))
        who = f"{gpu.entity} ({gpu.bdf or gpu.name})" if gpu else "a GPU"
        kind, number = int(data.eventType), int(data.eventData)
        words = _KINDS.get(kind, f"event {kind:#x}")
        if kind == _XID:
            words = f"XID {number}" + (f" ({_XIDS[number]})" if number in _XIDS else "")
        out.event("device error", f"{who}: {words}")
        if gpu is not None and kind == _XID:
            out.at(at := out.now_ns(), at)
            self._count(gpu, out, 1)

    def _count(self, gpu: Gpu, out: Sink, more: int) -> None:
        self._counts[gpu.uuid] = self._counts.get(gpu.uuid, 0) + more
        out.put(out.series(gpu.entity, "xid_errors", "errors", "cumulative", width_bits=64), self._counts[gpu.uuid])

    def _look_for_hangs(self, out: Sink) -> None:
        hanging = set(self._nvml.overdue(_HANGS_S))
        for who in sorted(hanging - self._hanging):
            out.event(
                "device error", f"{who}: a call to the driver has not returned for {_HANGS_S:g} s; nothing is read meanwhile"
            )
        for who in sorted(self._hanging - hanging):
            out.event("device", f"{who}: the driver has answered")
        self._hanging = hanging


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
