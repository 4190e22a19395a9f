"""Import files into one trace: find the kind, read, number the requests, write."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from hoptrace.collectors.files import mooncake, request_csv
from hoptrace.collectors.files.base import Imported, Importer
from hoptrace.errors import InputError, UsageError
from hoptrace.manifest import CollectorInfo, Manifest
from hoptrace.writer import TraceWriter

__all__ = ["IMPORTERS", "import_files"]

IMPORTERS: dict[str, Importer] = {i.kind: i for i in (request_csv.IMPORTER, mooncake.IMPORTER)}


def import_files(
    paths: Sequence[Path],
    out: Path,
    *,
    kind: str | None = None,
    limit: int | None = None,
    source: str | None = None,
    licence: str | None = None,
) -> Manifest:
    """Read ``paths`` into the new trace ``out``; returns its manifest.

    ``limit`` keeps the first requests by arrival. ``source`` and ``licence`` are written down as they are given.

    Raises:
        UsageError: the kind does not exist, or ``out`` does.
        InputError: a file is missing, of no known kind, or damaged (names file, line and column).
    """
    if kind is not None and kind not in IMPORTERS:
        raise UsageError(f"There is no importer {kind!r}.", hint=f"Choose one of: {', '.join(IMPORTERS)}.")
    if out.exists():
        raise UsageError(f"{out} is already there.", hint="Choose another name after -o, or remove it first.")
    read: list[tuple[Path, Importer, Imported]] = []
    for path in paths:
        importer = _importer(path, kind)
        read.append((path, importer, importer.read(path)))
    requests = pl.concat([i.requests for _, _, i in read], how="diagonal").sort("arrival_ns", maintain_order=True)
    if limit is not None:
        requests = requests.head(limit)
    if requests.is_empty():
        raise InputError(f"{', '.join(map(str, paths))}: no request could be read.")
    requests = requests.with_row_index("request").with_columns(pl.col("request").cast(pl.Int64))
    manifest = Manifest(
        origin="imported",
        title=f"{len(requests)} requests of {', '.join(p.name for p in paths)}",
        imported_from=[
            {
                "file": p.name,
                "kind": i.kind,
                "sha256": _sha256(p),
                "bytes": p.stat().st_size,
                "source": source,
                "licence": licence,
            }
            for p, i, _ in read
        ],
        collectors=[
            CollectorInfo(name=f"import:{i.kind}", available=True, rows=d.requests.height, dropped=d.dropped) for _, i, d in read
        ],
        notes=list(dict.fromkeys(note for _, _, d in read for note in d.notes)),
    )
    for _, _, d in read:
        for reason, rows in d.dropped.items():
            manifest.rows_dropped[reason] = manifest.rows_dropped.get(reason, 0) + rows
    columns = [c for c in requests.columns if c not in ("request", "source") and requests[c].null_count() < requests.height]
    with TraceWriter(out, manifest, background=False) as writer:
        writer.append_arrow("requests", requests.to_arrow())
        first, last = requests["arrival_ns"].min(), requests["arrival_ns"].max()
        writer.append(
            "coverage",
            [
                {"table": "requests", "columns": columns, "from_ns": first, "to_ns": last, "fraction": None, "source": s}
                for s in sorted(set(requests["source"]))
            ],
        )
    return manifest


def _importer(path: Path, kind: str | None) -> Importer:
    try:
        with path.open("rb") as f:
            head = f.read(65536)
    except FileNotFoundError:
        raise InputError(f"There is no file {path}.", hint="Check the path.") from None
    except OSError as e:
        raise InputError(f"{path} cannot be read: {e.strerror}.") from None
    if not head.strip():
        raise InputError(f"{path} is empty.")
    if kind is not None:
        return IMPORTERS[kind]
    for importer in IMPORTERS.values():
        if importer.matches(path, head):
            return importer
    kinds = "; ".join(f"{i.kind}: {i.summary}" for i in IMPORTERS.values())
    raise InputError(f"{path} is of no kind that hoptrace knows.", hint=f"Known kinds: {kinds}. Name one with --kind.")


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
