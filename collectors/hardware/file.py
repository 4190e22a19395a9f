"""A file of /proc or /sys that is read again and again: opened once, read at its start."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["KeptFile", "cpu_list", "read_int", "read_text"]

_DIGITS = 20  # of a range's two numbers: what has more is no list of the kernel's
_MOST = 65_536  # of a range

_FIRST = 4096
_LARGEST = 16 << 20
_WHOLE = 2048


class KeptFile:
    """Reading costs a third of opening and reading. What has vanished under an open descriptor gives ENODEV or ESRCH, and a file
    that has been replaced reads as it was: use it where the kernel makes the content."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self._size = _FIRST

    def read(self) -> bytes:
        """The whole content. OSError, with the file's name, if it can't be read; the next read opens it anew."""
        try:
            if self._fd is None:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            data = os.pread(self._fd, self._size, 0)
            while len(data) == self._size and self._size < _LARGEST:
                self._size *= 2
                data = os.pread(self._fd, self._size, 0)
            # The kernel gives a table in pieces of about a page (seq_file), so what is shorter is the whole.
            while len(data) >= _WHOLE and (more := os.pread(self._fd, self._size, len(data))):
                data += more
                if len(data) > _LARGEST:
                    break
            return data
        except OSError as e:
            self.close()
            e.filename = e.filename or str(self.path)
            raise

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def read_text(path: Path) -> str | None:
    """A small file's content without the white space around it; null where it can't be read."""
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    """A small file's number, decimal or 0x…; null where it can't be read or is no number."""
    text = read_text(path)
    try:
        return int(text, 0) if text else None
    except ValueError:
        return None


def cpu_list(text: str | None) -> set[int]:
    """Numbers of CPUs or nodes of a kernel list (0-3,8; Documentation/admin-guide/cputopology.rst); empty where there is none."""
    found: set[int] = set()
    for part in (text or "").split(","):
        low, dash, high = part.strip().partition("-")
        if low.isdigit() and (high.isdigit() if dash else True) and len(low + high) <= _DIGITS:
            found |= set(range(int(low), min(int(high or low), int(low) + _MOST) + 1))
    return found
