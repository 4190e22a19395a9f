"""The machine around the servers: what its CPUs did, and how long its threads lacked a resource.

Entities: ``cpu`` (all CPUs together), ``cpu:N``, ``hoptrace:PID`` (this process: collectors, proxy, and what else runs in it),
``pressure``. The machine's busy time less that of the servers' processes and of this one is what others took.
"""

from __future__ import annotations

import os
import time

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.file import KeptFile
from hoptrace.collectors.hardware.kernel import stat
from hoptrace.collectors.hardware.pressure import pressure_totals
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found, Pace, Roots, status_of

__all__ = ["CpuSource", "PressureSource", "cpu_ticks"]

_FIELDS = tuple(f"{kind}_ns" for kind in procfs.CPU_FIELDS)
_EACH_EVERY_NS = 1_000_000_000


class CpuSource:
    """/proc/stat: proc_stat(5). Times are counted in ticks of 10 ms; ``cpu:N`` once a second. Of its last lines the totals of the
    machine: switches, forks, interrupts, threads that run or are blocked."""

    name = "cpu"
    answers = "how busy the CPUs are, what the hypervisor gave to others, what recording takes"
    pace: Pace = "fast"
    every_s = 0.2  # the kernel writes a line of all interrupts with it each time

    def __init__(self, roots: Roots | None = None) -> None:
        self._roots = roots or Roots()
        self._file = KeptFile(self._roots.proc / "stat")
        self._boot = procfs.boot_id(self._roots.proc)[:8]
        self._each_due_ns = 0

    def probe(self) -> Found:
        try:
            times = procfs.cpu_times(self._roots.proc)
        except OSError as e:
            return Found(status_of(e), f"this system has no Linux /proc ({e.strerror})", "hoptrace counters need Linux")
        except ValueError as e:
            return Found("error", str(e))
        return Found("ok", sees=f"{times['cpus']} CPUs")

    def open(self, out: Sink) -> None:
        self._all = [out.series("cpu", name, "ns", "cumulative", incarnation=self._boot, width_bits=64) for name in _FIELDS]
        self._totals = [
            (key, out.series("cpu", name, unit, "cumulative" if grows else "gauge", incarnation=self._boot))
            for key, name, unit, grows in stat.TOTALS
        ]
        self._cpus = out.series("cpu", "cpus", "cpus", "gauge", incarnation=self._boot)
        self._own = out.series(f"hoptrace:{os.getpid()}", "on_cpu_ns", "ns", "cumulative", incarnation=self._boot, width_bits=64)

    def sample(self, out: Sink) -> None:
        before = out.now_ns()
        try:
            data = self._file.read()
        except OSError as e:
            out.at(before, out.now_ns())
            out.fail([*self._all, *(number for _, number in self._totals)], status_of(e))
            return
        after = out.now_ns()
        out.at(before, after)
        end = data.find(b"\n")
        times = cpu_ticks(data[:end])
        if times is None:
            out.fail(self._all, "error")
        else:
            for number, ticks in zip(self._all, times, strict=False):
                out.put(number, ticks * procfs.TICK_NS)
        for key, number in self._totals:
            if (n := stat.total(data, key)) is not None:
                out.put(number, n)
        out.put(self._own, time.process_time_ns())
        if after >= self._each_due_ns:
            self._each_due_ns = after + _EACH_EVERY_NS
            self._each(data, end + 1, out)

    def close(self) -> None:
        self._file.close()

    def _each(self, data: bytes, at: int, out: Sink) -> None:
        cpus = 0
        while data.startswith(b"cpu", at):
            end = data.find(b"\n", at)
            end = end if end >= 0 else len(data)
            line = data[at:end]
            at = end + 1
            times = cpu_ticks(line)
            if times is None or len(times) < len(_FIELDS):
                continue
            entity = f"cpu:{line[3 : line.find(b' ')].decode()}"
            for name, ticks in zip(_FIELDS, times, strict=False):
                number = out.series(entity, name, "ns", "cumulative", incarnation=self._boot, width_bits=64)
                out.put(number, ticks * procfs.TICK_NS)
            cpus += 1
        out.put(self._cpus, cpus)


def cpu_ticks(line: bytes) -> list[int] | None:
    """The times of a line of /proc/stat that tells of CPUs, in ticks, as many as there are; null if it is no such line."""
    words = line.split()
    if len(words) < 5 or not words[0].startswith(b"cpu") or not all(w.isdigit() for w in words[1:]):
        return None
    return [int(w) for w in words[1:]]


class PressureSource:
    """/proc/pressure: the time for which some, or all, threads that were not idle waited for a resource (psi.rst). Totals only:
    the averages are somebody else's window."""

    name = "pressure"
    answers = "how long threads of this machine lacked a CPU, memory or a disk"
    pace: Pace = "fast"
    every_s = None

    def __init__(self, roots: Roots | None = None) -> None:
        self._roots = roots or Roots()
        self._boot = procfs.boot_id(self._roots.proc)[:8]
        self._files: dict[str, KeptFile] = {}
        self._known: dict[str, dict[bytes, int]] = {}

    def probe(self) -> Found:
        self._files = {}
        why: OSError | None = None
        for resource in ("cpu", "memory", "io", "irq"):
            file = KeptFile(self._roots.proc / "pressure" / resource)
            try:
                file.read()
            except OSError as e:
                why = why or e
                continue
            self._files[resource] = file
        if self._files:
            return Found("ok", sees=", ".join(self._files))
        status = status_of(why) if why else "absent"
        return Found(
            status, "this kernel offers no pressure stall information (/proc/pressure)",
            "boot with psi=1 (Linux 4.20 or later with CONFIG_PSI)",
        )  # fmt: skip

    def open(self, out: Sink) -> None:
        self._known = {resource: {} for resource in self._files}

    def sample(self, out: Sink) -> None:
        for resource, file in self._files.items():
            before = out.now_ns()
            known = self._known[resource]
            try:
                data = file.read()
            except OSError as e:
                out.at(before, out.now_ns())
                out.fail(known.values(), status_of(e))
                continue
            out.at(before, out.now_ns())
            for kind, total_us in pressure_totals(data):
                number = known.get(kind)
                if number is None:
                    name = f"{resource}_{kind.decode()}_ns"
                    number = known[kind] = out.series(
                        "pressure", name, "ns", "cumulative", incarnation=self._boot, width_bits=64
                    )  # fmt: skip
                out.put(number, total_us * 1000)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
