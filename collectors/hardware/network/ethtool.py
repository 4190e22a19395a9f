"""A driver's own statistics, by the ioctl that `ethtool -S` uses (linux/ethtool.h): RoCE bytes, pauses, discards, queues.

A call often costs a firmware command, so this is a source of its own thread, once a second. It needs no privilege.
"""

from __future__ import annotations

import array
import errno
import fcntl
import socket
import struct
import time
from dataclasses import dataclass

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.network.carrier import adapters
from hoptrace.collectors.hardware.network.ethtool_names import is_known, meaning
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots, status_of

__all__ = ["MAX_STATISTICS", "EthtoolSource", "names_of"]

MAX_STATISTICS = 400
"""Statistics of one interface that are kept, those that are known by name first."""

_SIOCETHTOOL = 0x8946
_GSSET_INFO, _GSTRINGS, _GSTATS = 0x37, 0x1B, 0x1D
_SS_STATS, _STRING_BYTES, _MOST = 1, 32, 100_000
# A kernel before 6.19 writes as many values as the driver has at that moment, however large the caller said its room is
# (net/ethtool/ioctl.c): the room must hold more than a driver can add between two calls (queues that are made meanwhile).
_ROOM = 16_384
_LIST_S = 30.0


def names_of(data: bytes) -> list[str]:
    """Names of a string set: 32 bytes each, ended by a zero."""
    cut = [data[i : i + _STRING_BYTES] for i in range(0, len(data) - _STRING_BYTES + 1, _STRING_BYTES)]
    return [c.split(b"\0")[0].decode("ascii", "replace").strip() for c in cut]


@dataclass(slots=True)
class _Adapter:
    """``kept``: place among the driver's values, and the number of the series."""

    names: list[str]
    kept: list[tuple[int, int]]


class EthtoolSource:
    """Entities ``net:INTERFACE``."""

    name = "ethtool"
    answers = "what the adapters' drivers count: RoCE bytes, pauses, discards, queues, kicks"
    pace: Pace = "own"
    every_s = 1.0

    def __init__(self, roots: Roots | None = None) -> None:
        self._roots = roots or Roots()
        self._boot = procfs.boot_id(self._roots.proc)[:8]
        self._socket: socket.socket | None = None
        self._adapters: dict[str, _Adapter] = {}
        self._came: dict[str, int] = {}
        self._due_s = 0.0

    def probe(self) -> Found:
        if not self._roots.live:
            return Found("unsupported", "a driver can only be asked on its own machine", "run hoptrace on the host")
        names = adapters(self._roots.sys)
        if not names:
            return Found("absent", "there is no network adapter here (only virtual interfaces)", "run hoptrace on the host")
        told: list[str] = []
        why: OSError | None = None
        for name in names:
            try:
                if n := len(self._strings(name)):
                    told.append(f"{name} ({n})")
            except OSError as e:
                why = why or e
        if told:
            return Found("ok", sees=", ".join(told))
        if why is None or why.errno == errno.EOPNOTSUPP:
            return Found("unsupported", f"the drivers of {', '.join(names)} count nothing of their own", "another driver")
        return Found(status_of(why), f"ethtool statistics: {why.strerror}", "run as root" if why.errno == errno.EPERM else None)

    def open(self, out: Sink) -> None:
        return None

    def sample(self, out: Sink) -> None:
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + _LIST_S
            for name in adapters(self._roots.sys):
                if name not in self._adapters:
                    self._begin(name, out)
        for name, adapter in list(self._adapters.items()):
            self._one(name, adapter, out)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    # -- inside -------------------------------------------------------------------------------------------------------

    def _begin(self, name: str, out: Sink) -> None:
        try:
            names = self._strings(name)
        except OSError:
            return  # it counts nothing of its own, or is not ready: looked for again
        if not names:
            return
        came = self._came[name] = self._came.get(name, 0) + 1
        order = sorted(range(len(names)), key=lambda i: (not is_known(names[i]), i))[:MAX_STATISTICS]
        if len(names) > MAX_STATISTICS:
            out.drop(f"statistics of {name} beyond {MAX_STATISTICS}", len(names) - MAX_STATISTICS)
        kept = []
        for i in order:
            ours, unit, way = meaning(names[i])
            life = f"{self._boot}/{came}"
            # Values are 64 bits wide, the counters behind them may be narrower, and a driver may begin them anew: no width.
            kept.append((i, out.series(f"net:{name}", ours, unit, "cumulative", direction=way, incarnation=life)))
        self._adapters[name] = _Adapter(names, kept)

    def _one(self, name: str, adapter: _Adapter, out: Sink) -> None:
        before = out.now_ns()
        try:
            values = self._values(name, len(adapter.names))
        except OSError as e:
            out.at(before, out.now_ns())
            out.fail((number for _, number in adapter.kept), status_of(e))
            if e.errno not in (errno.EIO, errno.EBUSY, errno.EAGAIN, errno.ETIMEDOUT):
                # Gone, or its statistics are others now (queues were added): it begins anew.
                del self._adapters[name]
                self._due_s = min(self._due_s, time.monotonic() + 2)
                if status_of(e) == "lost":
                    out.event("device error", f"net:{name} is gone")
            return
        out.at(before, out.now_ns())
        for i, number in adapter.kept:
            out.put(number, values[i])

    def _call(self, name: str, data: array.array[int]) -> None:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        address, _ = data.buffer_info()
        fcntl.ioctl(self._socket, _SIOCETHTOOL, struct.pack("16sP", name.encode()[:15], address))

    def _count(self, name: str) -> int:
        info = array.array("B", struct.pack("=IIQI", _GSSET_INFO, 0, 1 << _SS_STATS, 0))
        self._call(name, info)
        _, _, mask, n = struct.unpack("=IIQI", info.tobytes())
        return n if mask and 0 < n <= _MOST else 0

    def _strings(self, name: str) -> list[str]:
        n = self._count(name)
        if not n:
            return []
        strings = array.array("B", struct.pack("=III", _GSTRINGS, _SS_STATS, n) + bytes((n + _ROOM) * _STRING_BYTES))
        self._call(name, strings)
        told = int(struct.unpack_from("=I", strings, 8)[0])
        return names_of(strings.tobytes()[12 : 12 + told * _STRING_BYTES]) if 0 < told <= _MOST else []

    def _values(self, name: str, n: int) -> tuple[int, ...]:
        """OSError ESTALE: the driver has other statistics now than when its names were read."""
        if self._count(name) == n:
            stats = array.array("B", struct.pack("=II", _GSTATS, n) + bytes(8 * (n + _ROOM)))
            self._call(name, stats)
            if int(struct.unpack_from("=I", stats, 4)[0]) == n:
                return struct.unpack_from(f"={n}Q", stats, 8)
        raise OSError(errno.ESTALE, "the driver's statistics have changed")
