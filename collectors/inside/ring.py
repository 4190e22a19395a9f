"""The channel between an engine's process and hoptrace: a file of fixed size that the writer never waits for.

One writer, any number of readers, or none: the newest frames are kept and the oldest overwritten, like a flight recorder. The
file is mapped shared, so what was written is in the page cache and outlives the writer, however it ends.

Layout (native byte order, words of 8 bytes): magic, version and encoding, size of the data; then who writes it; then words that
the writer publishes (tail, head, next sequence number, time of the last frame, frames lost, closed, switch); then JSON that says
what it is. Frames follow at ``HEADER_BYTES``: length, CRC-32, sequence number, payload, padded to 16 bytes, so that the 16
bytes of a frame's head never straddle the end. Positions count bytes ever written; a frame lies at its position modulo the size.

The writer moves the tail past what it is about to overwrite, writes, and moves the head last. A reader copies from its position
to the head and then looks at the tail: what lies before it may have been overwritten meanwhile and is dropped. CRC and sequence
numbers catch what a machine with weaker memory ordering may reorder. Standard library only: this runs inside the engine.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["HEADER_BYTES", "JSON", "MSGPACK", "Header", "Reader", "RingError", "Writer", "alive", "read_header"]

MAGIC = b"HOPTRACE"
VERSION = 1
MSGPACK, JSON = 1, 2
HEADER_BYTES = 32768
_FIXED = struct.Struct(
    "=8sIIQQQqqII"
)  # magic, version, encoding, data bytes, pid, start ticks, monotonic, realtime, JSON: size, CRC
_WORDS_AT = 128
_TAIL, _HEAD, _SEQUENCE, _LAST_NS, _LOST, _CLOSED, _OFF = range(7)
_BOOT_AT = 256
_ABOUT_AT = 320
_FRAME = struct.Struct("=IIQ")
_ALIGN = 16
_MOST_AT_ONCE = 4 << 20


class RingError(Exception):
    """The file is no channel, or of another version."""


@dataclass(frozen=True, slots=True)
class Header:
    """Who writes the channel. ``monotonic_ns`` and ``realtime_ns`` are the two clocks at its creation."""

    pid: int
    start_ticks: int
    boot_id: str
    encoding: int
    data_bytes: int
    monotonic_ns: int
    realtime_ns: int
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def role(self) -> str:
        """ "api" (stat logger) or "engine" (scheduler)."""
        return str(self.about.get("role", ""))


def _padded(size: int) -> int:
    return (size + _ALIGN - 1) & -_ALIGN


class Writer:
    """Makes the file ``path`` (it must not exist) with ``data_bytes`` of room, and writes frames into it.

    Raises OSError (no room, no right) from the constructor only. The room is allocated at once: a disk that fills up later can't
    hurt. A lock on the file tells readers that the writer lives.
    """

    def __init__(self, path: Path, data_bytes: int, encoding: int, about: dict[str, Any], *, pid: int | None = None) -> None:
        data_bytes = max(65536, data_bytes // 4096 * 4096)
        told = json.dumps(about, default=str).encode()
        if len(told) > HEADER_BYTES - _ABOUT_AT:
            told = json.dumps({k: v for k, v in about.items() if k != "config"}, default=str).encode()
        self.path = path
        self._size = data_bytes
        new = path.with_suffix(".new")
        self._fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(self._fd, 0, HEADER_BYTES + data_bytes)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._map = mmap.mmap(self._fd, HEADER_BYTES + data_bytes)
            fixed = _FIXED.pack(
                MAGIC, VERSION, encoding, data_bytes, pid or os.getpid(), _start_ticks(), time.monotonic_ns(), time.time_ns(),
                len(told), zlib.crc32(told),
            )  # fmt: skip
            self._map[: len(fixed)] = fixed
            boot = _boot_id().encode()[:36].ljust(36, b"\0")
            self._map[_BOOT_AT : _BOOT_AT + 36] = boot
            self._map[_ABOUT_AT : _ABOUT_AT + len(told)] = told
            self._words = memoryview(self._map)[_WORDS_AT:_BOOT_AT].cast("Q")
            self._tail = self._head = self._sequence = 0
            new.rename(path)
        except BaseException:
            os.close(self._fd)
            new.unlink(missing_ok=True)
            raise

    def put(self, payload: bytes, now_ns: int) -> bool:
        """Write one frame; false (and counted) if it is larger than half of the room."""
        words, size = self._words, self._size
        need = _FRAME.size + _padded(len(payload))
        if need > size // 2:
            words[_LOST] += 1
            return False
        head = self._head
        end = head + need
        if end - self._tail > size:
            tail = self._tail
            while end - tail > size:
                (length,) = struct.unpack_from("=I", self._map, HEADER_BYTES + tail % size)
                tail += _FRAME.size + _padded(length)
            self._tail = words[_TAIL] = tail
        sequence = self._sequence
        crc = zlib.crc32(payload, sequence & 0xFFFFFFFF)
        frame = _FRAME.pack(len(payload), crc, sequence) + payload
        at = head % size
        here = min(len(frame), size - at)
        self._map[HEADER_BYTES + at : HEADER_BYTES + at + here] = frame[:here]
        if here < len(frame):
            self._map[HEADER_BYTES : HEADER_BYTES + len(frame) - here] = frame[here:]
        words[_SEQUENCE] = self._sequence = sequence + 1
        words[_LAST_NS] = now_ns
        words[_HEAD] = self._head = end
        return True

    def lost(self) -> None:
        """Count a record that could not be written."""
        self._words[_LOST] += 1

    @property
    def off(self) -> bool:
        """Whether a reader has switched the writer off (:meth:`Reader.switch`)."""
        return bool(self._words[_OFF])

    def close(self) -> None:
        """Mark the channel as ended in order. The file stays for readers."""
        if self._fd < 0:
            return
        self._words[_CLOSED] = 1
        self._words.release()
        self._map.close()
        os.close(self._fd)
        self._fd = -1


class Reader:
    """Reads one channel from its oldest frame on, or from now on. OSError if it can't be opened, RingError if it is none.

    ``missed``: frames that were overwritten before they were read; ``damaged``: frames whose checksum was wrong;
    ``lost``: records that the writer could not write (too large, or a fault of the plug-in).
    """

    def __init__(self, path: Path, *, from_start: bool = True) -> None:
        self.path = path
        self.header = read_header(path)
        self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            whole = HEADER_BYTES + self.header.data_bytes
            if os.fstat(self._fd).st_size < whole:
                raise RingError(f"{path} is cut short")
            self._map = mmap.mmap(self._fd, whole, prot=mmap.PROT_READ)
        except BaseException:
            os.close(self._fd)
            raise
        self._view = memoryview(self._map)
        self._words = self._view[_WORDS_AT:_BOOT_AT].cast("Q")
        self.missed = self.damaged = 0
        self._at = self._words[_TAIL if from_start else _HEAD]
        # What was overwritten before this reader came is not its loss: the first frame that it reads tells where it begins.
        begins = 0 if self._at == 0 else None
        self._next: int | None = begins if from_start else self._words[_SEQUENCE]

    @property
    def lost(self) -> int:
        return self._words[_LOST]

    @property
    def closed(self) -> bool:
        return bool(self._words[_CLOSED])

    @property
    def last_ns(self) -> int:
        """CLOCK_MONOTONIC of the last frame; 0 if there is none."""
        return self._words[_LAST_NS]

    @property
    def head(self) -> int:
        """Bytes ever written."""
        return self._words[_HEAD]

    @property
    def position(self) -> int:
        """How far of :attr:`head` is read."""
        return self._at

    @property
    def pending(self) -> int:
        """Bytes that wait to be read."""
        return max(0, self._words[_HEAD] - self._at)

    def read(self, most_bytes: int = _MOST_AT_ONCE) -> list[bytes]:
        """Frames since the last call, oldest first, at most about ``most_bytes`` of them (one at least)."""
        head, tail = self._words[_HEAD], self._words[_TAIL]
        start = self._at = max(self._at, tail)
        if head <= start:
            return []
        size = self.header.data_bytes
        first = _FRAME.size + _padded(struct.unpack_from("=I", self._view, HEADER_BYTES + start % size)[0])
        copy = self._copy(start, min(head - start, max(most_bytes, min(first, size // 2))))
        tail = self._words[_TAIL]
        frames: list[bytes] = []
        at = 0 if tail <= start else tail - start
        while at + _FRAME.size <= len(copy) and (at < most_bytes or not frames):
            length, crc, sequence = _FRAME.unpack_from(copy, at)
            end = at + _FRAME.size + _padded(length)
            if end > len(copy) and frames:
                break
            payload = copy[at + _FRAME.size : at + _FRAME.size + length]
            if end > len(copy) or zlib.crc32(payload, sequence & 0xFFFFFFFF) != crc or sequence < (self._next or 0):
                # Never seen on x86. Go on at the head: sequence numbers tell how many that cost.
                self.damaged += 1
                self._at = head
                return frames
            if self._next is not None:
                self.missed += sequence - self._next
            self._next = sequence + 1
            frames.append(payload)
            at = end
        self._at = start + at
        return frames

    def _copy(self, start: int, length: int) -> bytes:
        size = self.header.data_bytes
        at = start % size
        here = min(length, size - at)
        first = bytes(self._view[HEADER_BYTES + at : HEADER_BYTES + at + here])
        return first if here == length else first + bytes(self._view[HEADER_BYTES : HEADER_BYTES + length - here])

    def close(self) -> None:
        if self._fd < 0:
            return
        self._words.release()
        self._view.release()
        self._map.close()
        os.close(self._fd)
        self._fd = -1

    @staticmethod
    def switch(path: Path, *, off: bool) -> None:
        """Switch the writer of a channel off or on while it runs (what it costs can so be measured on one server)."""
        with path.open("r+b", buffering=0) as f:
            f.seek(_WORDS_AT + 8 * _OFF)
            f.write(struct.pack("=Q", int(off)))


def read_header(path: Path) -> Header:
    """Who writes the channel ``path``. OSError if it can't be read, RingError if it is no channel of this version."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        raw = os.pread(fd, HEADER_BYTES, 0)
    finally:
        os.close(fd)
    if len(raw) < HEADER_BYTES or raw[:8] != MAGIC:
        raise RingError(f"{path} is no hoptrace channel")
    _, version, encoding, size, pid, ticks, monotonic, realtime, length, crc = _FIXED.unpack_from(raw)
    if version != VERSION:
        raise RingError(f"{path} is a channel of version {version}, this hoptrace reads version {VERSION}")
    told = raw[_ABOUT_AT : _ABOUT_AT + length]
    if zlib.crc32(told) != crc or size % 4096 or not 0 < size < 1 << 40:
        raise RingError(f"{path} has a damaged header")
    boot = raw[_BOOT_AT : _BOOT_AT + 36].rstrip(b"\0").decode("ascii", "replace")
    about = json.loads(told)
    return Header(pid, ticks, boot, encoding, size, monotonic, realtime, about if isinstance(about, dict) else {})


def alive(path: Path) -> bool:
    """Whether the channel's writer still lives: it holds a lock that the kernel gives back when it ends, in any namespace."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _start_ticks() -> int:
    """Start of this process since boot, in clock ticks (proc_pid_stat(5), field 22)."""
    try:
        text = Path("/proc/self/stat").read_text("utf-8", "replace")
        return int(text[text.rindex(")") + 2 :].split()[19])
    except (OSError, ValueError, IndexError):
        return 0
