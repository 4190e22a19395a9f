"""How many NVLinks a GPU has, and how fast its PCIe link is at its best."""

from __future__ import annotations

from typing import Any

from hoptrace.collectors.hardware.nvidia.errors import GONE, NvmlError
from hoptrace.collectors.hardware.nvidia.fields import decoded, raw_of
from hoptrace.collectors.hardware.nvidia.library import Nvml
from hoptrace.collectors.hardware.nvidia.table import C2C_COUNT, LINK_COUNT

__all__ = ["c2c_links", "field_value", "nvlinks", "pcie_bytes_per_s"]

_MOST_LINKS = 72
"""Metrics of nvidia-ml-py 13.615 go up to link 71; NVML_NVLINK_MAX_LINKS is 36 there, and 18 until Blackwell."""
_BEFORE_COUNT = 18
# PCI Express base specification: GT/s by encoding (8b/10b, 128b/130b, 242/256 in flits), over 8 bits.
_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


def nvlinks(nvml: Nvml, handle: Any) -> list[int]:
    """Numbers of the links that the GPU has, up or not. NvmlError if the GPU is gone."""
    count = field_value(nvml, handle, LINK_COUNT)
    if count is not None:
        return list(range(min(int(count), _MOST_LINKS)))
    found = []
    for link in range(_BEFORE_COUNT):  # a driver that does not tell the number
        try:
            nvml.call("nvmlDeviceGetNvLinkState", handle, link)
        except NvmlError as e:
            if e.code in GONE:
                raise
            break
        found.append(link)
    return found


def c2c_links(nvml: Nvml, handle: Any) -> list[int]:
    """Numbers of its links to the CPU (NVLink-C2C), up or not. NvmlError if the GPU is gone."""
    return list(range(min(int(field_value(nvml, handle, C2C_COUNT) or 0), _MOST_LINKS)))


def field_value(nvml: Nvml, handle: Any, number: int, scope: int = 0) -> int | float | None:
    """One field, decoded as all are; null where it is not told. NvmlError if the GPU is gone."""
    try:
        (told,) = nvml.call("nvmlDeviceGetFieldValues", handle, [(number, scope)])
    except NvmlError as e:
        if e.code in GONE:
            raise
        return None
    return None if told.nvmlReturn else decoded(int(told.valueType), raw_of(told), "gauge")[0]


def pcie_bytes_per_s(nvml: Nvml, handle: Any) -> float | None:
    """What one direction carries at most, by the best generation and width that device and slot agree on; null where not told."""
    told = []
    for name in ("nvmlDeviceGetMaxPcieLinkGeneration", "nvmlDeviceGetMaxPcieLinkWidth"):
        try:
            told.append(int(nvml.call(name, handle)))
        except NvmlError as e:
            if e.code in GONE:
                raise
            return None
    lane = _LANE_BYTES_PER_S.get(told[0])
    return lane * told[1] if lane else None
