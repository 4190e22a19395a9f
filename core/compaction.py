"""Tidy what a killed or starved writer left: journals become parts, stray files go. Reading needs none of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hoptrace.errors import EnvironmentProblem, UsageError
from hoptrace.folder import TraceFolder
from hoptrace.manifest import Manifest, Part, read_manifest
from hoptrace.schema import TABLES

__all__ = ["Compaction", "compact"]

_OURS = re.compile(r"(\d{5,})\.(journal|parquet|parquet\.tmp)")


@dataclass(frozen=True, slots=True)
class Compaction:
    """``journals`` turned into parts, ``rows`` in them, ``removed`` files that belonged to nothing."""

    journals: int
    rows: int
    removed: int


def compact(path: Path | str) -> Compaction:
    """Turn the journals of a trace into parts. The trace keeps saying that it was not closed cleanly, if so.

    A journal that the manifest does not name (the disk was full when it was begun) is taken in, unless its part is already there.

    Raises:
        InputError: there is no trace, or it is damaged or too new.
        UsageError: its writer is alive.
        EnvironmentProblem: the disk refuses; the trace is as readable as before.
    """
    path = Path(path)
    manifest = read_manifest(path)
    try:
        folder = TraceFolder(path, manifest)
    except BlockingIOError:
        raise UsageError(f"{path} is still being written.", hint="Stop the capture first; reading does not need this.") from None
    except OSError as e:
        raise EnvironmentProblem(f"{path} cannot be written: {e.strerror}.") from None
    try:
        removed = _take_stock(path, manifest)
        journals = [(name, p) for name, parts in manifest.tables.items() if name in TABLES for p in parts if p.kind == "journal"]
        for name, part in journals:
            folder.adopt(TABLES[name], path / part.file)
        folder.convert()
        stems = {part.file.removesuffix(".journal") for _, part in journals}
        made = [p for parts in manifest.tables.values() for p in parts if p.file.removesuffix(".parquet") in stems]
        return Compaction(len(made), sum(p.rows or 0 for p in made), removed)
    except OSError as e:
        raise EnvironmentProblem(
            f"{path} cannot be written: {e.strerror}.",
            hint="Free some space and run it again, or copy the trace elsewhere and compact the copy: it is whole as it is.",
        ) from None
    finally:
        folder.release()


def _take_stock(path: Path, manifest: Manifest) -> int:
    """Name the journals that hold rows of their own; delete what an interrupted rotation left. Returns how many files went."""
    named = {p.file for parts in manifest.tables.values() for p in parts}
    removed = 0
    for name in TABLES:
        for file in sorted((path / name).glob("*")):
            match = _OURS.fullmatch(file.name)
            if not match or f"{name}/{file.name}" in named:
                continue
            if match[2] == "journal" and f"{name}/{match[1]}.parquet" not in named:
                manifest.tables.setdefault(name, []).append(Part(file=f"{name}/{file.name}", kind="journal"))
                manifest.tables[name].sort(key=lambda p: int(Path(p.file).stem))
                continue
            file.unlink()
            removed += 1
    return removed
