"""The disk side of a trace that is being written: journals, parts, and the manifest that names them.

Order makes it safe. A part is complete on the disk before the manifest names it, and a journal is deleted only after the manifest
that named it has been replaced; so at every instant the manifest on the disk names files that hold every row once.

Nothing here knows of threads that hand over rows; everything raises OSError for the disk and leaves a state from which the same
call can be tried again.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

import pyarrow as pa

from hoptrace.errors import EnvironmentProblem, UsageError
from hoptrace.journal import JournalWriter, read_journal
from hoptrace.manifest import Manifest, Part, manifest_text, replace_manifest, sync_folder
from hoptrace.parts import checksum, key_range, write_part
from hoptrace.schema import Table

__all__ = ["LOCK", "TraceFolder", "being_written", "new_folder"]

LOCK = "writer.lock"
RESERVE = "manifest.reserve"
_RESERVE_BYTES = 64 << 10


def new_folder(path: Path, remedy: str) -> None:
    """Make the folder of a new trace.

    Raises:
        UsageError: something is already there; ``remedy`` says what to do.
        EnvironmentProblem: it cannot be made.
    """
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise UsageError(f"{path} is already there.", hint=remedy) from None
    except OSError as e:
        raise EnvironmentProblem(f"{path} cannot be made: {e.strerror}.") from None


class TraceFolder:
    """An existing folder that this process alone writes.

    ``guard`` protects the manifest in memory and is never held during a write; take it to change :attr:`manifest`.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        """Raises BlockingIOError if another process writes the folder, OSError if it cannot be written."""
        self.path = path
        self.manifest = manifest
        self.guard = threading.RLock()
        self._lock_file = _lock(path)
        self._saving = threading.Lock()
        self._journaling = threading.Lock()
        self._dirty = True
        self._obsolete: list[Path] = []
        self._journals: dict[str, JournalWriter] = {}
        self._sealed: list[tuple[Table, Path, int | None]] = []
        self._serials: dict[str, int] = {}

    # -- manifest -----------------------------------------------------------------------------------------------------

    def change(self, apply: Callable[[Manifest], None]) -> None:
        """Change the manifest in memory; :meth:`save` writes it.

        If ``apply`` raises, or leaves a value that JSON cannot say, that is raised and the manifest is as it was.
        """
        with self.guard:
            before = self.manifest.model_copy(deep=True)
            try:
                apply(self.manifest)
                manifest_text(self.manifest)
            except BaseException:
                for name in type(self.manifest).model_fields:
                    setattr(self.manifest, name, getattr(before, name))
                raise
            self._dirty = True

    def touch(self) -> None:
        """Note that the manifest in memory has changed."""
        self._dirty = True

    def save(self, *, force: bool = False) -> None:
        """Write the manifest if it has changed, then delete the files that it has ceased to name."""
        with self._saving:
            with self.guard:
                if not (self._dirty or force):
                    return
                text = manifest_text(self.manifest)
                self._dirty = False
                obsolete, self._obsolete = self._obsolete, []
            try:
                self._replace(text)
            except BaseException:
                with self.guard:
                    self._dirty = True
                    self._obsolete = obsolete + self._obsolete
                raise
            for path in obsolete:
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # it holds other files
                    path.parent.rmdir()

    def _replace(self, text: str) -> None:
        try:
            replace_manifest(self.path, text)
        except OSError as e:
            reserve = self.path / RESERVE
            if e.errno not in (errno.ENOSPC, errno.EDQUOT) or not reserve.exists():
                raise
            # What was lost must not go unsaid. No journal may take the room meanwhile: the next manifest needs it.
            with self._journaling:
                replace_manifest(self.path, text, into=reserve)
                self._reserve()

    def _reserve(self) -> None:
        """Take room for a manifest, as much as there is: on a full disk it is written into this file."""
        reserve = self.path / RESERVE
        for size in (_RESERVE_BYTES, _RESERVE_BYTES // 4):
            try:
                with reserve.open("wb") as f:
                    os.posix_fallocate(f.fileno(), 0, size)
            except OSError:
                reserve.unlink(missing_ok=True)
            else:
                return

    # -- journals -----------------------------------------------------------------------------------------------------

    def open_journals(self, specs: Iterable[Table]) -> None:
        """Begin a journal for each table and name them all at once: then :meth:`append` waits for no manifest."""
        for spec in specs:
            self._journals[spec.name] = self._new_journal(spec)
        self.save()
        if self._journals:
            self._reserve()

    def append(self, spec: Table, batch: pa.RecordBatch) -> None:
        """Write rows to the table's journal. Raises OSError; then none of them is there."""
        with self._journaling:
            new = spec.name not in self._journals
            if new:
                self._journals[spec.name] = self._new_journal(spec)
        if new:
            # Should the disk refuse, the journal takes rows all the same; the manifest is written as soon as it can be. (Not
            # under the lock: a save on a full disk takes it.)
            with contextlib.suppress(OSError):
                self.save()
        with self._journaling:
            self._journals[spec.name].append(batch)

    def sync(self) -> None:
        """Push the journals to the disk (power loss)."""
        for journal in list(self._journals.values()):
            journal.sync()
            sync_folder(journal.path.parent)

    def large(self, rows: int, size_bytes: int) -> list[str]:
        """Tables whose journal has grown beyond either limit."""
        return [n for n, j in list(self._journals.items()) if j.rows >= rows or j.bytes >= size_bytes]

    def seal(self, spec: Table, *, reopen: bool) -> None:
        """End the table's journal, to be turned into a part; with ``reopen`` the next one is ready first, so that none waits."""
        fresh = None
        if reopen:
            fresh = self._new_journal(spec)
            self.save()
        with self._journaling:
            journal = self._journals.pop(spec.name, None)
            if fresh is not None:
                self._journals[spec.name] = fresh
        if journal is not None:
            journal.close()
            self._sealed.append((spec, journal.path, journal.rows))

    def seal_all(self, specs: dict[str, Table]) -> None:
        """End every journal."""
        for name in list(self._journals):
            self.seal(specs[name], reopen=False)

    def adopt(self, spec: Table, path: Path) -> None:
        """Take a journal that an earlier writer left, to be turned into a part."""
        self._sealed.append((spec, path, None))

    @property
    def unfinished(self) -> int:
        """Sealed journals that are not parts yet."""
        return len(self._sealed)

    # -- parts --------------------------------------------------------------------------------------------------------

    def convert(self) -> None:
        """Turn the sealed journals into parts, the oldest first. At an OSError the rest stays sealed."""
        while self._sealed:
            spec, path, rows_written = self._sealed[0]
            journal = read_journal(path)
            file = f"{spec.name}/{path.stem}.parquet"
            data = journal.table()
            new = [self._part(file, data, spec)] if data is not None else []
            with self.guard:
                if rows_written is not None and journal.rows < rows_written:
                    self._count(f"{spec.name}: journal damaged on the disk", rows_written - journal.rows)
                parts = self.manifest.tables.get(spec.name, [])
                old = f"{spec.name}/{path.name}"
                at = next((i for i, p in enumerate(parts) if p.file == old), len(parts))
                parts = parts[:at] + new + parts[at + 1 :]
                if parts:
                    self.manifest.tables[spec.name] = parts
                else:
                    self.manifest.tables.pop(spec.name, None)
                self._obsolete.append(path)
                self._dirty = True
            self._sealed.pop(0)
            if new:
                self.save()
        self.save()

    def add_part(self, spec: Table, data: pa.Table) -> None:
        """Write rows straight into a new part (writers that are not live)."""
        file = f"{self._next(spec)}.parquet"
        part = self._part(file, data, spec)
        with self.guard:
            self.manifest.tables.setdefault(spec.name, []).append(part)
            self._dirty = True
        self.save()

    def reserve(self, spec: Table) -> str:
        """The next part's file, to be filled later by :meth:`fill`, in any order and from any thread."""
        return f"{self._next(spec)}.parquet"

    def fill(self, file: str, data: pa.Table, spec: Table) -> None:
        """Write the part that was reserved. The manifest in memory names it, in the order of the reservations. Raises OSError."""
        part = self._part(file, data, spec)
        with self.guard:
            bisect.insort(self.manifest.tables.setdefault(spec.name, []), part, key=lambda p: p.file)
            self._dirty = True

    def release(self) -> None:
        """Give the folder up for others to write. Idempotent."""
        if self._lock_file is not None:
            (self.path / RESERVE).unlink(missing_ok=True)
            (self.path / LOCK).unlink(missing_ok=True)
            self._lock_file.close()
            self._lock_file = None

    # -- inside -------------------------------------------------------------------------------------------------------

    def _count(self, reason: str, rows: int) -> None:
        self.manifest.rows_dropped[reason] = self.manifest.rows_dropped.get(reason, 0) + rows

    def _part(self, file: str, data: pa.Table, spec: Table) -> Part:
        rows = write_part(self.path / file, data, spec)
        return Part(file=file, rows=rows, merged=spec.merge, keys=key_range(data, spec), crc32=checksum(self.path / file))

    def _next(self, spec: Table) -> str:
        """Folder and stem of the table's next file; makes the folder."""
        folder = self.path / spec.name
        folder.mkdir(exist_ok=True)
        serial = self._serials.get(spec.name, 0)
        self._serials[spec.name] = serial + 1
        return f"{spec.name}/{serial:05d}"

    def _new_journal(self, spec: Table) -> JournalWriter:
        file = f"{self._next(spec)}.journal"
        journal = JournalWriter(self.path / file)
        with self.guard:
            self.manifest.tables.setdefault(spec.name, []).append(Part(file=file, kind="journal"))
            self._dirty = True
        return journal


def _lock(path: Path) -> IO[bytes] | None:
    file = (path / LOCK).open("ab")
    for patience in (3, 2, 1, 0):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            # Somebody may just be asking being_written(), which takes the lock for an instant.
            if not patience:
                file.close()
                raise
            time.sleep(0.02)
        except OSError:  # a file system that has no locks: go without
            break
    file.close()
    return None


def being_written(path: Path) -> bool:
    """Whether a living writer holds the trace."""
    try:
        fd = os.open(path / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False
