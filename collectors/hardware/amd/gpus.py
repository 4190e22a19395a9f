"""AMD GPUs through amdsmi (AMD's own Python package over libamd_smi): memory, PCIe and XGMI bytes, energy, clocks, errors.

Fields of amdsmi_get_gpu_metrics_info (gpu_metrics tables of the amdgpu driver): accumulated XGMI data is in KiB by link, what a
table does not have is all ones, which the package turns into "N/A". The driver's own PCIe call blocks for a second and is not
used. No AMD GPU has been at hand: what the package (7.0.2) returns was read in its source, and the tests answer in its place.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.sink import Direction, Semantics, Sink, Status
from hoptrace.collectors.hardware.source import Found, Pace, Roots

__all__ = ["AmdSource", "load"]

_KIB, _MIB = 1 << 10, 1 << 20

# Field of the metrics → (kind of entity, our name, unit, semantics, direction, what one is)
_METRICS: dict[str, tuple[str, str, str, Semantics, Direction | None, int]] = {
    "pcie_bandwidth_acc": ("pcie", "bandwidth_acc", "1", "cumulative", None, 1),
    "pcie_replay_count_acc": ("pcie", "replays", "times", "cumulative", None, 1),
    "pcie_nak_sent_count_acc": ("pcie", "naks_sent", "times", "cumulative", None, 1),
    "pcie_nak_rcvd_count_acc": ("pcie", "naks_received", "times", "cumulative", None, 1),
    "energy_accumulator": ("gpu", "energy_accumulator", "1", "cumulative", None, 1),
    "accumulation_counter": ("gpu", "accumulation_counter", "1", "cumulative", None, 1),
    "current_gfxclk": ("gpu", "sm_clock_mhz", "MHz", "gauge", None, 1),
    "current_uclk": ("gpu", "memory_clock_mhz", "MHz", "gauge", None, 1),
    "average_socket_power": ("gpu", "power_w", "W", "gauge", None, 1),
    "temperature_hotspot": ("gpu", "temperature_c", "°C", "gauge", None, 1),
    "average_gfx_activity": ("gpu", "kernel_running_percent", "%", "gauge", None, 1),
    "average_umc_activity": ("gpu", "memory_busy_percent", "%", "gauge", None, 1),
}
_LINKS: tuple[tuple[str, Direction], ...] = (("xgmi_read_data_acc", "rx"), ("xgmi_write_data_acc", "tx"))
_ERRORS: Mapping[int, Status] = {
    2: "unsupported", 3: "unsupported", 10: "denied", 31: "absent", 32: "lost", 33: "lost", 34: "absent", 54: "lost",
}  # fmt: skip
"""amdsmi_status_t: 2 not supported, 3 not implemented, 10 no permission, 31 not found, 32 not initialised, 33 no slot, 34 driver
not loaded, 54 the driver restarts."""


def load() -> Any:
    """The package. It prints, and raises what it likes, where its library is missing. ImportError, KeyError, OSError …"""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return import_module("amdsmi")


class AmdSource:
    """Entities ``gpu:UUID``, ``pcie:BDF``, ``xgmi:BDF/LINK``. ``loader`` gives the package."""

    name = "amdsmi"
    answers = "what AMD GPUs carried over PCIe and XGMI, their memory, clocks and energy"
    pace: Pace = "own"
    every_s = 0.1

    def __init__(self, roots: Roots | None = None, loader: Callable[[], Any] = load) -> None:
        self._roots = roots or Roots()
        self._load = loader
        self._smi: Any = None
        self._gpus: list[tuple[Any, str, str]] = []
        self._unsupported: set[tuple[str, str]] = set()
        self._boot = procfs.boot_id(self._roots.proc)[:8]
        self._lost: set[str] = set()

    def probe(self) -> Found:
        if not self._roots.live:
            return Found("unsupported", "a driver can only be asked on its own machine", "run hoptrace on the host")
        if not (self._roots.sys / "module/amdgpu").exists():
            return Found("absent", "the driver amdgpu is not loaded", "an AMD GPU with its driver")
        if self._roots.amdsmi:
            os.environ.setdefault("ROCM_PATH", self._roots.amdsmi)
        try:
            self._smi = self._load()
        except ModuleNotFoundError:
            return Found("absent", "the package amdsmi is not installed", "pip install amdsmi, of ROCm's own version")
        except Exception as e:  # without libamd_smi.so it raises a KeyError
            return Found("absent", f"amdsmi can't load its library ({type(e).__name__}: {e})", "install ROCm's amd-smi-lib")
        try:
            self._smi.amdsmi_init()
            self._gpus = self._list()
        except Exception as e:
            remedy = "add the user to the groups video and render" if self._code(e) == 10 else None
            return Found(self._status(e), f"amdsmi: {e}", remedy)
        if not self._gpus:
            return Found("absent", "amdsmi sees no GPU")
        return Found("ok", sees=f"{len(self._gpus)} GPUs")

    def open(self, out: Sink) -> None:
        return None

    def sample(self, out: Sink) -> None:
        for handle, uuid, bdf in self._gpus:
            self._one(handle, uuid, bdf, out)

    def close(self) -> None:
        if self._smi is not None:
            with contextlib.suppress(Exception):
                self._smi.amdsmi_shut_down()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _list(self) -> list[tuple[Any, str, str]]:
        found = []
        for handle in self._smi.amdsmi_get_processor_handles():
            bdf = str(self._smi.amdsmi_get_gpu_device_bdf(handle)).lower()
            found.append((handle, str(self._smi.amdsmi_get_gpu_device_uuid(handle)), bdf))
        return found

    def _one(self, handle: Any, uuid: str, bdf: str, out: Sink) -> None:
        before = out.now_ns()
        try:
            metrics = self._smi.amdsmi_get_gpu_metrics_info(handle)
        except Exception as e:
            out.at(before, out.now_ns())
            self._fail(uuid, bdf, self._status(e), out)
            if uuid not in self._lost:
                self._lost.add(uuid)
                out.event("device error", f"gpu:{uuid}: {e}")
            return
        out.at(before, out.now_ns())
        if uuid in self._lost:
            self._lost.discard(uuid)
            out.event("device", f"gpu:{uuid} answers again")
        for field, told in _METRICS.items():
            if field in metrics:
                self._put(self._series(field, uuid, bdf, out), metrics[field], told[5], out)
        for field, way in _LINKS:
            values = metrics.get(field)
            for link, value in enumerate(values if isinstance(values, list | tuple) else []):
                if self._real(value):
                    entity = f"xgmi:{bdf}/{link}"
                    number = out.series(entity, "data_bytes", "bytes", "cumulative", direction=way, incarnation=self._boot)
                    out.put(number, value * _KIB)
        self._memory(handle, uuid, out)

    def _memory(self, handle: Any, uuid: str, out: Sink) -> None:
        before = out.now_ns()
        numbers = {
            key: out.series(f"gpu:{uuid}", name, "bytes", "gauge")
            for key, name in (("vram_used", "memory_used_bytes"), ("vram_total", "memory_total_bytes"))
        }
        try:
            told = self._smi.amdsmi_get_gpu_vram_usage(handle)
        except Exception as e:
            out.at(before, out.now_ns())
            out.fail(numbers.values(), self._status(e))
            return
        out.at(before, out.now_ns())
        for key, number in numbers.items():
            self._put(number, told.get(key), _MIB, out)

    def _series(self, field: str, uuid: str, bdf: str, out: Sink) -> int:
        kind, name, unit, semantics, way, _ = _METRICS[field]
        entity = f"gpu:{uuid}" if kind == "gpu" else f"pcie:{bdf}"
        life = self._boot if semantics == "cumulative" else None
        return out.series(entity, name, unit, semantics, direction=way, incarnation=life)

    def _put(self, number: int, value: Any, one: int, out: Sink) -> None:
        if self._real(value):
            out.put(number, value * one)
        else:
            out.put(number, None, "unsupported")

    @staticmethod
    def _real(value: Any) -> bool:
        """Whether it is a value, not "N/A" (all ones of the field's width, which the package knows)."""
        return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0

    def _fail(self, uuid: str, bdf: str, status: Status, out: Sink) -> None:
        out.fail([self._series(field, uuid, bdf, out) for field in _METRICS], status)

    @staticmethod
    def _code(e: Exception) -> int | None:
        ask = getattr(e, "get_error_code", None)
        try:
            return int(ask()) if ask is not None else None
        except (TypeError, ValueError):
            return None

    def _status(self, e: Exception) -> Status:
        return _ERRORS.get(self._code(e) or 0, "error")
