"""Disks and network adapters as nodes of the graph, each with the link by which it is reached and the counters that count it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hoptrace.collectors.hardware.file import read_int, read_text
from hoptrace.collectors.hardware.network.facts import network_facts
from hoptrace.collectors.hardware.source import Roots
from hoptrace.collectors.hardware.topology.pci import PciDevice

__all__ = ["disks", "networks"]

_NOT_DISKS = re.compile(r"(loop|ram|zram|dm-|md|sr|fd|nbd)\d*")
_PATH = re.compile(r"nvme\d+c\d+n\d+")  # one path of a multipath namespace: the head bears the name without c
_BDF = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")

_Graph = tuple[list[dict[str, Any]], list[dict[str, Any]]]


def disks(roots: Roots, pci: Sequence[PciDevice], host: str | None) -> _Graph:
    """Whole disks, each once. ``host``: the memory node that their link starts at, if there is one for all."""
    nodes, links = [], []
    for path in _entries(roots.sys / "block"):
        if _NOT_DISKS.fullmatch(path.name) or _PATH.fullmatch(path.name):
            continue
        sectors = read_int(path / "size")
        device = _pci_of(path, pci)
        kind = "nvme" if path.name.startswith("nvme") else "disk"
        node = {"name": path.name, "kind": kind, "capacity_bytes": sectors * 512 if sectors else None}
        node |= {"bdf": device.bdf if device else None, "model": read_text(path / "device/model")}
        nodes.append({k: v for k, v in node.items() if v is not None})
        near = f"dram{device.numa}" if device and device.numa is not None else host
        if near:
            links.append(_link(path.name, near, path.name, "nvme" if kind == "nvme" else "disk", f"block:{path.name}", device))
    return nodes, links


def networks(roots: Roots, pci: Sequence[PciDevice], host: str | None) -> _Graph:
    """RDMA ports and Ethernet interfaces that are real adapters, each towards ``network``. An interface that is one wire with an
    RDMA port has a link of its own: its counters do not see RDMA, and the port's do not see the network stack (RoCE). IPoIB is
    counted by its port."""
    facts = network_facts(roots)
    nodes: list[dict[str, Any]] = []
    links: list[dict[str, Any]] = []
    for rdma in facts.rdma:
        nodes.append(_node(rdma.name, "nic", _pci_of(roots.sys / "class/infiniband" / rdma.name, pci)))
        for port in rdma.ports:
            link = {
                "name": f"{rdma.name}/{port.number}", "a": rdma.name, "b": "network",
                "kind": "roce" if port.link_layer == "ethernet" else "infiniband", "entity": f"rdma:{rdma.name}/{port.number}",
                "bytes_per_s": port.bytes_per_s, "source": "the port's rate (sysfs)" if port.bytes_per_s else None,
                "interface": port.interface,
            }  # fmt: skip
            links.append({k: v for k, v in link.items() if v is not None})
    for adapter in facts.adapters:
        if adapter.ipoib:
            continue
        nodes.append(_node(adapter.name, "nic", _pci_of(roots.sys / "class/net" / adapter.name, pci)))
        link = {
            "name": f"{adapter.name}-network", "a": adapter.name, "b": "network", "kind": "ethernet",
            "entity": f"net:{adapter.name}", "bytes_per_s": adapter.bytes_per_s,
            "source": "the interface's speed (sysfs)" if adapter.bytes_per_s else None,
        }  # fmt: skip
        links.append({k: v for k, v in link.items() if v is not None})
    # What crosses the PCIe links of adapters and disks nobody counts at the device (at the root port: source iio-ports).
    for node in nodes:
        device = next((d for d in pci if d.bdf == node.get("bdf")), None)
        near = f"dram{device.numa}" if device and device.numa is not None else host
        if near:
            links.append(_link(f"{node['name']}-{near}", node["name"], near, "pcie", None, device))
    if nodes:
        nodes.append({"name": "network", "kind": "network"})
    return nodes, links


def _node(name: str, kind: str, device: PciDevice | None) -> dict[str, Any]:
    node = {"name": name, "kind": kind, "bdf": device.bdf if device else None, "numa": device.numa if device else None}
    return {k: v for k, v in node.items() if v is not None}


def _link(name: str, a: str, b: str, kind: str, entity: str | None, device: PciDevice | None) -> dict[str, Any]:
    link: dict[str, Any] = {"name": name, "a": a, "b": b, "kind": kind, "entity": entity}
    if device is not None:
        link |= {
            "generation": device.generation, "width": device.width, "bytes_per_s": device.bytes_per_s,
            "via": list(device.bridges) or None,
            "source": "PCIe generation and width (sysfs)" if device.bytes_per_s else None,
        }  # fmt: skip
    return {k: v for k, v in link.items() if v is not None}


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _pci_of(path: Path, pci: Sequence[PciDevice]) -> PciDevice | None:
    """The PCI function that a class device hangs on: the last one in its real path (an NVMe head has none: that of its first
    path)."""
    places = [path / "device", path]
    if path.name.startswith("nvme"):
        controller = re.match(r"nvme\d+", path.name)
        places.append(path.parent.parent / "class/nvme" / (controller[0] if controller else ""))
    for place in places:
        try:
            real = str(place.resolve())
        except (OSError, RuntimeError):
            continue
        known = [b for b in _BDF.findall(real) if any(d.bdf == b for d in pci)]
        if known:
            return next(d for d in pci if d.bdf == known[-1])
    return None
