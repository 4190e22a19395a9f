"""AMD GPUs through amdsmi (AMD's own Python package over libamd_smi): memory, XGMI bytes, energy, clocks, throttling, errors.

amdsmi_get_gpu_pci_throughput is not used: the driver sleeps for a second in it, and no table tells PCIe bytes. No AMD GPU has
been at hand: the tests run the package (7.0.2) over a library of ours, and answer in its place.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.amd.metrics import FIELDS, KILOBYTE, LINKS, by_link, format_of, value_of
from hoptrace.collectors.hardware.sink import Direction, Sink, Status
from hoptrace.collectors.hardware.source import Found, Pace, Roots

__all__ = ["AmdSource", "load"]

_MIB = 1 << 20
_ERRORS: Mapping[int, Status] = {
    2: "unsupported", 3: "unsupported", 10: "denied", 31: "lost", 32: "lost", 33: "lost", 34: "absent", 51: "absent", 54: "lost",
}  # fmt: skip
"""amdsmi_status_t: 2 not supported, 3 not implemented, 10 no permission, 31 not found, 32 not initialised, 33 no slot, 34 driver
not loaded, 51 no driver, 54 the driver restarts."""
_NO_PERMISSION = 10
_GPU_FORMATS = (None, 1)
_SOONEST_S, _LATEST_S, _SLOW_S = 1.0, 60.0, 1.0


def load() -> Any:
    """The package. It prints, and raises what it likes, where its library is missing. ImportError, KeyError, OSError …"""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return import_module("amdsmi")


@dataclass(slots=True)
class _Gpu:
    """``energy_uj``: what one count of its energy accumulator is. ``none``: calls that it does not support. ``series``: all of
    them, by what they are of."""

    handle: Any
    uuid: str
    bdf: str
    life: str
    energy_uj: float | None = None
    lost: bool = False
    slow_due_s: float = 0.0
    none: set[str] = field(default_factory=set)
    series: dict[str, int] = field(default_factory=dict)


class AmdSource:
    """Entities ``gpu:UUID``, ``pcie:BDF``, ``xgmi:BDF/LINK``. ``loader`` gives the package."""

    name = "amdsmi"
    answers = "what AMD GPUs carried over XGMI, their memory, clocks, energy and PCIe errors"
    pace: Pace = "own"
    every_s = 0.1

    def __init__(self, roots: Roots | None = None, loader: Callable[[], Any] = load) -> None:
        self._roots = roots or Roots()
        self._load = loader
        self._smi: Any = None
        self._gpus: list[_Gpu] = []
        self._boot = procfs.boot_id(self._roots.proc)[:8]
        self._begun = 0
        self._again_s = float("inf")
        self._wait_s = _SOONEST_S

    def probe(self) -> Found:
        if not self._roots.live:
            return Found("unsupported", "a driver can only be asked on its own machine", "run hoptrace on the host")
        if not (self._roots.sys / "module/amdgpu").exists():
            return Found("absent", "the driver amdgpu is not loaded", "an AMD GPU with its driver")
        if self._roots.amdsmi:
            os.environ.setdefault("ROCM_PATH", self._roots.amdsmi)
        try:
            if self._smi is None:
                self._smi = self._load()
        except ModuleNotFoundError:
            return Found("absent", "the package amdsmi is not installed", "pip install amdsmi, of the version of ROCm here")
        except Exception as e:  # without libamd_smi.so it raises a KeyError
            return Found("absent", f"amdsmi can't load libamd_smi.so ({type(e).__name__}: {e})", "install ROCm's amd-smi-lib")
        try:
            self._begin()
        except Exception as e:
            status = _status(e)
            groups = "add the user to the groups video and render" if status == "denied" else "see dmesg for amdgpu"
            return Found("absent" if status == "lost" else status, f"amdsmi: {_words(e)}", groups)
        if not self._gpus:
            return Found("absent", "amdsmi sees no GPU", "in a container: --device /dev/kfd --device /dev/dri")
        return Found("ok", sees=f"{len(self._gpus)} GPUs")

    def open(self, out: Sink) -> None:
        return None

    def sample(self, out: Sink) -> None:
        now_s = time.monotonic()
        if now_s >= self._again_s:
            self._return(now_s, out)
        for gpu in self._gpus:
            self._one(gpu, now_s, out)
        if any(g.lost for g in self._gpus) and self._again_s == float("inf"):
            self._again_s = now_s + self._wait_s

    def close(self) -> None:
        if self._smi is not None:
            with contextlib.suppress(Exception):
                self._smi.amdsmi_shut_down()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._smi.amdsmi_init()
        self._begun += 1
        found = []
        for handle in self._smi.amdsmi_get_processor_handles():
            bdf = str(self._smi.amdsmi_get_gpu_device_bdf(handle)).lower()
            uuid = str(self._smi.amdsmi_get_gpu_device_uuid(handle))
            # Counters begin anew with the driver, which the library has to be opened anew for.
            gpu = _Gpu(handle, uuid, bdf, f"{self._boot}/{uuid}/{self._begun}")
            with contextlib.suppress(Exception):
                resolution = self._smi.amdsmi_get_energy_count(handle).get("counter_resolution")
                gpu.energy_uj = resolution if isinstance(resolution, float) and resolution > 0 else None
            found.append(gpu)
        self._gpus = found

    def _return(self, now_s: float, out: Sink) -> None:
        """A lost GPU: the library is opened anew, ever less often. Handles are others then."""
        if not any(g.lost for g in self._gpus):
            self._again_s, self._wait_s = float("inf"), _SOONEST_S
            return
        self._wait_s = min(2 * self._wait_s, _LATEST_S)
        self._again_s = now_s + self._wait_s
        before = self._gpus
        with contextlib.suppress(Exception):
            self._smi.amdsmi_shut_down()
        try:
            self._begin()
        except Exception:
            return  # they stay as they were: lost
        there = {g.uuid for g in self._gpus}
        self._gpus += [g for g in before if g.uuid not in there]
        known = {g.uuid: g for g in before}
        for gpu in self._gpus:
            was = known.get(gpu.uuid, gpu)
            gpu.lost = was.lost  # until it answers
            if not was.lost:
                gpu.life, gpu.series = was.life, was.series

    def _one(self, gpu: _Gpu, now_s: float, out: Sink) -> None:
        before = out.now_ns()
        try:
            metrics = self._smi.amdsmi_get_gpu_metrics_info(gpu.handle)
        except Exception as e:
            out.at(before, out.now_ns())
            self._failed(gpu, e, out)
            return
        out.at(before, out.now_ns())
        if gpu.lost:
            gpu.lost = False
            out.event("device", f"gpu:{gpu.uuid} answers again")
        if format_of(metrics) in _GPU_FORMATS:
            self._fields(gpu, metrics, out)
        for name, way in LINKS:
            for link, value in by_link(metrics.get(name)):
                key = f"{name} {link}"
                number = gpu.series.get(key)
                if number is None:
                    number = self._declare(gpu, key, f"xgmi:{gpu.bdf}/{link}", "data_bytes", "bytes", out, direction=way)
                out.put(number, value * KILOBYTE)
        if now_s >= gpu.slow_due_s:
            gpu.slow_due_s = now_s + _SLOW_S
            self._memory(gpu, out)

    def _fields(self, gpu: _Gpu, metrics: Mapping[str, Any], out: Sink) -> None:
        for name, what in FIELDS.items():
            if name not in metrics:
                continue  # a release that has not got it
            value = value_of(metrics[name], what.bits)
            if value is None and what.instead is not None:
                several = metrics.get(what.instead)
                value = value_of(several[0], what.bits) if isinstance(several, list) and several else None
            number = gpu.series.get(name)
            if number is None:
                entity = f"gpu:{gpu.uuid}" if what.kind == "gpu" else f"pcie:{gpu.bdf}"
                number = gpu.series[name] = out.series(
                    entity, what.name, what.unit, what.semantics, incarnation=gpu.life if what.semantics == "cumulative" else None
                )
            out.put(number, value, "ok" if value is not None else "unsupported")
        count = value_of(metrics.get("energy_accumulator"), 64)
        if gpu.energy_uj is not None and "energy_accumulator" in metrics:
            number = gpu.series.get("energy")
            if number is None:
                number = self._declare(gpu, "energy", f"gpu:{gpu.uuid}", "energy_mj", "mJ", out)
            out.put(number, None if count is None else count * gpu.energy_uj / 1000, "ok" if count is not None else "unsupported")

    def _memory(self, gpu: _Gpu, out: Sink) -> None:
        if "memory" in gpu.none:
            return
        numbers = [out.series(f"gpu:{gpu.uuid}", f"memory_{n}_bytes", "bytes", "gauge") for n in ("used", "total")]
        gpu.series |= dict(zip(("memory used", "memory total"), numbers, strict=True))
        before = out.now_ns()
        try:
            told = self._smi.amdsmi_get_gpu_vram_usage(gpu.handle)
        except Exception as e:
            out.at(before, out.now_ns())
            status = _status(e)
            out.fail(numbers, status)
            if status == "unsupported":
                gpu.none.add("memory")
            return
        out.at(before, out.now_ns())
        for key, number in zip(("vram_used", "vram_total"), numbers, strict=True):
            value = value_of(told.get(key), 32)  # in MiB
            out.put(number, None if value is None else value * _MIB, "ok" if value is not None else "unsupported")

    def _declare(
        self, gpu: _Gpu, key: str, entity: str, name: str, unit: str, out: Sink, *, direction: Direction | None = None
    ) -> int:  # fmt: skip
        number = gpu.series[key] = out.series(entity, name, unit, "cumulative", direction=direction, incarnation=gpu.life)
        return number

    def _failed(self, gpu: _Gpu, e: Exception, out: Sink) -> None:
        status = _status(e)
        out.fail(gpu.series.values(), status)
        if not gpu.series:  # it never answered: still a row that says so
            out.put(out.series(f"gpu:{gpu.uuid}", "throttled", "1", "gauge"), None, status)
        if status == "lost" and not gpu.lost:
            gpu.lost = True
            out.event("device error", f"gpu:{gpu.uuid}: {_words(e)}")


def _code(e: Exception) -> int | None:
    ask = getattr(e, "get_error_code", None)
    try:
        return int(ask()) if ask is not None else None
    except (TypeError, ValueError):
        return None


def _status(e: Exception) -> Status:
    return _ERRORS.get(_code(e) or 0, "error")


def _words(e: Exception) -> str:
    """On one line: the package puts its error codes on two."""
    return " ".join(str(e).split())
