"""In which order runs come, which are done, and where their files lie: a command that was killed goes on from here."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hoptrace.errors import InputError

__all__ = ["Folder", "Run", "order"]


@dataclass(frozen=True)
class Run:
    """One run of one policy."""

    round: int
    policy: str

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.round:02d}-{self.policy}"


def order(policies: tuple[str, ...], rounds: int) -> list[Run]:
    """A B1 B2 … A B1 B2 …: what drifts slowly meets all policies alike."""
    return [Run(i, p) for i in range(rounds) for p in policies]


class Folder:
    """The folder of one cell: ``NN-policy.trace`` with ``NN-policy.run.json`` of each run that is done, rejected ones in
    ``rejected/``. The JSON is written last: a run without it is not done."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def trace(self, run: Run) -> Path:
        """Where a run's trace is, or will be."""
        return self.path / f"{run.name}.trace"

    def told(self, run: Run) -> dict[str, Any] | None:
        """The gauges of a run that is done; null if it is not."""
        path = self.path / f"{run.name}.run.json"
        if not path.exists() or not self.trace(run).exists():
            return None
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def begin(self, run: Run) -> Path:
        """Where to record it; what a killed command left there, or half moved, is gone."""
        part = self.path / f"{run.name}.part"
        for left in (part, self.trace(run)):
            shutil.rmtree(left, ignore_errors=True)
        part.mkdir()
        return part / "run.trace"

    def keep(self, run: Run, gauges: dict[str, Any]) -> None:
        """What was recorded is the run."""
        part = self.path / f"{run.name}.part"
        os.replace(part / "run.trace", self.trace(run))
        _write(self.path / f"{run.name}.run.json", gauges)
        shutil.rmtree(part, ignore_errors=True)

    def reject(self, run: Run, gauges: dict[str, Any]) -> None:
        """What was recorded is put aside, with its gauges, which say why."""
        aside = self.path / "rejected"
        aside.mkdir(exist_ok=True)
        part, name = self.path / f"{run.name}.part", f"{run.name}-{gauges['attempt']}"
        shutil.rmtree(aside / f"{name}.trace", ignore_errors=True)
        if (part / "run.trace").exists():
            os.replace(part / "run.trace", aside / f"{name}.trace")
        _write(aside / f"{name}.run.json", gauges)
        shutil.rmtree(part, ignore_errors=True)

    def rejected(self, run: Run) -> int:
        """How many attempts at a run were put aside."""
        return len(list((self.path / "rejected").glob(f"{run.name}-*.run.json")))

    def same(self, told: dict[str, Any]) -> None:
        """Note what decides the runs of this cell, by policy.

        Raises:
            InputError: runs of another setting are here.
        """
        path = self.path / "cell.json"
        before: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        for policy, now in told.items():
            was = before.get(policy)
            if was is not None and was != json.loads(json.dumps(now)) and any(self.path.glob(f"*-{policy}.run.json")):
                key = next((k for k in now if was.get(k) != json.loads(json.dumps(now[k]))), "a key")
                raise InputError(
                    f"{self.path} has runs of {policy} under another recipe: its {key} has changed.",
                    hint="Give another folder with -o, or remove that cell's.",
                )
        _write(path, before | told)


def _write(path: Path, data: dict[str, Any]) -> None:
    part = path.with_name(path.name + ".new")
    part.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(part, path)
