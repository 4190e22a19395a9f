"""What the files of an RDMA port count: our name, unit, what one is, and where a counter stops.

Documentation/ABI/stable/sysfs-class-infiniband and drivers/infiniband/core/sysfs.c of the kernel (the widths of PortCounters);
the names under hw_counters are each driver's own (mlx5, rxe, efa, irdma, bnxt_re, ionic).
"""

from __future__ import annotations

from dataclasses import dataclass

from hoptrace.collectors.hardware.sink import Direction, Semantics

__all__ = ["HOT", "What", "hw_meaning", "meaning"]

HOT = frozenset(("port_xmit_data", "port_rcv_data", "port_xmit_packets", "port_rcv_packets", "port_xmit_wait"))
"""Read each time; all others once a second: on mlx5 each file is a command to the firmware."""

# PortXmitData counts all between the start of a packet and its VCRC (InfiniBand Architecture Specification, PortCounters): the
# headers too, so it is no payload.
_KNOWN: dict[str, tuple[str, str, int, Direction | None]] = {
    "port_xmit_data": ("raw_bytes", "bytes", 4, "tx"), "port_rcv_data": ("raw_bytes", "bytes", 4, "rx"),
    "port_xmit_packets": ("packets", "packets", 1, "tx"), "port_rcv_packets": ("packets", "packets", 1, "rx"),
    "unicast_xmit_packets": ("unicast_packets", "packets", 1, "tx"),
    "unicast_rcv_packets": ("unicast_packets", "packets", 1, "rx"),
    "multicast_xmit_packets": ("multicast_packets", "packets", 1, "tx"),
    "multicast_rcv_packets": ("multicast_packets", "packets", 1, "rx"),
    "port_xmit_wait": ("port_xmit_wait", "ticks", 1, None), "link_downed": ("link_downed", "times", 1, None),
    "link_error_recovery": ("link_error_recovery", "times", 1, None), "symbol_error": ("symbol_error", "errors", 1, None),
    "port_rcv_errors": ("port_rcv_errors", "packets", 1, "rx"), "port_xmit_discards": ("port_xmit_discards", "packets", 1, "tx"),
    "VL15_dropped": ("VL15_dropped", "packets", 1, None),
}  # fmt: skip
"""The tick of port_xmit_wait (data to send, no credit) is the device's own."""

_BITS = {
    "symbol_error": 16, "link_error_recovery": 8, "link_downed": 8, "port_rcv_errors": 16, "port_rcv_remote_physical_errors": 16,
    "port_rcv_switch_relay_errors": 16, "port_xmit_discards": 16, "port_xmit_constraint_errors": 8,
    "port_rcv_constraint_errors": 8, "local_link_integrity_errors": 4, "excessive_buffer_overrun_errors": 4, "VL15_dropped": 16,
    "port_xmit_wait": 32,
}  # fmt: skip
_EXTENDED = ("port_xmit_data", "port_rcv_data", "port_xmit_packets", "port_rcv_packets")
_WAYS: dict[str, Direction] = {"tx": "tx", "sent": "tx", "xmit": "tx", "rx": "rx", "rcvd": "rx", "recv": "rx"}
_UNITS = {"bytes": "bytes", "octets": "bytes", "pkts": "packets", "packets": "packets"}
_RXE: dict[str, tuple[str, Direction]] = {"sent_pkts": ("packets", "tx"), "rcvd_pkts": ("packets", "rx")}
_GAUGES = ("active_", "watermark_")


@dataclass(frozen=True, slots=True)
class What:
    """``one``: what one count is in ``unit``. ``end``: the reading at which the counter stops for good (it saturates, it does
    not wrap), null where it does not or nobody tells."""

    name: str
    unit: str
    one: int = 1
    direction: Direction | None = None
    semantics: Semantics = "cumulative"
    end: int | None = None


def meaning(file: str, *, extended: bool) -> What:
    """Of a file in `counters`. ``extended``: the adapter has 64-bit data and packet counters (then it counts unicast packets
    too, which the old ones do not)."""
    bits = _BITS.get(file) or (32 if file in _EXTENDED and not extended else None)
    end = None if bits is None else (1 << bits) - 1
    name, unit, one, way = _KNOWN.get(file, (file, "1", 1, None))
    return What(name, unit, one, way, end=end)


def hw_meaning(file: str) -> What:
    """Of a file in `hw_counters`: its own name, with unit and direction where the name tells them."""
    if (packets := _RXE.get(file)) is not None:
        return What(packets[0], "packets", direction=packets[1])
    words = file.lower().split("_")
    unit = next((u for w in reversed(words) if (u := _UNITS.get(w)) is not None), "1")
    gauge = file.startswith(_GAUGES)
    return What(file, unit, direction=_WAYS.get(words[0]), semantics="gauge" if gauge else "cumulative")
