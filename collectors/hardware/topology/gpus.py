"""GPUs as nodes of the graph: what the PCI tree tells of any, and what a vendor's library adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hoptrace.collectors.hardware.nvidia.topology import GpuLinks, joined
from hoptrace.collectors.hardware.source import Roots
from hoptrace.collectors.hardware.topology.pci import PciDevice, link_bytes_per_s

__all__ = ["gpus"]

_VENDORS = {0x10DE: "NVIDIA", 0x1002: "AMD", 0x8086: "Intel"}


def gpus(roots: Roots, pci: Sequence[PciDevice], host: str | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A compute node for each GPU, its memory where it is told, its PCIe link, NVLinks and C2C."""
    told = joined(roots)
    if told:
        return _nvidia(told, pci, host)
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


def _nvidia(
    told: Sequence[GpuLinks], pci: Sequence[PciDevice], host: str | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    nodes: list[dict[str, Any]] = []
    links: list[dict[str, Any]] = []
    by_bdf = {g.gpu.bdf: f"gpu{g.gpu.index}" for g in told if g.gpu.bdf}
    switches = False
    for g in told:
        name, memory = f"gpu{g.gpu.index}", f"hbm{g.gpu.index}"
        device = next((d for d in pci if d.bdf == g.gpu.bdf), None)
        numa = device.numa if device and device.numa is not None else g.numa
        node: dict[str, Any] = {"name": name, "kind": "compute", "model": g.gpu.name, "uuid": g.gpu.uuid, "numa": numa}
        node["bdf"] = g.gpu.bdf
        nodes.append({k: v for k, v in node.items() if v is not None})
        own: dict[str, Any] = {"name": memory, "kind": "hbm", "capacity_bytes": g.memory_bytes, "numa": g.memory_numa}
        nodes.append({k: v for k, v in own.items() if v is not None})
        links.append({"name": f"{name}-{memory}", "a": name, "b": memory, "kind": "hbm"})
        near = f"dram{numa}" if numa is not None else host
        if near:
            links.append(_host_link(g, name, near, device))
            if g.c2c_links:
                c2c: dict[str, Any] = {
                    "name": f"{name}-{near}-c2c",
                    "a": name,
                    "b": near,
                    "kind": "c2c",
                    "entity": f"c2c:{g.gpu.uuid}",
                }
                c2c |= {"width": g.c2c_links, "source": "NVML"}
                rate = None if g.c2c_bytes_per_s is None else g.c2c_bytes_per_s * g.c2c_links
                links.append(c2c if rate is None else c2c | {"bytes_per_s": rate})
        for k in g.nvlinks:
            to = by_bdf.get(k.bdf or "") if k.to == "gpu" else "nvswitch" if k.to == "switch" else None
            switches |= to == "nvswitch"
            link: dict[str, Any] = {
                "name": f"{name}-nvlink{k.link}", "a": name, "b": to, "kind": "nvlink", "entity": f"nvlink:{g.gpu.uuid}/{k.link}",
                "bytes_per_s": k.bytes_per_s, "source": "NVML" if k.bytes_per_s else None,
            }  # fmt: skip
            links.append({key: v for key, v in link.items() if v is not None})
    if switches:
        nodes.append({"name": "nvswitch", "kind": "switch"})
    return nodes, links


def _host_link(g: GpuLinks, name: str, near: str, device: PciDevice | None) -> dict[str, Any]:
    """The PCIe link to the host: NVML knows what it can do, sysfs where it hangs."""
    link = pcie_link(name, near, device) if device else {"name": f"{name}-{near}", "a": name, "b": near, "kind": "pcie"}
    if g.gpu.bdf:
        link["entity"] = f"pcie:{g.gpu.bdf}"
    rate = link_bytes_per_s(g.generation, g.width)
    if rate is not None:
        link |= {"generation": g.generation, "width": g.width, "bytes_per_s": rate, "source": "PCIe generation and width (NVML)"}
    return link


def pcie_link(name: str, near: str, device: PciDevice) -> dict[str, Any]:
    """The link of a device to its host; sent is what the device sends."""
    link = {
        "name": f"{name}-{near}", "a": name, "b": near, "kind": "pcie", "entity": f"pcie:{device.bdf}",
        "generation": device.generation, "width": device.width, "bytes_per_s": device.bytes_per_s,
        "via": list(device.bridges) or None,
        "source": "PCIe generation and width (sysfs)" if device.bytes_per_s else None,
    }  # fmt: skip
    return {k: v for k, v in link.items() if v is not None}
