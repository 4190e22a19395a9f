"""A PCI function's link and error counts as sysfs tells them (Documentation/ABI/testing/sysfs-bus-pci, …-devices-aer_stats)."""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["AER", "Link", "aer", "gigatransfers", "lanes"]

AER: Final = (("aer_dev_correctable", "correctable"), ("aer_dev_nonfatal", "nonfatal"), ("aer_dev_fatal", "fatal"))
"""File, and what its errors are called here."""

_MOST_LANES = 32


class Link(NamedTuple):
    """GT/s of each lane and the lanes; null: not known, or the link is down."""

    gigatransfers_per_s: float | None
    lanes: int | None

    def __str__(self) -> str:
        speed = "unknown speed" if self.gigatransfers_per_s is None else f"{self.gigatransfers_per_s:g} GT/s"
        return f"{speed} x{self.lanes if self.lanes is not None else '?'}"

    def below(self, most: Link) -> bool:
        """Whether it is known to be less than ``most``."""
        return any(a is not None and b is not None and a < b for a, b in zip(self, most, strict=True))


def gigatransfers(data: bytes) -> float | None:
    """b"32.0 GT/s PCIe" → 32.0; "Unknown" → null. Older kernels write "8 GT/s"."""
    number, _, unit = data.strip().partition(b" ")
    if not unit.startswith(b"GT/s"):
        return None
    try:
        found = float(number)
    except ValueError:
        return None
    return found if 0 < found < 1000 else None


def lanes(data: bytes) -> int | None:
    """Lanes of the link; 0 is a link that is down, 255 unknown (drivers/pci/pci-sysfs.c)."""
    word = data.strip()
    found = int(word) if word.isdigit() else 0
    return found if 0 < found <= _MOST_LANES else None


def aer(data: bytes) -> tuple[int | None, dict[str, int]]:
    """The total of a table of errors, and its kinds by the kernel's names (BadTLP …)."""
    kinds: dict[str, int] = {}
    total = None
    for line in data.split(b"\n")[:-1]:
        name, _, count = line.partition(b" ")
        count = count.strip()
        if not name or not count.isdigit():
            continue
        if name.startswith(b"TOTAL_ERR_"):
            total = int(count)
        else:
            kinds[name.decode("ascii", "replace")] = int(count)
    return total, kinds
