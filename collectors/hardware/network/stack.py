"""The network stack's own troubles: retransmissions, overflowing queues of listeners, packets dropped or put off by a busy CPU.

/proc/net/snmp, /proc/net/netstat (two lines a protocol: names, numbers), of each namespace; /proc/net/softnet_stat (one line a
CPU, hexadecimal: processed, dropped, time_squeeze), of the machine: Documentation/networking/snmp_counter.rst,
net/core/net-procfs.c.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.file import KeptFile
from hoptrace.collectors.hardware.network.where import Place, Places
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots, Server, status_of

__all__ = ["StackSource", "softnet", "two_lines"]

_TCP: dict[str, tuple[str, str]] = {
    "InSegs": ("tcp_segments_in", "segments"), "OutSegs": ("tcp_segments_out", "segments"),
    "RetransSegs": ("tcp_retransmissions", "segments"), "InErrs": ("tcp_errors_in", "segments"),
    "OutRsts": ("tcp_resets_out", "segments"), "EstabResets": ("tcp_resets", "connections"),
    "ListenOverflows": ("listen_overflows", "times"), "ListenDrops": ("listen_drops", "times"),
    "DelayedACKs": ("tcp_delayed_acks", "times"), "TCPTimeouts": ("tcp_timeouts", "times"),
    "TCPBacklogDrop": ("tcp_backlog_drops", "packets"), "PruneCalled": ("tcp_prunes", "times"),
    "TCPRcvCollapsed": ("tcp_collapsed", "segments"), "TCPZeroWindowDrop": ("tcp_zero_window_drops", "segments"),
    "TCPToZeroWindowAdv": ("tcp_zero_window_told", "times"), "TCPLostRetransmit": ("tcp_lost_retransmissions", "segments"),
}  # fmt: skip
_FILES = (("snmp", (b"Tcp",)), ("netstat", (b"TcpExt",)))


def two_lines(data: bytes, protocols: tuple[bytes, ...]) -> dict[str, int]:
    """Counters by name of the protocols' pairs of lines; a pair of unequal length, or a value that is no number, is left out."""
    lines = data.splitlines()
    found: dict[str, int] = {}
    for names, values in pairwise(lines):
        head = names.split(b" ", 1)[0]
        if head.rstrip(b":") not in protocols or not values.startswith(head + b" "):
            continue
        left, right = names.split()[1:], values.split()[1:]
        if len(left) == len(right):
            found |= {n.decode("ascii", "replace"): int(v) for n, v in zip(left, right, strict=True) if v.isdigit()}
    return found


def softnet(data: bytes) -> tuple[int, int, int, int]:
    """Packets processed and dropped, and times that a CPU ran out of its budget with packets left, over all CPUs, and how many
    CPUs these are."""
    sums = (0, 0, 0, 0)
    for line in data.splitlines():
        words = line.split()[:3]
        try:
            row = [int(w, 16) for w in words]
        except ValueError:
            continue
        if len(row) == 3 and min(row) >= 0:
            sums = (sums[0] + row[0], sums[1] + row[1], sums[2] + row[2], sums[3] + 1)
    return sums


@dataclass(slots=True)
class _Net:
    place: Place
    files: list[tuple[KeptFile, tuple[bytes, ...]]]
    numbers: dict[str, int] = field(default_factory=dict)


class StackSource:
    """Entities ``tcp`` (``tcp:SERVER`` in a server's own network namespace) and ``softnet``."""

    name = "network-stack"
    answers = "whether answers wait for retransmissions, full queues or a CPU that is late with packets"
    pace: Pace = "fast"
    every_s = 1.0

    def __init__(self, roots: Roots | None = None, servers: Sequence[Server] = ()) -> None:
        self._roots = roots or Roots()
        self._places = Places(self._roots, servers)
        self._boot = procfs.boot_id(self._roots.proc)[:8]
        self._nets: dict[Place, _Net] = {}
        self._softnet: KeptFile | None = None
        self._soft: list[int] = []

    def probe(self) -> Found:
        place = self._places.now()[0]
        net = self._net(place)
        told, why = _told(net)
        for file, _ in net.files:
            file.close()
        if told:
            return Found("ok", sees=f"{len(told)} counters of TCP")
        if why is not None:
            return Found(status_of(why), f"{why.filename}: {why.strerror}", "mount /proc, or a kernel with TCP")
        return Found("error", f"{place.folder}/snmp is not in the kernel's format", "tell us which kernel this is")

    def open(self, out: Sink) -> None:
        return None

    def sample(self, out: Sink) -> None:
        places = self._places.now()
        for place in places:
            net = self._nets.get(place)
            if net is None:
                net = self._nets[place] = self._net(place)
            self._tcp(net, out)
        for place in [p for p in self._nets if p not in places]:
            gone = self._nets.pop(place)
            for file, _ in gone.files:
                file.close()
            out.at(at := out.now_ns(), at)
            out.fail(gone.numbers.values(), "lost")
        self._backlog(places[0], out)

    def close(self) -> None:
        for net in self._nets.values():
            for file, _ in net.files:
                file.close()
        if self._softnet is not None:
            self._softnet.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    @staticmethod
    def _net(place: Place) -> _Net:
        return _Net(place, [(KeptFile(place.folder / name), protocols) for name, protocols in _FILES])

    def _tcp(self, net: _Net, out: Sink) -> None:
        before = out.now_ns()
        told, why = _told(net)
        out.at(before, out.now_ns())
        for name, value in told.items():
            number = net.numbers.get(name)
            if number is None:
                ours, unit = _TCP[name]
                own = net.place.server is not None
                # unsigned long: 64 bits where the kernel has 64.
                number = net.numbers[name] = out.series(
                    net.place.entity("tcp"), ours, unit, "cumulative", width_bits=64,
                    incarnation=f"{self._boot}/{net.place.identity}" if own else self._boot,
                )  # fmt: skip
            out.put(number, value)
        out.fail((n for name, n in net.numbers.items() if name not in told), status_of(why) if why else "absent")

    def _backlog(self, place: Place, out: Sink) -> None:
        if self._softnet is None:
            self._softnet = KeptFile(place.folder / "softnet_stat")
        before = out.now_ns()
        try:
            packets, dropped, squeezed, cpus = softnet(self._softnet.read())
        except OSError as e:
            out.at(before, out.now_ns())
            out.fail(self._soft, status_of(e))
            return
        out.at(before, out.now_ns())
        if not cpus:
            out.fail(self._soft, "error")
            return
        # Each CPU's are 32 bits wide, and so is what their sum wraps by; a CPU that goes takes its share along: another series.
        life = f"{self._boot}/{cpus}"
        self._soft = [
            out.series("softnet", name, unit, "cumulative", incarnation=life, width_bits=32)
            for name, unit in (("packets", "packets"), ("dropped", "packets"), ("squeezed", "times"))
        ]
        out.put_all(self._soft, (packets, dropped, squeezed))


def _told(net: _Net) -> tuple[dict[str, int], OSError | None]:
    """Counters of ours by the kernel's name, and the first error."""
    told: dict[str, int] = {}
    why: OSError | None = None
    for file, protocols in net.files:
        try:
            found = two_lines(file.read(), protocols)
        except OSError as e:
            why = why or e
            continue
        told |= {n: v for n, v in found.items() if n in _TCP}
    return told, why
