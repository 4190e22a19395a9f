"""Memory: how full it is, what moves between its nodes and tiers, CXL devices."""

from __future__ import annotations

from collections.abc import Iterator

from hoptrace.collectors.hardware.memory.cgroup import CgroupMemorySource
from hoptrace.collectors.hardware.memory.cxl import CxlSource
from hoptrace.collectors.hardware.memory.damon import DamonSource
from hoptrace.collectors.hardware.memory.meminfo import MeminfoSource
from hoptrace.collectors.hardware.memory.nodes import NodesSource
from hoptrace.collectors.hardware.memory.numa_maps import NumaMapsSource
from hoptrace.collectors.hardware.memory.swap import SwapSource
from hoptrace.collectors.hardware.memory.tiers import TiersSource
from hoptrace.collectors.hardware.memory.vmstat import VmstatSource
from hoptrace.collectors.hardware.source import Asked, Source

__all__ = ["sources"]


def sources(asked: Asked) -> Iterator[Source]:
    """The machine's, and the servers'."""
    yield MeminfoSource(asked.roots)
    yield VmstatSource(asked.roots)
    yield NodesSource(asked.roots)
    yield TiersSource(asked.roots)
    yield SwapSource(asked.roots)
    yield CxlSource(asked.roots)
    yield DamonSource(asked.roots)
    yield CgroupMemorySource(asked.servers, asked.roots)
    for server in asked.servers:
        yield NumaMapsSource(server, asked.roots, several=len(asked.servers) > 1)
