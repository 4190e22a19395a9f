"""The network stack's own troubles: retransmissions, overflowing queues of listeners, packets dropped or put off by a busy CPU.

/proc/net/snmp, /proc/net/netstat (two lines a protocol: names, numbers), /proc/net/softnet_stat (one line a CPU, hexadecimal:
processed, dropped, time_squeeze): Documentation/networking/snmp_counter.rst, net/core/net-procfs.c.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.file import KeptFile
from hoptrace.collectors.hardware.network.interfaces import net_folder
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots, Server, status_of

__all__ = ["StackSource", "softnet", "two_lines"]

_TCP = {
    "InSegs": ("tcp_segments_in", "segments"), "OutSegs": ("tcp_segments_out", "segments"),
    "RetransSegs": ("tcp_retransmissions", "segments"), "ListenOverflows": ("listen_overflows", "times"),
    "ListenDrops": ("listen_drops", "times"), "DelayedACKs": ("tcp_delayed_acks", "times"),
    "TCPTimeouts": ("tcp_timeouts", "times"), "TCPBacklogDrop": ("tcp_backlog_drops", "packets"),
}  # fmt: skip


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


def softnet(data: bytes) -> tuple[int, int, int]:
    """Packets processed and dropped, and times that a CPU ran out of its budget with packets left, over all CPUs."""
    sums = [0, 0, 0]
    for line in data.splitlines():
        words = line.split()[:3]
        try:
            row = [int(w, 16) for w in words]
        except ValueError:
            continue
        if len(row) == 3:
            sums = [a + b for a, b in zip(sums, row, strict=True)]
    return sums[0], sums[1], sums[2]


class StackSource:
    """Entity ``tcp`` and ``softnet``."""

    name = "network-stack"
    answers = "whether answers wait for retransmissions, full queues or a CPU that is late with packets"
    pace: Pace = "fast"
    every_s = 1.0

    def __init__(self, roots: Roots | None = None, servers: Sequence[Server] = ()) -> None:
        roots = roots or Roots()
        folder = net_folder(roots, servers)
        self._snmp, self._netstat = KeptFile(folder / "snmp"), KeptFile(folder / "netstat")
        self._softnet = KeptFile(folder / "softnet_stat")
        self._boot = procfs.boot_id(roots.proc)[:8]
        self._numbers: dict[str, int] = {}

    def probe(self) -> Found:
        found, why = self._read()
        if not found:
            status = status_of(why) if why else "error"
            return Found(status, f"{why.filename}: {why.strerror}" if why else "/proc/net/snmp is not in the kernel's format")
        return Found("ok", sees=f"{len(found)} counters")

    def open(self, out: Sink) -> None:
        return None

    def sample(self, out: Sink) -> None:
        before = out.now_ns()
        found, why = self._read()
        out.at(before, out.now_ns())
        for key, (value, unit) in found.items():
            number = self._numbers.get(key)
            if number is None:
                entity, _, name = key.partition(" ")
                number = self._numbers[key] = out.series(
                    entity, name, unit, "cumulative", incarnation=self._boot, width_bits=32 if entity == "softnet" else 64
                )  # fmt: skip
            out.put(number, value)
        out.fail((n for key, n in self._numbers.items() if key not in found), status_of(why) if why else "absent")

    def close(self) -> None:
        for file in (self._snmp, self._netstat, self._softnet):
            file.close()

    def _read(self) -> tuple[dict[str, tuple[int, str]], OSError | None]:
        told: dict[str, int] = {}
        found: dict[str, tuple[int, str]] = {}
        why: OSError | None = None
        for file, protocols in ((self._snmp, (b"Tcp",)), (self._netstat, (b"TcpExt",))):
            try:
                told |= two_lines(file.read(), protocols)
            except OSError as e:
                why = why or e
        found |= {f"tcp {ours}": (told[n], unit) for n, (ours, unit) in _TCP.items() if n in told}
        try:
            processed, dropped, squeezed = softnet(self._softnet.read())
            found |= {"softnet packets": (processed, "packets"), "softnet dropped": (dropped, "packets")}
            found["softnet squeezed"] = (squeezed, "times")
        except OSError as e:
            why = why or e
        return found, why
