"""What the names of drivers' statistics (`ethtool -S`) mean. There is no common list: these are read from the kernel's documents
of mlx5 (Documentation/networking/device_drivers/ethernet/mellanox/mlx5/counters.rst), ionic and virtio_net."""

from __future__ import annotations

import re

from hoptrace.collectors.hardware.sink import Direction

__all__ = ["is_known", "meaning"]

_KNOWN: dict[str, tuple[str, str, Direction | None]] = {
    # RoCE, of this function alone, headers included: neither the network stack nor /proc/net/dev sees it.
    "rx_vport_rdma_unicast_bytes": ("rdma_unicast_bytes", "bytes", "rx"),
    "tx_vport_rdma_unicast_bytes": ("rdma_unicast_bytes", "bytes", "tx"),
    "rx_vport_rdma_multicast_bytes": ("rdma_multicast_bytes", "bytes", "rx"),
    "tx_vport_rdma_multicast_bytes": ("rdma_multicast_bytes", "bytes", "tx"),
    # All that crossed the port's wire, of all functions, RoCE and the rest: `raw` is with protocol.
    "rx_bytes_phy": ("raw_phy_bytes", "bytes", "rx"), "tx_bytes_phy": ("raw_phy_bytes", "bytes", "tx"),
    "octets_rx_all": ("raw_phy_bytes", "bytes", "rx"), "octets_tx_total": ("raw_phy_bytes", "bytes", "tx"),
    "rx_pause_ctrl_phy": ("pauses", "frames", "rx"), "tx_pause_ctrl_phy": ("pauses", "frames", "tx"),
    "frames_rx_pause": ("pauses", "frames", "rx"), "frames_tx_pause": ("pauses", "frames", "tx"),
    "rx_discards_phy": ("discards", "packets", "rx"), "tx_discards_phy": ("discards", "packets", "tx"),
    "rx_out_of_buffer": ("out_of_buffer", "packets", "rx"),
}  # fmt: skip

_PRIORITY = re.compile(r"([rt]x)_prio(\d)_(bytes|packets|pause|pause_duration|discards)")
_UNITS = {
    "bytes": "bytes", "octets": "bytes", "packets": "packets", "pkts": "packets", "frames": "frames", "kicks": "kicks",
    "drops": "packets", "dropped": "packets", "discards": "packets", "pause": "frames",
}  # fmt: skip


def is_known(name: str) -> bool:
    """Whether it has a meaning of ours: such ones are never cut off by a limit."""
    return name in _KNOWN or _PRIORITY.fullmatch(name) is not None


def meaning(name: str) -> tuple[str, str, Direction | None]:
    """Our name, unit and direction of a statistic; one that is not known keeps its own name, and unit and direction are what
    the words of the name say (`rx0_drops`, `tx_queue_3_bytes`, `octets_rx_ok`). Kicks are virtio's doorbells."""
    if (known := _KNOWN.get(name)) is not None:
        return known
    if (match := _PRIORITY.fullmatch(name)) is not None:
        way: Direction = "rx" if match[1] == "rx" else "tx"
        # The duration is in microseconds (mlx5's document), of the port's priority.
        unit = {"pause_duration": "us", "pause": "frames", "bytes": "bytes"}.get(match[3], "packets")
        return f"prio{match[2]}_{match[3]}", unit, way
    words = [w.rstrip("0123456789") for w in name.lower().split("_")]
    unit = next((u for w in reversed(words) if (u := _UNITS.get(w)) is not None), "1")
    ways = {w for w in words if w in ("rx", "tx")}
    first: Direction | None = None if len(ways) != 1 else "rx" if "rx" in ways else "tx"
    return name, unit, first
