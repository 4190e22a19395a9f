"""Text in blocks of whole records: UTF-8 whatever the file's encoding, cut where a record ends, in bounded memory."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hoptrace.collectors.files.raw import encoding_of
from hoptrace.errors import InputError

__all__ = ["BAD", "NOT_TEXT", "ROW", "Block", "blocks"]

# Columns of every frame made from text: the record's first line in the file, and why it cannot be used (null if it can).
ROW = "_row"
BAD = "_bad"
NOT_TEXT = "The file has bytes that are no text in its encoding: they read as �."

_READ_BYTES = 4 << 20
# A record longer than this is cut at a line end all the same: a quote that never closes must not take the rest of the file.
_MOST_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Block:
    """Whole records: their text and the number of their first line in the file, from 1. ``damaged``: bytes were no text."""

    data: bytes
    line: int
    damaged: bool = False


def blocks(file: BinaryIO, *, quoted: bool = False, path: Path | None = None) -> Iterator[Block]:
    """The file's text in pieces that end with a record; the last may lack its line end. A byte order mark is left out.

    ``quoted``: line ends inside double quotes end no record (CSV). Bytes that are no text of the encoding become U+FFFD.
    ``path`` is for messages.

    Raises:
        InputError: a line is longer than 32 MiB.
    """
    start = file.read(_READ_BYTES)
    encoding, mark = encoding_of(start)
    decoder = None if encoding == "utf-8" else codecs.getincrementaldecoder(encoding)(errors="replace")
    line = 1
    rest = b""
    piece = start[mark:]
    while piece or rest:
        last = not piece
        if decoder is not None:
            piece = decoder.decode(piece, final=last).encode()
        data = rest + piece
        end = len(data) if last else _end(data, quoted)
        if not end and len(data) > _MOST_BYTES:
            end = data.rfind(b"\n") + 1
            if not end:
                raise InputError(
                    f"Line {line:,} of {path or 'the file'} is longer than {_MOST_BYTES >> 20} MiB.",
                    hint="A file of this kind has a record a line.",
                )
        if end:
            whole, rest = data[:end], data[end:]
            yield _block(whole, line)
            line += whole.count(b"\n")
        else:
            rest = data
        if last:
            break
        piece = file.read(_READ_BYTES)


def _block(data: bytes, line: int) -> Block:
    if data.isascii():
        return Block(data, line)
    try:
        data.decode()
    except UnicodeDecodeError:
        return Block(data.decode(errors="replace").encode(), line, damaged=True)
    return Block(data, line)


def _end(data: bytes, quoted: bool) -> int:
    """Where the last whole record ends; 0 if none does."""
    at = data.rfind(b"\n")
    if at < 0 or not quoted or b'"' not in data:
        return at + 1
    inside = data.count(b'"', 0, at) % 2
    while inside and at >= 0:
        # Back over the quote that is still open.
        quote = data.rfind(b'"', 0, at)
        before = data.rfind(b"\n", 0, quote)
        inside = (inside - data.count(b'"', max(before, 0), at)) % 2
        at = before
    return at + 1
