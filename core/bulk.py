"""Writes a whole trace at once (replays, importers): parts are made and written by threads while more rows come, and the trace
appears under its name when it is whole, or not at all.

It grows in a folder beside, ``.NAME.writing``; a kill leaves that one, which no reader takes for a trace's name, and the next
writer of the same name removes it.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

import pyarrow as pa

from hoptrace.errors import EnvironmentProblem, UsageError
from hoptrace.folder import TraceFolder, being_written, new_folder
from hoptrace.manifest import Manifest, sync_folder
from hoptrace.schema import table

__all__ = ["BulkWriter"]

_REMEDY = "Choose another name after -o, or remove it first."


class BulkWriter:
    """Use as a context manager; leaving it by an exception leaves nothing behind.

    :meth:`submit` may only be called from one thread.
    """

    def __init__(self, path: Path | str, manifest: Manifest, *, threads: int = 2) -> None:
        """Begin the trace ``path``, which must not exist.

        Raises:
            UsageError: something is already there, or another process is writing it.
            EnvironmentProblem: the folder cannot be made.
        """
        from hoptrace import __version__

        self.path = Path(path)
        self.manifest = manifest
        if os.path.lexists(self.path):
            raise UsageError(f"{self.path} is already there.", hint=_REMEDY)
        self._at = self.path.absolute().with_name(f".{self.path.absolute().name}.writing")
        if self._at.is_dir():
            if being_written(self._at):
                raise UsageError(f"{self.path} is being written by another process.", hint="Choose another name after -o.")
            shutil.rmtree(self._at, ignore_errors=True)
        manifest.hoptrace_version = __version__
        manifest.created_utc = manifest.created_utc or datetime.now(UTC).isoformat(timespec="seconds")
        manifest.closed = False
        new_folder(self._at, _REMEDY)
        try:
            self._folder = TraceFolder(self._at, manifest)
            self._folder.save()
        except OSError as e:
            shutil.rmtree(self._at, ignore_errors=True)
            raise self._refused(e) from None
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hoptrace-part")
        # Parts in memory at once: those being written, and one more waiting for each.
        self._room = threading.Semaphore(2 * threads)
        self._waiting: list[Future[None]] = []
        self._done = False

    def submit(self, name: str, make: Callable[[], pa.Table]) -> None:
        """One part of the table ``name``: ``make`` gives its rows, in a thread. Waits while too many parts are under way.

        Parts stand in the trace in the order of the calls. A part of no rows is none.

        Raises:
            EnvironmentProblem: the disk refused an earlier part. Whatever else an earlier ``make`` raised.
        """
        spec = table(name)
        self._check()
        self._room.acquire()
        place = self._folder.reserve(spec)

        def work() -> None:
            try:
                data = make()
                if data.num_rows:
                    self._folder.fill(place, data, spec)
            finally:
                self._room.release()

        self._waiting.append(self._pool.submit(work))

    def settle(self) -> Path:
        """Wait for the parts and name them in the manifest: the folder where they can be read before the trace is whole, and
        while ``manifest`` is still to be changed. Raises as :meth:`submit`."""
        self._pool.shutdown(wait=True)
        self._check()
        return self._at

    def close(self) -> Path:
        """Wait for the parts, mark the trace whole and give it its name.

        Raises as :meth:`submit`; nothing is left then. UsageError if something has come to be under the name meanwhile.
        """
        try:
            self.settle()
            self.manifest.closed = True
            # Threads name the tables as they come to an end: the same call gives the same manifest.
            self.manifest.tables = {name: self.manifest.tables[name] for name in sorted(self.manifest.tables)}
            self._folder.touch()
            try:
                self._folder.save(force=True)
                self._folder.release()
                if os.path.lexists(self.path):
                    raise UsageError(f"{self.path} has come to be meanwhile.", hint=_REMEDY)
                self._at.rename(self.path)
                sync_folder(self.path.absolute().parent)
            except OSError as e:
                raise self._refused(e) from None
        except BaseException:
            self.abort()
            raise
        self._done = True
        return self.path

    def abort(self) -> None:
        """Leave nothing. Idempotent."""
        if self._done:
            return
        self._done = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._folder.release()
        shutil.rmtree(self._at, ignore_errors=True)

    def __enter__(self) -> BulkWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            if not self._done:
                self.close()
        else:
            self.abort()

    def _check(self) -> None:
        """Raise what a part raised."""
        left = []
        for future in self._waiting:
            if not future.done():
                left.append(future)
                continue
            error = future.exception()
            if isinstance(error, OSError):
                raise self._refused(error) from None
            if error is not None:
                raise error
        self._waiting = left

    def _refused(self, e: OSError) -> EnvironmentProblem:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT)
        why = "the disk is full" if full else str(e.strerror)
        return EnvironmentProblem(
            f"{self.path} cannot be written: {why}. Nothing of it is left.",
            hint="Free some space and run it again." if full else None,
        )
