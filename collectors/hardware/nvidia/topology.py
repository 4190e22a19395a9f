"""How GPUs are joined, as NVML tells it: PCIe links at their best, NVLinks with what is at their other end, C2C, NUMA nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hoptrace.collectors.hardware.nvidia.errors import NvmlError
from hoptrace.collectors.hardware.nvidia.gpus import Gpu, gpus, handle_of
from hoptrace.collectors.hardware.nvidia.library import Nvml, library
from hoptrace.collectors.hardware.nvidia.table import LINK_COUNT
from hoptrace.collectors.hardware.scraped.meaning import pci_address
from hoptrace.collectors.hardware.source import Roots

__all__ = ["GpuLinks", "Joined", "joined"]

_SPEED, _C2C_COUNT, _C2C_MBPS, _MOST = 164, 170, 172, 36
_REMOTE = {0: "gpu", 1: "npu", 2: "switch"}
"""nvmlIntNvLinkDeviceType_t."""


@dataclass(frozen=True, slots=True)
class Joined:
    """One NVLink that is up. ``to``: gpu, npu, switch, or null; ``bdf`` of the other end; ``bytes_per_s`` in one direction."""

    link: int
    to: str | None
    bdf: str | None
    bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class GpuLinks:
    """One GPU. Null is unknown; generation and width are the link's at its best."""

    gpu: Gpu
    memory_bytes: int | None
    generation: int | None
    width: int | None
    numa: int | None
    memory_numa: int | None
    nvlinks: tuple[Joined, ...]
    c2c_links: int
    c2c_bytes_per_s: float | None


def joined(roots: Roots) -> list[GpuLinks]:
    """All GPUs of this machine; none where there is no driver. Does not raise."""
    nvml = library(roots)
    if nvml is None or not nvml.start().available:
        return []
    try:
        found = gpus(nvml)
    except NvmlError:
        return []
    out = []
    for gpu in found:
        try:
            with nvml.using("topology"):
                out.append(_one(nvml, gpu))
        except NvmlError:
            continue
    return out


def _one(nvml: Nvml, gpu: Gpu) -> GpuLinks:
    handle = handle_of(nvml, gpu.uuid)
    memory = _tried(nvml, "nvmlDeviceGetMemoryInfo", handle, nvml.constant("nvmlMemory_v2", 0x02000028))
    count = _field(nvml, handle, LINK_COUNT, 0)
    nvlinks = []
    for link in range(min(int(count or 0), _MOST)):
        if _tried(nvml, "nvmlDeviceGetNvLinkState", handle, link) != 1:
            continue
        kind = _tried(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        pci = _tried(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
        bus = (
            pci.busId.decode("ascii", "replace")
            if pci is not None and isinstance(pci.busId, bytes)
            else getattr(pci, "busId", None)
        )
        mbps = _field(nvml, handle, _SPEED, link)
        to = _REMOTE.get(int(kind)) if kind is not None else None
        nvlinks.append(Joined(link, to, pci_address(bus), mbps * 1e6 if mbps else None))
    c2c_mbps = _field(nvml, handle, _C2C_MBPS, 0)
    numa = _tried(nvml, "nvmlDeviceGetNumaNodeId", handle)
    return GpuLinks(
        gpu, int(memory.total) if memory is not None else None, _whole(_tried(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle)),
        _whole(_tried(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle)), None, _whole(numa), tuple(nvlinks),
        int(_field(nvml, handle, _C2C_COUNT, 0) or 0), c2c_mbps * 1e6 if c2c_mbps else None,
    )  # fmt: skip


def _tried(nvml: Nvml, name: str, *arguments: Any) -> Any:
    try:
        return nvml.call(name, *arguments)
    except NvmlError:
        return None


def _field(nvml: Nvml, handle: Any, number: int, scope: int) -> float | None:
    told = _tried(nvml, "nvmlDeviceGetFieldValues", handle, [(number, scope)])
    if told is None or told[0].nvmlReturn:
        return None
    value = told[0]
    return float(value.value.ullVal if value.valueType in (2, 3) else value.value.uiVal)


def _whole(value: Any) -> int | None:
    return int(value) if value is not None else None
