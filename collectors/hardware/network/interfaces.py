"""Ethernet interfaces: /proc/net/dev, proc_pid_net(5). RDMA bypasses the network stack: its bytes are not in here."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.file import KeptFile
from hoptrace.collectors.hardware.network.where import Place, Places
from hoptrace.collectors.hardware.sink import Direction, Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots, Server, found_by_error, status_of

__all__ = ["FEW", "InterfacesSource", "interfaces_of"]

FEW = 16
"""Up to so many interfaces are all recorded at each beat; of more, those that are no adapters once a second."""

_FIELDS: tuple[tuple[int, str, str, Direction], ...] = (
    (0, "raw_bytes", "bytes", "rx"), (1, "packets", "packets", "rx"), (2, "errors", "packets", "rx"),
    (3, "dropped", "packets", "rx"), (8, "raw_bytes", "bytes", "tx"), (9, "packets", "packets", "tx"),
    (10, "errors", "packets", "tx"), (11, "dropped", "packets", "tx"),
)  # fmt: skip
_AT = tuple(i for i, *_ in _FIELDS)
_SLOW_S = 1.0


def interfaces_of(data: bytes) -> Iterator[tuple[str, list[int]]]:
    """Name and the eight numbers of each interface that are kept (rx bytes, packets, errors, drops, then tx); lines of another
    form are passed over."""
    for line in data.splitlines():
        name, colon, rest = line.partition(b":")
        values = _values(rest) if colon else None
        if values is not None:
            yield name.strip().decode("utf-8", "replace"), values


def _values(rest: bytes) -> list[int] | None:
    words = rest.split()
    if len(words) < 12:
        return None
    kept = [words[i] for i in _AT]
    # int() would take signs and underscores too.
    return [int(w) for w in kept] if all(map(bytes.isdigit, kept)) else None


@dataclass(slots=True)
class _Interface:
    series: list[int]
    rest: bytes = b""
    values: list[int] = field(default_factory=list)
    fast: bool = True
    due_s: float = 0.0


@dataclass(slots=True)
class _Net:
    """A namespace as it is read."""

    place: Place
    file: KeptFile
    there: dict[bytes, _Interface] = field(default_factory=dict)
    came: dict[bytes, int] = field(default_factory=dict)


class InterfacesSource:
    """Entities ``net:INTERFACE`` of this namespace and ``net:SERVER/INTERFACE`` of a server that has its own; loopback
    (``net:lo``) is counted like the others and is no wire."""

    name = "network"
    answers = "what crossed each network interface"
    pace: Pace = "fast"
    every_s = None

    def __init__(self, roots: Roots | None = None, servers: Sequence[Server] = ()) -> None:
        self._roots = roots or Roots()
        self._places = Places(self._roots, servers)
        self._boot = procfs.boot_id(self._roots.proc)[:8]
        self._nets: dict[Place, _Net] = {}

    def probe(self) -> Found:
        places = self._places.now()
        file = KeptFile(places[0].folder / "dev")
        try:
            names = [n for n, _ in interfaces_of(file.read())]
        except OSError as e:
            return found_by_error(e, "mount /proc, or a kernel with networking")
        finally:
            file.close()
        if not names:
            return Found("absent", f"{file.path} tells of no interface", "run hoptrace in the host's network namespace")
        others = [str(p.server) for p in places[1:]]
        own = f"; namespaces of their own: {', '.join(others)}" if others else ""
        return Found("ok", sees=", ".join(names[:6]) + (" …" if len(names) > 6 else "") + own)

    def open(self, out: Sink) -> None:
        return None

    def sample(self, out: Sink) -> None:
        places = self._places.now()
        for place in places:
            net = self._nets.get(place)
            if net is None:
                net = self._nets[place] = _Net(place, KeptFile(place.folder / "dev"))
            self._one(net, out)
        if len(self._nets) > len(places):
            for place in [p for p in self._nets if p not in places]:
                gone = self._nets.pop(place)
                gone.file.close()
                out.at(at := out.now_ns(), at)
                for was in gone.there.values():
                    out.fail(was.series, "lost")

    def close(self) -> None:
        for net in self._nets.values():
            net.file.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _one(self, net: _Net, out: Sink) -> None:
        before = out.now_ns()
        try:
            data = net.file.read()
        except OSError as e:
            out.at(before, out.now_ns())
            for was in net.there.values():
                out.fail(was.series, status_of(e))
            return
        out.at(before, out.now_ns())
        now_s = time.monotonic()
        gone = set(net.there)
        for line in data.splitlines():
            name, colon, rest = line.partition(b":")
            if not colon:
                continue
            name = name.strip()
            interface = net.there.get(name)
            if interface is None or interface.rest != rest:
                values = _values(rest)
                if values is None:
                    continue
                if interface is None:
                    interface = net.there[name] = self._new(net, name, out)
                interface.rest, interface.values = rest, values
            gone.discard(name)
            if interface.fast or now_s >= interface.due_s:
                interface.due_s = now_s + _SLOW_S
                out.put_all(interface.series, interface.values)
        for vanished in gone:
            out.fail(net.there.pop(vanished).series, "absent")

    def _new(self, net: _Net, name: bytes, out: Sink) -> _Interface:
        """One that comes back counts from 0 again: it is another incarnation."""
        came = net.came[name] = net.came.get(name, 0) + 1
        text = name.decode("utf-8", "replace")
        life = "/".join((self._boot, *([net.place.identity] if net.place.server else []), str(came)))
        entity = net.place.entity("net", text)
        adapter = net.place.server is None and (self._roots.sys / "class/net" / text / "device").exists()
        fast = adapter or name == b"lo" or len(net.there) < FEW
        # Its counters are 64 bits wide (struct rtnl_link_stats64).
        series = [out.series(entity, what, unit, "cumulative", direction=way, incarnation=life, width_bits=64)
                  for _, what, unit, way in _FIELDS]  # fmt: skip
        return _Interface(series, fast=fast)
