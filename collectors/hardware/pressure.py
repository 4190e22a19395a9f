"""Pressure stall information: the files of /proc/pressure and of a cgroup (Documentation/accounting/psi.rst)."""

from __future__ import annotations

__all__ = ["pressure_totals"]


def pressure_totals(data: bytes) -> list[tuple[bytes, int]]:
    """(some or full, total in µs) of each line of a pressure file; lines that are none are left out."""
    found = []
    for line in data.splitlines():
        at = line.rfind(b"total=")
        kind = line[: line.find(b" ")]
        digits = line[at + 6 :].strip()
        if at > 0 and kind in (b"some", b"full") and digits.isdigit():
            found.append((kind, int(digits)))
    return found
