"""The channels (:mod:`hoptrace.collectors.inside.ring`) that the processes of one server write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.inside.channel import decoder
from hoptrace.collectors.inside.ring import Header, Reader, RingError, alive, read_header

_SLICE = 1 << 15

__all__ = ["Open", "Search", "folders", "records_of", "search", "tree"]


@dataclass(frozen=True, slots=True)
class Search:
    """Channels of the server's tree, or why there are none and what would change that."""

    paths: tuple[Path, ...] = ()
    headers: tuple[Header, ...] = ()
    reason: str | None = None


def tree(pid: int, proc: Path = Path("/proc")) -> set[tuple[int, int]]:
    """The process and all that descend from it, as (number in its own namespace, start in ticks since boot)."""
    children: dict[int, list[int]] = {}
    starts: dict[int, int] = {}
    for folder in proc.iterdir():
        if folder.name.isdigit():
            try:
                stat = procfs.process_stat(folder)
            except (OSError, ValueError):
                continue
            number = int(folder.name)
            children.setdefault(stat.parent, []).append(number)
            starts[number] = stat.start_ticks
    found: set[tuple[int, int]] = set()
    todo = [pid]
    while todo:
        number = todo.pop()
        if number in starts:
            found.add((_own_number(proc / str(number), number), starts[number]))
        todo += children.pop(number, [])
    return found


def _own_number(folder: Path, number: int) -> int:
    """A process in a container knows itself by the last of its numbers (proc_pid_status(5), NSpid)."""
    try:
        for line in (folder / "status").read_text("utf-8", "replace").splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    except (OSError, ValueError):
        pass
    return number


def folders(folder: Path, pid: int, proc: Path = Path("/proc")) -> list[Path]:
    """Where the server's plug-in may write: ``folder``, and what its own environment and user say, as its process sees it.

    hoptrace may run as root beside a server of another user, or outside the server's container.
    """
    told: str | None = None
    uid: int | None = None
    try:
        uid = (proc / str(pid)).stat().st_uid
        for line in (proc / str(pid) / "environ").read_bytes().split(b"\0"):
            if line.startswith(b"HOPTRACE_CHANNELS="):
                told = line.split(b"=", 1)[1].decode("utf-8", "replace")
    except OSError:
        pass
    there = told or (f"/tmp/hoptrace-{uid}" if uid is not None else None)
    found = [folder]
    if there and there.startswith("/"):
        found += [Path(there), proc / str(pid) / "root" / there.lstrip("/")]
    kept: list[Path] = []
    seen: set[tuple[int, int]] = set()
    for path in found:
        try:
            stat = path.stat()
        except OSError:
            continue
        if (stat.st_dev, stat.st_ino) not in seen:
            seen.add((stat.st_dev, stat.st_ino))
            kept.append(path)
    return kept


def search(folder: Path, pid: int, proc: Path = Path("/proc")) -> Search:
    """Channels of living processes in the tree of ``pid``. Takes some milliseconds: call it in a thread."""
    install = "install hoptrace into vLLM's environment (pip install 'hoptrace[vllm]') and restart vLLM"
    places = folders(folder, pid, proc)
    if not places:
        return Search(reason=f"there is no {folder}, so no plug-in: {install}, or set HOPTRACE_CHANNELS as the server has it")
    files: list[Path] = []
    unreadable: str | None = None
    for place in places:
        try:
            files += sorted(p for p in place.iterdir() if p.suffix == ".ring")
        except OSError as e:
            unreadable = f"{place} can't be read ({e.strerror}): run hoptrace as the server's user or as root"
    if not files:
        empty = f"no plug-in writes to {places[-1]}: {install}, or set HOPTRACE_CHANNELS as the server has it"
        return Search(reason=unreadable or empty)
    members = tree(pid, proc)
    boot = procfs.boot_id(proc)
    paths: list[Path] = []
    headers: list[Header] = []
    denied = versions = 0
    for file in files:
        try:
            header = read_header(file)
        except PermissionError:
            denied += 1
            continue
        except RingError:
            versions += 1
            continue
        except (OSError, ValueError):
            continue
        ours = (header.pid, header.start_ticks) in members and (not boot or header.boot_id == boot)
        if ours and alive(file):
            paths.append(file)
            headers.append(header)
    if paths:
        return Search(tuple(paths), tuple(headers))
    if denied:
        return Search(reason=f"the channels in {places[-1]} are another user's: run hoptrace as the server's user or as root")
    if versions:
        return Search(reason=f"the plug-in in vLLM's environment is of another version: {install}")
    return Search(reason=f"none of the channels in {places[-1]} is of process {pid} or its children: {install}")


class Open:
    """A channel that is being read. ``identity`` tells one life of a process from the next."""

    def __init__(self, path: Path, *, from_start: bool) -> None:
        self.reader = Reader(path, from_start=from_start)
        self.header = self.reader.header
        self.path = path
        self.identity = (self.header.pid, self.header.start_ticks)
        self._decode: Callable[[bytes], Any] = decoder(self.header.encoding)
        self.malformed = 0
        self.lost_before = self.reader.lost

    @property
    def role(self) -> str:
        return self.header.role

    @property
    def engine(self) -> int:
        """Data-parallel rank of an engine's own channel."""
        rank = self.header.about.get("dp_rank", 0)
        return rank if isinstance(rank, int) else 0

    def some(self) -> list[dict[str, Any]]:
        """The next records, a few hundred at most; none if there are none yet."""
        records: list[dict[str, Any]] = []
        for frame in self.reader.read(_SLICE):
            try:
                record = self._decode(frame)
            except Exception:
                record = None
            # "c": four times; every other record: one.
            times = list if isinstance(record, dict) and record.get("k") == "c" else int
            if isinstance(record, dict) and isinstance(record.get("k"), str) and isinstance(record.get("t"), times):
                records.append(record)
            else:
                self.malformed += 1
        return records

    @property
    def ended(self) -> bool:
        """Its process has gone and all is read."""
        return not self.reader.pending and not alive(self.path)


def records_of(path: Path) -> Iterator[dict[str, Any]]:
    """All records that a channel still holds, oldest first: after a crash, say. OSError, RingError."""
    channel = Open(path, from_start=True)
    try:
        while channel.reader.pending:
            yield from channel.some()
    finally:
        channel.reader.close()
