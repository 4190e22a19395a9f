"""Which process listens on a URL's port, from /proc/net/tcp and the open files of each process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.urls import port_of
from hoptrace.errors import UsageError

__all__ = ["Found", "find_listener", "fixed", "lately", "local_address"]

_LISTEN = "0A"
_FORWARDERS = ("docker-proxy", "rootlessport", "slirp4netns", "pasta", "ssh", "kubectl")


@dataclass(frozen=True, slots=True)
class Found:
    """The process, or why it is not known and what would help."""

    pid: int | None
    reason: str | None = None


def find_listener(url: str, *, proc: Path = Path("/proc"), local: set[str] | None = None) -> Found:
    """The process that listens where ``url`` points. ``local`` are this machine's addresses (all interfaces' if null)."""
    parts = urlsplit(url)
    port = port_of(parts)
    host = parts.hostname or ""
    if not local_address(host, local):
        return Found(None, f"{host} is another machine: run hoptrace there to record its process")
    inodes = _listening(proc, port)
    if not inodes:
        return Found(None, f"no socket of this machine's network namespace listens on port {port} (a container?): give --pid")
    holders, denied = _holders(proc, inodes)
    if not holders:
        why = "the processes of other users can't be looked into" if denied else "no process here holds the socket"
        return Found(None, f"{why}: run as the server's user or as root, or give --pid")
    pid = min(holders)  # forked workers share the socket: the oldest is their parent
    try:
        command = (proc / str(pid) / "comm").read_text().strip()
    except OSError:
        command = ""
    if command in _FORWARDERS:
        return Found(None, f"port {port} is held by {command}, which only forwards to the server: give the server's --pid")
    return Found(pid)


def lately(find: Callable[[], Found], proc: Path = Path("/proc")) -> Callable[[], Found]:
    """``find`` for several who ask often: the same answer for as long as that process lives. Looking through the open files of
    all processes takes ten milliseconds and more."""
    known: tuple[Found, int] | None = None
    guard = threading.Lock()

    def start_of(pid: int) -> int | None:
        try:
            stat = procfs.process_stat(proc / str(pid))
        except (OSError, ValueError):
            return None
        return None if stat.state in ("Z", "X") else stat.start_ticks

    def ask() -> Found:
        nonlocal known
        with guard:
            if known is not None and known[0].pid is not None and start_of(known[0].pid) == known[1]:
                return known[0]
            found = find()
            started = None if found.pid is None else start_of(found.pid)
            known = None if started is None else (found, started)
            return found

    return ask


def fixed(pid: int, url: str | None = None) -> Callable[[], Found]:
    """``find`` for a number that the user gave, with a remark where another process holds ``url``'s port.

    Raises:
        UsageError: there is no such process.
    """
    if Path("/proc/stat").exists() and not Path(f"/proc/{pid}").exists():
        raise UsageError(f"There is no process {pid}.", hint="Give the server's number, or --pid auto.")
    holder = find_listener(url).pid if url is not None else None
    # An engine may well be another process than the one that listens: a remark, no refusal.
    other = holder not in (None, pid)
    remark = f"process {pid} does not hold the server's port, {holder} does: is it the server's?" if other else None
    return lambda: Found(pid, remark) if Path(f"/proc/{pid}").exists() else Found(None, f"there is no process {pid}")


def local_address(host: str, local: set[str] | None = None) -> bool:
    """Whether ``host`` (a name or an address) is this machine. ``local`` are its addresses (all interfaces' if null)."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        addresses = set()
    return any(_is_local(a, local) for a in addresses)


def _is_local(address: str, local: set[str] | None) -> bool:
    if address.startswith("127.") or address in ("::1", "0.0.0.0", "::"):
        return True
    if local is None:
        import psutil

        local = {a.address.split("%")[0] for addresses in psutil.net_if_addrs().values() for a in addresses}
    return address.split("%")[0] in local


def _listening(proc: Path, port: int) -> set[str]:
    inodes: set[str] = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if len(fields) > 9 and fields[3] == _LISTEN and int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(fields[9])
    return inodes - {"0"}


def _holders(proc: Path, inodes: set[str]) -> tuple[set[int], bool]:
    wanted = {f"socket:[{inode}]" for inode in inodes}
    found: set[int] = set()
    denied = False
    for process in proc.iterdir():
        if not process.name.isdigit():
            continue
        try:
            files = list((process / "fd").iterdir())
        except PermissionError:
            denied = True
            continue
        except OSError:
            continue
        for file in files:
            try:
                if str(file.readlink()) in wanted:
                    found.add(int(process.name))
                    break
            except OSError:
                continue
    return found, denied
