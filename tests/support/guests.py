"""The recorded trees of guests with CXL memory, unpacked once a session; a test that changes files copies its tree."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from functools import cache
from pathlib import Path

from hoptrace.collectors.hardware.source import Roots

__all__ = ["copied", "guest", "roots_of"]

_TAR = Path(__file__).parents[1] / "data" / "hardware" / "guests.tar.gz"


@cache
def _all() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="hoptrace-guests-"))
    with tarfile.open(_TAR) as tar:
        tar.extractall(folder, filter="fully_trusted")  # links lead out of a tree, as /sys has them; the file is ours
    return folder


def guest(name: str) -> Path:
    """The folder of cxl-volatile-6.12, cxl-pmem-6.1, hmat-only-6.12 or plain-vm: proc, sys, cmd."""
    return _all() / name


def copied(name: str, to: Path) -> Path:
    """A copy that may be changed."""
    shutil.copytree(guest(name), to / name, symlinks=True)
    return to / name


def roots_of(folder: Path) -> Roots:
    """Where its files are."""
    return Roots(folder / "proc", folder / "sys")
