"""Whether a trace is whole and keeps its laws: many small checks, each of which says what it found in a sentence.

An *error* means that a figure computed from the trace would be wrong; a *warning* means that something is missing and the trace
says so itself, or that a figure may be coarser than it looks. The checks of rows are in :mod:`hoptrace.validate_rows` and
:mod:`hoptrace.validate_steps`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from hoptrace.errors import InputError
from hoptrace.folder import being_written
from hoptrace.journal import read_journal
from hoptrace.manifest import Part
from hoptrace.parts import checksum
from hoptrace.reader import Trace
from hoptrace.schema import MINOR, TABLES, VERSION

__all__ = ["CHECKS", "Check", "Finding", "check", "validate"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. ``count`` is how many rows, files or requests it concerns; null where that means nothing."""

    level: Literal["error", "warning"]
    check: str
    message: str
    table: str | None = None
    count: int | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """A check of rows: runs if all ``tables`` are readable; those it only looks at if they are there are not listed."""

    name: str
    tables: tuple[str, ...]
    run: Callable[[Trace], Iterator[Finding]]


CHECKS: list[Check] = []


def check(*tables: str) -> Callable[[Callable[[Trace], Iterator[Finding]]], Callable[[Trace], Iterator[Finding]]]:
    """Register a check of rows under its function's name."""

    def register(run: Callable[[Trace], Iterator[Finding]]) -> Callable[[Trace], Iterator[Finding]]:
        CHECKS.append(Check(run.__name__, tables, run))
        return run

    return register


def validate(trace: Trace, progress: Callable[[str], None] | None = None) -> list[Finding]:
    """All findings, errors first. Reads every byte of every file; ``progress`` is told what is being looked at."""
    from hoptrace import validate_rows, validate_steps  # noqa: F401 - importing registers their checks

    tell = progress or (lambda _: None)
    findings: list[Finding] = []
    findings += manifest_complete(trace)
    findings += closed_cleanly(trace)
    findings += nothing_dropped(trace)
    broken: set[str] = set()
    for name, parts in trace.manifest.tables.items():
        tell(f"files of {name}")
        if name not in TABLES:
            findings.append(Finding("warning", "known_table", f"Table {name!r} is not in schema {VERSION}.", name))
            continue
        for part in parts:
            wrong = list(file_whole(trace, name, part))
            findings += wrong
            if any(f.level == "error" for f in wrong):
                broken.add(name)
    for one in CHECKS:
        if broken.isdisjoint(one.tables):
            tell(one.name.replace("_", " "))
            try:
                findings += one.run(trace)
            except (InputError, pl.exceptions.PolarsError) as e:
                # A table that the check merely looks at is broken; what is wrong with it has been said.
                if not broken:
                    findings.append(Finding("error", one.name, str(e)))
    return sorted(findings, key=lambda f: (f.level, f.table or "", f.check, f.message))


# -- the folder and its manifest --------------------------------------------------------------------------------------


def manifest_complete(trace: Trace) -> Iterator[Finding]:
    """A replay says how it was made and how wrong it is; an import says of what."""
    m = trace.manifest
    if m.origin == "replayed":
        if m.replay is None:
            yield Finding("error", "manifest_complete", "The manifest says that this is a replay, but not of what.")
            return
        if not m.replay.policy:
            yield Finding("error", "manifest_complete", "The replay's policy is not in the manifest.")
        if not m.replay.cost_model:
            yield Finding("error", "manifest_complete", "The replay's cost model is not in the manifest.")
        if m.replay.error is None:
            yield Finding(
                "warning", "manifest_complete", "How wrong the replay is has not been measured: no error in the manifest."
            )
    elif m.origin == "imported" and not m.imported_from:
        yield Finding("warning", "manifest_complete", "The manifest does not say which files were imported.")
    names = [s.name for s in m.servers]
    for name in sorted({n for n in names if names.count(n) > 1}):
        yield Finding("error", "manifest_complete", f"Two servers of the manifest have the name {name!r}.")
    if int(m.schema_version.split(".")[1]) > MINOR:
        yield Finding(
            "warning", "manifest_complete", f"Schema {m.schema_version} is newer than {VERSION}: not everything is checked."
        )


def closed_cleanly(trace: Trace) -> Iterator[Finding]:
    """The last second may be missing from a trace whose writer was killed."""
    if trace.manifest.closed:
        return
    if being_written(trace.path):
        yield Finding("warning", "closed_cleanly", "The trace is still being written.")
    else:
        yield Finding("warning", "closed_cleanly", "The trace was not closed cleanly: its last second may be missing.")


def nothing_dropped(trace: Trace) -> Iterator[Finding]:
    """What the trace itself says it lost."""
    for reason, n in sorted(trace.manifest.rows_dropped.items()):
        yield Finding("warning", "nothing_dropped", f"{n:,} rows were dropped ({reason}).", count=n)
    for what, n in sorted(trace.manifest.values_dropped.items()):
        yield Finding("warning", "nothing_dropped", f"{n:,} values did not fit and are null ({what}).", what.split(".")[0], n)
    for c in trace.manifest.collectors:
        for reason, n in sorted(c.dropped.items()):
            yield Finding("warning", "nothing_dropped", f"Collector {c.name} dropped {n:,} rows ({reason}).", count=n)


def file_whole(trace: Trace, name: str, part: Part) -> Iterator[Finding]:
    """The file is there, every byte of it reads and matches its checksum, and it holds as many rows as the manifest says."""
    path = trace.path / part.file
    if not path.resolve().is_relative_to(trace.path.resolve()):
        yield Finding("error", "file_whole", f"The manifest names a file outside the trace: {part.file}.", name)
        return
    try:
        if part.kind == "journal":
            yield from _journal_whole(trace, name, path)
        else:
            yield from _part_whole(name, part, path)
    except FileNotFoundError:
        if trace.manifest.closed or not being_written(trace.path):
            yield Finding("error", "file_whole", f"{part.file} is missing though the manifest names it.", name, 1)
    except (OSError, pa.ArrowException) as e:
        why = (str(e).splitlines() or [type(e).__name__])[0]
        yield Finding("error", "file_whole", f"{part.file} is damaged ({why}).", name, 1)


def _journal_whole(trace: Trace, name: str, path: Path) -> Iterator[Finding]:
    read = read_journal(path)
    file = f"{name}/{path.name}"
    if read.frames_lost:
        message = f"{file} is damaged in its middle: about {read.frames_lost} half seconds of rows are lost."
        yield Finding("error", "file_whole", message, name, read.frames_lost)
    elif read.bytes_lost and not being_written(trace.path):
        yield Finding("warning", "file_whole", f"{file} ends in {read.bytes_lost:,} bytes that were not written whole.", name, 1)


def _part_whole(name: str, part: Part, path: Path) -> Iterator[Finding]:
    if part.crc32 is not None and checksum(path) != part.crc32:
        yield Finding("error", "file_whole", f"{part.file} is damaged (its checksum differs).", name, 1)
        return
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        rows = file.metadata.num_rows
        types = {f.name: f.type for f in file.schema_arrow}
        for i in range(file.num_row_groups):
            file.read_row_group(i)
    if part.rows is not None and part.rows != rows:
        yield Finding("error", "file_whole", f"{part.file} holds {rows:,} rows, the manifest says {part.rows:,}.", name, 1)
    for column in TABLES[name].columns:
        if column.name in types and types[column.name] != column.type:
            message = f"{part.file}: column {column.name} is {types[column.name]}, the schema says {column.type}."
            yield Finding("warning", "file_whole", message, name, 1)
