"""What the kernel counts of interrupts, disks, the PCI tree, control groups, caches, energy and the uncore."""

from __future__ import annotations

from collections.abc import Iterator

from hoptrace.collectors.hardware.kernel.block import BlockSource
from hoptrace.collectors.hardware.kernel.interrupts import InterruptSource
from hoptrace.collectors.hardware.source import Asked, Source

__all__ = ["sources"]


def sources(asked: Asked) -> Iterator[Source]:
    """One source for each thing that is counted."""
    yield InterruptSource(asked.roots)
    yield BlockSource(asked.roots)
