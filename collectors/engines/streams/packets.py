"""TCP segments of one port out of captured frames: link headers, VLAN tags, IPv4, IPv6 with extension headers.

Checksums are not looked at: a frame that leaves this machine is captured before the card fills them in.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

__all__ = ["ACK", "FIN", "RST", "SYN", "Segment", "link", "segment"]

FIN, SYN, RST, ACK = 0x01, 0x02, 0x04, 0x10

# Why a packet is passed over; the words under which it is counted.
FRAGMENT = "IP fragment"
BROKEN = "broken header"
OTHER = "not TCP of this port"
LINK = "unknown link layer"

_TCP = 6
_IPV4_TCP = struct.Struct("!HHIIBBH")  # ports, sequence, acknowledgement, offset, flags, window
_U16 = struct.Struct("!H")
_VLAN = (0x8100, 0x88A8, 0x9100)
_IPV4, _IPV6 = 0x0800, 0x86DD
# Extension headers that may stand before TCP (RFC 8200, section 4; RFC 4302 for authentication; RFC 6275, 7401, 5533).
_HOP, _ROUTING, _FRAGMENT, _AUTH, _DESTINATION = 0, 43, 44, 51, 60
_EXTENSIONS = (_HOP, _ROUTING, _AUTH, _DESTINATION, 135, 139, 140)
_LOOPBACK_TYPE = 772
_OUTGOING = 4


@dataclass(slots=True)
class Segment:
    """One TCP segment. ``client`` and ``server`` are address and port in network order (6 or 18 bytes).

    ``size`` is the payload's length on the wire; ``data`` is shorter where the capture cut it.
    """

    to_server: bool
    client: bytes
    server: bytes
    seq: int
    ack: int
    flags: int
    window: int
    data: bytes
    size: int


def link(frame: bytes | memoryview, kind: int) -> int | str:
    """Where the IP header begins in a frame of link type ``kind`` (https://www.tcpdump.org/linktypes.html); else why not."""
    if kind == 1:  # Ethernet
        at = 12
    elif kind == 113:  # Linux cooked
        if len(frame) >= 16 and _u16(frame, 0) == _OUTGOING and _u16(frame, 2) == _LOOPBACK_TYPE:
            return OTHER  # loopback: the packet comes a second time, as received
        at = 14
    elif kind == 276:  # Linux cooked, version 2
        if len(frame) >= 20 and frame[10] == _OUTGOING and _u16(frame, 8) == _LOOPBACK_TYPE:
            return OTHER
        return _network(frame, 20, _u16(frame, 0)) if len(frame) >= 20 else BROKEN
    elif kind in (0, 108):  # BSD loopback: an address family, whose byte order and value differ between systems
        return 4 if len(frame) > 4 else BROKEN
    elif kind in (12, 14, 101, 228, 229):  # raw IP
        return 0
    else:
        return LINK
    if len(frame) < at + 2:
        return BROKEN
    return _network(frame, at + 2, _u16(frame, at))


def _network(frame: bytes | memoryview, at: int, protocol: int) -> int | str:
    while protocol in _VLAN:
        if len(frame) < at + 4:
            return BROKEN
        protocol = _u16(frame, at + 2)
        at += 4
    return at if protocol in (_IPV4, _IPV6) else OTHER


def _u16(frame: bytes | memoryview, at: int) -> int:
    return int(_U16.unpack_from(frame, at)[0])


def segment(data: bytes | memoryview, at: int, end: int, beyond: int, port: int | None) -> Segment | str:
    """The TCP segment in the IP packet ``data[at:end]``, or why there is none that counts. With a null ``port`` all count, and
    whoever they go to is taken for the server.

    ``beyond`` is how many bytes of the packet the capture cut off after ``end``. A packet without a length (it was merged from
    several and is larger than the field can say: BIG TCP) lasts to the end of what was captured.
    """
    if end - at < 20:
        return BROKEN
    version = data[at] >> 4
    if version == 4:
        header = (data[at] & 15) * 4
        total = (data[at + 2] << 8) | data[at + 3]
        if header < 20 or (total and total < header):
            return BROKEN
        if data[at + 9] != _TCP:
            return OTHER
        if (data[at + 6] & 0x3F) | data[at + 7]:  # more fragments, or an offset
            return FRAGMENT
        src, dst, tcp = data[at + 12 : at + 16], data[at + 16 : at + 20], at + header
        stop = at + total if total else end + beyond
    elif version == 6:
        found = _ipv6(data, at, end)
        if isinstance(found, str):
            return found
        payload = (data[at + 4] << 8) | data[at + 5]
        src, dst, tcp = data[at + 8 : at + 24], data[at + 24 : at + 40], found
        stop = at + 40 + payload if payload else end + beyond
    else:
        return BROKEN
    if tcp + 20 > end or stop > end + beyond:
        return BROKEN
    sport, dport, seq, ack, offset, flags, window = _IPV4_TCP.unpack_from(data, tcp)
    to_server = port is None or dport == port
    if not to_server and sport != port:
        return OTHER
    begin = tcp + (offset >> 4) * 4
    if begin < tcp + 20 or begin > stop:
        return BROKEN
    payload_data = bytes(data[begin : min(stop, end)])
    a, b = bytes(src) + bytes(data[tcp : tcp + 2]), bytes(dst) + bytes(data[tcp + 2 : tcp + 4])
    if to_server:
        return Segment(True, a, b, seq, ack, flags, window, payload_data, stop - begin)
    return Segment(False, b, a, seq, ack, flags, window, payload_data, stop - begin)


def _ipv6(data: bytes | memoryview, at: int, end: int) -> int | str:
    """Where TCP begins behind the extension headers."""
    if end - at < 40:
        return BROKEN
    following, at = data[at + 6], at + 40
    while following != _TCP:
        if following == _FRAGMENT:
            if end - at < 8:
                return BROKEN
            # A header that says "the only fragment" (RFC 6946) is none.
            if _u16(data, at + 2) & 0xFFF9:
                return FRAGMENT
            following, at = data[at], at + 8
            continue
        if following not in _EXTENSIONS:
            return OTHER
        if end - at < 2:
            return BROKEN
        length = (data[at + 1] + 2) * 4 if following == _AUTH else (data[at + 1] + 1) * 8
        following, at = data[at], at + length
    return at
