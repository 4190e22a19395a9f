"""The crash-safe trace writer: hand over rows from any thread, lose at most the last second to a kill.

A live writer has two threads. One moves what was handed over into checksummed journals twice a second and does nothing that can
take long; the other does what can: it pushes journals to the disk every five seconds (power loss), turns large ones into sorted
Parquet parts, and writes the manifest when it has changed. Handing over rows therefore never waits for the disk.

A full disk does not raise in the threads that hand over rows (a collector must never harm the server): rows are dropped, counted
in the manifest, and :meth:`TraceWriter.close` raises one clear error. What comes after the disk is free again is recorded again.
"""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from hoptrace.clock import TraceClock
from hoptrace.errors import EnvironmentProblem
from hoptrace.folder import TraceFolder, new_folder
from hoptrace.manifest import Manifest
from hoptrace.parts import conform
from hoptrace.rows import to_arrow
from hoptrace.schema import TABLES, Table, table

__all__ = ["TraceWriter"]

_FLUSH_S = 0.5
_SYNC_S = 5.0
_RETRY_S = 30.0
_PART_BYTES = 64 << 20
_PART_ROWS = 1_000_000
_FRAME_ROWS = 65_536
_MAX_BUFFERED_ROWS = 1_000_000


class _Buffer:
    """What was handed over of one table and is not on the disk, in order: lists of mappings and Arrow tables."""

    def __init__(self, spec: Table) -> None:
        self.spec = spec
        self.names = frozenset(spec.names)
        self.chunks: list[list[dict[str, Any]] | pa.Table] = []
        self.rows = 0


class TraceWriter:
    """Writes one trace folder. Use as a context manager; leaving it by an exception still closes the trace, marked as not clean.

    All methods may be called from any thread.
    """

    def __init__(
        self,
        path: Path | str,
        manifest: Manifest,
        *,
        clock: TraceClock | None = None,
        background: bool = True,
        part_rows: int | None = None,
    ) -> None:
        """Create the folder ``path`` (it must not exist) and its manifest.

        ``background=False`` is for importers and replays, which are not live: no threads and no journals; rows are kept until a
        part has ``part_rows`` (a million), nothing is dropped for want of room, and a disk that refuses raises at once.

        Raises:
            UsageError: something is already there.
            EnvironmentProblem: the folder cannot be made or written.
            ValueError: the manifest is that of a trace that has been written before.
        """
        from hoptrace import __version__

        if manifest.tables:
            raise ValueError("the manifest names files of another trace: make a new one")
        self.path = Path(path)
        self.clock = clock or TraceClock.start()
        if clock or background:
            manifest.utc_offset_ns = self.clock.utc_offset_ns
        manifest.hoptrace_version = __version__
        manifest.created_utc = manifest.created_utc or datetime.now(UTC).isoformat(timespec="seconds")
        manifest.closed = False
        self._folder = _create(self.path, manifest, live=background)
        self._background = background
        self._part_rows = part_rows or _PART_ROWS
        self._lock = self._folder.guard
        self._buffers: dict[str, _Buffer] = {}
        self._problem: Exception | None = None
        self._closing = False
        self._closed = False
        self._flushing = threading.Lock()
        self._keeping = threading.RLock()
        self._close_lock = threading.RLock()
        self._stop = threading.Event()
        self._retry_at = 0.0
        self._threads: list[threading.Thread] = []
        if background:
            for name, work in (("flush", self._flush_loop), ("keep", self._keep_loop)):
                thread = threading.Thread(target=work, name=f"hoptrace-{name}", daemon=True)
                thread.start()
                self._threads.append(thread)

    @property
    def manifest(self) -> Manifest:
        """The manifest in memory. Change it with :meth:`update`."""
        manifest: Manifest = self._folder.manifest
        return manifest

    # -- handing over -------------------------------------------------------------------------------------------------

    def append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Hand over rows (mappings by column name; what is missing is null). They are copied.

        A live writer never blocks on the disk here and never raises for it. After :meth:`close` rows are dropped and counted in
        memory. A value that its column cannot hold becomes null and is counted in the manifest (see :mod:`hoptrace.rows`).

        Raises:
            KeyError: there is no such table or column. That is a bug of the caller, and silence would lose a whole column.
            EnvironmentProblem: the disk refuses (not a live writer).
        """
        copies = [dict(row) for row in rows]
        if not copies:
            return
        with self._lock:
            buffer = self._buffer(name)
            if not all(row.keys() <= buffer.names for row in copies):
                unknown = set().union(*copies) - buffer.names
                raise KeyError(f"table {name!r} has no column {sorted(map(str, unknown))}")
            if self._refuse(buffer, len(copies)):
                return
            if buffer.chunks and isinstance(buffer.chunks[-1], list):
                buffer.chunks[-1].extend(copies)
            else:
                buffer.chunks.append(copies)
            buffer.rows += len(copies)
        self._spill(buffer)

    def append_arrow(self, name: str, data: pa.Table | pa.RecordBatch, *, keep_unknown: bool = False) -> None:
        """Hand over a whole Arrow table or batch (importers, replays).

        ``keep_unknown`` takes columns that the schema does not know, for those who copy from a trace of a newer minor version.

        Raises:
            KeyError: there is no such table or column.
            ArrowInvalid: a column has the wrong type.
            EnvironmentProblem: the disk refuses (not a live writer).
        """
        if isinstance(data, pa.RecordBatch):
            data = pa.Table.from_batches([data])
        unknown = set(data.column_names) - set(table(name).names)
        if unknown and not keep_unknown:
            raise KeyError(f"table {name!r} has no column {sorted(unknown)}")
        data = conform(data, table(name))
        if not data.num_rows:
            return
        with self._lock:
            buffer = self._buffer(name)
            if self._refuse(buffer, data.num_rows):
                return
            buffer.chunks.append(data)
            buffer.rows += data.num_rows
        self._spill(buffer)

    def drop(self, reason: str, rows: int = 1) -> None:
        """Count rows that a collector had to drop."""
        with self._lock:
            _add(self.manifest.rows_dropped, reason, rows)
            self._folder.touch()

    def update(self, change: Callable[[Manifest], None]) -> None:
        """Change the manifest (what a probe found, a server's settings). A live writer writes it within a second, others now.

        Raises what ``change`` raises, or what JSON cannot say; the manifest is then as it was.
        """
        self._folder.change(change)
        if not self._background and not self._closed:
            with _plainly(self.path):
                self._folder.save()

    # -- to the disk --------------------------------------------------------------------------------------------------

    def flush(self, *, sync: bool = False) -> None:
        """Push what was handed over into the journals, where readers see it; with ``sync`` to the disk itself."""
        with self._flushing:
            for buffer in list(self._buffers.values()):
                self._guard(lambda b=buffer: self._journal(b))  # type: ignore[misc]
        if sync:
            with self._keeping:
                self._guard(self._folder.sync)

    def close(self, *, clean: bool = True) -> Path:
        """Turn every journal into a sorted part and mark the trace closed. Returns the folder. Done once, it is idle.

        Raises:
            EnvironmentProblem: the disk refused rows; says how many, what is kept, and the remedy. If journals could not become
                parts, the trace is readable all the same, and calling close again (or `hoptrace compact`) finishes it.
        """
        with self._close_lock:
            if self._closed:
                return self.path
            with self._lock:
                # From here on rows are counted as dropped: none can slip in behind the last flush and vanish.
                self._closing = True
            self._stop.set()
            for thread in self._threads:
                thread.join()
            self._finish(clean)
            problem, self._problem = self._problem, None
            if problem is not None:
                self._raise(problem)
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
            if error is not None and not isinstance(error, EnvironmentProblem):
                error.add_note(str(e))

    # -- inside -------------------------------------------------------------------------------------------------------

    def _buffer(self, name: str) -> _Buffer:
        buffer = self._buffers.get(name)
        if buffer is None:
            buffer = self._buffers[name] = _Buffer(table(name))
        return buffer

    def _refuse(self, buffer: _Buffer, rows: int) -> bool:
        """Whether there is no place for the rows; then they are counted. Call under the lock.

        What comes into an empty buffer is taken whatever its size: it is in memory already.
        """
        if self._closing:
            _add(self.manifest.rows_dropped, "handed over after close", rows)
        elif self._background and buffer.rows and buffer.rows + rows > _MAX_BUFFERED_ROWS:
            _add(self.manifest.rows_dropped, f"{buffer.spec.name}: buffer full", rows)
        else:
            return False
        self._folder.touch()
        return True

    def _spill(self, buffer: _Buffer) -> None:
        """Write a part as soon as one is full (writers that are not live)."""
        if self._background or buffer.rows < self._part_rows:
            return
        with self._flushing, _plainly(self.path):
            self._part(buffer)

    def _take(self, buffer: _Buffer) -> pa.Table | None:
        """What the buffer holds, as Arrow; it is empty afterwards."""
        with self._lock:
            chunks, buffer.chunks, buffer.rows = buffer.chunks, [], 0
        tables: list[pa.Table] = []
        for chunk in chunks:
            if isinstance(chunk, list):
                chunk, losses = to_arrow(chunk, buffer.spec)
                if losses.rows or losses.values:
                    with self._lock:
                        for what, n in losses.rows.items():
                            _add(self.manifest.rows_dropped, what, n)
                        for what, n in losses.values.items():
                            _add(self.manifest.values_dropped, what, n)
                        self._folder.touch()
            tables.append(chunk)
        data = pa.concat_tables(tables, promote_options="default") if tables else None
        return data if data is not None and data.num_rows else None

    def _journal(self, buffer: _Buffer) -> None:
        data = self._take(buffer)
        if data is None:
            return
        for batch in data.combine_chunks().to_batches(max_chunksize=_FRAME_ROWS):
            self._guard(lambda b=batch: self._folder.append(buffer.spec, b), rows=batch.num_rows)  # type: ignore[misc]

    def _part(self, buffer: _Buffer) -> None:
        """Write the buffer as parts. Raises OSError, with the rows that were lost counted."""
        data = self._take(buffer)
        done = 0
        while data is not None and done < data.num_rows:
            try:
                self._folder.add_part(buffer.spec, data.slice(done, self._part_rows))
            except OSError as e:
                with self._lock:
                    _add(self.manifest.rows_dropped, f"disk: {e.strerror}", data.num_rows - done)
                raise
            done += self._part_rows

    def _guard(self, action: Callable[[], object], *, rows: int = 0) -> bool:
        """Do it; keep the first error for close and count the rows that it cost."""
        try:
            action()
        except Exception as e:
            with self._lock:
                self._problem = self._problem or e
                if rows:
                    reason = e.strerror if isinstance(e, OSError) else type(e).__name__
                    _add(self.manifest.rows_dropped, f"disk: {reason}", rows)
                    self._folder.touch()
            return False
        return True

    def _finish(self, clean: bool) -> None:
        folder = self._folder
        done = True
        for buffer in self._buffers.values():
            if self._background:
                self._journal(buffer)
            else:
                done &= self._guard(lambda b=buffer: self._part(b))  # type: ignore[misc]
        with self._keeping:
            folder.seal_all(TABLES)
            done &= self._guard(folder.convert)
        with self._lock:
            self.manifest.closed = clean and done
        if self._guard(lambda: folder.save(force=True)) and done:
            folder.release()
            self._closed = True

    def _raise(self, problem: Exception) -> None:
        if not isinstance(problem, OSError):
            raise problem
        lost = sum(self.manifest.rows_dropped.values())
        hint = "What was written is kept and readable."
        if not self._closed:
            hint += f" Free some space (or copy it elsewhere), then run: hoptrace compact {shlex.quote(str(self.path))}"
        raise EnvironmentProblem(
            f"The disk of {self.path} refused writes ({problem.strerror}): {lost} rows were dropped.", hint=hint
        ) from None

    def _flush_loop(self) -> None:
        while not self._stop.wait(_FLUSH_S):
            self._guard(self.flush)

    def _keep_loop(self) -> None:
        next_sync = time.monotonic() + _SYNC_S
        while not self._stop.wait(_FLUSH_S):
            now = time.monotonic()
            with self._keeping:
                self._guard(self._folder.save)
                if now >= next_sync:
                    next_sync = now + _SYNC_S
                    self._guard(self._folder.sync)
                if now < self._retry_at:
                    continue
                fine = True
                for name in self._folder.large(_PART_ROWS, _PART_BYTES):
                    fine &= self._guard(lambda n=name: self._folder.seal(TABLES[n], reopen=True))  # type: ignore[misc]
                fine &= self._guard(self._folder.convert)
                if not fine:
                    # A full disk: do not write a part again and again.
                    self._retry_at = now + _RETRY_S


def _add(counts: dict[str, int], what: str, n: int) -> None:
    counts[what] = counts.get(what, 0) + n


class _plainly:  # noqa: N801 - reads as a phrase
    """Turns an OSError into one sentence."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if isinstance(error, OSError):
            raise EnvironmentProblem(
                f"{self.path} cannot be written: {error.strerror}.", hint="Free some space, remove the folder, and run it again."
            ) from None


def _create(path: Path, manifest: Manifest, *, live: bool) -> TraceFolder:
    new_folder(path, "Choose another name after -o, or remove it first.")
    try:
        folder = TraceFolder(path, manifest)
        folder.open_journals(TABLES.values() if live else ())
    except OSError as e:
        raise EnvironmentProblem(f"{path} cannot be written: {e.strerror}.") from None
    return folder
