"""Child processes: where they run, how they end, and that none outlives the command that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from hoptrace.errors import EnvironmentProblem

__all__ = ["end", "grant", "last_words", "pin", "spawn", "task_ns", "tree", "wait_until"]

_PDEATHSIG = 1  # prctl(2), PR_SET_PDEATHSIG
_REALTIME = 10
_C = ctypes.CDLL(None)


def spawn(
    command: Sequence[str], log: Path, *, env: Mapping[str, str] | None = None, cpus: Sequence[int] = (), nice: int | str = 0
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own; it gets SIGTERM if this process dies. Its words go to the end of ``log``."""

    def before() -> None:
        _C.prctl(_PDEATHSIG, signal.SIGTERM)
        if cpus:
            os.sched_setaffinity(0, cpus)
        grant(0, nice)

    with log.open("ab") as out:
        return subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=dict(env or os.environ),
            start_new_session=True, preexec_fn=before,
        )  # fmt: skip


def tree(pid: int) -> list[psutil.Process]:
    """A process and all that came of it."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def pin(pid: int, cpus: Sequence[int], others: Sequence[int], nice: int | str) -> bool:
    """Put the threads of a server's tree that compute on ``cpus`` and the rest on ``others``, all at a priority; whether that was
    granted.

    What answers clients must not wait for what computes: answers would leave in multiples of the kernel's tick. In a tree of
    several processes (vLLM) the first one answers and the others compute; in a single one (llama.cpp) it is the thread that has
    used most CPU, so it has to have computed before.
    """
    granted = True
    processes = tree(pid)
    for process in processes:
        times = task_ns(process.pid)
        busiest = max(times, key=times.__getitem__, default=0)
        for task in times:
            computes = task == busiest if len(processes) == 1 else process.pid != pid
            with suppress(ProcessLookupError):
                os.sched_setaffinity(task, cpus if computes else others)
                granted &= grant(task, nice)
    return granted


def task_ns(pid: int, cpus: Sequence[int] | None = None) -> dict[int, int]:
    """CPU time in ns of each thread of a process, of those that may run on one of ``cpus``: /proc/PID/task/TID/schedstat."""
    found = {}
    with suppress(OSError):
        for task in [int(t.name) for t in Path(f"/proc/{pid}/task").iterdir()]:
            with suppress(OSError):
                if cpus is None or os.sched_getaffinity(task) & set(cpus):
                    found[task] = int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0])
    return found


def _group(task: int, nice: int) -> None:
    """With autogroups (sched(7)) a nice value counts among the threads of one session only: a session has a value of its own.

    A task in no session's group is in the root group, whose weight Linux does not let one change (EINVAL): there the nice value
    counts as it is. A /proc that cannot be written to leaves the group as it was.
    """
    try:
        Path(f"/proc/{task or 'self'}/autogroup").write_text(f"{nice}\n")
    except PermissionError:
        raise
    except OSError:
        pass


def grant(task: int, nice: int | str) -> bool:
    """Give a thread (0: this process) a nice value or ``realtime``; whether that was allowed."""
    try:
        if isinstance(nice, str):
            os.sched_setscheduler(task, os.SCHED_FIFO, os.sched_param(_REALTIME))
        else:
            os.setpriority(os.PRIO_PROCESS, task, nice)
            _group(task, nice)
    except PermissionError:
        return False
    return True


def end(process: subprocess.Popen[bytes], *, with_signal: int = signal.SIGTERM, patience_s: float = 15) -> None:
    """End a process and its tree: asked first, then killed."""
    known = tree(process.pid) if process.poll() is None else []
    with suppress(ProcessLookupError):
        if process.poll() is None:
            process.send_signal(with_signal)
    with suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)
    for p in known:
        with suppress(psutil.NoSuchProcess):
            p.kill()
    psutil.wait_procs(known, timeout=5)
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, what: str, seconds: float) -> None:
    """Wait until something is ready.

    Raises:
        EnvironmentProblem: the process ended before, or the time is over; quotes the end of its log.
    """
    until = time.monotonic() + seconds
    while not ready():
        if process.poll() is not None:
            raise EnvironmentProblem(f"{what} ended with {process.returncode}: {last_words(log)}", hint=f"Its log is {log}.")
        if time.monotonic() > until:
            raise EnvironmentProblem(f"{what} was not ready within {seconds:.0f} s: {last_words(log)}", hint=f"Its log is {log}.")
        time.sleep(0.1)


def last_words(log: Path, lines: int = 3) -> str:
    """The last lines of a log, as one."""
    try:
        said = [x.strip() for x in log.read_text(errors="replace").splitlines() if x.strip()]
    except OSError:
        said = []
    return " | ".join(x[:200] for x in said[-lines:]) or "it said nothing."
