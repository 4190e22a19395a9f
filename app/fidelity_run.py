"""Runs a fidelity study for the Fidelity page, as `hoptrace fidelity --json` does: a process of its own, so that a replay's
memory goes when it ends and a user who leaves does not hold the dashboard up.

The page knows the study only as the JSON whose keys docs/fidelity-command.md explains.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from hoptrace.errors import InputError

__all__ = ["run_study"]


def run_study(a: str, others: Sequence[str], repeats: Sequence[str], *, truth: bool) -> dict[str, Any]:
    """The study of trace ``a`` and ``others``, the runs ``repeats`` of ``a``'s policy giving the noise floor.

    Args:
        truth: whether to tell where the error comes from, by putting in recorded truth.

    Raises:
        InputError: the traces cannot be studied together, with the command's own sentence.
    """
    command = [sys.executable, "-m", "hoptrace", "fidelity", "--json", "--truth", "auto" if truth else "none"]
    for r in repeats:
        command += ["--repeat", r]
    # Behind `--`: a trace may be called anything.
    found = subprocess.run([*command, "--", a, *others], capture_output=True, text=True, check=False)
    if found.returncode:
        said = [line for line in found.stderr.splitlines() if line.strip()]
        raise InputError(" ".join(said) or f"hoptrace fidelity ended with {found.returncode} and said nothing.")
    study: dict[str, Any] = json.loads(found.stdout)
    return study
