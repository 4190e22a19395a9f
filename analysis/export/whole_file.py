"""Files that an export writes: whole or not at all, and nothing replaced that was not to be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from hoptrace.errors import EnvironmentProblem, UsageError

__all__ = ["check_target", "whole_file"]


def check_target(path: Path, *, force: bool) -> None:
    """Refuse what an export must not replace: devices, pipes and folders always, and a file unless ``force`` is set.

    Raises:
        UsageError: something is there that is not to be replaced.
        EnvironmentProblem: there is no such folder; said before the work, not after it.
    """
    if not path.parent.is_dir():
        raise EnvironmentProblem(f"{path} cannot be written: there is no folder {path.parent}.")
    device = path.is_symlink() and str(path.absolute()).startswith(("/dev/", "/proc/"))
    if device or (path.exists() and not path.is_file()):
        raise UsageError(f"{path} is no ordinary file.", hint="Name a file after -o.")
    if path.exists() and not force:
        raise UsageError(f"{path} is already there.", hint="Choose another name after -o, or add --force.")


@contextmanager
def whole_file(path: Path, *, force: bool) -> Iterator[BinaryIO]:
    """A file to write into, which takes the place of ``path`` when the block ends well, and is gone otherwise.

    Raises:
        UsageError: something is there and ``force`` is not set, or it is no ordinary file.
        EnvironmentProblem: it cannot be written.
    """
    check_target(path, force=force)
    temporary = path.with_name(path.name + ".part")
    try:
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as e:
        raise EnvironmentProblem(f"{path} cannot be written: {e.strerror}.") from None
