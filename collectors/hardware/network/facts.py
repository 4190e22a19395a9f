"""What network adapters there are, for the platform graph: RDMA devices with their ports and interfaces, Ethernet adapters.

A RoCE port and its Ethernet interface, or an InfiniBand port and its IPoIB interface, are one wire: each is told with the other's
name. Documentation/ABI/stable/sysfs-class-infiniband, Documentation/ABI/testing/sysfs-class-net.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hoptrace.collectors.hardware.file import read_int, read_text
from hoptrace.collectors.hardware.source import Roots

__all__ = ["Adapter", "Network", "Port", "RdmaDevice", "network_facts"]

_ARPHRD_INFINIBAND = 32  # linux/if_arp.h: an IPoIB interface
_ACTIVE = "4"
_BDF = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*Gb/sec")
_GIDS = 4

LinkLayer = Literal["infiniband", "ethernet"]


@dataclass(frozen=True, slots=True)
class Port:
    """A port. ``active``: it can carry data; null where nobody tells. ``bytes_per_s``: of one direction, null where it is not
    active or nobody tells. ``interface``: the network interface on the same wire."""

    number: str
    link_layer: LinkLayer | None
    active: bool | None
    bytes_per_s: float | None
    interface: str | None


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """``bdf``: its PCI function, null for software devices (rxe, siw). ``numa``: the node that it hangs on."""

    name: str
    bdf: str | None
    numa: int | None
    ports: tuple[Port, ...]


@dataclass(frozen=True, slots=True)
class Adapter:
    """A network interface that is a device. ``rdma``: (device, port) on the same wire. ``bytes_per_s``: the negotiated speed,
    null while the link is down or where the driver does not tell (virtio)."""

    name: str
    bdf: str | None
    numa: int | None
    up: bool | None
    bytes_per_s: float | None
    ipoib: bool
    rdma: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Network:
    """All that there is."""

    rdma: tuple[RdmaDevice, ...]
    adapters: tuple[Adapter, ...]


def network_facts(roots: Roots) -> Network:
    """The adapters of a machine; what can't be read is null or left out. Software interfaces (bridges, tunnels) are none."""
    rdma = tuple(_device(p) for p in _entries(roots.sys / "class/infiniband"))
    wires: dict[str, list[tuple[str, str]]] = {}
    for device in rdma:
        for port in device.ports:
            if port.interface is not None:
                wires.setdefault(port.interface, []).append((device.name, port.number))
    found = [p for p in _entries(roots.sys / "class/net") if (p / "device").exists()]
    return Network(rdma, tuple(_adapter(p, tuple(wires.get(p.name, ()))) for p in found))


def _device(path: Path) -> RdmaDevice:
    interfaces = [p.name for p in _entries(path / "device/net")]
    # A software device says on which interface it stands.
    only = interfaces[0] if len(interfaces) == 1 else read_text(path / "parent")
    numbers = sorted((p for p in _entries(path / "ports") if p.is_dir()), key=lambda p: (len(p.name), p.name))
    ports = tuple(_port(p, only if len(numbers) == 1 else None) for p in numbers)
    return RdmaDevice(path.name, _bdf(path), _numa(path), ports)


def _port(path: Path, only: str | None) -> Port:
    layer = (read_text(path / "link_layer") or "").lower()
    state = (read_text(path / "state") or "").split(":")[0]
    rate = _RATE.match(read_text(path / "rate") or "")
    active = state == _ACTIVE if state.isdigit() else None
    gids = (read_text(path / f"gid_attrs/ndevs/{i}") for i in range(_GIDS))
    return Port(
        path.name,
        "infiniband" if layer == "infiniband" else "ethernet" if layer == "ethernet" else None,
        active,
        float(rate[1]) * 1e9 / 8 if rate and active else None,
        next((g for g in gids if g), None) or only or None,
    )


def _adapter(path: Path, rdma: tuple[tuple[str, str], ...]) -> Adapter:
    mbit = read_int(path / "speed")
    state = read_text(path / "operstate")
    return Adapter(
        path.name, _bdf(path), _numa(path), None if state in (None, "unknown") else state == "up",
        mbit * 1e6 / 8 if mbit is not None and 0 < mbit < 1 << 31 else None,
        read_int(path / "type") == _ARPHRD_INFINIBAND, rdma,
    )  # fmt: skip


def _bdf(path: Path) -> str | None:
    """The PCI function nearest to it: the last in the real path of its device."""
    try:
        known = _BDF.findall(str((path / "device").resolve()))
    except (OSError, RuntimeError):
        return None
    return known[-1] if known else None


def _numa(path: Path) -> int | None:
    node = read_int(path / "device/numa_node")
    return node if node is not None and node >= 0 else None  # -1: the firmware does not say


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
