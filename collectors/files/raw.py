"""Files as they lie on the disk: opened with gzip and zstandard undone, and their beginning as text to tell the kind by."""

from __future__ import annotations

import codecs
import gzip
import io
import stat
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from hoptrace.errors import InputError

__all__ = ["HEAD_BYTES", "encoding_of", "head", "open_raw", "packed"]

HEAD_BYTES = 65_536
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
# What hoptrace does not undo. gzip is there for what was packed twice.
_PACKED = (
    (b"BZh", "packed with bzip2"), (b"\xfd7zXZ\x00", "packed with xz"), (b"PK\x03\x04", "a zip archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"), (_GZIP, "packed twice"), (_ZSTD, "packed twice"),
    (b"PAR1", "a Parquet file"), (b"SQLite format 3\x00", "an SQLite database"),
)  # fmt: skip
_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


class _Counted(io.RawIOBase):
    """A file that says how many of its bytes were read."""

    def __init__(self, file: IO[bytes], advance: Callable[[int], None]) -> None:
        self._file, self._advance = file, advance

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        n: int = self._file.readinto(buffer)  # type: ignore[attr-defined]
        self._advance(n)
        return n

    def close(self) -> None:
        self._file.close()
        super().close()


class _Plain(io.BufferedReader):
    """Decompressed bytes; damage is told in a sentence."""

    def __init__(self, inner: Any, path: Path) -> None:
        super().__init__(cast("io.RawIOBase", _Undone(inner, path)), buffer_size=1 << 20)


class _Undone(io.RawIOBase):
    def __init__(self, inner: Any, path: Path) -> None:
        self._inner, self._path = inner, path

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._inner.read(len(buffer))
        except (EOFError, zlib.error, OSError) as e:
            raise InputError(f"{self._path} is damaged: {_words(e)}.", hint="Fetch or copy it again.") from None
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._inner.close()
        super().close()


def open_raw(path: Path, advance: Callable[[int], None] = lambda n: None) -> BinaryIO:
    """Open a file for reading, gzip and zstandard undone (told by its first bytes, not by its name).

    Raises:
        InputError: there is none, it cannot be read, or (while reading) it is damaged.
    """
    try:
        # Before it is opened: a pipe that nobody writes to would wait for ever.
        if not stat.S_ISREG(mode := path.stat().st_mode) and not stat.S_ISDIR(mode):
            raise InputError(
                f"{path} is no ordinary file: an import reads its beginning twice.", hint="Write it to a file and import that."
            )
        file = path.open("rb")
        start = file.read(4)
        file.seek(0)
    except FileNotFoundError:
        hint = "Write it to a file and import that." if str(path) == "-" else "Check the path."
        raise InputError(f"There is no file {path}.", hint=hint) from None
    except OSError as e:
        raise InputError(f"{path} cannot be read: {e.strerror}.") from None
    counted = io.BufferedReader(_Counted(file, advance), buffer_size=1 << 20)
    if start.startswith(_GZIP):
        return cast("BinaryIO", _Plain(gzip.GzipFile(fileobj=counted), path))
    if start == _ZSTD:
        import pyarrow as pa

        return cast("BinaryIO", _Plain(pa.CompressedInputStream(pa.PythonFile(counted, mode="r"), "zstd"), path))
    return cast("BinaryIO", counted)


def encoding_of(start: bytes) -> tuple[str, int]:
    """Encoding of a text that begins so, and the length of its byte order mark: UTF-8 unless it says or shows UTF-16."""
    for mark, name in _MARKS:
        if start.startswith(mark):
            return name, len(mark)
    even, odd = start[:200:2], start[1:200:2]
    if len(start) >= 4 and even and odd:
        # ASCII as UTF-16 has a zero in each pair.
        if odd.count(0) > len(odd) * 0.8 and not even.count(0):
            return "utf-16-le", 0
        if even.count(0) > len(even) * 0.8 and not odd.count(0):
            return "utf-16-be", 0
    return "utf-8", 0


def head(path: Path) -> bytes:
    """The first 64 KiB, decompressed, as UTF-8 without a byte order mark. Raises InputError as :func:`open_raw` does."""
    with open_raw(path) as f:
        start = f.read(HEAD_BYTES)
    encoding, mark = encoding_of(start)
    if encoding == "utf-8":
        return start[mark:]
    return start[mark:].decode(encoding, errors="ignore").encode()


def packed(start: bytes) -> str | None:
    """How a file that begins so is packed, where hoptrace does not undo it; null if it is not."""
    return next((name for mark, name in _PACKED if start.startswith(mark)), None)


def _words(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0].rstrip(".")
