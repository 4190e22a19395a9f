"""Inference servers that run on this machine: processes that engines start, and the ports they listen on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hoptrace.collectors.hardware import tree

__all__ = ["Here", "servers_here"]

_LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class Here:
    """A server's process, its title (no flags: they hold secrets), and the TCP ports it listens on; none where the process may
    not be looked into, or is in another network namespace."""

    pid: int
    command: str
    ports: tuple[int, ...]


def servers_here(proc: Path = Path("/proc")) -> list[Here]:
    """By process number. Workers and helpers of a server are not listed: their parent is."""
    ports = _listening(proc)
    found: list[Here] = []
    try:
        numbers = sorted(int(p.name) for p in proc.iterdir() if p.name.isdigit())
    except OSError:
        return []
    for pid in numbers:
        if (command := tree.server_title(pid, proc)) is None:
            continue
        theirs = sorted({ports[inode] for inode in _sockets(proc / str(pid)) if inode in ports})
        if theirs or not any(h.command == command for h in found):
            found.append(Here(pid, command, tuple(theirs)))
    # A launcher that listens nowhere itself is told only where nobody else of its kind does.
    listening = {h.command for h in found if h.ports}
    return [h for h in found if h.ports or h.command not in listening]


def _listening(proc: Path) -> dict[str, int]:
    """Ports of listening TCP sockets by inode."""
    found: dict[str, int] = {}
    for name in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if len(fields) > 9 and fields[3] == _LISTEN:
                found[fields[9]] = int(fields[1].rsplit(":", 1)[1], 16)
    return found


def _sockets(folder: Path) -> set[str]:
    """Inodes of a process's sockets; empty where they may not be seen."""
    found = set()
    try:
        files = list((folder / "fd").iterdir())
    except OSError:
        return set()
    for file in files:
        try:
            target = str(file.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(target[8:-1])
    return found
