"""Segments out of frames: every header that may come before TCP, and those that can't be read."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.frames import CLIENT, PORT, SERVER, ethernet, ipv4, ipv6, tcp

from hoptrace.collectors.engines.streams import packets
from hoptrace.collectors.engines.streams.packets import ACK, Segment, link, segment

ADDRESS = bytes([10, 0, 0, 9]) + struct.pack("!H", 40_000), bytes([10, 0, 0, 1]) + struct.pack("!H", 8000)
UP = tcp(40_000, 8000, 7, 8, ACK, b"GET / HTTP/1.1\r\n", window=3)
DOWN = tcp(8000, 40_000, 0xFFFF_FFFF, 1, ACK, b"ok")


def read(packet: bytes, *, cut: int = 0, port: int = PORT) -> Segment | str:
    return segment(packet, 0, len(packet) - cut, cut, port)


def test_ipv4_both_ways() -> None:
    up, down = read(ipv4(CLIENT[0], SERVER[0], UP)), read(ipv4(SERVER[0], CLIENT[0], DOWN))
    assert up == Segment(True, *ADDRESS, 7, 8, ACK, 3, b"GET / HTTP/1.1\r\n", 16)
    assert down == Segment(False, *ADDRESS, 0xFFFF_FFFF, 1, ACK, 500, b"ok", 2)


def test_options_of_ip_and_tcp_are_passed_over() -> None:
    found = read(ipv4(CLIENT[0], SERVER[0], tcp(40_000, 8000, 1, 1, ACK, b"x", options=bytes(12)), options=bytes(8)))
    assert isinstance(found, Segment) and found.data == b"x"


def test_the_padding_of_a_short_frame_is_no_payload() -> None:
    found = read(ipv4(CLIENT[0], SERVER[0], tcp(40_000, 8000, 1, 1, ACK, b"")) + bytes(6))
    assert isinstance(found, Segment) and (found.size, found.data) == (0, b"")


@pytest.mark.parametrize(
    ("fragment", "refused"), [(0x4000, False), (0x0000, False), (0x2000, True), (0x0010, True), (0x2010, True)]
)
def test_fragments_are_refused(fragment: int, refused: bool) -> None:
    assert (read(ipv4(CLIENT[0], SERVER[0], UP, fragment=fragment)) == packets.FRAGMENT) is refused


def test_a_cut_packet_tells_how_long_it_was() -> None:
    found = read(ipv4(CLIENT[0], SERVER[0], UP), cut=10)
    assert isinstance(found, Segment) and (found.size, found.data) == (16, b"GET / ")


def test_a_packet_too_large_for_its_length_field_lasts_to_its_end() -> None:
    big = b"y" * 70_000
    for packet in (
        ipv4(SERVER[0], CLIENT[0], tcp(8000, 40_000, 1, 1, ACK, big), total=0),
        ipv6("fd00::1", "fd00::9", tcp(8000, 40_000, 1, 1, ACK, big), length=0),
    ):
        found = read(packet)
        assert isinstance(found, Segment) and found.data == big and found.size == 70_000


HOP, ROUTING, AUTH, DESTINATION = 0, 43, 51, 60


@pytest.mark.parametrize(
    ("first", "chain"),
    [
        (6, b""),
        (HOP, bytes([6, 0]) + bytes(6)),
        (HOP, bytes([DESTINATION, 1]) + bytes(14) + bytes([6, 0]) + bytes(6)),
        (ROUTING, bytes([6, 2]) + bytes(22)),
        (AUTH, bytes([6, 4]) + bytes(22)),
        (44, bytes([6, 0, 0, 0]) + bytes(4)),  # an atomic fragment
    ],
)
def test_ipv6_with_extension_headers(first: int, chain: bytes) -> None:
    found = read(ipv6("fd00::9", "fd00::1", chain + UP, following=first))
    assert isinstance(found, Segment)
    assert found.data == b"GET / HTTP/1.1\r\n" and len(found.client) == 18 and found.client[-2:] == ADDRESS[0][-2:]


@pytest.mark.parametrize(
    ("packet", "why"),
    [
        (ipv6("fd00::9", "fd00::1", bytes([6, 0, 0, 1]) + bytes(4) + UP, following=44), packets.FRAGMENT),
        (ipv6("fd00::9", "fd00::1", bytes([6, 0, 0, 8]) + bytes(4) + UP, following=44), packets.FRAGMENT),
        (ipv6("fd00::9", "fd00::1", UP, following=17), packets.OTHER),
        (ipv6("fd00::9", "fd00::1", b"", following=HOP), packets.BROKEN),
        (ipv4(CLIENT[0], SERVER[0], UP, protocol=17), packets.OTHER),
        (ipv4(CLIENT[0], SERVER[0], tcp(40_000, 8001, 1, 1, ACK, b"x")), packets.OTHER),
        (ipv4(CLIENT[0], SERVER[0], UP[:19]), packets.BROKEN),
        (ipv4(CLIENT[0], SERVER[0], UP, total=2000), packets.BROKEN),
        (ipv4(CLIENT[0], SERVER[0], UP, total=10), packets.BROKEN),
        (b"\x41" + ipv4(CLIENT[0], SERVER[0], UP)[1:], packets.BROKEN),
        (b"\x15" * 60, packets.BROKEN),
        (b"", packets.BROKEN),
    ],
)
def test_what_is_not_read_says_why(packet: bytes, why: str) -> None:
    assert read(packet) == why


PACKET4, PACKET6 = ipv4(CLIENT[0], SERVER[0], UP), ipv6("fd00::9", "fd00::1", UP)
COOKED = struct.pack("!HHHQH", 0, 1, 6, 0, 0x0800)
COOKED2 = struct.pack("!HHIHBBQ", 0x86DD, 0, 2, 1, 0, 6, 0)


@pytest.mark.parametrize(
    ("frame", "kind", "at"),
    [
        (ethernet(PACKET4), 1, 14),
        (ethernet(PACKET6, 5), 1, 18),
        (ethernet(PACKET4, 5, 6), 1, 22),
        (COOKED + PACKET4, 113, 16),
        (struct.pack("!HHHQHHH", 0, 1, 6, 0, 0x8100, 7, 0x0800) + PACKET4, 113, 20),
        (COOKED2 + PACKET6, 276, 20),
        (struct.pack("<I", 2) + PACKET4, 0, 4),
        (PACKET6, 101, 0),
        (bytes(12) + b"\x08\x06" + bytes(28), 1, packets.OTHER),  # ARP
        (struct.pack("!HHHQH", 4, 772, 6, 0, 0x0800) + PACKET4, 113, packets.OTHER),  # loopback, as sent
        (struct.pack("!HHIHBBQ", 0x0800, 0, 1, 772, 4, 6, 0) + PACKET4, 276, packets.OTHER),
        (bytes(13), 1, packets.BROKEN),
        (bytes(12) + b"\x81\x00\x00", 1, packets.BROKEN),
        (PACKET4, 147, packets.LINK),
    ],
)
def test_link_layers(frame: bytes, kind: int, at: int | str) -> None:
    assert link(frame, kind) == at
    if isinstance(at, int):
        assert isinstance(segment(frame, at, len(frame), 0, PORT), Segment)


@given(st.binary(max_size=120), st.integers(0, 300), st.sampled_from([0, 1, 12, 101, 108, 113, 276, 999]))
def test_no_bytes_raise(data: bytes, beyond: int, kind: int) -> None:
    link(data, kind)
    segment(data, 0, len(data), beyond, PORT)


@given(st.data())
def test_no_damaged_packet_raises_or_gives_more_than_there_is(data: st.DataObject) -> None:
    packet = bytearray(data.draw(st.sampled_from([PACKET4, PACKET6, ipv6("fd00::9", "fd00::1", bytes(16) + UP, following=HOP)])))
    for _ in range(data.draw(st.integers(1, 4))):
        packet[data.draw(st.integers(0, len(packet) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(packet)))
    found = segment(bytes(packet), 0, len(packet) - cut, cut, PORT)
    if isinstance(found, Segment):
        assert len(found.data) <= found.size <= len(packet)
