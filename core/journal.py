"""The journal: the part of a table that is still being written, readable after a kill at any instant.

A Parquet file without its footer is unreadable and Arrow IPC has no checksum, so each batch is a frame of its own:

    4 bytes magic "HTJ1" | u32 sequence number | u32 length | u32 crc32 of the payload | payload (Arrow IPC stream, zstd)

A reader takes frames until the first one that is torn, damaged or out of sequence.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

__all__ = ["JournalRead", "JournalWriter", "read_journal"]

_MAGIC = b"HTJ1"
_HEAD = struct.Struct("<4sIII")
_MAX_PAYLOAD = 1 << 30
_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd")


def encode_frame(sequence: int, batch: pa.RecordBatch) -> bytes:
    """One frame as bytes."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=_OPTIONS) as out:
        out.write_batch(batch)
    payload = sink.getvalue().to_pybytes()
    return _HEAD.pack(_MAGIC, sequence, len(payload), zlib.crc32(payload)) + payload


class JournalWriter:
    """Appends frames to one file. A failed write is cut off again, so that later frames stay readable."""

    def __init__(self, path: Path) -> None:
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
            self._file.truncate(self.bytes)
            self._file.seek(self.bytes)
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
    """What a journal still holds: whole batches, and the bytes after the last whole frame."""

    batches: list[pa.RecordBatch]
    bytes_lost: int

    @property
    def rows(self) -> int:
        return sum(b.num_rows for b in self.batches)


def read_journal(path: Path) -> JournalRead:
    """Read all whole frames; never raises for a torn or damaged tail. FileNotFoundError if there is no file."""
    batches: list[pa.RecordBatch] = []
    size = path.stat().st_size
    done = 0
    with path.open("rb") as f:
        while True:
            head = f.read(_HEAD.size)
            if len(head) < _HEAD.size:
                break
            magic, sequence, length, crc = _HEAD.unpack(head)
            if magic != _MAGIC or sequence != len(batches) or length > _MAX_PAYLOAD:
                break
            payload = f.read(length)
            if len(payload) < length or zlib.crc32(payload) != crc:
                break
            try:
                with pa.ipc.open_stream(payload) as reader:
                    table = reader.read_all()
            except pa.ArrowInvalid:
                break
            batches.append(table.combine_chunks().to_batches()[0] if table.num_rows else pa.RecordBatch.from_pylist([], table.schema))
            done = f.tell()
    # The file may have grown while it was read (a live trace): what came later is not lost.
    return JournalRead(batches, max(0, size - done))
