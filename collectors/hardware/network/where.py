"""In which network namespaces the files of /proc/net are read. Interfaces of two namespaces may bear one name (eth0 here and in a
container) and are not the same."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hoptrace.collectors.hardware.source import Roots, Server

__all__ = ["Place", "Places", "own_net"]

_LOOK_S, _LATEST_S = 5.0, 60.0


@dataclass(frozen=True, slots=True)
class Place:
    """A namespace: its `net` folder, whose it is (null: hoptrace's own, which /sys/class/net shows too), and an identity that
    changes when it is another one."""

    folder: Path
    server: str | None
    identity: str

    def entity(self, kind: str, name: str = "") -> str:
        """``net:eth0`` here, ``net:SERVER/eth0`` in a server's own namespace; without a name ``tcp`` and ``tcp:SERVER``."""
        return ":".join(filter(None, (kind, "/".join(filter(None, (self.server, name))))))


def own_net(proc: Path) -> Path:
    """Of the machine whose /proc this is. In a container that has the host's at another place, `net` there leads to the
    container's own: the host's is that of its first process."""
    if proc != Path("/proc") and (proc / "net").is_symlink() and (proc / "1/net/dev").exists():
        return proc / "1/net"
    return proc / "net"


class Places:
    """This namespace, then those of servers that have another one (a container without the host's network)."""

    def __init__(self, roots: Roots, servers: Sequence[Server]) -> None:
        self._proc, self._servers = roots.proc, servers
        folder = own_net(roots.proc)
        self._own = _identity(roots.proc / ("1" if folder.parent.name == "1" else "self"))
        self._first = Place(folder, None, self._own or "")
        self._pids: dict[str, int] = {}
        self._due_s = 0.0
        self._wait_s = _LOOK_S
        self._found = [self._first]

    def now(self) -> list[Place]:
        """As of at most five seconds ago. A server that has gone is looked for ever less often: that may read all processes."""
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._found = self._look()
            missing = len(self._pids) < len(self._servers)
            self._wait_s = min(2 * self._wait_s, _LATEST_S) if missing else _LOOK_S
            self._due_s = now_s + self._wait_s
        return self._found

    def _look(self) -> list[Place]:
        found, seen = [self._first], {self._own}
        if self._own is None:
            return found
        for server in self._servers:
            pid = self._pids.get(server.name)
            if pid is None or not (self._proc / str(pid)).exists():
                self._pids.pop(server.name, None)
                pid = server.find().pid
                if pid is None:
                    continue
                self._pids[server.name] = pid
            identity = _identity(self._proc / str(pid))
            if identity is not None and identity not in seen:
                seen.add(identity)
                found.append(Place(self._proc / str(pid) / "net", server.name, identity))
        return found


def _identity(process: Path) -> str | None:
    """`net:[4026531840]`, namespaces(7); null where it can't be read (another user's process)."""
    try:
        return str((process / "ns/net").readlink())
    except OSError:
        return None
