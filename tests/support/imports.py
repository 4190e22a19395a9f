"""Helpers for tests of imports: write a file, import it, look at its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

import hoptrace
from hoptrace.collectors.files.base import Options
from hoptrace.collectors.files.run import Imported, import_files

DATA = Path(__file__).parents[1] / "data"
# Extra checks look into ../shared, which a user's clone lacks.
SHARED = Path(__file__).parents[3] / "shared" / "traces"


def run(folder: Path, content: str | bytes, name: str = "file", *, out: str = "out.trace", **more: Any) -> Imported:
    """Import ``content`` as a file; keywords of `Options` and of `import_files`."""
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    fields = {k: more.pop(k) for k in list(more) if k in Options.__slots__}
    return import_files([path], folder / out, options=Options(**fields), **more)


def rows(folder: Path, table: str = "requests", out: str = "out.trace") -> pl.DataFrame:
    """Rows of the trace that :func:`run` wrote."""
    return hoptrace.open(folder / out).table(table).collect()


def told(done: Imported, part: str) -> bool:
    """Whether a note says so."""
    return any(part in note for note in done.manifest.notes)
