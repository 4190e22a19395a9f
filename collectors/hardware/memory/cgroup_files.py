"""The memory controller's files of a control group: Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.memory.keyed import pairs

__all__ = ["FILES", "Memory", "Reading", "memory_of"]

Reading = dict[str, tuple[int | None, str, Literal["cumulative", "gauge"]]]
"""By our name: value (null: there is no limit), unit, semantics."""

_NO_LIMIT_V1 = (1 << 63) - (1 << 20)
"""The first version writes the largest multiple of a page for no limit (PAGE_COUNTER_MAX, include/linux/page_counter.h): at most
64 KiB below 2^63."""

_STAT = {"anon": "anonymous_bytes", "file": "cached_bytes", "shmem": "shared_bytes", "zswap": "zswap_pool_bytes"}
_STAT_V1 = {
    "total_rss": "anonymous_bytes",
    "total_cache": "cached_bytes",
    "total_shmem": "shared_bytes",
    "total_swap": "swap_bytes",
}
_BY_NODE = {"anon": "anonymous", "file": "cached", "hierarchical_anon": "anonymous", "hierarchical_file": "cached"}
_MOVED = ("pgpromote_", "pgdemote_")


@dataclass(frozen=True, slots=True)
class Memory:
    """Where a process's group is: ``path`` as the kernel names it, ``folder``, ``version`` of the hierarchy; else ``reason``."""

    path: str | None
    folder: Path | None
    version: int
    reason: str | None = None


def memory_of(pid: int, proc: Path, sys: Path) -> Memory:
    """From /proc/PID/cgroup. OSError if the process is gone or may not be seen."""
    reason = "no control group counts its memory"
    tree = sys / "fs/cgroup"
    for line in (proc / str(pid) / "cgroup").read_text("utf-8", "replace").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        tops: tuple[Path, ...]
        if number == "0" and not controllers:
            version, file, tops = 2, "memory.current", (tree, tree / "unified")
        elif "memory" in controllers.split(","):
            version, file, tops = 1, "memory.usage_in_bytes", (tree / "memory",)
        else:
            continue
        if ".." in path.split("/"):
            reason = "its control group lies outside this container"
            continue
        for top in tops:
            folder = top / path.removesuffix(" (deleted)").lstrip("/")
            if version == 1 and path == "/":
                reason = "it is in the root group (cgroup v1), whose memory is the machine's"
            elif (folder / file).is_file():
                return Memory(path, folder, version)
    return Memory(None, None, 0, reason)


def _number(name: str, unit: str, semantics: Literal["cumulative", "gauge"]) -> Callable[[bytes], Reading]:
    def read(data: bytes) -> Reading:
        word = data.strip()
        if word == b"max":
            return {name: (None, unit, semantics)}
        if not word.isdigit() or len(word) > 20:
            return {}
        value = int(word)
        return {name: (None if name == "limit_bytes" and value >= _NO_LIMIT_V1 else value, unit, semantics)}

    return read


def _stat(data: bytes) -> Reading:
    found: Reading = {}
    for key, value in pairs(data):
        if key in _STAT:
            found[_STAT[key]] = (value, "bytes", "gauge")
        elif key == "pgmajfault":
            found[key] = (value, "faults", "cumulative")
        elif key.startswith(_MOVED):
            found[key] = (value, "pages", "cumulative")
    return found


def _stat_v1(data: bytes) -> Reading:
    found: Reading = {}
    for key, value in pairs(data):
        if key in _STAT_V1:
            found[_STAT_V1[key]] = (value, "bytes", "gauge")
        elif key == "total_pgmajfault":
            found["pgmajfault"] = (value, "faults", "cumulative")
    return found


def _by_node(unit_bytes: int) -> Callable[[bytes], Reading]:
    """``anon N0=1 N1=2`` (second version: bytes) or ``hierarchical_anon=3 N0=1 N1=2`` (first: pages)."""

    def read(data: bytes) -> Reading:
        found: Reading = {}
        for line in data.decode("ascii", "replace").split("\n")[:-1]:
            key, *nodes = line.split()[:4096] or [""]
            name = _BY_NODE.get(key.partition("=")[0])
            for word in nodes if name else ():
                node, _, value = word.partition("=")
                if node[:1] == "N" and node[1:].isdecimal() and value.isdecimal() and len(value) <= 20:
                    found[f"node{int(node[1:])}_{name}_bytes"] = (int(value) * unit_bytes, "bytes", "gauge")
        return found

    return read


def _oom(data: bytes) -> Reading:
    kills = dict(pairs(data)).get("oom_kill")
    return {} if kills is None else {"oom_kills": (kills, "processes", "cumulative")}


FILES: dict[int, dict[str, Callable[[bytes], Reading]]] = {
    2: {
        "memory.max": _number("limit_bytes", "bytes", "gauge"),
        "memory.swap.current": _number("swap_bytes", "bytes", "gauge"),
        "memory.stat": _stat,
        "memory.numa_stat": _by_node(1),
    },
    1: {
        "memory.usage_in_bytes": _number("memory_used_bytes", "bytes", "gauge"),
        "memory.limit_in_bytes": _number("limit_bytes", "bytes", "gauge"),
        "memory.failcnt": _number("limit_hits", "times", "cumulative"),
        "memory.oom_control": _oom,
        "memory.stat": _stat_v1,
        "memory.numa_stat": _by_node(procfs.PAGE_BYTES),
    },
}
"""By version of the hierarchy. What the second one counts of events and use (memory.current, memory.events) is read by
:mod:`hoptrace.collectors.hardware.kernel.cgroups`."""
