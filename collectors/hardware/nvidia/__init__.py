"""NVIDIA GPUs through NVML (nvidia-ml-py, the extra `nvidia`)."""

from __future__ import annotations

from collections.abc import Iterator

from hoptrace.collectors.hardware.perf.not_asked import NotAsked
from hoptrace.collectors.hardware.source import Asked, Source

__all__ = ["sources"]

_ANSWERS = "what crossed NVIDIA GPUs' PCIe and NVLinks; their memory, clocks, throttling, energy, errors"


def sources(asked: Asked) -> Iterator[Source]:
    """Two for each GPU, one for the driver's events; where there is no GPU, one that says why."""
    from hoptrace.collectors.hardware.nvidia.errors import NvmlError, found_by_code
    from hoptrace.collectors.hardware.nvidia.events import XidSource
    from hoptrace.collectors.hardware.nvidia.gpm import GpmSource
    from hoptrace.collectors.hardware.nvidia.gpu_source import GpuSource
    from hoptrace.collectors.hardware.nvidia.gpus import gpus
    from hoptrace.collectors.hardware.nvidia.library import library

    nvml = library(asked.roots)
    if nvml is None:
        remedy = "run hoptrace on the host"
        yield NotAsked("nvml", _ANSWERS, "a driver can only be asked on its own machine", remedy, status="unsupported")
        return
    found = nvml.start()
    if not found.available:
        yield NotAsked("nvml", _ANSWERS, found.reason or "", found.remedy, status=found.status)
        return
    try:
        listed = gpus(nvml)
    except NvmlError as e:
        why = found_by_code(e)
        yield NotAsked("nvml", _ANSWERS, why.reason or "", why.remedy, status=why.status)
        return
    if not listed:
        yield NotAsked("nvml", _ANSWERS, "the driver sees no GPU", "give this machine or container a GPU")
        return
    for gpu in listed:
        yield GpuSource(nvml, gpu, asked.roots)
        yield GpmSource(nvml, gpu)
    yield XidSource(nvml, listed)
