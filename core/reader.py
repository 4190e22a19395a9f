"""Read a trace: Polars lazy frames by table name, DuckDB views, and the manifest. A trace that is being written, or whose writer was
killed, reads like any other."""

from __future__ import annotations

import threading
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa

from hoptrace.errors import InputError, UsageError
from hoptrace.journal import read_journal
from hoptrace.manifest import Manifest, Part, read_manifest
from hoptrace.parts import conform, merge_rows
from hoptrace.schema import TABLES, Table, table

__all__ = ["Trace", "open_trace"]


class Trace:
    """One trace folder. Cheap to make; nothing but the manifest is read until a table is asked for."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The folder's name without ``.trace``."""
        return self.path.name.removesuffix(".trace")

    @property
    def origin(self) -> str:
        """recorded, imported or replayed. For people to read: no code may branch on it."""
        return self.manifest.origin

    def table(self, name: str) -> pl.LazyFrame:
        """All rows of a table with all columns of the schema (missing ones null), one row per key where rows merge.

        Raises:
            KeyError: no such table in the schema.
            InputError: a file that the manifest names is missing or damaged; names it.
        """
        spec = table(name)
        parts = self.manifest.tables.get(name, [])
        frames = [f for p in parts if (f := self._part(p, spec)) is not None]
        if not frames:
            return pl.from_arrow(spec.arrow.empty_table()).lazy()  # type: ignore[union-attr]
        frame = pl.concat(frames, how="diagonal") if len(frames) > 1 else frames[0]
        if spec.merge and not (len(parts) == 1 and parts[0].merged):
            frame = merge_rows(frame, spec)
        return frame

    def rows(self, name: str) -> int:
        """Rows of a table."""
        return int(self.table(name).select(pl.len()).collect().item())

    def has(self, name: str) -> bool:
        """Whether the table holds any row."""
        return name in self.manifest.tables and self.rows(name) > 0

    def duckdb(self) -> duckdb.DuckDBPyConnection:
        """A new in-memory connection with one view per table of the schema. Close it; use one per thread."""
        con = duckdb.connect(":memory:", config={"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"})
        for name in TABLES:
            con.register(name, self.table(name).collect().to_arrow())
        return con

    def sql(self, query: str) -> pl.DataFrame:
        """Run one query over the tables by their names. UsageError with DuckDB's own words if it is wrong."""
        con = self.duckdb()
        try:
            return pl.from_arrow(con.execute(query).to_arrow_table())  # type: ignore[return-value]
        except duckdb.Error as e:
            raise UsageError(f"{str(e).strip()}") from None
        finally:
            con.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _part(self, part: Part, spec: Table) -> pl.LazyFrame | None:
        path = self.path / part.file
        if not path.resolve().is_relative_to(self.path.resolve()):
            raise InputError(f"{self.path / 'manifest.json'} names a file outside the trace: {part.file}.")
        try:
            if part.kind == "journal":
                batches = read_journal(path).batches
                if not batches:
                    return None
                return pl.from_arrow(conform(pa.Table.from_batches(batches), spec)).lazy()  # type: ignore[union-attr]
            frame = pl.scan_parquet(path)
            have = frame.collect_schema().names()
        except FileNotFoundError:
            if part.kind == "journal":
                # A live writer may have turned it into a part since the manifest was read.
                fresh = read_manifest(self.path)
                replaced = [p for p in fresh.tables.get(spec.name, []) if p.file == part.file.replace(".journal", ".parquet")]
                if replaced:
                    self.manifest = fresh
                    return self._part(replaced[0], spec)
            raise InputError(f"{path} is missing though the manifest names it.", hint="Restore it from a copy of the trace.") from None
        except (pl.exceptions.PolarsError, OSError) as e:
            why = str(e).splitlines()[0]
            raise InputError(f"{path} is damaged ({why}).", hint="Restore it from a copy of the trace.") from None
        missing = [c for c in spec.columns if c.name not in have]
        if missing:
            empty = pl.from_arrow(spec.arrow.empty_table())
            frame = frame.with_columns(pl.lit(None, dtype=empty.schema[c.name]).alias(c.name) for c in missing)  # type: ignore[union-attr]
        extra = [n for n in have if n not in spec.names]
        return frame.select([*spec.names, *extra])


def open_trace(path: Path | str) -> Trace:
    """Open a trace folder.

    Raises:
        InputError: there is none, it is damaged, or its schema is newer than this hoptrace reads.
    """
    folder = Path(path)
    return Trace(folder, read_manifest(folder))
