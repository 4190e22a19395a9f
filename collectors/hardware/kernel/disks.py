"""/proc/diskstats as numbers, and which of its lines are disks that count their bytes once.

Format: Documentation/admin-guide/iostats.rst. A sector there is 512 bytes, whatever the disk's own is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["SECTOR_BYTES", "chosen", "lines_of", "whole_disks"]

SECTOR_BYTES = 512

# What has no medium of its own: its bytes are those of a file, of memory, or of the disks below it.
_NOT_DISKS = re.compile(r"(loop|ram|zram|dm-|md|sr|fd|nbd|drbd|bcache)\d+(p\d+)?")
_PATH = re.compile(r"(nvme\d+)c\d+(n\d+)")
_ENDS_IN_DIGIT = re.compile(r".*\d")


def lines_of(data: bytes) -> dict[str, list[int]]:
    """Device → its counters, from reads completed on (11 before Linux 4.18, 15, 17 since 5.5). Lines that are none are left
    out, as is a last one without its end."""
    found: dict[str, list[int]] = {}
    for line in data.split(b"\n")[:-1]:
        words = line.split()
        if len(words) >= 14 and all(w.isdigit() for w in words[3:]):
            found[words[2].decode("utf-8", "replace")] = list(map(int, words[3:]))
    return found


def whole_disks(names: Iterable[str]) -> list[str]:
    """Those that are neither partitions nor built of others nor in memory. Paths of NVMe namespaces are among them.

    A partition bears its disk's name and a number, with p between where the name ends in a digit (the kernel's disk_name); where
    there is no such disk (xvda1 alone) it is one.
    """
    known = set(names)
    return sorted(n for n in known if not _NOT_DISKS.fullmatch(n) and not _is_partition(n, known))


def chosen(disks: Iterable[str]) -> dict[str, list[str]]:
    """Disk → its paths. NVMe multipath lists each path (nvme0c0n1) and the namespace that they lead to (nvme0n1), both with the
    same bytes; kernels before 6.4 leave the namespace's own at 0. A path without its namespace is a disk of the name it would
    have."""
    found: dict[str, list[str]] = {}
    for name in disks:
        path = _PATH.fullmatch(name)
        if path is None:
            found.setdefault(name, [])
        else:
            found.setdefault(path[1] + path[2], []).append(name)
    return found


def _is_partition(name: str, known: set[str]) -> bool:
    base = name.rstrip("0123456789")
    if base == name:
        return False
    if base in known and not _ENDS_IN_DIGIT.fullmatch(base):
        return True
    return base.endswith("p") and base[:-1] in known and _ENDS_IN_DIGIT.fullmatch(base[:-1]) is not None
