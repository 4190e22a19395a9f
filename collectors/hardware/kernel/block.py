"""Disks: bytes, operations, time and queue, once each. Entity ``block:DEV``; read is from the disk.

Bytes that a GPU or a network adapter fetches from a disk directly are counted here too. What pages the kernel had already is not.
"""

from __future__ import annotations

from typing import Final

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.file import KeptFile
from hoptrace.collectors.hardware.kernel.disks import SECTOR_BYTES, chosen, lines_of, whole_disks
from hoptrace.collectors.hardware.sink import Direction, Semantics, Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots, found_by_error, status_of

__all__ = ["BlockSource"]

_FIELDS: Final[tuple[tuple[int, str, str, Semantics, Direction | None, int, int | None], ...]] = (
    (2, "data_bytes", "bytes", "cumulative", "read", SECTOR_BYTES, None),
    (6, "data_bytes", "bytes", "cumulative", "write", SECTOR_BYTES, None),
    (0, "ops", "operations", "cumulative", "read", 1, 64),
    (4, "ops", "operations", "cumulative", "write", 1, 64),
    (3, "wait_ms", "ms", "cumulative", "read", 1, 32),
    (7, "wait_ms", "ms", "cumulative", "write", 1, 32),
    (8, "in_flight_ops", "operations", "gauge", None, 1, None),
    (9, "busy_ms", "ms", "cumulative", None, 1, 32),
    (10, "queue_ms", "ms", "cumulative", None, 1, 32),
    (11, "discard_ops", "operations", "cumulative", None, 1, 64),
    (13, "discarded_bytes", "bytes", "cumulative", None, SECTOR_BYTES, None),
    (15, "flush_ops", "operations", "cumulative", None, 1, 64),
    (16, "flush_ms", "ms", "cumulative", None, 1, 32),
)
"""Column of iostats.rst (its number less one), name, unit, semantics, direction, factor, width. Times are printed as unsigned int
(block/genhd.c, diskstats_show): they stay in ms, where they wrap at 32 bits. wait: from the queue to the end, summed over
operations; busy: at least one was under way; queue: busy × operations under way. Discards since 4.18, flushes since 5.5."""

_LOOK_EVERY = 100


class BlockSource:
    """/proc/diskstats, at the fast rate: one read for all disks."""

    name = "block"
    answers = "how many bytes each disk read and wrote, how long operations took and queued"
    pace: Pace = "fast"
    every_s = None

    def __init__(self, roots: Roots | None = None) -> None:
        self._roots = roots or Roots()
        self._file = KeptFile(self._roots.proc / "diskstats")
        self._boot = procfs.boot_id(self._roots.proc)[:8]
        self._wanted: dict[str, int] = {}
        self._lines = -1
        self._beat = 0
        self._looked = False
        self._disks: dict[str, list[str]] = {}
        self._lives: dict[str, int] = {}
        self._series: dict[tuple[str, str], list[int]] = {}

    def probe(self) -> Found:
        try:
            data = self._file.read()
        except OSError as e:
            return found_by_error(e, "hoptrace counters need Linux with /proc/diskstats")
        disks = chosen(whole_disks(lines_of(data)))
        if not disks:
            return Found("absent", "no disk of its own here (loop devices, RAM disks and such are left out)")
        several = sum(1 for paths in disks.values() if paths)
        remark = f"{several} of them by multipath, each counted once" if several else None
        return Found("ok", remark, sees=", ".join(sorted(disks)))

    def open(self, out: Sink) -> None:
        return None

    def sample(self, out: Sink) -> None:
        before = out.now_ns()
        try:
            data = self._file.read()
        except OSError as e:
            out.at(before, out.now_ns())
            for series in self._series.values():
                out.fail(series, status_of(e))
            return
        out.at(before, out.now_ns())
        lines = data.split(b"\n")[:-1]
        self._beat += 1
        by_name = self._chosen(lines)
        if by_name is None:
            self._look(lines, out)
            by_name = self._chosen(lines) or {}
        for disk, paths in self._disks.items():
            self._one(disk, paths, by_name, out)

    def close(self) -> None:
        self._file.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _chosen(self, lines: list[bytes]) -> dict[str, list[bytes]] | None:
        """The words of the disks' lines; null where the lines have to be looked at anew. Most lines are partitions and loop
        devices: only those that are wanted are parsed."""
        if len(lines) != self._lines or self._beat % _LOOK_EVERY == 0:
            self._lines = -1
            return None
        found = {}
        for name, at in self._wanted.items():
            words = lines[at].split()
            if len(words) < 3 or words[2] != name.encode("latin-1"):
                return None
            found[name] = words
        return found

    def _look(self, lines: list[bytes], out: Sink) -> None:
        """Which lines are disks; another list than before: some came or went."""
        where = {words[2].decode("latin-1"): i for i, line in enumerate(lines) if len(words := line.split()) > 2}
        disks = chosen(whole_disks(where))
        self._beat, self._lines = 1, len(lines)
        self._wanted = {n: where[n] for disk, paths in disks.items() for n in (disk, *paths) if n in where}
        if disks == self._disks:
            return
        for (disk, life), series in list(self._series.items()):
            if disk not in disks:
                out.fail(series, "lost")
                del self._series[disk, life]
        for disk in self._disks.keys() - disks.keys():
            self._lives[disk] = self._lives.get(disk, 0) + 1
            out.event("device", f"disk {disk} is gone")
        if self._looked:
            for disk in disks.keys() - self._disks.keys():
                out.event("device", f"disk {disk} is there now")
        self._disks, self._looked = disks, True

    def _one(self, disk: str, paths: list[str], by_name: dict[str, list[bytes]], out: Sink) -> None:
        own = _numbers(by_name.get(disk))
        life = f"{self._boot}/{gone}" if (gone := self._lives.get(disk)) else self._boot
        if paths and (own is None or not any(own[:8])):
            told = {p: n for p in paths if (n := _numbers(by_name.get(p))) is not None}
            if told and (own is None or any(any(n[:8]) for n in told.values())):
                own = list(map(sum, zip(*told.values(), strict=False)))
                life += f"/{'+'.join(told)}"  # with a path less the sum falls
        if own is None:  # the line is broken
            for (known, _), numbers in self._series.items():
                if known == disk:
                    out.fail(numbers, "error")
            return
        series = self._series.get((disk, life))
        if series is None:
            series = self._series[disk, life] = [
                out.series(f"block:{disk}", name, unit, semantics, direction=way, incarnation=life, width_bits=width)
                for column, name, unit, semantics, way, _, width in _FIELDS
                if column < len(own)
            ]
        for number, (column, _, _, _, _, factor, _) in zip(series, _FIELDS, strict=False):
            out.put(number, own[column] * factor)


def _numbers(words: list[bytes] | None) -> list[int] | None:
    """The counters of a line; null where it is none."""
    if words is None or len(words) < 14:
        return None
    try:
        found = list(map(int, words[3:]))
    except ValueError:
        return None
    return found if min(found) >= 0 else None
