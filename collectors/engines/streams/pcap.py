"""Packets from a capture file: pcap and pcapng, as tcpdump, Wireshark and dumpcap write them.

Formats: https://www.ietf.org/archive/id/draft-ietf-opsawg-pcap-05.html and
https://www.ietf.org/archive/id/draft-ietf-opsawg-pcapng-03.html. What they hold beside packets (names, comments) is not read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hoptrace.errors import InputError

__all__ = ["Captured", "Recording", "is_pcap", "read_pcap"]

_PCAP = {
    b"\xd4\xc3\xb2\xa1": ("<", 1_000), b"\xa1\xb2\xc3\xd4": (">", 1_000),
    b"\x4d\x3c\xb2\xa1": ("<", 1), b"\xa1\xb2\x3c\x4d": (">", 1),
}  # fmt: skip
_SECTION = b"\x0a\x0d\x0d\x0a"
_ORDERS = {b"\x4d\x3c\x2b\x1a": "<", b"\x1a\x2b\x3c\x4d": ">"}
_INTERFACE, _OLD_PACKET, _SIMPLE, _STATISTICS, _PACKET = 1, 2, 3, 5, 6
_TIME_UNIT, _TIME_OFFSET, _DROPPED = 9, 14, 5
_LARGEST = 64 << 20


@dataclass(slots=True)
class Captured:
    """One packet: ``link`` is the link type of its first header, ``size`` its length on the wire, ``real_ns`` its UTC time."""

    link: int
    real_ns: int
    data: bytes
    size: int


@dataclass(slots=True)
class _Interface:
    link: int
    ticks_per_s: int = 1_000_000
    offset_ns: int = 0
    dropped: int = 0


def is_pcap(head: bytes) -> bool:
    """Whether a file that begins with ``head`` is one of both."""
    return head[:4] in _PCAP or (head[:4] == _SECTION and head[8:12] in _ORDERS)


class Recording:
    """Iterate over it once. ``cut``: the file ends in the middle of a record, as it does when the writer was killed; ``untimed``:
    packets without a time, which are left out; ``dropped``: packets that the capturing machine says it had to drop."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self._interfaces: list[_Interface] = []
        self._number = 0
        self.cut = False
        self.untimed = 0

    @property
    def dropped(self) -> int:
        return sum(i.dropped for i in self._interfaces)

    def __iter__(self) -> Iterator[Captured]:
        magic = self._file.read(4)
        if magic in _PCAP:
            yield from self._pcap(*_PCAP[magic])
        elif magic == _SECTION:
            yield from self._pcapng()
        else:
            raise InputError(f"{self._name} is no pcap or pcapng file.", hint="Write it with tcpdump -w or dumpcap.")

    def _pcap(self, order: str, scale: int) -> Iterator[Captured]:
        head = self._file.read(20)
        if len(head) < 20:
            self.cut = True
            return
        kind = struct.unpack(order + "HHiIII", head)[5] & 0xFFFF
        record = struct.Struct(order + "IIII")
        while header := self._file.read(16):
            if len(header) < 16:
                break
            seconds, fraction, length, size = record.unpack(header)
            data = self._take(length)
            if data is None:
                return
            self._number += 1
            yield Captured(kind, seconds * 1_000_000_000 + fraction * scale, data, max(size, length))
        self.cut = bool(header)

    def _pcapng(self) -> Iterator[Captured]:
        order = self._section(self._file.read(8))
        while order and (head := self._file.read(8)):
            if len(head) < 8:
                self.cut = True
                return
            if head[:4] == _SECTION:
                order = self._section(head[4:] + self._file.read(4))
                continue
            kind, length = struct.unpack(order + "II", head)
            body = self._block(length)
            if body is None:
                return
            try:
                found = self._read(kind, order, body)
            except (struct.error, IndexError):
                raise self._damaged("is damaged") from None
            if found is not None:
                yield found

    def _section(self, head: bytes) -> str:
        """A section begins: its byte order, and no interface yet."""
        order = _ORDERS.get(head[4:8], "")
        if len(head) < 8:
            self.cut = True
            return ""
        if not order:
            raise self._damaged("begins a section of no known byte order")
        if self._block(struct.unpack(order + "I", head[:4])[0], done=12) is None:
            return ""
        dropped = self.dropped
        self._interfaces = [_Interface(-1, dropped=dropped)] if dropped else []
        self._first = len(self._interfaces)
        return order

    def _block(self, length: int, done: int = 8) -> bytes | None:
        if length < done + 4 or length % 4:
            raise self._damaged(f"says it is {length} bytes long")
        body = self._take(length - done)
        return None if body is None else body[:-4]

    def _take(self, length: int) -> bytes | None:
        """So many bytes; null if the file ends before."""
        if length > _LARGEST:
            raise self._damaged(f"says it is {length} bytes long")
        data = self._file.read(length)
        if len(data) < length:
            self.cut = True
            return None
        return data

    def _read(self, kind: int, order: str, body: bytes) -> Captured | None:
        if kind == _INTERFACE:
            self._interfaces.append(_interface(order, body))
        elif kind == _STATISTICS:
            (number,) = struct.unpack_from(order + "I", body)
            for code, value in _options(order, body[12:]):
                if code == _DROPPED and len(value) == 8:
                    self._interfaces[self._first + number].dropped = struct.unpack(order + "Q", value)[0]
        elif kind == _SIMPLE:
            self._number += 1
            self.untimed += 1
        elif kind in (_PACKET, _OLD_PACKET):
            number, high, low, length, size = struct.unpack_from(order + "IIIII", body)
            if kind == _OLD_PACKET:
                (number,) = struct.unpack_from(order + "H", body)
            if length > len(body) - 20:
                raise self._damaged(f"says it is {length} bytes long")
            i = self._interfaces[self._first + number]
            self._number += 1
            real_ns = ((high << 32) | low) * 1_000_000_000 // i.ticks_per_s + i.offset_ns
            return Captured(i.link, real_ns, body[20 : 20 + length], max(size, length))
        return None

    def _damaged(self, how: str) -> InputError:
        return InputError(
            f"{self._name}: packet {self._number + 1} {how}.", hint="The file is damaged: capture or copy it again."
        )


def _interface(order: str, body: bytes) -> _Interface:
    found = _Interface(struct.unpack_from(order + "H", body)[0])
    for code, value in _options(order, body[8:]):
        if code == _TIME_UNIT and value:
            power = value[0] & 0x7F
            found.ticks_per_s = 2**power if value[0] & 0x80 else 10**power
        elif code == _TIME_OFFSET and len(value) == 8:
            found.offset_ns = struct.unpack(order + "q", value)[0] * 1_000_000_000
    return found


def _options(order: str, data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        code, length = struct.unpack_from(order + "HH", data, at)
        if code == 0:
            return
        yield code, data[at + 4 : at + 4 + length]
        at += 4 + (length + 3) // 4 * 4


def read_pcap(path: Path | str) -> Iterator[Captured]:
    """The packets of a file, in its order.

    Raises:
        InputError: it can't be opened, is of another kind, or is damaged; a file that ends early gives what it has.
    """
    try:
        with Path(path).open("rb") as file:
            yield from Recording(file, str(path))
    except OSError as e:
        raise InputError(f"{path} cannot be read: {e.strerror}.") from None
