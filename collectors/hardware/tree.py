"""All processes of a server, from the one that listens: front ends, engines, workers. Linux's /proc only."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hoptrace.collectors.hardware import procfs

__all__ = ["MAX_PROCESSES", "Process", "Role", "arguments", "server_title", "tree_lately", "tree_of"]

MAX_PROCESSES = 64
"""Processes of one server that are looked at: those nearest to the listener."""

Role = Literal["api", "engine", "worker", "helper", "other"]

# By the title that engines give their processes (vLLM: VLLM::EngineCore, VLLM::Worker_TP0; SGLang: sglang::scheduler_TP0; TGI:
# text-generation-server serve), else by the command.
_ROLES: tuple[tuple[re.Pattern[str], Role], ...] = (
    (re.compile(r"resource_tracker|semaphore_tracker|multiprocessing\.forkserver"), "helper"),
    (re.compile(r"^VLLM::(EngineCore|DPCoordinator)|^sglang::(data_parallel_controller|scheduler)", re.I), "engine"),
    (re.compile(r"^VLLM::Worker|^ray::|mpi4py|text-generation-server|orted|TRTLLM.*worker", re.I), "worker"),
    (re.compile(r"^sglang::detokenizer", re.I), "helper"),
    (
        re.compile(
            r"^VLLM::ApiServer|api_server|vllm serve|launch_server|llama-server|llama_cpp\.server|hoptrace\.demo_server"
            r"|trtllm-serve|text-generation|dynamo",
            re.I,
        ),
        "api",
    ),
)
_SHELLS = frozenset(
    ("sh", "bash", "dash", "zsh", "fish", "tini", "dumb-init", "sudo", "su", "nohup", "timeout", "flock", "env", "setsid",
     "systemd", "screen", "tmux", "docker", "containerd-shim", "make", "ssh", "sshd", "srun", "pytest", "conda", "uv")
)  # fmt: skip
_ENOUGH_CHARS = 300
_LATELY_S, _REMEMBERED = 5.0, 64
_HIGHEST = 6


@dataclass(frozen=True, slots=True)
class Process:
    """One process. ``command`` is its title, or program and first argument: whole command lines hold secrets, see
    :func:`arguments`."""

    pid: int
    parent: int
    role: Role
    command: str
    start_ticks: int


_LATELY: dict[tuple[Path, int], tuple[float, list[Process]]] = {}


def tree_of(pid: int, proc: Path = Path("/proc")) -> list[Process]:
    """The server's processes, the top one first, then by distance; empty if ``pid`` is gone or may not be seen.

    A listener that is a child (vLLM with several API servers) belongs to the tree of its parent, as long as the parent is of an
    engine too and no shell. Workers that another process has started (Ray's, MPI's on other hosts) are not in it.
    """
    top = _top(pid, proc)
    # A kernel with CONFIG_PROC_CHILDREN tells each thread's children: only the tree is walked then, not all of the machine.
    children = _told_children if (proc / str(top) / "task" / str(top) / "children").exists() else _all_children(proc)
    found: list[Process] = []
    queue, seen = [top], {top}
    while queue and len(found) < MAX_PROCESSES:
        number = queue.pop(0)
        try:
            own = procfs.process_stat(proc / str(number))
        except (OSError, ValueError):
            continue
        if own.state in ("Z", "X"):
            continue
        command = _title(proc / str(number)) or own.command
        found.append(Process(number, own.parent, _role(command, own.command), command, own.start_ticks))
        for child in sorted(children(proc / str(number))):
            if child not in seen:
                seen.add(child)
                queue.append(child)
    _LATELY[proc, pid] = (time.monotonic(), found)
    while len(_LATELY) > _REMEMBERED:
        _LATELY.pop(next(iter(_LATELY)))
    return found


def tree_lately(pid: int, proc: Path = Path("/proc")) -> list[Process]:
    """The same, as it was at most five seconds ago: several sources look at one server."""
    at_s, found = _LATELY.get((proc, pid), (0.0, []))
    return found if found and time.monotonic() - at_s < _LATELY_S else tree_of(pid, proc)


def _told_children(folder: Path) -> list[int]:
    """/proc/PID/task/TID/children, proc_tid_children(5)."""
    found: list[int] = []
    try:
        for task in (folder / "task").iterdir():
            with suppress(OSError):
                found += map(int, (task / "children").read_bytes().split())
    except OSError:
        pass
    return found


def _all_children(proc: Path) -> Callable[[Path], list[int]]:
    """Each process's children, from the parents of all."""
    children: dict[str, list[int]] = {}
    try:
        numbers = [p.name for p in proc.iterdir() if p.name.isdigit()]
    except OSError:
        numbers = []
    for number in numbers:
        with suppress(OSError, ValueError):
            children.setdefault(str(procfs.process_stat(proc / number).parent), []).append(int(number))
    return lambda folder: children.get(folder.name, [])


def server_title(pid: int, proc: Path = Path("/proc")) -> str | None:
    """The title of a process that serves an engine's API; null if it is none."""
    try:
        stat = procfs.process_stat(proc / str(pid))
    except (OSError, ValueError):
        return None
    command = _title(proc / str(pid)) or stat.command
    if stat.command.split(":")[0] in _SHELLS or _role(command, stat.command) != "api":
        return None
    return command


def arguments(pid: int, proc: Path = Path("/proc")) -> list[str]:
    """The command line of a process, as it was started; empty if it is gone, a kernel thread, or has put a title there.

    It may hold secrets: take from it only what :mod:`hoptrace.collectors.engines.command_line` allows, and keep nothing else.
    """
    try:
        raw = (proc / str(pid) / "cmdline").read_bytes()
    except OSError:
        return []
    words = [w.decode("utf-8", "replace") for w in raw.rstrip(b"\0").split(b"\0")]
    # A title (setproctitle) fills the first word and leaves the others empty.
    return words if len(words) > 1 and any(words[1:]) else [w for w in words if w]


def _top(pid: int, proc: Path) -> int:
    for _ in range(_HIGHEST):
        try:
            parent = procfs.process_stat(proc / str(pid)).parent
            above = procfs.process_stat(proc / str(parent)) if parent > 1 else None
        except (OSError, ValueError):
            return pid
        if above is None or above.command.split(":")[0] in _SHELLS:
            return pid
        words = arguments(parent, proc)
        if not words or Path(words[0]).name in _SHELLS or parent == os.getpid():
            return pid
        if _role(words[0] if len(words) == 1 else _program(words), above.command) not in ("api", "engine"):
            return pid
        pid = parent
    return pid


def _title(folder: Path) -> str:
    words = arguments(int(folder.name), folder.parent)
    if not words:
        return ""
    if len(words) == 1:
        return words[0][:_ENOUGH_CHARS]
    return _program(words)[:_ENOUGH_CHARS]


def _program(words: Sequence[str]) -> str:
    """Program, and the module, script or subcommand that it runs: no flag, no value of one."""
    name = Path(words[0]).name
    if "-m" in words[1:4] and name.startswith("python"):  # llama-server's -m is a model's file
        at = words.index("-m")
        return f"{name} -m {words[at + 1]}" if at + 1 < len(words) else name
    if "-c" in words[1:4]:
        at = words.index("-c")
        known = re.search(r"multiprocessing\.\w+", words[at + 1]) if at + 1 < len(words) else None
        return f"{name} -c {known[0]}" if known else f"{name} -c"
    first = next((w for w in words[1:3] if not w.startswith("-")), None) if name.startswith("python") else words[1]
    if first is None or first.startswith("-") or "=" in first:
        return name
    rest = words[2] if len(words) > 2 and Path(first).name in ("vllm", "trtllm-serve") and words[2] == "serve" else ""
    return f"{name} {Path(first).name if '/' in first else first} {rest}".rstrip()


def _role(command: str, comm: str) -> Role:
    for text in (command, comm):
        for pattern, role in _ROLES:
            if pattern.search(text):
                return role
    return "other"
