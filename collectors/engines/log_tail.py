"""Following a server's log file: lines as they come, through rotation, truncation and half-written lines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hoptrace.collectors.context import Context

__all__ = ["Log", "LogTail", "log_of"]

_MARK = 64
_AT_ONCE = 4 << 20
_LONGEST_LINE = 1 << 20


@dataclass(frozen=True, slots=True)
class Log:
    """The file that a server's words go to, or why there is none to read and what would help."""

    path: Path | None
    reason: str | None = None


def log_of(ctx: Context, order: Sequence[int] = (1, 2)) -> Log:
    """The file that the user named, else the one that the server's standard output (``order``: or error) is written to."""
    if ctx.options.log is not None:
        path = ctx.options.log
        if not path.exists():
            return Log(None, f"there is no {path}")
        return Log(path) if os.access(path, os.R_OK) else Log(None, f"{path} may not be read by this user")
    found = ctx.find() if ctx.find is not None else None
    if found is None or found.pid is None:
        why = found.reason if found is not None else "the server's process is not looked at (--pid none)"
        return Log(None, f"{why}; or name the server's log file with --log")
    told = None
    for fd in order:
        path = Path(f"/proc/{found.pid}/fd/{fd}")
        try:
            target = str(path.readlink())
        except OSError:
            continue
        if not target.startswith("/") or target.startswith("/dev/"):
            told = told or target.split(":")[0].replace("/dev/pts", "a terminal")
            continue
        for place in (Path(target), Path(f"/proc/{found.pid}/root{target}")):
            try:
                if place.samefile(path) and os.access(place, os.R_OK):
                    return Log(place)
            except OSError:
                continue
        told = told or f"{target} (which can't be read here)"
    where = f"the server's output goes to {told}" if told else "where the server's output goes can't be seen"
    return Log(None, f"{where}: redirect it to a file, or name its log file with --log")


class LogTail:
    """Reads what is appended to ``path``. Not thread-safe; :meth:`read` may take some milliseconds.

    A file that is replaced (rotation) is read to its end, then the new one from its beginning; one that is cut (copytruncate) is
    read from its beginning again. A line is given when it is whole. Lines over 1 MiB are dropped and counted in ``dropped``.
    """

    def __init__(self, path: Path, *, from_start: bool = False) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._inode: tuple[int, int] | None = None
        self._from_start = from_start
        self._partial = b""
        self._skip = False
        self._mark = b""
        self.rotations = 0
        self.truncations = 0
        self.dropped = 0

    def read(self) -> list[str]:
        """Whole lines that have come since the last call, at most 4 MiB of them."""
        lines: list[str] = []
        if self._file is None and not self._open():
            return lines
        lines += self._new()
        try:
            there = self.path.stat()
        except OSError:
            return lines  # moved away, and not made anew yet: the old one may still be written to
        if (there.st_dev, there.st_ino) != self._inode:
            lines += self._new()  # what came between the two looks
            self._end()
            self.rotations += 1
            self._from_start = True
            if self._open():
                lines += self._new()
        return lines

    def close(self) -> None:
        """Let go of the file."""
        self._end()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _open(self) -> bool:
        try:
            self._file = self.path.open("rb")
        except OSError:
            return False
        stat = os.fstat(self._file.fileno())
        self._inode = stat.st_dev, stat.st_ino
        self._mark = b""
        if not self._from_start:
            self._file.seek(0, os.SEEK_END)
            # In the middle of a line: the rest of it is none.
            at = self._file.tell()
            self._skip = at > 0 and os.pread(self._file.fileno(), 1, at - 1) != b"\n"
            self._mark = os.pread(self._file.fileno(), _MARK, max(0, at - _MARK))
        return True

    def _end(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
        self._partial, self._skip = b"", False

    def _new(self) -> list[str]:
        assert self._file is not None
        fd, at = self._file.fileno(), self._file.tell()
        try:
            size = os.fstat(fd).st_size
            # Cut, or cut and grown again: what stands before our place is not what we have read.
            if size < at or (size > at and self._mark and os.pread(fd, len(self._mark), at - len(self._mark)) != self._mark):
                self.truncations += 1
                self._file.seek(0)
                self._partial, self._skip, self._mark = b"", False, b""
            data = self._file.read(_AT_ONCE)
        except OSError:
            return []
        if not data:
            return []
        self._mark = (self._mark + data)[-_MARK:]
        *lines, rest = (self._partial + data).split(b"\n")
        if lines and self._skip:
            del lines[0]  # the end of a line whose beginning is not known, or too long
            self._skip = False
        if len(rest) > _LONGEST_LINE:
            rest = b""
            if not self._skip:
                self.dropped += 1
            self._skip = True
        self._partial = rest
        return [line.decode("utf-8", "replace").rstrip("\r") for line in lines]
