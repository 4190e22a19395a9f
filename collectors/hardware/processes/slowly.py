"""What is read of a process once a second: swap, and what it read and wrote through the kernel.

/proc/PID/io is for the server's own user and root (ptrace rights, proc_pid_io(5)): elsewhere it is `denied`, not 0.
"""

from __future__ import annotations

from pathlib import Path

from hoptrace.collectors.hardware.file import KeptFile
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import status_of

__all__ = ["Slowly"]

_SWAP = b"\nVmSwap:"
_IO = (
    (b"rchar: ", "read_call_bytes", "bytes"), (b"wchar: ", "write_call_bytes", "bytes"),
    (b"syscr: ", "read_calls", "calls"), (b"syscw: ", "write_calls", "calls"),
    (b"read_bytes: ", "disk_read_bytes", "bytes"), (b"write_bytes: ", "disk_write_bytes", "bytes"),
)  # fmt: skip
"""As proc_pid_io(5): rchar and wchar are what calls asked to carry (sockets and page cache among it), the others what was fetched
from, or is to be sent to, a disk."""


class Slowly:
    """Of one life of one process."""

    def __init__(self, folder: Path, entity: str, incarnation: str) -> None:
        self._status, self._io = KeptFile(folder / "status"), KeptFile(folder / "io")
        self._entity, self._incarnation = entity, incarnation
        self._denied = False
        self._read: dict[int, None] = {}

    def lost(self, out: Sink) -> None:
        """The process is gone: so is what could be read of it."""
        out.fail(self._read, "lost")

    def sample(self, out: Sink) -> None:
        swap = out.series(self._entity, "swap_bytes", "bytes", "gauge", incarnation=self._incarnation)
        try:
            data = self._status.read()
        except OSError as e:
            out.put(swap, None, status_of(e))
        else:
            at = data.find(_SWAP)
            words = data[at + len(_SWAP) : at + 40].split() if at >= 0 else []
            if words and words[0].isdigit():
                out.put(swap, int(words[0]) * 1024)
                self._read[swap] = None
        numbers = [
            out.series(self._entity, name, unit, "cumulative", incarnation=self._incarnation, width_bits=64)
            for _, name, unit in _IO
        ]
        if self._denied:
            out.fail(numbers, "denied")
            return
        try:
            data = self._io.read()
        except PermissionError:
            self._denied = True  # it stays so: asking again each second is only noise
            out.fail(numbers, "denied")
            return
        except OSError as e:
            out.fail(numbers, status_of(e))
            return
        for number, (key, _, _) in zip(numbers, _IO, strict=True):
            at = 0 if data.startswith(key) else data.find(b"\n" + key) + 1
            end = data.find(b"\n", at)
            word = data[at + len(key) : end if end >= 0 else None]
            if (at or data.startswith(key)) and word.isdigit():
                out.put(number, int(word))
                self._read[number] = None

    def close(self) -> None:
        self._status.close()
        self._io.close()
