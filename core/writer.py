"""The crash-safe trace writer: hand over rows from any thread, lose at most the last second to a kill.

Rows are buffered for half a second, then go as a checksummed frame into the table's journal; every five seconds the journals are
fsynced. When a journal is large enough, and at the end, it becomes a sorted Parquet part: the part is renamed into place, the manifest is
replaced, and only then is the journal deleted, so at every instant the manifest names a complete set of files.

A full disk does not raise in the threads that hand over rows (a collector must never harm the server): rows are dropped, counted in
the manifest, and :meth:`TraceWriter.close` raises one clear error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from hoptrace.clock import TraceClock
from hoptrace.errors import EnvironmentProblem, InputError, UsageError
from hoptrace.journal import JournalWriter, read_journal
from hoptrace.manifest import FILE, Manifest, Part, write_manifest
from hoptrace.parts import conform, write_part
from hoptrace.schema import TABLES, Table, table

__all__ = ["TraceWriter"]

_FLUSH_S = 0.5
_SYNC_S = 5.0
_ROTATE_BYTES = 64 << 20
_MAX_BUFFERED_ROWS = 1_000_000


class _Open:
    """What is in progress of one table."""

    def __init__(self, spec: Table) -> None:
        self.spec = spec
        self.rows: list[Mapping[str, Any]] = []
        self.batches: list[pa.Table] = []
        self.buffered = 0
        self.journal: JournalWriter | None = None
        self.serial = 0


class TraceWriter:
    """Writes one trace folder. Use as a context manager; leaving it by an exception still closes the trace, marked as not clean."""

    def __init__(self, path: Path | str, manifest: Manifest, *, clock: TraceClock | None = None, background: bool = True) -> None:
        """Create the folder ``path`` (it must not exist) and its manifest.

        ``background=False`` leaves flushing to the caller (importers and replays, which are not live).

        Raises:
            UsageError: something is already there.
            EnvironmentProblem: the folder cannot be made.
        """
        from hoptrace import __version__

        self.path = Path(path)
        self.clock = clock or TraceClock.start()
        self.manifest = manifest
        manifest.utc_offset_ns = self.clock.utc_offset_ns if clock or background else manifest.utc_offset_ns
        manifest.hoptrace_version = __version__
        manifest.created_utc = manifest.created_utc or datetime.now(UTC).isoformat(timespec="seconds")
        try:
            self.path.mkdir(parents=True)
        except FileExistsError:
            raise UsageError(f"{self.path} is already there.", hint="Choose another name after -o, or remove it first.") from None
        except OSError as e:
            raise EnvironmentProblem(f"{self.path} cannot be made: {e.strerror}.") from None
        self._lock = threading.RLock()
        self._open: dict[str, _Open] = {}
        self._problem: OSError | None = None
        self._closed = False
        self._wake = threading.Event()
        try:
            write_manifest(self.path, manifest)
        except OSError as e:
            raise EnvironmentProblem(f"{self.path} cannot be written: {e.strerror}.") from None
        self._thread: threading.Thread | None = None
        if background:
            self._thread = threading.Thread(target=self._run, name="hoptrace-writer", daemon=True)
            self._thread.start()

    # -- handing over -------------------------------------------------------------------------------------------------

    def append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Hand over rows (mappings by column name; what is missing is null). Never blocks on the disk, never raises for it.

        Raises KeyError for an unknown table.
        """
        spec = table(name)
        if not rows:
            return
        with self._lock:
            o = self._state(spec)
            if self._closed or o.buffered + len(rows) > _MAX_BUFFERED_ROWS:
                self._drop("closed" if self._closed else "buffer full", len(rows))
                return
            o.rows.extend(rows)
            o.buffered += len(rows)

    def append_arrow(self, name: str, data: pa.Table | pa.RecordBatch) -> None:
        """Hand over a whole Arrow table or batch (importers, replays). KeyError for an unknown table, ArrowInvalid for wrong types."""
        spec = table(name)
        if isinstance(data, pa.RecordBatch):
            data = pa.Table.from_batches([data])
        data = conform(data, spec)
        with self._lock:
            o = self._state(spec)
            if self._closed:
                self._drop("closed", data.num_rows)
                return
            self._buffer_rows(o)
            o.batches.append(data)
            o.buffered += data.num_rows

    def drop(self, reason: str, rows: int = 1) -> None:
        """Count rows that a collector had to drop."""
        with self._lock:
            self._drop(reason, rows)

    def update(self, change: Callable[[Manifest], None]) -> None:
        """Change the manifest and write it (what a probe found, a server's configuration)."""
        with self._lock:
            change(self.manifest)
            self._guard(lambda: write_manifest(self.path, self.manifest), 0)

    # -- to the disk --------------------------------------------------------------------------------------------------

    def flush(self, *, sync: bool = False) -> None:
        """Push what is buffered into the journals, and rotate those that have grown large."""
        with self._lock:
            for o in self._open.values():
                self._flush_table(o)
                if sync and o.journal is not None:
                    self._guard(o.journal.sync, 0)
                if o.journal is not None and o.journal.bytes > _ROTATE_BYTES:
                    self._guard(lambda o=o: self._rotate(o), 0)  # type: ignore[misc]

    def close(self, *, clean: bool = True) -> Path:
        """Turn every journal into a sorted part and mark the trace closed. Returns the folder.

        Raises:
            EnvironmentProblem: the disk refused rows; says how many, what is kept, and the remedy.
        """
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            if self._closed:
                return self.path
            self.flush(sync=True)
            for o in self._open.values():
                if o.journal is not None:
                    journal = o.journal
                    self._guard(lambda o=o: self._rotate(o, final=True), 0)  # type: ignore[misc]
                    journal.close()
            self._closed = True
            self.manifest.closed = clean and self._problem is None
            self._guard(lambda: write_manifest(self.path, self.manifest), 0)
            if self._problem is not None:
                lost = sum(self.manifest.rows_dropped.values())
                raise EnvironmentProblem(
                    f"The disk of {self.path} refused writes ({self._problem.strerror}): {lost} rows were dropped.",
                    hint="What was written before is kept and readable. Free some space, then run: hoptrace compact " + str(self.path),
                )
        return self.path

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
            return
        try:
            self.close(clean=False)
        except EnvironmentProblem as e:
            # The first error is the one to report; this one must not hide it.
            if error is not None:
                error.add_note(str(e))

    # -- inside -------------------------------------------------------------------------------------------------------

    def _state(self, spec: Table) -> _Open:
        o = self._open.get(spec.name)
        if o is None:
            o = self._open[spec.name] = _Open(spec)
        return o

    def _drop(self, reason: str, rows: int) -> None:
        self.manifest.rows_dropped[reason] = self.manifest.rows_dropped.get(reason, 0) + rows

    def _guard(self, action: Callable[[], object], rows: int) -> bool:
        try:
            action()
        except OSError as e:
            self._problem = self._problem or e
            if rows:
                self._drop(f"disk: {e.strerror}", rows)
            return False
        return True

    @staticmethod
    def _buffer_rows(o: _Open) -> None:
        if o.rows:
            o.batches.append(pa.Table.from_pylist(o.rows, schema=o.spec.arrow))
            o.rows = []

    def _flush_table(self, o: _Open) -> None:
        if not o.buffered:
            return
        try:
            self._buffer_rows(o)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as e:
            # One hostile row must not take the others with it.
            good: list[pa.Table] = []
            bad = 0
            for row in o.rows:
                try:
                    good.append(pa.Table.from_pylist([row], schema=o.spec.arrow))
                except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
                    bad += 1
            o.rows = []
            o.batches.extend(good)
            self._drop(f"{o.spec.name}: {str(e)[:80]}", bad)
        batches, o.batches, o.buffered = o.batches, [], 0
        if not batches:
            return
        data = pa.concat_tables(batches).combine_chunks()
        if o.journal is None and not self._guard(lambda: self._new_journal(o), data.num_rows):
            return
        journal = o.journal
        assert journal is not None
        for batch in data.to_batches():
            self._guard(lambda b=batch: journal.append(b), batch.num_rows)  # type: ignore[misc]

    def _new_journal(self, o: _Open) -> None:
        folder = self.path / o.spec.name
        folder.mkdir(exist_ok=True)
        file = f"{o.spec.name}/{o.serial:05d}.journal"
        (self.path / file).unlink(missing_ok=True)
        o.journal = JournalWriter(self.path / file)
        self.manifest.tables.setdefault(o.spec.name, []).append(Part(file=file, kind="journal"))
        write_manifest(self.path, self.manifest)

    def _rotate(self, o: _Open, *, final: bool = False) -> None:
        journal = o.journal
        assert journal is not None
        data = pa.Table.from_batches(read_journal(journal.path).batches)
        parts = self.manifest.tables[o.spec.name]
        file = f"{o.spec.name}/{o.serial:05d}.parquet"
        rows = write_part(self.path / file, data, o.spec)
        merged = o.spec.merge and final and len(parts) == 1
        new = [p for p in parts if p.kind == "parquet"] + [Part(file=file, rows=rows, merged=merged)]
        self.manifest.tables[o.spec.name] = new
        try:
            write_manifest(self.path, self.manifest)
        except OSError:
            self.manifest.tables[o.spec.name] = parts
            raise
        journal.close()
        journal.path.unlink(missing_ok=True)
        o.serial += 1
        o.journal = None

    def _run(self) -> None:
        last_sync = time.monotonic()
        while not self._wake.wait(_FLUSH_S):
            sync = time.monotonic() - last_sync > _SYNC_S
            self.flush(sync=sync)
            if sync:
                last_sync = time.monotonic()


def compact(path: Path) -> int:
    """Turn the journals that a killed or starved writer left into parts; returns how many. Reading needs no such repair."""
    from hoptrace.manifest import read_manifest

    manifest = read_manifest(path)
    done = 0
    for name, parts in manifest.tables.items():
        if name not in TABLES:
            continue
        new: list[Part] = []
        for part in parts:
            if part.kind == "parquet":
                new.append(part)
                continue
            batches = read_journal(path / part.file).batches
            done += 1
            if not batches:
                continue
            file = part.file.replace(".journal", ".parquet")
            rows = write_part(path / file, pa.Table.from_batches(batches), TABLES[name])
            new.append(Part(file=file, rows=rows))
        old = [p.file for p in parts if p.kind == "journal"]
        manifest.tables[name] = new
        write_manifest(path, manifest)
        for file in old:
            (path / file).unlink(missing_ok=True)
    if not (path / FILE).exists():  # pragma: no cover - read_manifest has refused before
        raise InputError(f"{path} has no {FILE}.")
    return done
