"""NVIDIA GPUs through NVML (nvidia-ml-py, the extra `nvidia`)."""

from __future__ import annotations

from collections.abc import Iterator

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.source import Asked, Source

__all__ = ["sources"]

_NVIDIA = 0x10DE


def sources(asked: Asked) -> Iterator[Source]:
    """Four for each GPU and one for the driver's events; where there is none, one that says why and looks again."""
    from hoptrace.collectors.hardware.nvidia.counters import CountersSource
    from hoptrace.collectors.hardware.nvidia.errors import NvmlError, found_by_code
    from hoptrace.collectors.hardware.nvidia.events import EventsSource
    from hoptrace.collectors.hardware.nvidia.gpm import GpmSource
    from hoptrace.collectors.hardware.nvidia.gpus import gpus
    from hoptrace.collectors.hardware.nvidia.library import library
    from hoptrace.collectors.hardware.nvidia.nothing import Nothing
    from hoptrace.collectors.hardware.nvidia.owners import Owners
    from hoptrace.collectors.hardware.nvidia.seat import Seat
    from hoptrace.collectors.hardware.nvidia.state import StateSource
    from hoptrace.collectors.hardware.nvidia.window import WindowSource
    from hoptrace.collectors.hardware.source import Found
    from hoptrace.collectors.hardware.topology.pci import pci_devices

    nvml = library(asked.roots)
    if nvml is None:
        yield Nothing(Found("unsupported", "NVML tells of this machine, and the trees are another's", "run hoptrace on the host"))
        return
    found = nvml.start()
    if not found.available:
        # Without a driver nobody knows more than the bus tells; a driver that answers has GPUs, on a bus or not (WSL).
        if found.status == "absent" and not any(d.kind == "gpu" and d.vendor == _NVIDIA for d in pci_devices(asked.roots)):
            found = Found(found.status, f"no NVIDIA GPU is on the PCI bus; {found.reason}", f"such a GPU, and: {found.remedy}")
        yield Nothing(found, nvml.start)
        return
    try:
        listed = gpus(nvml)
    except NvmlError as e:
        yield Nothing(found_by_code(e))
        return
    if not listed.found and not listed.silent:
        yield Nothing(Found("absent", "the driver sees no GPU", "give this machine or container a GPU"))
        return
    for index, error in listed.silent.items():
        yield Nothing(found_by_code(error), name=f"nvml-{index}")
    if not listed.found:
        return
    boot = procfs.boot_id(asked.roots.proc)[:8]
    owners = Owners(asked.servers, asked.roots.proc)
    seats = [Seat(nvml, gpu, boot) for gpu in listed.found]
    for seat in seats:
        yield CountersSource(seat)
        yield StateSource(seat, owners)
        yield GpmSource(seat)
        yield WindowSource(seat)
    yield EventsSource(seats)
