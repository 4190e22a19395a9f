"""Ethernet interfaces: /proc/net/dev, proc_pid_net(5). RDMA bypasses the network stack: its bytes are not in here.

The namespace is that of the first server's process where it can be seen (a container has its own), else this process's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.file import KeptFile
from hoptrace.collectors.hardware.sink import Direction, Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots, Server, found_by_error, status_of

__all__ = ["InterfacesSource", "interfaces_of", "net_folder"]

_FIELDS: tuple[tuple[int, str, str, Direction], ...] = (
    (0, "raw_bytes", "bytes", "rx"), (1, "packets", "packets", "rx"), (2, "errors", "packets", "rx"),
    (3, "dropped", "packets", "rx"), (8, "raw_bytes", "bytes", "tx"), (9, "packets", "packets", "tx"),
    (10, "errors", "packets", "tx"), (11, "dropped", "packets", "tx"),
)  # fmt: skip


def interfaces_of(data: bytes) -> Iterator[tuple[str, list[int]]]:
    """Name and numbers of each interface; lines of another form are passed over."""
    for line in data.splitlines():
        name, colon, rest = line.partition(b":")
        words = rest.split()
        if colon and len(words) >= 12 and all(w.isdigit() for w in words[:12]):
            yield name.strip().decode("utf-8", "replace"), [int(w) for w in words]


def net_folder(roots: Roots, servers: Sequence[Server]) -> Path:
    """Where the network is looked at."""
    for server in servers:
        pid = server.find().pid
        if pid is not None and (roots.proc / str(pid) / "net/dev").exists():
            return roots.proc / str(pid) / "net"
    return roots.proc / "net"


class InterfacesSource:
    """Entities ``net:INTERFACE``; loopback (``net:lo``) is counted like the others and is no wire."""

    name = "network"
    answers = "what crossed each network interface"
    pace: Pace = "fast"
    every_s = None

    def __init__(self, roots: Roots | None = None, servers: Sequence[Server] = ()) -> None:
        self._roots = roots or Roots()
        self._folder = net_folder(self._roots, servers)
        self._file = KeptFile(self._folder / "dev")
        self._boot = procfs.boot_id(self._roots.proc)[:8]
        self._series: dict[str, list[int]] = {}

    def probe(self) -> Found:
        try:
            names = [n for n, _ in interfaces_of(self._file.read())]
        except OSError as e:
            return found_by_error(e)
        if not names:
            return Found("absent", "there are no network interfaces here")
        own = "" if self._folder == self._roots.proc / "net" else "; as the server sees them"
        return Found("ok", sees=", ".join(names[:6]) + (" …" if len(names) > 6 else "") + own)

    def open(self, out: Sink) -> None:
        return None

    def sample(self, out: Sink) -> None:
        before = out.now_ns()
        try:
            data = self._file.read()
        except OSError as e:
            out.at(before, out.now_ns())
            for numbers in self._series.values():
                out.fail(numbers, status_of(e))
            return
        out.at(before, out.now_ns())
        seen = set()
        for name, values in interfaces_of(data):
            seen.add(name)
            if name not in self._series:
                self._series[name] = [
                    # unsigned long: 64 bits where the kernel has 64.
                    out.series(f"net:{name}", what, unit, "cumulative", direction=way, incarnation=self._boot, width_bits=64)
                    for _, what, unit, way in _FIELDS
                ]
            out.put_all(self._series[name], [values[i] for i, _, _, _ in _FIELDS])
        for name in self._series.keys() - seen:
            out.fail(self._series[name], "absent")

    def close(self) -> None:
        self._file.close()
