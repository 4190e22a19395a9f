"""Linux's /proc as numbers: one function per file, no state. ``proc`` is the root, so that recorded trees can be read.

Formats: proc_pid_stat(5), proc_stat(5), Documentation/scheduler/sched-stats.rst, Documentation/accounting/psi.rst.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "CPU_FIELDS", "PAGE_BYTES", "TICK_NS", "CpuTimes", "ProcessStat", "boot_id", "cpu_times", "process_stat", "stat_of",
    "threads", "uptime_ns",
]  # fmt: skip

TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
CPU_FIELDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """/proc/PID/stat. CPU times include ended threads, in steps of one tick (10 ms). ``start_ticks`` is since boot."""

    command: str
    state: str
    parent: int
    user_ns: int
    system_ns: int
    minor_faults: int
    major_faults: int
    threads: int
    start_ticks: int
    rss_bytes: int


CpuTimes = dict[str, int]


def boot_id(proc: Path) -> str:
    """Identity of this boot; empty where it can't be read."""
    try:
        return (proc / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def process_stat(folder: Path) -> ProcessStat:
    """``folder`` is /proc/PID or /proc/PID/task/TID. OSError if it is gone, ValueError if it is not in the kernel's format."""
    return stat_of((folder / "stat").read_bytes(), folder / "stat")


def stat_of(data: bytes, path: Path | None = None) -> ProcessStat:
    """The content of a stat file; ``path`` is for the error. ValueError if it is not in the kernel's format."""
    text = data.decode("utf-8", "replace")
    # The command may hold spaces and parentheses: the last one ends it.
    begin, end = text.index("("), text.rindex(")")
    f = text[end + 2 :].split()
    if len(f) < 22:
        raise ValueError(f"{path or 'stat'} has {len(f)} fields")
    return ProcessStat(
        command=text[begin + 1 : end],
        state=f[0],
        parent=int(f[1]),
        minor_faults=int(f[7]),
        major_faults=int(f[9]),
        user_ns=int(f[11]) * TICK_NS,
        system_ns=int(f[12]) * TICK_NS,
        threads=int(f[17]),
        start_ticks=int(f[19]),
        rss_bytes=int(f[21]) * PAGE_BYTES,
    )


def threads(folder: Path) -> list[int]:
    """Thread numbers of /proc/PID, ascending. OSError if it is gone."""
    # A path for each thread would cost more than the listing.
    return sorted(int(name) for name in os.listdir(folder / "task") if name.isdigit())  # noqa: PTH208


def cpu_times(proc: Path) -> CpuTimes:
    """Time of all CPUs together by kind since boot, in ns (guest time is within user), and ``cpus``. OSError, ValueError."""
    times: CpuTimes = {}
    cpus = 0
    for line in (proc / "stat").read_text().splitlines():
        name, *values = line.split()
        if name == "cpu":
            times = {f"{kind}_ns": int(v) * TICK_NS for kind, v in zip(CPU_FIELDS, values, strict=False)}
        elif name.startswith("cpu") and name[3:].isdigit():
            cpus += 1
    if not times:
        raise ValueError("no line for all CPUs in /proc/stat")
    return times | {"cpus": cpus}


def uptime_ns(proc: Path) -> int | None:
    """Time since boot, on the clock of ``start_ticks``, in steps of 10 ms; null where it can't be read."""
    try:
        return round(float((proc / "uptime").read_text().split()[0]) * 1e9)
    except (OSError, ValueError, IndexError):
        return None
