"""How GPUs are joined, as NVML tells it: PCIe links at their best, NVLinks with what is at their other end, C2C, NUMA nodes.

Tested here against a compiled stub of the library only: no GPU was lent to this project's machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hoptrace.collectors.hardware.nvidia.errors import NvmlError
from hoptrace.collectors.hardware.nvidia.gpus import Gpu, gpus, handle_of
from hoptrace.collectors.hardware.nvidia.library import Nvml, library, within
from hoptrace.collectors.hardware.nvidia.links import c2c_links, field_value, nvlinks
from hoptrace.collectors.hardware.scraped.meaning import pci_address
from hoptrace.collectors.hardware.source import Roots

__all__ = ["GpuLinks", "Joined", "joined"]

_SPEED, _C2C_STATE, _C2C_MBPS = 164, 171, 172
_REMOTE = {0: "gpu", 1: "npu", 2: "switch"}
"""nvmlIntNvLinkDeviceType_t."""
_LEVELS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""nvmlGpuTopologyLevel_t, in the words of `nvidia-smi topo -m`."""
_PEERS = {
    0: "ok", 1: "chipset not supported", 2: "GPU not supported", 3: "I/O hub topology not supported", 4: "disabled by a key",
    5: "not supported",
}  # fmt: skip
"""nvmlGpuP2PStatus_t."""
_P2P_READ, _P2P_NVLINK = 0, 2
_NODE_WORDS, _SCOPE_NODE = 16, 0
_HANGS_S = 5.0


@dataclass(frozen=True, slots=True)
class Joined:
    """One NVLink that is up. ``to``: gpu, npu, switch, or null; ``bdf`` of the other end; ``bytes_per_s`` in one direction."""

    link: int
    to: str | None
    bdf: str | None
    bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class GpuLinks:
    """One GPU. Null is unknown; generation and width are the PCIe link's at its best.

    numa: the nearest node of the host's memory. memory_numa: the node that the GPU's own memory is to the kernel (GH200, GB200).
    c2c_links: those that are up; c2c_bytes_per_s: what one carries in one direction.
    nearest: what the way to another GPU (by UUID) has in common with this one's on PCIe (PIX, PXB, PHB, NODE, SYS). reads:
    whether this GPU may read another's memory (`ok`, or why not). by_nvlink: the same over NVLink.
    """

    gpu: Gpu
    memory_bytes: int | None
    generation: int | None
    width: int | None
    numa: int | None
    memory_numa: int | None
    nvlinks: tuple[Joined, ...]
    c2c_links: int
    c2c_bytes_per_s: float | None
    nearest: Mapping[str, str] = field(default_factory=dict)
    reads: Mapping[str, str] = field(default_factory=dict)
    by_nvlink: Mapping[str, str] = field(default_factory=dict)


def joined(roots: Roots) -> list[GpuLinks]:
    """All GPUs of this machine; none where there is no driver. Does not raise."""
    nvml = library(roots)
    if nvml is None or not nvml.start().available:
        return []
    try:
        found = gpus(nvml).found
    except NvmlError:
        return []
    out = []
    for gpu in found:
        try:
            out.append(within(_HANGS_S, gpu.entity, lambda gpu=gpu: _told(nvml, gpu, found)))  # type: ignore[misc]
        except NvmlError:
            continue
    return out


def _told(nvml: Nvml, gpu: Gpu, every: list[Gpu]) -> GpuLinks:
    with nvml.using(f"topology of {gpu.entity}"):
        return _one(nvml, gpu, every)


def _one(nvml: Nvml, gpu: Gpu, every: list[Gpu]) -> GpuLinks:
    handle = handle_of(nvml, gpu.uuid)
    memory = _tried(nvml, "nvmlDeviceGetMemoryInfo", handle)
    up = [n for n in nvlinks(nvml, handle) if _tried(nvml, "nvmlDeviceGetNvLinkState", handle, n) == 1]
    c2c, c2c_bytes_per_s = _c2c(nvml, handle)
    nearest: dict[str, str] = {}
    reads: dict[str, str] = {}
    by_nvlink: dict[str, str] = {}
    for other in every:
        theirs = _tried(nvml, "nvmlDeviceGetHandleByUUID", other.uuid.encode()) if other.uuid != gpu.uuid else None
        if theirs is None:
            continue
        level = _tried(nvml, "nvmlDeviceGetTopologyCommonAncestor", handle, theirs)
        for told, words, into in (
            (level, _LEVELS, nearest),
            (_tried(nvml, "nvmlDeviceGetP2PStatus", handle, theirs, _P2P_READ), _PEERS, reads),
            (_tried(nvml, "nvmlDeviceGetP2PStatus", handle, theirs, _P2P_NVLINK), _PEERS, by_nvlink),
        ):
            if told is not None and int(told) in words:
                into[other.uuid] = words[int(told)]
    return GpuLinks(
        gpu,
        None if memory is None else int(memory.total),
        _whole(_tried(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle)),
        _whole(_tried(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle)),
        _nearest_node(nvml, handle),
        _whole(_tried(nvml, "nvmlDeviceGetNumaNodeId", handle)),
        tuple(_link(nvml, handle, n) for n in up),
        c2c,
        c2c_bytes_per_s,
        nearest,
        reads,
        by_nvlink,
    )


def _link(nvml: Nvml, handle: Any, number: int) -> Joined:
    kind = _whole(_tried(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, number))
    pci = _tried(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, number)
    bus = None if pci is None else pci.busId
    mbps = field_value(nvml, handle, _SPEED, number)
    return Joined(
        number,
        _REMOTE.get(kind) if kind is not None else None,
        pci_address(bus.decode("ascii", "replace") if isinstance(bus, bytes) else bus),
        mbps * 1e6 if mbps else None,
    )


def _c2c(nvml: Nvml, handle: Any) -> tuple[int, float | None]:
    """How many links to the CPU are up (as far as that is told), and what one of them carries in one direction."""
    up = [n for n in c2c_links(nvml, handle) if field_value(nvml, handle, _C2C_STATE, n) in (1, None)]
    told = [mbps for n in up if (mbps := field_value(nvml, handle, _C2C_MBPS, n))]
    return len(up), sum(told) / len(told) * 1e6 if told else None


def _nearest_node(nvml: Nvml, handle: Any) -> int | None:
    """The one node whose memory is nearest; null where several are as near, or none is told."""
    told = _tried(nvml, "nvmlDeviceGetMemoryAffinity", handle, _NODE_WORDS, _SCOPE_NODE)
    if told is None:
        return None
    nodes = [word * 64 + bit for word, mask in enumerate(told) for bit in range(64) if int(mask) >> bit & 1]
    return nodes[0] if len(nodes) == 1 else None


def _tried(nvml: Nvml, name: str, *arguments: Any) -> Any:
    try:
        return nvml.call(name, *arguments)
    except NvmlError:
        return None


def _whole(value: Any) -> int | None:
    return int(value) if value is not None else None
