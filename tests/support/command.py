"""The command line in this process: a new one costs seconds of imports."""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from hoptrace.cli import main

__all__ = ["Ran", "run"]


@dataclass(frozen=True)
class Ran:
    """What a command gave."""

    returncode: int
    stdout: str
    stderr: str


def run(*args: str | Path) -> Ran:
    """`hoptrace ARGS`."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    argv = mock.patch.object(sys, "argv", ["hoptrace", *map(str, args)])
    with argv, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as e:
            code = int(e.code or 0)
    return Ran(code, out.getvalue(), err.getvalue())
