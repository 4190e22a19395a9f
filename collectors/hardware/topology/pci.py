"""The PCI tree: which devices there are, how they are linked now and at most, and which bridges they share.

Link attributes: Documentation/ABI/testing/sysfs-bus-pci; classes: the PCI Code and ID Assignment Specification.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hoptrace.collectors.hardware.file import read_int, read_text
from hoptrace.collectors.hardware.source import Roots

__all__ = ["KINDS", "PciDevice", "link_bytes_per_s", "pci_devices"]

_BDF = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_SPEED = re.compile(r"(\d+(?:\.\d+)?)\s*GT/s")
_DEEPEST = 16

KINDS = {0x0300: "gpu", 0x0302: "gpu", 0x0380: "gpu", 0x1200: "gpu", 0x0108: "nvme", 0x0200: "nic", 0x0207: "nic", 0x0502: "cxl"}
"""Base class and subclass → kind: display and 3D controllers and processing accelerators, NVMe, Ethernet and InfiniBand
controllers, CXL memory. All else is `other`."""

_GENERATION = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
# What of the signalled bits is payload of the link: 8b/10b, 128b/130b, and 242 of 256 bytes of a flit (PCI Express Base 6.0).
_SHARE = {1: 8 / 10, 2: 8 / 10, 3: 128 / 130, 4: 128 / 130, 5: 128 / 130, 6: 242 / 256}


@dataclass(frozen=True, slots=True)
class PciDevice:
    """One function. ``bdf`` is domain:bus:device.function; ``numa`` null where nobody tells. generation, width: of its link now;
    ``most_``: what the device could do. ``bridges``: from the root port down, without the device."""

    bdf: str
    kind: str
    vendor: int | None
    numa: int | None
    generation: int | None
    width: int | None
    most_generation: int | None
    most_width: int | None
    bridges: tuple[str, ...]

    @property
    def bytes_per_s(self) -> float | None:
        """What the link carries at most in one direction, at its best: an idle link trains down. Headers are in it."""
        return link_bytes_per_s(self.most_generation or self.generation, self.most_width or self.width)


def link_bytes_per_s(generation: int | None, width: int | None) -> float | None:
    """Bytes a second in one direction of a PCIe link, after the encoding of its bits; null where either is not known."""
    rates = {g: rate for rate, g in _GENERATION.items()}
    if generation not in rates or not width:
        return None
    return rates[generation] * 1e9 * _SHARE[generation] * width / 8


def pci_devices(roots: Roots) -> list[PciDevice]:
    """All functions of the machine, by their place."""
    found: list[PciDevice] = []
    try:
        tops = sorted(p for p in (roots.sys / "devices").iterdir() if p.name.startswith("pci"))
    except OSError:
        return []
    for top in tops:
        _walk(top, (), found, 0)
    return sorted(found, key=lambda d: d.bdf)


def _walk(folder: Path, bridges: tuple[str, ...], found: list[PciDevice], depth: int) -> None:
    try:
        below = sorted(p for p in folder.iterdir() if _BDF.fullmatch(p.name) and p.is_dir() and not p.is_symlink())
    except OSError:
        return
    for path in below:
        found.append(_device(path, bridges))
        if depth < _DEEPEST:
            _walk(path, (*bridges, path.name), found, depth + 1)


def _device(path: Path, bridges: tuple[str, ...]) -> PciDevice:
    number = read_int(path / "class") or 0
    numa = read_int(path / "numa_node")
    return PciDevice(
        path.name, KINDS.get(number >> 8, "other"), read_int(path / "vendor"), numa if numa is not None and numa >= 0 else None,
        _generation(path / "current_link_speed"), _width(path / "current_link_width"),
        _generation(path / "max_link_speed"), _width(path / "max_link_width"), bridges,
    )  # fmt: skip


def _generation(path: Path) -> int | None:
    match = _SPEED.match(read_text(path) or "")
    return _GENERATION.get(float(match[1])) if match else None


def _width(path: Path) -> int | None:
    # 255 stands for unknown, 0 for a link that is down (drivers/pci/pci-sysfs.c).
    width = read_int(path)
    return width if width is not None and 0 < width <= 32 else None
