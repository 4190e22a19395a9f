"""Import files into one trace: find the kind, read in pieces, number the requests, write; all of it or nothing."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from hoptrace.collectors.files.base import Importer, Options, Sink
from hoptrace.collectors.files.kinds import kind_of
from hoptrace.collectors.files.rejects import Rejects
from hoptrace.errors import EnvironmentProblem, InputError, UsageError
from hoptrace.folder import being_written
from hoptrace.manifest import CollectorInfo, Manifest, read_manifest
from hoptrace.reader import open_trace
from hoptrace.schema import TABLES
from hoptrace.writer import TraceWriter

__all__ = ["Imported", "import_files"]

_WORKING = ".importing"
# Rows of a Parquet part: what an import holds in memory of each table.
_PART_ROWS = 400_000


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import did.

    ``read`` = ``written`` + ``rejected`` + ``beyond_limit``, in records of the files. ``reasons`` counts the rejects by reason,
    ``first_rejects`` are the first of them (file, row, reason, value).
    """

    manifest: Manifest
    read: int
    written: int
    rejected: int
    beyond_limit: int
    reasons: dict[str, int]
    first_rejects: list[dict[str, object]] = field(default_factory=list)


def import_files(
    paths: Sequence[Path],
    out: Path,
    *,
    kind: str | None = None,
    limit: int | None = None,
    source: str | None = None,
    licence: str | None = None,
    options: Options | None = None,
    rejects: Path | None = None,
    strict: bool = False,
    progress: Callable[[Path, int, int], None] | None = None,
) -> Imported:
    """Read ``paths`` into the new trace ``out``.

    The trace is written beside ``out`` and gets its name when it is whole: a failure leaves nothing, a kill only a folder whose
    name ends in ``.importing``, which the next import to the same name removes.

    Args:
        limit: keep the first requests by arrival (and what belongs to them).
        source, licence: written down as they are given.
        options: what the user said of the files.
        rejects: a CSV file to write, with every rejected record; it stays if the import fails.
        strict: a rejected record is an error.
        progress: called with the file, the bytes read of it and its size.

    Raises:
        UsageError: the kind does not exist, or ``out`` or ``rejects`` does.
        InputError: a file is missing, of no known kind, or cannot be read; every record of one was rejected; ``strict``.
        EnvironmentProblem: the trace cannot be written.
    """
    if out.exists():
        raise UsageError(f"{out} is already there.", hint="Choose another name after -o, or remove it first.")
    if rejects is not None and rejects.absolute() == out.absolute():
        raise UsageError(f"-o and --rejects both name {out}.", hint="Choose another name after --rejects.")
    options = options or Options()
    chosen = _chosen(paths, _mapped(kind, options))
    refused = Rejects(rejects, strict=strict)
    working = out.with_name(out.name + _WORKING)
    _clear(working)
    manifest = Manifest(origin="imported")
    try:
        with TraceWriter(working, manifest, background=False, part_rows=_PART_ROWS) as writer:
            sinks = _read(chosen, writer, refused, options, progress)
            refused.raise_if_strict()
            _describe(chosen, sinks, manifest, writer, refused, source, licence)
        beyond = 0
        if limit is not None:
            beyond = _cut(working, limit)
            manifest = read_manifest(working)
        _rename(working, out)
    except BaseException:
        shutil.rmtree(working, ignore_errors=True)
        raise
    finally:
        refused.close()
    read = sum(s.read for s in sinks)
    written = sum(s.written for s in sinks) - beyond
    return Imported(manifest, read, written, refused.total, beyond, refused.reasons, refused.kept.head(5).to_dicts())


def _mapped(kind: str | None, options: Options) -> str | None:
    """A log whose columns the user describes is of the kind `log`."""
    if options.mapping is None and options.line_format is None:
        return kind
    if kind not in (None, "log"):
        raise UsageError(f"--map and --format are for access logs, not for the kind {kind}.", hint="Leave --kind out.")
    return "log"


def _chosen(paths: Sequence[Path], kind: str | None) -> list[tuple[Path, Importer, list[Path]]]:
    """The files to read with their importers, and what each of them reads besides."""
    found: list[tuple[Path, Importer]] = []
    unknown: dict[Path, InputError] = {}
    for path in paths:
        try:
            found.append((path, kind_of(path, kind)))
        except InputError as e:
            unknown[path] = e
    # `hoptrace import run/*` names what belongs to another file too.
    belongs = {p.resolve() for path, importer in found for p in importer.companions(path)}
    for path, error in unknown.items():
        if path.resolve() not in belongs:
            raise error
    chosen: list[tuple[Path, Importer, list[Path]]] = []
    beside: set[Path] = set()
    for path, importer in found:
        if path.resolve() in beside:
            continue
        more = [p for p in importer.companions(path) if p.exists()]
        beside |= {p.resolve() for p in more}
        chosen.append((path, importer, more))
    twice = [p for i, (p, _, _) in enumerate(chosen) if p.resolve() in {q.resolve() for q, _, _ in chosen[:i]}]
    if twice:
        raise UsageError(f"{twice[0]} is named twice.", hint="Its requests would count twice.")
    return chosen


def _read(
    chosen: list[tuple[Path, Importer, list[Path]]],
    writer: TraceWriter,
    refused: Rejects,
    options: Options,
    progress: Callable[[Path, int, int], None] | None,
) -> list[Sink]:
    sinks: list[Sink] = []
    offset = 0
    for path, importer, _ in chosen:
        done, size = 0, path.stat().st_size

        def advance(n: int, path: Path = path, size: int = size) -> None:
            nonlocal done
            done += n
            if progress is not None:
                progress(path, min(done, size), size)

        sink = Sink(
            path, importer.kind, writer, refused, options=options, offset=offset, sha256=_sha256(path), advance=advance
        )  # fmt: skip
        importer.read(path, sink)
        sink.finish()
        offset = sink.next_request
        sinks.append(sink)
    return sinks


def _describe(
    chosen: list[tuple[Path, Importer, list[Path]]],
    sinks: list[Sink],
    manifest: Manifest,
    writer: TraceWriter,
    refused: Rejects,
    source: str | None,
    licence: str | None,
) -> None:
    """What the manifest, `coverage` and `events` say of the import."""
    rows = [row for s in sinks for row in s.coverage()]
    writer.append("coverage", _joined(rows))
    begins = [int(str(r["from_ns"])) for r in rows]
    writer.append("events", refused.events(min(begins, default=0)))
    for (path, importer, more), sink in zip(chosen, sinks, strict=True):
        for p in (path, *more):
            entry: dict[str, object] = {
                "file": p.name, "kind": importer.kind, "sha256": sink.sha256 if p == path else _sha256(p),
                "bytes": p.stat().st_size, "source": source, "licence": licence,
            }  # fmt: skip
            if p == path:
                entry |= {"rows_read": sink.read, "rows_written": sink.written, "rows_rejected": sink.rejected}
            manifest.imported_from.append(entry)
    by_source: dict[str, CollectorInfo] = {}
    for sink in sinks:
        info = by_source.setdefault(sink.source, CollectorInfo(name=sink.source, available=True))
        info.rows += sink.written
    manifest.collectors += by_source.values()
    for reason, n in refused.reasons.items():
        manifest.rows_dropped[reason] = manifest.rows_dropped.get(reason, 0) + n
    notes = [note for s in sinks for note in s.notes()]
    if {"utc", "relative"} <= {s.epoch for s in sinks}:
        notes.append("Some files have times in UTC, others from their own start: in this trace they lie far apart.")
    elif len(sinks) > 1 and {s.epoch for s in sinks} == {"relative"}:
        notes.append("The files' times count from each one's own start: in this trace all start at once.")
    manifest.notes += list(dict.fromkeys(notes))
    n = sum(s.written for s in sinks)
    what = f"{n:,} {sinks[0].main}" if len({s.main for s in sinks}) == 1 else f"{n:,} rows"
    manifest.title = manifest.title or f"{what} of {', '.join(p.name for p, _, _ in chosen)}"


def _joined(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """One coverage row per table and source: from the first file's start to the last one's end."""
    merged: dict[tuple[object, object], dict[str, object]] = {}
    for row in rows:
        key = (row["table"], row["source"])
        before = merged.setdefault(key, row)
        if before is not row:
            before["from_ns"] = min(int(str(before["from_ns"])), int(str(row["from_ns"])))
            before["to_ns"] = max(int(str(before["to_ns"])), int(str(row["to_ns"])))
            names = {*before["columns"], *row["columns"]}  # type: ignore[misc]
            before["columns"] = [n for n in TABLES[str(row["table"])].names if n in names]
    return list(merged.values())


def _cut(working: Path, limit: int) -> int:
    """Keep the first ``limit`` requests by arrival in the trace; returns how many went. Requests keep their numbers' order."""
    trace = open_trace(working)
    order = trace.table("requests").select("request", "arrival_ns").collect()
    keep = order.sort("arrival_ns", "request", maintain_order=True).head(limit).select("request").sort("request")
    beyond = order.height - keep.height
    if not beyond:
        return 0
    numbers = keep.with_row_index("new").with_columns(pl.col("new").cast(pl.Int64))
    manifest = trace.manifest.model_copy(deep=True)
    parts, manifest.tables = manifest.tables, {}
    files = ", ".join(e["file"] for e in manifest.imported_from)
    manifest.title = f"The first {keep.height:,} requests of {files}"
    manifest.notes.append(f"Only the first {keep.height:,} requests by arrival were kept (--limit): {beyond:,} more were read.")
    smaller = working.with_name(working.name + "-limit")
    _clear(smaller)
    try:
        with TraceWriter(smaller, manifest, background=False, part_rows=_PART_ROWS) as writer:
            for name in parts:
                for part in parts[name]:
                    # Part by part: each has a bounded number of rows, and none of their kinds (vantages) is passed over.
                    frame = pl.read_parquet(working / part.file, glob=False)
                    writer.append_arrow(name, _kept(frame, numbers).to_arrow())
        shutil.rmtree(working)
        smaller.rename(working)
    except BaseException:
        shutil.rmtree(smaller, ignore_errors=True)
        raise
    return beyond


def _kept(frame: pl.DataFrame, numbers: pl.DataFrame) -> pl.DataFrame:
    """The rows of requests that are kept (`request` to `new` in ``numbers``) under their new numbers, and those of no request."""
    columns = frame.columns
    if "request" in columns:
        frame = frame.join(numbers, on="request", how="left", maintain_order="left")
        frame = frame.filter(pl.col("request").is_null() | pl.col("new").is_not_null()).with_columns(
            pl.col("new").alias("request")
        )
    if "parent_request" in columns:
        parents = numbers.rename({"request": "parent_request", "new": "new_parent"})
        frame = frame.join(parents, on="parent_request", how="left", maintain_order="left")
        frame = frame.with_columns(pl.col("new_parent").alias("parent_request"))
    return frame.select(columns)


def _clear(working: Path) -> None:
    """Remove what an import that was killed left behind."""
    if being_written(working):
        raise UsageError(f"Another import writes {working}.", hint="Wait for it, or choose another name after -o.")
    shutil.rmtree(working, ignore_errors=True)


def _rename(working: Path, out: Path) -> None:
    if out.exists():
        raise UsageError(f"{out} is there meanwhile.", hint="Choose another name after -o.")
    try:
        working.rename(out)
    except OSError as e:
        raise EnvironmentProblem(f"{out} cannot be made: {e.strerror}.") from None


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as f:
            return hashlib.file_digest(f, "sha256").hexdigest()
    except OSError as e:
        raise InputError(f"{path} cannot be read: {e.strerror}.") from None
