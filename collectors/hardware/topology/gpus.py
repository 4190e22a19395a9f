"""GPUs as nodes of the graph: what the PCI tree tells of any, and what a vendor's library adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hoptrace.collectors.hardware.source import Roots
from hoptrace.collectors.hardware.topology.pci import PciDevice

__all__ = ["gpus"]

_VENDORS = {0x10DE: "NVIDIA", 0x1002: "AMD", 0x8086: "Intel"}


def gpus(roots: Roots, pci: Sequence[PciDevice], host: str | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A compute node for each GPU, its memory where it is told, its PCIe link, NVLinks and C2C."""
    nodes: list[dict[str, Any]] = []
    links: list[dict[str, Any]] = []
    # A display controller of a server's baseboard is no GPU that computes: only those whose makers are known.
    mine = [d for d in pci if d.kind == "gpu" and d.vendor in _VENDORS]
    for i, device in enumerate(mine):
        name = f"gpu{i}"
        node: dict[str, Any] = {"name": name, "kind": "compute", "bdf": device.bdf, "numa": device.numa}
        node["model"] = _VENDORS[device.vendor or 0]
        nodes.append({k: v for k, v in node.items() if v is not None})
        near = f"dram{device.numa}" if device.numa is not None else host
        if near:
            links.append(pcie_link(name, near, device))
    return nodes, links


def pcie_link(name: str, near: str, device: PciDevice) -> dict[str, Any]:
    """The link of a device to its host; sent is what the device sends."""
    link = {
        "name": f"{name}-{near}", "a": name, "b": near, "kind": "pcie", "entity": f"pcie:{device.bdf}",
        "generation": device.generation, "width": device.width, "bytes_per_s": device.bytes_per_s,
        "via": list(device.bridges) or None,
        "source": "PCIe generation and width (sysfs)" if device.bytes_per_s else None,
    }  # fmt: skip
    return {k: v for k, v in link.items() if v is not None}
