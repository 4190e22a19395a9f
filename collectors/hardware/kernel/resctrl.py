"""Memory bandwidth and cache occupancy by L3 cache: resctrl (Documentation/filesystems/resctrl.rst).

Entity ``resctrl:GROUP/DOMAIN`` (``resctrl:/mon_L3_00``): the default group ``/`` has all tasks and CPUs that are in no other, so
that a machine's bandwidth is the sum over its control groups. Bytes are those between an L3 cache and memory, in both directions.
Groups are only read, never made: that is for whoever runs the machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.file import KeptFile, read_text
from hoptrace.collectors.hardware.sink import Semantics, Sink, Status
from hoptrace.collectors.hardware.source import Found, Pace, Roots, status_of

__all__ = ["MAX_GROUPS", "ResctrlSource", "reading"]

MAX_GROUPS = 64
_LIST_EVERY = 30
_FILES: Final[tuple[tuple[str, str, Semantics], ...]] = (
    ("mbm_total_bytes", "mbm_total_bytes", "cumulative"), ("mbm_local_bytes", "mbm_local_bytes", "cumulative"),
    ("llc_occupancy", "llc_occupancy_bytes", "gauge"),
)  # fmt: skip
"""File, name, semantics. The kernel extends the counters to 64 bits."""
_WORDS: Final[dict[bytes, Status]] = {b"Unavailable": "absent", b"Error": "error", b"Unassigned": "absent"}
"""What stands there instead of a number: no counter is free at present, the hardware refused, none is assigned (AMD ABMC)."""


def reading(data: bytes) -> tuple[int | None, Status]:
    """A file's value, or why there is none."""
    word = data.strip()
    if word.isdigit():
        return int(word), "ok"
    return None, _WORDS.get(word, "error")


class ResctrlSource:
    """Once a second: the kernel asks a CPU of each cache."""

    name = "resctrl"
    answers = "how many bytes each L3 cache exchanges with memory, local and remote"
    pace: Pace = "slow"
    every_s = 1.0

    def __init__(self, roots: Roots | None = None) -> None:
        self._roots = roots or Roots()
        self._root = self._roots.sys / "fs/resctrl"
        self._boot = procfs.boot_id(self._roots.proc)[:8]
        self._files: dict[Path, tuple[KeptFile, int]] = {}
        self._beat = 0
        self._full = False

    def probe(self) -> Found:
        found = list(_monitored(self._root))
        if found:
            domains = {p.parent.name for _, p in found}
            return Found("ok", sees=f"{len(domains)} domains, {len({g for g, _ in found})} groups")
        if (self._root / "info").is_dir():
            return Found("unsupported", "resctrl is mounted but this CPU has no monitoring (CMT, MBM)", "a CPU with MBM")
        if "resctrl" in (read_text(self._roots.proc / "filesystems") or "").split():
            return Found("absent", "resctrl is not mounted", "mount -t resctrl resctrl /sys/fs/resctrl (as root)")
        why = "this kernel has no resctrl: built without it, a CPU without Intel RDT, AMD QoS or Arm MPAM, or a virtual machine"
        return Found("unsupported", why, "hardware with memory bandwidth monitoring")

    def open(self, out: Sink) -> None:
        self._list(out)

    def sample(self, out: Sink) -> None:
        self._beat += 1
        if self._beat % _LIST_EVERY == 0:
            self._list(out)
        for path, (file, number) in list(self._files.items()):
            before = out.now_ns()
            try:
                value, status = reading(file.read())
            except OSError as e:
                value, status = None, status_of(e)
                if status in ("absent", "lost"):
                    # The group is gone; one of that name that is made anew counts from 0, as another series.
                    file.close()
                    del self._files[path]
                    status = "lost"
            out.at(before, out.now_ns())
            out.put(number, value, status)

    def close(self) -> None:
        for file, _ in self._files.values():
            file.close()

    def _list(self, out: Sink) -> None:
        groups: set[str] = set()
        for group, path in _monitored(self._root):
            if path in self._files:
                groups.add(group)
                continue
            if group not in groups and len(groups) >= MAX_GROUPS:
                if not self._full:
                    self._full = True
                    out.event("gap", f"resctrl: more than {MAX_GROUPS} groups; the others are not read")
                continue
            groups.add(group)
            name, semantics = next((n, s) for f, n, s in _FILES if f == path.name)
            try:
                made = path.parent.stat().st_ctime_ns
            except OSError:
                continue
            number = out.series(
                f"resctrl:{group}/{path.parent.name}", name, "bytes", semantics, incarnation=f"{self._boot}/{made}",
                width_bits=64 if semantics == "cumulative" else None,
            )  # fmt: skip
            self._files[path] = (KeptFile(path), number)


def _monitored(root: Path) -> list[tuple[str, Path]]:
    """(group, file) of every counter: control groups below the root, monitoring groups below each of them."""
    groups = [root, *_below(root / "mon_groups")]
    for control in _below(root):
        if control.name not in ("info", "mon_data", "mon_groups"):
            groups += [control, *_below(control / "mon_groups")]
    found = []
    for group in groups:
        name = "/" + str(group.relative_to(root)) if group != root else "/"
        for domain in _below(group / "mon_data"):
            # Sub-NUMA clusters are below their cache's folder, whose own files add them up.
            found += [(name.rstrip("/"), domain / f) for f, _, _ in _FILES if (domain / f).exists()]
    return found


def _below(folder: Path) -> list[Path]:
    try:
        return sorted(p for p in folder.iterdir() if p.is_dir())
    except OSError:
        return []
