"""Memory: how full it is, what moves between its nodes and tiers, CXL devices."""

from __future__ import annotations

from collections.abc import Iterator

from hoptrace.collectors.hardware.memory.cxl import CxlSource
from hoptrace.collectors.hardware.memory.meminfo import MeminfoSource
from hoptrace.collectors.hardware.memory.nodes import NodesSource
from hoptrace.collectors.hardware.memory.numa_maps import NumaMapsSource
from hoptrace.collectors.hardware.memory.tiers import TiersSource
from hoptrace.collectors.hardware.memory.vmstat import VmstatSource
from hoptrace.collectors.hardware.source import Asked, Source

__all__ = ["sources"]


def sources(asked: Asked) -> Iterator[Source]:
    """The machine's, and one for each server."""
    yield MeminfoSource(asked.roots)
    yield VmstatSource(asked.roots)
    yield NodesSource(asked.roots)
    yield TiersSource(asked.roots)
    yield CxlSource(asked.roots)
    for server in asked.servers:
        yield NumaMapsSource(server, asked.roots, several=len(asked.servers) > 1)
