"""A text file that another program appends to, read line by line as it grows."""

from __future__ import annotations

import os
from pathlib import Path

from hoptrace.collectors.hardware.sink import Sink

__all__ = ["Appended"]

_LONGEST = 1 << 20


class Appended:
    """``gone``: the last look found no file that can be read. A file of another inode, or a shorter one, was begun anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._inode: int | None = None
        self._rest = b""
        self.gone = False

    def skip(self) -> None:
        """What stands in the file by now is not read. OSError if it can't be looked at."""
        status = self._path.stat()
        self._inode, self._at = status.st_ino, status.st_size

    def lost(self, e: OSError, out: Sink) -> bool:
        """It could not be read: told by an event once, when it is lost first."""
        first, self.gone = not self.gone, True
        if first:
            out.event("metrics vanished", f"{self._path.name}: {e.strerror or e}")
        return first

    def lines(self, out: Sink) -> tuple[bool, list[bytes]]:
        """Whether it was begun anew (told by an event, but for the first look), and the whole lines since the last look, at most
        1 MiB. OSError if it can't be opened."""
        with self._path.open("rb") as f:
            status = os.fstat(f.fileno())
            anew = status.st_ino != self._inode or status.st_size < self._at
            if anew:
                if self._inode is not None:
                    out.event("gap", f"{self._path.name} was begun anew")
                self._inode, self._at, self._rest = status.st_ino, 0, b""
            f.seek(self._at)
            data = f.read(_LONGEST)
        if self.gone:
            self.gone = False
            out.event("metrics", f"{self._path.name} is there again")
        self._at += len(data)
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()[-_LONGEST:]
        return anew, lines
