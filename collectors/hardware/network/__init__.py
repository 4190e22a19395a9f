"""RDMA ports, network interfaces and their links, what drivers and the network stack count."""

from __future__ import annotations

from collections.abc import Iterator

from hoptrace.collectors.hardware.network.carrier import CarrierSource
from hoptrace.collectors.hardware.network.ethtool import EthtoolSource
from hoptrace.collectors.hardware.network.infiniband import InfinibandSource
from hoptrace.collectors.hardware.network.interfaces import InterfacesSource
from hoptrace.collectors.hardware.network.stack import StackSource
from hoptrace.collectors.hardware.source import Asked, Source

__all__ = ["sources"]


def sources(asked: Asked) -> Iterator[Source]:
    """The machine's, and those of servers with a network namespace of their own."""
    yield InfinibandSource(asked.roots)
    yield InterfacesSource(asked.roots, asked.servers)
    yield CarrierSource(asked.roots)
    yield EthtoolSource(asked.roots)
    yield StackSource(asked.roots, asked.servers)
