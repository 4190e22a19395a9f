"""The servers' processes and the machine's CPUs, as the operating system counts them."""

from __future__ import annotations

from collections.abc import Iterator

from hoptrace.collectors.hardware.processes.machine import CpuSource, PressureSource
from hoptrace.collectors.hardware.processes.process import ProcessSource
from hoptrace.collectors.hardware.source import Asked, Source

__all__ = ["sources"]


def sources(asked: Asked) -> Iterator[Source]:
    """The machine's CPUs and pressure; one source for each server."""
    yield CpuSource(asked.roots)
    yield PressureSource(asked.roots)
    for server in asked.servers:
        yield ProcessSource(server, asked.roots, several=len(asked.servers) > 1)
