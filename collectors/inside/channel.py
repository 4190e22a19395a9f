"""Where channels lie, and the guard that keeps the plug-in's faults from the engine. Standard library and, if there, msgspec."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hoptrace.collectors.inside import ring

__all__ = ["DEAD_KEPT", "DEAD_KEPT_S", "Channel", "decoder", "folder", "remove_old"]

DEFAULT_BYTES = 8 << 20
_MOST_BYTES = 1 << 30
DEAD_KEPT_S = 86_400
"""How long the channel of a process that has ended stays, so that its last steps can be read."""
DEAD_KEPT = 16
"""How many of them stay: a server that crashes every minute must not fill the disk."""
_FAULTS = 100

_log = logging.getLogger("vllm.hoptrace")  # below `vllm`: the engine's own handlers print it


def folder() -> Path:
    """``HOPTRACE_CHANNELS``, else /tmp/hoptrace-UID. Not made."""
    told = os.environ.get("HOPTRACE_CHANNELS")
    return Path(told) if told else Path(f"/tmp/hoptrace-{os.getuid()}")


def make_folder(path: Path) -> None:
    """Make the folder for this user alone. PermissionError if it is a link, or another user's (only root's is trusted)."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{path} is not a folder")
    if found.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{path} belongs to another user")


def remove_old(path: Path, *, now: float | None = None) -> int:
    """Remove channels whose process has ended a day ago, or which are not among the newest; gives how many."""
    now = time.time() if now is None else now
    dead: list[tuple[float, Path]] = []
    for file in path.glob("*.ring"):
        with contextlib.suppress(OSError):
            written = file.lstat().st_mtime
            with contextlib.suppress(ring.RingError):
                reader = ring.Reader(file)
                # A mapped file's own time may stand still: the last frame's is on a clock of this boot.
                if reader.header.boot_id == ring._boot_id():
                    written = max(written, now - (time.monotonic_ns() - max(reader.last_ns, reader.header.monotonic_ns)) / 1e9)
                reader.close()
            if not ring.alive(file):
                dead.append((written, file))
    dead.sort(reverse=True)
    removed = 0
    for i, (written, file) in enumerate(dead):
        if i >= DEAD_KEPT or now - written > DEAD_KEPT_S:
            with contextlib.suppress(OSError):
                file.unlink()
                removed += 1
    return removed


def _encoder() -> tuple[int, Callable[[Any], bytes]]:
    try:
        import msgspec
    except ImportError:
        return ring.JSON, lambda value: json.dumps(value, separators=(",", ":")).encode()
    return ring.MSGPACK, msgspec.msgpack.Encoder().encode


def decoder(encoding: int) -> Callable[[bytes], Any]:
    """What turns a frame back. ImportError where msgspec is needed and missing."""
    if encoding == ring.JSON:
        return json.loads
    import msgspec

    return msgspec.msgpack.Decoder().decode


class Channel:
    """A ring and its encoder. A fault is counted, and many in a row turn the channel off, with one warning."""

    def __init__(self, writer: ring.Writer, encode: Callable[[Any], bytes]) -> None:
        self._writer: ring.Writer | None = writer
        self._encode = encode
        self._pid = os.getpid()
        self._faults = 0
        self.path = writer.path

    @classmethod
    def open(cls, role: str, about: dict[str, Any]) -> Channel | None:
        """A channel of this process; null (with one warning) where it can't be had."""
        try:
            if os.environ.get("HOPTRACE_VLLM", "1").lower() in ("0", "off", "no", "false"):
                return None
            place = folder()
            make_folder(place)
            with contextlib.suppress(Exception):
                remove_old(place)
            told = os.environ.get("HOPTRACE_CHANNEL_BYTES", "")
            size = min(int(told), _MOST_BYTES) if told.isdigit() else DEFAULT_BYTES
            encoding, encode = _encoder()
            name = f"vllm-{role}-{os.getpid()}-{time.monotonic_ns():x}.ring"
            writer = ring.Writer(place / name, size, encoding, {"role": role, "parent": os.getppid(), **about})
        except Exception as e:
            _log.warning("hoptrace records nothing here: %s: %s", type(e).__name__, e)
            return None
        _log.info("hoptrace writes to %s", writer.path)
        return cls(writer, encode)

    @property
    def on(self) -> bool:
        """Whether records are wanted: false after too many faults, in a forked child, and while a reader has switched it off."""
        writer = self._writer
        return writer is not None and not writer.off and os.getpid() == self._pid

    def send(self, record: dict[str, Any], now_ns: int) -> None:
        """Write one record. May raise; call it where :meth:`fault` catches."""
        if self._writer is not None:
            self._writer.put(self._encode(record), now_ns)
            self._faults = 0

    def fault(self, error: BaseException) -> None:
        """Count a fault of the plug-in. Never raises."""
        try:
            if self._writer is None or os.getpid() != self._pid:
                return
            self._writer.lost()
            self._faults += 1
            if self._faults == 1 or self._faults == _FAULTS:
                _log.warning("hoptrace could not record: %s: %s", type(error).__name__, error)
            if self._faults >= _FAULTS:
                _log.warning("hoptrace turns itself off after %d faults in a row", self._faults)
                self._writer = None
        except Exception:  # the last line of defence: the engine goes on whatever happens here
            self._writer = None
