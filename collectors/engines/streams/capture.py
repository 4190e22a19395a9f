"""Packets of one TCP port from the kernel (AF_PACKET), with the kernel's time stamps.

The queue is the kernel's: a ring of memory that both share (TPACKET_V3), 32 MB, which holds seconds of traffic. Nobody waits for
whoever reads it: when it is full the kernel drops packets for this socket, and counts them. Where the ring can't be had, a socket
with a large receive buffer does the same at a higher cost per packet.
Constants: linux/if_packet.h, linux/filter.h, linux/socket.h. Layout of the ring: Documentation/networking/packet_mmap.rst.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

__all__ = ["Capture", "Frame", "Plain", "Ring", "StampClock", "filter_program", "open_capture"]

_ETH_P_ALL = 3
_SOL_PACKET = 263
_PACKET_RX_RING, _PACKET_STATISTICS, _PACKET_VERSION = 5, 6, 10
_TPACKET_V3 = 2
_SO_ATTACH_FILTER, _SO_RCVBUFFORCE, _SO_TIMESTAMPNS = 26, 33, 35
_STATUS_KERNEL, _STATUS_USER = 0, 1

BLOCK_BYTES = 1 << 17
"""One block; a packet merged from several (64 KB) must fit. A block is closed when it is full or :data:`RETIRE_MS` old, so their
number and not only their size says how long nobody need read."""
BLOCKS = 256
RETIRE_MS = 50
_PLAIN_BYTES = 32 << 20
_STAMPING_S = 0.1

_BLOCK = struct.Struct("=IIIIIIQ")  # version, offset of private part, status, packets, offset of the first, length, number
_HEADER = struct.Struct("=IIIIIIHH")  # to the next, seconds, ns, captured, on the wire, status, link header, network header
_STATS_V3 = struct.Struct("=III")
_STATS = struct.Struct("=II")
_TIMESPEC = struct.Struct("=qq")

# Classic BPF, on the packet from its IP header on (SOCK_DGRAM): instructions (code, if true, if false, k).
_LD_B, _LD_H, _LDX_IHL, _LD_H_X = 0x30, 0x28, 0xB1, 0x48
_JEQ, _JSET, _AND, _RET = 0x15, 0x45, 0x54, 0x06
_AD = 0xFFFFF000  # SKF_AD_OFF
_AD_PACKET_TYPE, _AD_HARDWARE = _AD + 4, _AD + 28
_OUTGOING, _LOOPBACK = 4, 772


@dataclass(slots=True)
class Frame:
    """One captured packet: ``data[at:end]`` begins with the IP header and is valid until the next one is asked for. ``beyond``:
    bytes of it that were cut off. ``real_ns``: CLOCK_REALTIME."""

    data: bytes | memoryview
    at: int
    end: int
    beyond: int
    real_ns: int


def filter_program(port: int) -> bytes:
    """Accepts TCP over IPv4 or IPv6 from or to ``port``; over loopback, where each packet passes twice, only as received.

    IPv6 packets with extension headers are let through, they are looked into later.
    """
    accept, refuse = "accept", "refuse"
    named: list[tuple[str | None, int, str | int, str | int, int]] = [
        (None, _LD_H, 0, 0, _AD_HARDWARE),
        (None, _JEQ, 0, "ip", _LOOPBACK),
        (None, _LD_B, 0, 0, _AD_PACKET_TYPE),
        (None, _JEQ, refuse, 0, _OUTGOING),
        ("ip", _LD_B, 0, 0, 0),
        (None, _AND, 0, 0, 0xF0),
        (None, _JEQ, "v4", 0, 0x40),
        (None, _JEQ, "v6", refuse, 0x60),
        ("v4", _LD_B, 0, 0, 9),
        (None, _JEQ, 0, refuse, 6),
        (None, _LD_H, 0, 0, 6),
        (None, _JSET, refuse, 0, 0x1FFF),  # a later fragment has no ports
        (None, _LDX_IHL, 0, 0, 0),
        (None, _LD_H_X, 0, 0, 0),
        (None, _JEQ, accept, 0, port),
        (None, _LD_H_X, 0, 0, 2),
        (None, _JEQ, accept, refuse, port),
        ("v6", _LD_B, 0, 0, 6),
        *((None, _JEQ, accept, 0, kind) for kind in (0, 43, 44, 51, 60, 135, 139, 140)),
        (None, _JEQ, 0, refuse, 6),
        (None, _LD_H, 0, 0, 40),
        (None, _JEQ, accept, 0, port),
        (None, _LD_H, 0, 0, 42),
        (None, _JEQ, accept, refuse, port),
        (accept, _RET, 0, 0, 0x40000),
        (refuse, _RET, 0, 0, 0),
    ]
    at = {name: i for i, (name, *_) in enumerate(named) if name}

    def jump(i: int, to: str | int) -> int:
        return to if isinstance(to, int) else at[to] - i - 1

    return b"".join(struct.pack("=HBBI", code, jump(i, yes), jump(i, no), k) for i, (_, code, yes, no, k) in enumerate(named))


def _attach(sock: socket.socket, program: bytes) -> None:
    code = ctypes.create_string_buffer(program, len(program))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", len(program) // 8, ctypes.addressof(code)))


def _open(port: int) -> socket.socket:
    # Protocol 0: nothing comes before the filter is there and the socket is bound.
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)
    try:
        sock.setblocking(False)
        _attach(sock, filter_program(port))
    except BaseException:
        sock.close()
        raise
    return sock


def _bind(sock: socket.socket, interface: str) -> None:
    """Begin to receive. By libc: Python's bind knows no "all interfaces"."""
    index = socket.if_nametoindex(interface) if interface else 0
    address = struct.pack("=H2siHBB8x", socket.AF_PACKET, struct.pack("!H", _ETH_P_ALL), index, 0, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.bind(sock.fileno(), address, len(address)) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Ring:
    """The kernel's ring."""

    kind = "ring"

    def __init__(self, interface: str, port: int, *, blocks: int = BLOCKS, retire_ms: int = RETIRE_MS) -> None:
        """``interface``: its name, or an empty string for all. Raises OSError."""
        self._sock = _open(port)
        try:
            self._sock.setsockopt(_SOL_PACKET, _PACKET_VERSION, _TPACKET_V3)
            frames = BLOCK_BYTES // 2048 * blocks
            request = struct.pack("=IIIIIII", BLOCK_BYTES, blocks, 2048, frames, retire_ms, 0, 0)
            self._sock.setsockopt(_SOL_PACKET, _PACKET_RX_RING, request)
            self._map = mmap.mmap(self._sock.fileno(), BLOCK_BYTES * blocks, mmap.MAP_SHARED)
            self._view = memoryview(self._map)
            _bind(self._sock, interface)
        except BaseException:
            self._sock.close()
            raise
        self._blocks = blocks
        self._block = self._at = 0
        self._left: int | None = None

    def frames(self) -> Iterator[Frame]:
        """What has come, in order; whoever stops in between goes on there. A block goes back to the kernel when what follows its
        last packet is asked for."""
        view = self._view
        while True:
            base = self._block * BLOCK_BYTES
            if self._left is None:
                _, _, status, packets, first, _, _ = _BLOCK.unpack_from(view, base)
                if not status & _STATUS_USER:
                    return
                self._left, self._at = packets, base + first
            while self._left:
                at = self._at
                following, seconds, ns, captured, size, _, _, network = _HEADER.unpack_from(view, at)
                self._at += following
                self._left -= 1
                start = at + network
                yield Frame(view, start, start + captured, size - captured, seconds * 1_000_000_000 + ns)
            self._left = None
            self._block = (self._block + 1) % self._blocks
            struct.pack_into("=I", view, base + 8, _STATUS_KERNEL)

    def dropped(self) -> int:
        """Packets that the kernel had no room for since the last call."""
        return int(_STATS_V3.unpack(self._sock.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, _STATS_V3.size))[1])

    def close(self) -> None:
        """Give it back."""
        self._sock.close()
        self._view.release()
        with suppress(BufferError):  # a frame is still held somewhere: it goes with that
            self._map.close()


class Plain:
    """A packet socket, read one packet at a time."""

    kind = "socket"

    def __init__(self, interface: str, port: int) -> None:
        """As :class:`Ring`."""
        self._sock = _open(port)
        try:
            try:
                self._sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _PLAIN_BYTES)
            except OSError:  # beyond net.core.rmem_max only an administrator may go
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _PLAIN_BYTES)
            self._sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
            # The kernel begins to stamp packets a little later; those before would bear the time at which they are read.
            time.sleep(_STAMPING_S)
            _bind(self._sock, interface)
        except BaseException:
            self._sock.close()
            raise

    def frames(self) -> Iterator[Frame]:
        """What has come, in order."""
        while True:
            try:
                data, more, _, _ = self._sock.recvmsg(0x40000, 64, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            real_ns = time.time_ns()
            for level, kind, value in more:
                if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS:
                    seconds, ns = _TIMESPEC.unpack_from(value)
                    real_ns = seconds * 1_000_000_000 + ns
            yield Frame(data, 0, len(data), 0, real_ns)

    def dropped(self) -> int:
        """As :meth:`Ring.dropped`."""
        return int(_STATS.unpack(self._sock.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, _STATS.size))[1])

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


Capture = Ring | Plain


def open_capture(interface: str, port: int) -> Capture:
    """A ring, or a plain socket where there is none. Raises OSError (PermissionError without CAP_NET_RAW)."""
    try:
        return Ring(interface, port)
    except PermissionError:
        raise
    except (OSError, ValueError):
        return Plain(interface, port)


class StampClock:
    """CLOCK_REALTIME stamps of the last moments as times of the trace.

    The offset between the wall clock and the trace clock is read with each batch; if the wall clock was set in between, a stamp
    is converted with the offset that puts it between the two readings.
    """

    def __init__(self, utc_offset_ns: int) -> None:
        self._utc_offset_ns = utc_offset_ns
        self._before = self._now = self._read()
        self._begin_ns = self._end_ns = time.monotonic_ns() + utc_offset_ns

    def batch(self) -> int:
        """A batch of packets begins, which came since the last one; gives the time."""
        self._before, self._now = self._now, self._read()
        self._begin_ns, self._end_ns = self._end_ns, time.monotonic_ns() + self._utc_offset_ns
        return self._end_ns

    def trace_ns(self, real_ns: int) -> int:
        """The stamp on the trace clock."""
        time_ns = real_ns - self._now
        if abs(self._now - self._before) > 1_000_000 and not self._begin_ns <= time_ns <= self._end_ns:
            return min(max(real_ns - self._before, self._begin_ns), self._end_ns)
        return time_ns

    def _read(self) -> int:
        """CLOCK_REALTIME less trace time; of three tries the one that was interrupted least."""
        best = None
        for _ in range(3):
            a = time.monotonic_ns()
            real = time.time_ns()
            b = time.monotonic_ns()
            if best is None or b - a < best[0]:
                best = (b - a, real - (a + b) // 2)
        assert best is not None
        return best[1] - self._utc_offset_ns
