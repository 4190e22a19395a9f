"""The journal: the part of a table that is still being written, readable after a kill at any instant.

A Parquet file without its footer is unreadable and Arrow IPC has no checksum, so each batch is a frame of its own:

    4 bytes magic "HTJ1" | u32 sequence number | u32 length | u32 crc32 | payload (Arrow IPC stream, zstd)

The checksum covers sequence, length and payload. A reader takes every frame whose checksum holds. Behind a damaged one it looks
for the next magic, so that one flipped byte costs one frame and not all that follow; frames count upwards, so stale bytes are
never taken for new ones.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

__all__ = ["JournalRead", "JournalWriter", "encode_frame", "read_journal"]

_MAGIC = b"HTJ1"
_HEAD = struct.Struct("<4sIII")
_COUNTED = struct.Struct("<II")
_MAX_PAYLOAD = 1 << 30
_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd")


def encode_frame(sequence: int, batch: pa.RecordBatch) -> bytes:
    """One frame as bytes."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=_OPTIONS) as out:
        out.write_batch(batch)
    payload: bytes = sink.getvalue().to_pybytes()
    return _HEAD.pack(_MAGIC, sequence, len(payload), _crc(sequence, payload)) + payload


def _crc(sequence: int, payload: bytes | memoryview) -> int:
    return zlib.crc32(payload, zlib.crc32(_COUNTED.pack(sequence, len(payload))))


class JournalWriter:
    """Appends frames to one new file. A failed write is cut off again, so that later frames stay readable."""

    def __init__(self, path: Path) -> None:
        """Raises FileExistsError: a journal is never written over."""
        self.path = path
        self.rows = 0
        self.bytes = 0
        self._sequence = 0
        # Unbuffered: what write() returns from has reached the operating system and survives a kill of this process.
        self._file = path.open("xb", buffering=0)

    def append(self, batch: pa.RecordBatch) -> None:
        """Write one frame. Raises OSError (a full disk), with the journal as it was before."""
        frame = encode_frame(self._sequence, batch)
        view = memoryview(frame)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError:
            # Should the cut fail as well, the reader steps over the torn frame.
            with contextlib.suppress(OSError):
                self._file.truncate(self.bytes)
            self._file.seek(0, os.SEEK_END)
            raise
        self._sequence += 1
        self.rows += batch.num_rows
        self.bytes += len(frame)

    def sync(self) -> None:
        """Push it to the disk (power loss)."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True)
class JournalRead:
    """What a journal still holds: whole batches; the bytes that belong to none; how many frames are missing between others."""

    batches: list[pa.RecordBatch]
    bytes_lost: int
    frames_lost: int

    @property
    def rows(self) -> int:
        return sum(b.num_rows for b in self.batches)

    def table(self) -> pa.Table | None:
        """All rows as one Arrow table; null if there are none."""
        tables = [pa.Table.from_batches([b]) for b in self.batches]
        return pa.concat_tables(tables, promote_options="default") if tables else None


def read_journal(path: Path) -> JournalRead:
    """Read all whole frames; never raises for torn or damaged ones. FileNotFoundError if there is no file.

    A journal that grows while it is read gives the frames that were whole; a frame half written counts as ``bytes_lost``.
    """
    data = memoryview(path.read_bytes())
    whole = data.obj
    assert isinstance(whole, bytes)
    batches: list[pa.RecordBatch] = []
    at = taken = expected = frames_lost = 0
    while (at := whole.find(_MAGIC, at)) >= 0:
        frame = _frame(data, at, expected)
        if frame is None:
            at += 1
            continue
        sequence, batch, size = frame
        batches.append(batch)
        frames_lost += sequence - expected
        expected = sequence + 1
        at += size
        taken += size
    return JournalRead(batches, len(data) - taken, frames_lost)


def _frame(data: memoryview, at: int, expected: int) -> tuple[int, pa.RecordBatch, int] | None:
    """Sequence, batch and size of the frame at ``at``; null if it is torn, damaged or older than ``expected``."""
    if len(data) - at < _HEAD.size:
        return None
    _, sequence, length, crc = _HEAD.unpack_from(data, at)
    start = at + _HEAD.size
    if sequence < expected or length > _MAX_PAYLOAD or len(data) - start < length:
        return None
    payload = data[start : start + length]
    if _crc(sequence, payload) != crc:
        return None
    try:
        with pa.ipc.open_stream(payload) as reader:
            return sequence, reader.read_next_batch(), _HEAD.size + length
    except (pa.ArrowException, OSError, StopIteration):
        return None
