"""How quiet the machine was while a run lasted, and how much CPU its servers took.

From /proc/stat (proc(5)): what each core did, and what the hypervisor kept from it; from /proc/PID/stat (through psutil): what
the command's own processes used. What neither the run's own processes nor idleness accounts for, others took.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from harness.children import task_ns, tree

__all__ = ["Gauge", "Sample", "busy_of", "probe", "verdict"]

_TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")
_PROBE_LOOPS = 4500  # some 1 s on the machine that this was written on


@dataclass(frozen=True)
class Sample:
    """Counts since some past: ``busy_ns`` and ``steal_ns`` of the watched cores, ``servers_ns`` of the servers' trees, ``own_ns``
    of all the command's threads that may run on these cores."""

    time_ns: int
    busy_ns: int
    steal_ns: int
    servers_ns: int
    own_ns: int


def busy_of(stat: str, cpus: Sequence[int]) -> tuple[int, int]:
    """(busy, steal) in ns of the cores in the text of /proc/stat: user, nice, system, irq, softirq (guest time is in user)."""
    busy = steal = 0
    for line in stat.splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cpus:
            n = [int(x) for x in fields]
            busy += n[0] + n[1] + n[2] + n[5] + n[6]
            steal += n[7]
    return busy * _TICK_NS, steal * _TICK_NS


class Gauge:
    """Watches the cores ``cpus`` while servers run on them; ``servers`` are the roots of their trees.

    ``client_too``: whether the client's processes run on these cores as well, so that their time is not others'.
    """

    def __init__(self, cpus: Sequence[int], servers: Sequence[int], *, client_too: bool) -> None:
        self.cpus, self.servers, self.client_too = tuple(cpus), tuple(servers), client_too
        self._first = self.sample()

    def sample(self) -> Sample:
        """The counts now."""
        of_servers = [p for root in self.servers for p in tree(root)]
        servers = sum(_cpu_ns(p) for p in of_servers)
        own = sum(sum(task_ns(p.pid, self.cpus).values()) for p in of_servers)
        busy, steal = busy_of(Path("/proc/stat").read_text(), self.cpus)
        now = time.monotonic_ns()
        if self.client_too:
            known = {p.pid for p in of_servers}
            own += sum(_cpu_ns(p) for p in tree(os.getpid()) if p.pid not in known)
            # Those that have ended meanwhile.
            ended = resource.getrusage(resource.RUSAGE_CHILDREN)
            own += int((ended.ru_utime + ended.ru_stime) * 1e9)
        return Sample(now, busy, steal, servers, own)

    def read(self) -> dict[str, Any]:
        """Since this was made: shares of the cores' time, and the servers' CPU seconds."""
        return between(self._first, self.sample(), len(self.cpus))


def between(a: Sample, b: Sample, cores: int) -> dict[str, Any]:
    """Shares of ``cores`` × the time from ``a`` to ``b``."""
    whole = max(1, (b.time_ns - a.time_ns) * cores)
    foreign = max(0, (b.busy_ns - a.busy_ns) - (b.own_ns - a.own_ns))
    return {
        "foreign_share": round(foreign / whole, 4), "steal_share": round((b.steal_ns - a.steal_ns) / whole, 4),
        "server_cpu_s": round((b.servers_ns - a.servers_ns) / 1e9, 3),
    }  # fmt: skip


def verdict(gauges: dict[str, Any], bounds: Any) -> list[str]:
    """What speaks against a run, in words; nothing if it may stand."""
    found = []
    for name, what in (("foreign", "others took {} of the servers' cores"), ("steal", "the hypervisor kept {} of them")):
        share, most = gauges[f"{name}_share"], getattr(bounds, f"{name}_at_most")
        if share > most:
            found.append(f"{what.format(f'{share:.1%}')}, {most:.1%} is allowed")
    apart = abs(gauges["probe_after_ns"] / gauges["probe_before_ns"] - 1)
    if apart > bounds.probe_apart_at_most:
        found.append(f"the probe after differs by {apart:.1%} from the one before, {bounds.probe_apart_at_most:.1%} is allowed")
    if gauges["failed"]:
        found.append(f"{gauges['failed']} requests failed")
    return found


def _cpu_ns(process: psutil.Process) -> int:
    with suppress(psutil.NoSuchProcess):
        t = process.cpu_times()
        return int((t.user + t.system) * 1e9)
    return 0


def probe() -> tuple[int, int]:
    """(CPU, wall) ns of a fixed piece of work: products of matrices that fit a core's cache, and sweeps over memory that does
    not."""
    import numpy as np

    a = np.random.default_rng(0).random((192, 192), dtype=np.float32)
    far = np.ones(8 << 20, dtype=np.float32)
    wall, cpu = time.monotonic_ns(), time.process_time_ns()
    total = 0.0
    for i in range(_PROBE_LOOPS):
        b = a @ a
        total += float(b[0, 0])
        if i % 20 == 0:
            total += float(far.sum())
    return time.process_time_ns() - cpu, time.monotonic_ns() - wall


if __name__ == "__main__":
    sys.stdout.write("{} {}\n".format(*probe()))
