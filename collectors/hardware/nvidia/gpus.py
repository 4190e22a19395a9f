"""Which GPUs there are, by what stays theirs: the UUID. Indexes move when a GPU falls off the bus or comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hoptrace.collectors.hardware.nvidia.errors import NvmlError
from hoptrace.collectors.hardware.nvidia.library import Nvml, within
from hoptrace.collectors.hardware.scraped.meaning import pci_address

__all__ = ["Gpu", "Listed", "gpus", "handle_of"]

_HANGS_S = 5.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """``index`` as NVML counted it when it was listed; ``bdf`` null where it is not told."""

    index: int
    uuid: str
    name: str
    bdf: str | None

    @property
    def entity(self) -> str:
        return f"gpu:{self.uuid}"


@dataclass(frozen=True, slots=True)
class Listed:
    """``found``: those that answer. ``silent``: by index, those that the driver counts and that don't: why."""

    found: list[Gpu]
    silent: dict[int, NvmlError]


def gpus(nvml: Nvml) -> Listed:
    """All that the driver counts. NvmlError if not even their number is told."""
    found: list[Gpu] = []
    silent: dict[int, NvmlError] = {}
    for index in range(int(within(_HANGS_S, "nvmlDeviceGetCount", lambda: nvml.call("nvmlDeviceGetCount")))):
        try:
            found.append(within(_HANGS_S, f"GPU {index}", lambda index=index: _one(nvml, index)))  # type: ignore[misc]
        except NvmlError as e:
            silent[index] = e
    return Listed(found, silent)


def _one(nvml: Nvml, index: int) -> Gpu:
    with nvml.using(f"list {index}"):
        handle = nvml.call("nvmlDeviceGetHandleByIndex", index)
        uuid = _text(nvml.call("nvmlDeviceGetUUID", handle))
        name = _text(nvml.call("nvmlDeviceGetName", handle))
        try:
            bdf = pci_address(_text(nvml.call("nvmlDeviceGetPciInfo_v3", handle).busId))
        except NvmlError:
            bdf = None
        return Gpu(index, uuid, name, bdf)


def handle_of(nvml: Nvml, uuid: str) -> Any:
    """The handle of a GPU for calls, until the library is started anew. NvmlError."""
    return nvml.call("nvmlDeviceGetHandleByUUID", uuid.encode())


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
