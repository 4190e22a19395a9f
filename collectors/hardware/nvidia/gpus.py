"""Which GPUs there are, by what stays theirs: the UUID. Indexes move when a GPU falls off the bus or comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hoptrace.collectors.hardware.nvidia.errors import NvmlError
from hoptrace.collectors.hardware.nvidia.library import Nvml
from hoptrace.collectors.hardware.scraped.meaning import pci_address

__all__ = ["Gpu", "gpus", "handle_of"]


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


def gpus(nvml: Nvml) -> list[Gpu]:
    """All that answer. NvmlError if not even their number is told."""
    found = []
    with nvml.using("list"):
        for index in range(int(nvml.call("nvmlDeviceGetCount"))):
            try:
                handle = nvml.call("nvmlDeviceGetHandleByIndex", index)
                uuid = _text(nvml.call("nvmlDeviceGetUUID", handle))
                name = _text(nvml.call("nvmlDeviceGetName", handle))
            except NvmlError:
                continue  # it has fallen off the bus
            try:
                bdf = pci_address(_text(nvml.call("nvmlDeviceGetPciInfo_v3", handle).busId))
            except NvmlError:
                bdf = None
            found.append(Gpu(index, uuid, name, bdf))
    return found


def handle_of(nvml: Nvml, uuid: str) -> Any:
    """The handle of a GPU for calls, until the library is started anew. NvmlError."""
    return nvml.call("nvmlDeviceGetHandleByUUID", uuid.encode())


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
