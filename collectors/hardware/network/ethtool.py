"""A driver's own statistics, by the ioctl that `ethtool -S` uses (linux/ethtool.h): RDMA bytes of RoCE, pauses, discards.

The names are the driver's. A call often costs a firmware command, so this is a source of its own thread, once a second.
"""

from __future__ import annotations

import array
import errno
import fcntl
import socket
import struct
from pathlib import Path

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.sink import Direction, Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots, status_of

__all__ = ["MAX_STATISTICS", "EthtoolSource", "meaning", "names_of"]

MAX_STATISTICS = 400
"""Statistics of one interface that are kept, those that are known by name first."""

_SIOCETHTOOL = 0x8946
_GSSET_INFO, _GSTRINGS, _GSTATS = 0x37, 0x1B, 0x1D
_SS_STATS, _STRING_BYTES, _MOST = 1, 32, 100_000

_KNOWN: dict[str, tuple[str, str, Direction | None]] = {
    "rx_vport_rdma_unicast_bytes": ("rdma_bytes", "bytes", "rx"), "tx_vport_rdma_unicast_bytes": ("rdma_bytes", "bytes", "tx"),
    "rx_bytes_phy": ("phy_bytes", "bytes", "rx"), "tx_bytes_phy": ("phy_bytes", "bytes", "tx"),
    "rx_pause_ctrl_phy": ("pauses", "frames", "rx"), "tx_pause_ctrl_phy": ("pauses", "frames", "tx"),
    "rx_discards_phy": ("discards", "packets", "rx"), "tx_discards_phy": ("discards", "packets", "tx"),
}  # fmt: skip
"""mlx5's names (its driver's documentation). Others keep their own."""


def names_of(data: bytes) -> list[str]:
    """Names of a string set: 32 bytes each, ended by a zero."""
    cut = [data[i : i + _STRING_BYTES] for i in range(0, len(data) - _STRING_BYTES + 1, _STRING_BYTES)]
    return [c.split(b"\0")[0].decode("ascii", "replace").strip() for c in cut]


def meaning(name: str) -> tuple[str, str, Direction | None]:
    """Our name, unit and direction of a driver's statistic."""
    if (known := _KNOWN.get(name)) is not None:
        return known
    way: Direction | None = "rx" if name.startswith("rx") else "tx" if name.startswith("tx") else None
    unit = "bytes" if name.endswith(("_bytes", "_octets")) else "packets" if "packets" in name else "1"
    return name, unit, way


class EthtoolSource:
    """Entities ``net:INTERFACE``."""

    name = "ethtool"
    answers = "what the adapters' drivers count: RoCE bytes, pauses, discards, queues"
    pace: Pace = "own"
    every_s = 1.0

    def __init__(self, roots: Roots | None = None) -> None:
        self._roots = roots or Roots()
        self._boot = procfs.boot_id(self._roots.proc)[:8]
        self._socket: socket.socket | None = None
        self._names: dict[str, list[str]] = {}
        self._series: dict[str, list[tuple[int, int]]] = {}

    def probe(self) -> Found:
        if not self._roots.live:
            return Found("unsupported", "a driver can only be asked on its own machine", "run hoptrace on the host")
        adapters = self._adapters()
        if not adapters:
            return Found("absent", "there is no network adapter here (only virtual interfaces)")
        self._names = {}
        why: OSError | None = None
        for name in adapters:
            try:
                if found := self._strings(name):
                    self._names[name] = found
            except OSError as e:
                why = why or e
        if self._names:
            return Found("ok", sees=", ".join(f"{n} ({len(s)})" for n, s in self._names.items()))
        if why is None or why.errno == errno.EOPNOTSUPP:
            return Found("unsupported", f"the drivers of {', '.join(adapters)} count nothing of their own")
        return Found(status_of(why), f"ethtool statistics: {why.strerror}", "run as root" if why.errno == errno.EPERM else None)

    def open(self, out: Sink) -> None:
        for name, statistics in self._names.items():
            # Known ones first, so that the limit never cuts them off.
            order = sorted(range(len(statistics)), key=lambda i: (statistics[i] not in _KNOWN, i))[:MAX_STATISTICS]
            if len(statistics) > MAX_STATISTICS:
                out.drop(f"statistics of {name} beyond {MAX_STATISTICS}", len(statistics) - MAX_STATISTICS)
            self._series[name] = []
            for i in order:
                ours, unit, way = meaning(statistics[i])
                number = out.series(f"net:{name}", ours, unit, "cumulative", direction=way, incarnation=self._boot, width_bits=64)
                self._series[name].append((i, number))

    def sample(self, out: Sink) -> None:
        for name, series in self._series.items():
            before = out.now_ns()
            try:
                values = self._values(name, len(self._names[name]))
            except OSError as e:
                out.at(before, out.now_ns())
                out.fail((number for _, number in series), status_of(e))
                continue
            out.at(before, out.now_ns())
            for i, number in series:
                out.put(number, values[i])

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    # -- inside -------------------------------------------------------------------------------------------------------

    def _adapters(self) -> list[str]:
        try:
            return sorted(p.name for p in (self._roots.sys / "class/net").iterdir() if Path(p / "device").exists())
        except OSError:
            return []

    def _call(self, name: str, data: array.array[int]) -> None:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        address, _ = data.buffer_info()
        fcntl.ioctl(self._socket, _SIOCETHTOOL, struct.pack("16sP", name.encode()[:15], address))

    def _strings(self, name: str) -> list[str]:
        info = array.array("B", struct.pack("=IIQI", _GSSET_INFO, 0, 1 << _SS_STATS, 0))
        self._call(name, info)
        n = int(struct.unpack("=IIQI", info.tobytes())[3])
        if not 0 < n <= _MOST:
            return []
        strings = array.array("B", struct.pack("=III", _GSTRINGS, _SS_STATS, n) + bytes(n * _STRING_BYTES))
        self._call(name, strings)
        return names_of(strings.tobytes()[12:])

    def _values(self, name: str, n: int) -> tuple[int, ...]:
        stats = array.array("B", struct.pack("=II", _GSTATS, n) + bytes(8 * n))
        self._call(name, stats)
        told = int(struct.unpack_from("=I", stats.tobytes(), 4)[0])
        if told != n:
            raise OSError(errno.ESTALE, "the driver's statistics have changed")
        return struct.unpack_from(f"={n}Q", stats.tobytes(), 8)
