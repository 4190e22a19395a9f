"""What the kernel is asked for: the filter, run here on packets of every kind; and its stamps, on the trace clock."""

from __future__ import annotations

import struct
import time

import pytest
from support.frames import CLIENT, SERVER, ipv4, ipv6, tcp

from hoptrace.collectors.engines.streams.capture import StampClock, filter_program
from hoptrace.collectors.engines.streams.packets import ACK

ETHERNET, LOOPBACK = 1, 772
HOST, OUTGOING = 0, 4
_AD = 0xFFFF_F000


def run(program: bytes, packet: bytes, hardware: int = ETHERNET, kind: int = HOST) -> int:
    """Classic BPF as far as the filter uses it (Linux, Documentation/networking/filter.rst). Reading behind the end refuses."""
    a = x = at = 0
    while True:
        code, yes, no, k = struct.unpack_from("=HBBI", program, 8 * at)
        at += 1
        if code == 0x06:
            return k
        if code == 0x15:
            at += yes if a == k else no
        elif code == 0x45:
            at += yes if a & k else no
        elif code == 0x54:
            a &= k
        elif k >= _AD:
            a = {4: kind, 28: hardware}[k - _AD]
        else:
            size, start = (2, k) if code == 0x28 else (2, x + k) if code == 0x48 else (1, k)
            if start + size > len(packet):
                return 0
            value = int.from_bytes(packet[start : start + size])
            if code == 0xB1:
                x = (value & 15) * 4
            else:
                a = value


UP, DOWN = tcp(40_000, 8000, 1, 1, ACK, b"x"), tcp(8000, 40_000, 1, 1, ACK, b"y")
V4, V6 = (CLIENT[0], SERVER[0]), ("fd00::9", "fd00::1")


@pytest.mark.parametrize(
    ("packet", "taken"),
    [
        (ipv4(*V4, UP), True),
        (ipv4(*V4, DOWN), True),
        (ipv4(*V4, UP, options=bytes(40)), True),
        (ipv4(*V4, tcp(40_000, 8001, 1, 1, ACK, b"")), False),
        (ipv4(*V4, struct.pack("!HHHH", 40_000, 8000, 8, 0), protocol=17), False),
        (ipv4(*V4, UP, fragment=0x2000), True),  # the first of a packet's fragments: so that it is counted
        (ipv4(*V4, UP, fragment=0x0010), False),
        (ipv6(*V6, UP), True),
        (ipv6(*V6, DOWN), True),
        (ipv6(*V6, tcp(40_000, 8001, 1, 1, ACK, b"")), False),
        (ipv6(*V6, UP, following=17), False),
        (ipv6(*V6, bytes([6, 0]) + bytes(6) + UP, following=0), True),
        (ipv6(*V6, bytes([6, 0, 0, 1]) + bytes(4) + UP, following=44), True),
        (b"\x00\x01\x08\x00\x06\x04" + bytes(22), False),  # ARP
        (b"", False),
        (ipv4(*V4, UP)[:21], False),
    ],
)
def test_the_filter(packet: bytes, taken: bool) -> None:
    program = filter_program(8000)
    assert bool(run(program, packet)) is taken
    assert bool(run(program, packet, kind=OUTGOING)) is taken
    assert bool(run(program, packet, LOOPBACK)) is taken
    assert not run(program, packet, LOOPBACK, OUTGOING), "on loopback each packet passes twice"


def test_a_taken_packet_is_taken_whole() -> None:
    assert run(filter_program(65_535), ipv4(*V4, tcp(1, 65_535, 1, 1, ACK, b""))) >= 65_536 + 100


class Clocks:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monotonic, self.offset = 1_000_000_000, 10**18
        monkeypatch.setattr(time, "monotonic_ns", lambda: self.monotonic)
        monkeypatch.setattr(time, "time_ns", lambda: self.monotonic + self.offset)

    def stamp(self) -> int:
        return self.monotonic + self.offset


def test_stamps_are_put_on_the_trace_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    stamps = StampClock(7 * 10**17)
    for _ in range(3):
        clocks.monotonic += 100_000_000
        clocks.offset += 20_000  # it is slewed
        at, real = clocks.monotonic + 7 * 10**17, clocks.stamp()
        assert stamps.batch() == at and stamps.trace_ns(real) == at
        assert stamps.trace_ns(real - 50_000_000) == at - 50_000_000


@pytest.mark.parametrize("step_ns", [3_600 * 10**9, -3_600 * 10**9, 5_000_000_000, -5_000_000_000])
def test_a_step_of_the_wall_clock_moves_no_packet(monkeypatch: pytest.MonkeyPatch, step_ns: int) -> None:
    clocks = Clocks(monkeypatch)
    stamps = StampClock(0)
    stamps.batch()
    times, reals = [], []
    for i in range(10):
        clocks.monotonic += 10_000_000
        if i == 5:
            clocks.offset += step_ns
        times.append(clocks.monotonic)
        reals.append(clocks.stamp())
    stamps.batch()
    assert [stamps.trace_ns(real) for real in reals] == times
    clocks.monotonic += 1
    stamps.batch()
    assert stamps.trace_ns(clocks.stamp()) == clocks.monotonic
