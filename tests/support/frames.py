"""Packets made by hand: TCP segments in IPv4 or IPv6, frames, a connection that counts its own sequence numbers."""

from __future__ import annotations

import ipaddress
import struct
from dataclasses import dataclass, field

from hoptrace.collectors.engines.streams.packets import ACK, FIN, RST, SYN, Segment, segment

PSH = 0x08
CLIENT, SERVER, PORT = ("10.0.0.9", 40_000), ("10.0.0.1", 8000), 8000


def tcp(sport: int, dport: int, seq: int, ack: int, flags: int, data: bytes, *, window: int = 500, options: bytes = b"") -> bytes:
    offset = (20 + len(options)) // 4 << 4
    return struct.pack("!HHIIBBHHH", sport, dport, seq % 2**32, ack % 2**32, offset, flags, window, 0, 0) + options + data


def ipv4(
    src: str,
    dst: str,
    payload: bytes,
    *,
    options: bytes = b"",
    fragment: int = 0x4000,
    protocol: int = 6,
    total: int | None = None,
) -> bytes:
    length = 20 + len(options) + len(payload) if total is None else total
    head = struct.pack("!BBHHHBBH", 0x40 | (5 + len(options) // 4), 0, length, 1, fragment, 64, protocol, 0)
    return head + ipaddress.IPv4Address(src).packed + ipaddress.IPv4Address(dst).packed + options + payload


def ipv6(src: str, dst: str, payload: bytes, *, following: int = 6, length: int | None = None) -> bytes:
    head = struct.pack("!IHBB", 0x6000_0000, len(payload) if length is None else length, following, 64)
    return head + ipaddress.IPv6Address(src).packed + ipaddress.IPv6Address(dst).packed + payload


def ethernet(packet: bytes, *vlans: int) -> bytes:
    kind = 0x0800 if packet[0] >> 4 == 4 else 0x86DD
    tags = b"".join(struct.pack("!HH", 0x8100, v) for v in vlans)
    return bytes(12) + tags + struct.pack("!H", kind) + packet


@dataclass
class Peers:
    """A client and a server that talk; gives each packet as an IPv4 packet from its header on."""

    client: tuple[str, int] = CLIENT
    server: tuple[str, int] = SERVER
    client_seq: int = 1000
    server_seq: int = 9_000_000
    packets: list[bytes] = field(default_factory=list)

    def _packet(self, up: bool, flags: int, data: bytes, window: int) -> bytes:
        a, b = (self.client, self.server) if up else (self.server, self.client)
        seq, ack = (self.client_seq, self.server_seq) if up else (self.server_seq, self.client_seq)
        packet = ipv4(a[0], b[0], tcp(a[1], b[1], seq, ack if flags & ACK else 0, flags, data, window=window))
        step = len(data) + bool(flags & (SYN | FIN))
        if up:
            self.client_seq += step
        else:
            self.server_seq += step
        self.packets.append(packet)
        return packet

    def up(self, data: bytes = b"", flags: int = ACK, window: int = 500) -> bytes:
        return self._packet(True, flags, data, window)

    def down(self, data: bytes = b"", flags: int = ACK, window: int = 500) -> bytes:
        return self._packet(False, flags, data, window)

    def open(self) -> list[bytes]:
        return [self.up(flags=SYN), self.down(flags=SYN | ACK), self.up()]

    def close(self) -> list[bytes]:
        return [self.down(flags=FIN | ACK), self.up(flags=FIN | ACK), self.down()]

    def reset(self, up: bool) -> bytes:
        return self._packet(up, RST | ACK, b"", 0)


def parsed(packet: bytes, port: int = PORT) -> Segment:
    """The packet's segment; the test fails if it has none."""
    found = segment(packet, 0, len(packet), 0, port)
    assert isinstance(found, Segment), found
    return found
