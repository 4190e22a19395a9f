"""Which control group a process is in, and the numbers of its files (Documentation/admin-guide/cgroup-v2.rst, cgroup-v1)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

__all__ = ["Place", "keyed", "place_of"]


class Place(NamedTuple):
    """``path``: as the kernel names it; null where there is none to look at, ``reason`` says why. ``folder``: its folder of the
    second version; ``cpu_v1``: that of the CPU controller of the first version."""

    path: str | None
    folder: Path | None
    cpu_v1: Path | None
    reason: str | None = None


def place_of(pid: int, proc: Path, sys: Path) -> Place:
    """From /proc/PID/cgroup. OSError if the process is gone or may not be seen.

    The machine's root group is none: its pressure is the machine's, and it has no limit. A container's own looks like a root
    (its path is /) but is told by files that the root has not, or only the root has. A path that climbs out (/../x) belongs to a
    parent of this container's tree: its files are not mounted here.
    """
    second: str | None = None
    cpu: str | None = None
    for line in (proc / str(pid) / "cgroup").read_text("utf-8", "replace").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            second = path
        elif "cpu" in controllers.split(","):
            cpu = path
    tree = sys / "fs/cgroup"
    root = next((r for r in (tree, tree / "unified") if (r / "cgroup.controllers").is_file()), None)
    v1 = next((r for r in (tree / "cpu,cpuacct", tree / "cpu") if r.is_dir()), None) if cpu is not None else None
    folder, cpu_v1 = _inside(root, second), _inside(v1, cpu)
    if folder is None and cpu_v1 is None:
        climbs = any(p is not None and "/.." in p for p in (second, cpu))
        why = "its control group lies outside this container" if climbs else "no tree of control groups is mounted here"
        return Place(None, None, None, why)
    if folder is not None and not (folder / "cgroup.events").exists():
        folder = None
    if cpu_v1 is not None and (cpu_v1 / "cgroup.sane_behavior").exists():
        cpu_v1 = None
    if folder is None and cpu_v1 is None:
        version = "this machine uses the first version of control groups, and " if cpu is not None else ""
        return Place(None, None, None, f"{version}the server is in the root group, whose pressure is the machine's")
    return Place(second if folder is not None else cpu, folder, cpu_v1)


def _inside(root: Path | None, path: str | None) -> Path | None:
    if root is None or path is None or ".." in path.split("/"):
        return None
    folder = root / path.removesuffix(" (deleted)").lstrip("/")
    return folder if folder.is_dir() else None


def keyed(data: bytes) -> dict[bytes, int]:
    """A file of lines `name number`; lines that are none are left out."""
    found = {}
    for line in data.split(b"\n"):
        name, _, value = line.partition(b" ")
        if value.isdigit():
            found[name] = int(value)
    return found
