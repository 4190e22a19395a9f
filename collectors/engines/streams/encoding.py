"""Answers in a content encoding, decoded only to be looked at: what the client gets is not touched."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, Protocol

__all__ = ["Decoding", "Garbled", "decoding"]

_PIECE_BYTES = 1 << 20


class Garbled(Exception):
    """The bytes are not in the encoding that the headers tell."""


class Decoding(Protocol):
    """Undoes one encoding, piece by piece. Memory is bounded whatever the bytes say."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What these bytes decode to. Garbled if they do not."""


def decoding(name: str) -> Decoding | None:
    """The decoder for one content encoding; null if there is none here (br and zstd need a library of that name)."""
    if name in ("gzip", "x-gzip"):
        return _Zlib(31)
    if name == "deflate":
        return _Zlib(15)
    try:
        if name == "br":
            import brotli  # type: ignore[import-not-found,import-untyped,unused-ignore]

            return _Other(brotli.Decompressor().process)
        if name == "zstd":
            import zstandard

            # Each flushed piece may be a frame of its own.
            return _Other(zstandard.ZstdDecompressor().decompressobj(read_across_frames=True).decompress)
    except ImportError:
        return None
    return None


class _Zlib:
    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._first = b""
        self._inflate = zlib.decompressobj(bits)

    def feed(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._inflate.eof:  # gzip members one after another
                self._inflate = zlib.decompressobj(self._bits)
            try:
                out = self._inflate.decompress(data, _PIECE_BYTES)
            except zlib.error as e:
                if self._bits != 15 or len(self._first) >= 2:
                    raise Garbled from e
                # Some servers send deflate without its zlib header, which is two bytes long.
                self._bits, data = -15, self._first + data
                self._inflate = zlib.decompressobj(-15)
                continue
            self._first += data[: 2 - len(self._first)]
            data = self._inflate.unconsumed_tail or self._inflate.unused_data
            if out:
                yield out


class _Other:
    def __init__(self, decode: Any) -> None:
        self._decode = decode

    def feed(self, data: bytes) -> Iterator[bytes]:
        try:
            yield self._decode(data)
        except Exception as e:  # each library has errors of its own
            raise Garbled from e
