"""Capture files made by hand."""

from __future__ import annotations

import struct

Packet = tuple[int, bytes]
"""UTC time in ns, and the frame."""


def pcap(packets: list[Packet], *, link: int = 1, order: str = "<", nanoseconds: bool = True, snap: int = 1 << 18) -> bytes:
    scale = 1 if nanoseconds else 1000
    out = [struct.pack(order + "IHHiIII", 0xA1B23C4D if nanoseconds else 0xA1B2C3D4, 2, 4, 0, 0, snap, link)]
    for ns, data in packets:
        cut = data[:snap]
        out += [struct.pack(order + "IIII", ns // 10**9, ns % 10**9 // scale, len(cut), len(data)), cut]
    return b"".join(out)


def block(order: str, kind: int, body: bytes) -> bytes:
    body += bytes(-len(body) % 4)
    length = 12 + len(body)
    return struct.pack(order + "II", kind, length) + body + struct.pack(order + "I", length)


def option(order: str, code: int, value: bytes) -> bytes:
    return struct.pack(order + "HH", code, len(value)) + value + bytes(-len(value) % 4)


def section(order: str) -> bytes:
    return block(order, 0x0A0D0D0A, struct.pack(order + "IHHq", 0x1A2B3C4D, 1, 0, -1) + option(order, 4, b"a test") + bytes(4))


def interface(order: str, link: int, *, unit: int | None = None, offset_s: int | None = None) -> bytes:
    options = b"" if unit is None else option(order, 9, bytes([unit]))
    options += b"" if offset_s is None else option(order, 14, struct.pack(order + "q", offset_s))
    return block(order, 1, struct.pack(order + "HHI", link, 0, 0) + options + (bytes(4) if options else b""))


def packet(order: str, number: int, ticks: int, data: bytes, *, size: int | None = None) -> bytes:
    head = struct.pack(order + "IIIII", number, ticks >> 32, ticks & 0xFFFF_FFFF, len(data), size or len(data))
    return block(order, 6, head + data)


def pcapng(packets: list[Packet], *, link: int = 1, order: str = "<") -> bytes:
    return section(order) + interface(order, link, unit=9) + b"".join(packet(order, 0, ns, data) for ns, data in packets)
