"""All sources of hardware and operating system counters, family by family: the one list that a capture and `doctor` go by."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from hoptrace.collectors.hardware.clocks import ClocksSource
from hoptrace.collectors.hardware.source import Asked, Source

__all__ = ["FAMILIES", "sources"]

FAMILIES = ("processes", "perf", "kernel", "memory", "nvidia", "amd", "network", "scraped")
"""Each is a package with ``sources(asked)``."""


def sources(asked: Asked) -> Iterator[Source]:
    """Every source there can be, whether it is here or not."""
    yield ClocksSource(asked.roots)
    for family in FAMILIES:
        yield from import_module(f"hoptrace.collectors.hardware.{family}").sources(asked)
