"""perf's counters: what is read, what is refused and why, and a program that makes a known number of calls, counted live."""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hoptrace.collectors.hardware.listener import Found as FoundProcess
from hoptrace.collectors.hardware.perf import sources, tracepoints
from hoptrace.collectors.hardware.perf.events import SOFTWARE, Count, Event, PerfEvent, make_room, why_not
from hoptrace.collectors.hardware.source import Asked, Roots, Server

LIVE = Path(__file__).parent / "support" / "perf_live.py"


def _opens() -> bool:
    try:
        PerfEvent(Event(SOFTWARE, 1), pid=0).close()
    except OSError:
        return False
    return True


opens = pytest.mark.skipif(not _opens(), reason="perf_event_open is refused here")


@opens
def test_a_task_s_own_clock_goes_on() -> None:
    event = PerfEvent(Event(SOFTWARE, 1), pid=0)  # task-clock, ns
    first = event.read().value
    assert sum(i * i for i in range(100_000)) > 0
    second = event.read().value
    assert first is not None and second is not None and second > first > 0
    event.close()
    event.close()


@opens
@pytest.mark.parametrize(
    ("told", "count"),
    [((100, 10, 10), Count(100)), ((100, 10, 5), Count(200, scaled=True)), ((7, 10, 0), Count(None)), ((0, 0, 0), Count(0))],
)
def test_an_event_that_shared_its_counter_is_scaled(
    told: tuple[int, int, int], count: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = PerfEvent(Event(SOFTWARE, 1), pid=0)
    monkeypatch.setattr(os, "read", lambda fd, n: struct.pack("=QQQ", *told))
    assert event.read() == count
    monkeypatch.setattr(os, "read", lambda fd, n: b"")
    with pytest.raises(OSError) as e:
        event.read()
    assert e.value.errno == errno.ENODEV
    monkeypatch.undo()
    event.close()


@pytest.mark.parametrize(
    ("number", "status", "words"),
    [
        (errno.EACCES, "denied", "perf_event_paranoid is 4"), (errno.EPERM, "denied", "this user may not"),
        (errno.ENOENT, "unsupported", "virtual machine"), (errno.ENOSYS, "unsupported", "seccomp"),
        (errno.EMFILE, "error", "no file descriptors"), (errno.ESRCH, "absent", "gone"), (errno.EIO, "error", "Input/output"),
        (errno.EOPNOTSUPP, "unsupported", "does not offer"),
    ],
)  # fmt: skip
def test_why_an_event_is_refused(number: int, status: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "sys/kernel").mkdir(parents=True)
    (tmp_path / "sys/kernel/perf_event_paranoid").write_text("4\n")
    found = why_not(OSError(number, os.strerror(number)), "cpu_cycles", tmp_path)
    assert found.status == status and words in str(found.reason) and str(found.reason).startswith("cpu_cycles: ")


def test_room_for_files_is_made_once() -> None:
    import resource

    make_room()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == resource.RLIM_INFINITY or soft >= min(hard, 65536) or hard == resource.RLIM_INFINITY


def test_tracepoints_that_nobody_asked_for_are_told(tmp_path: Path) -> None:
    (told,) = [s for s in sources(Asked()) if s.name == "tracepoints"]
    found = told.probe()
    assert not found.available and "not asked for" in str(found.reason) and "--tracepoints" in str(found.remedy)


def test_tracefs_that_is_not_mounted_and_that_is_not_there(tmp_path: Path) -> None:
    roots = Roots(tmp_path / "proc", tmp_path / "sys")
    assert tracepoints.found_at(roots)[1].reason == "this kernel has no tracepoints (CONFIG_FTRACE)"  # type: ignore[union-attr]
    (tmp_path / "sys/kernel/tracing").mkdir(parents=True)
    why = tracepoints.found_at(roots)[1]
    assert why is not None and why.status == "absent" and "mount -t tracefs" in str(why.remedy)
    for call, number in (("futex", "87"), ("sched_yield", "99"), ("ioctl", "no number")):
        folder = tmp_path / f"sys/kernel/tracing/events/syscalls/sys_enter_{call}"
        folder.mkdir(parents=True)
        (folder / "id").write_text(number)
    events, why = tracepoints.found_at(roots)
    assert why is None and {n: [e.config for e in es] for n, es in events.items()} == {"futex_calls": [87], "yield_calls": [99]}


def test_a_recorded_tree_has_no_events_of_its_own(tmp_path: Path) -> None:
    roots = Roots(tmp_path / "proc", tmp_path / "sys")
    servers = [Server(n, lambda: FoundProcess(os.getpid())) for n in ("a", "b")]
    found = {s.name: s.probe() for s in sources(Asked(roots, servers))}
    assert set(found) == {"perf-software@a", "perf-hardware@a", "perf-software@b", "perf-hardware@b", "tracepoints"}
    assert not any(f.available for f in found.values())


def test_a_server_that_is_not_found() -> None:
    (source,) = [s for s in sources(Asked(servers=[Server("a", lambda: FoundProcess(None, "nobody"))])) if "software" in s.name]
    assert source.probe().reason == "nobody"


def live(mode: str) -> dict[str, Any]:
    if os.geteuid() != 0:
        pytest.skip("needs root: tracefs is mounted in a mount namespace of its own")
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, str(LIVE), mode], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        pytest.skip(f"no mount namespace here: {done.stderr[-200:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    if "cannot mount" in done.stdout and not any("yield_calls" in c for c in told["counters"].values()):
        pytest.skip("tracefs can't be mounted here")
    return told  # type: ignore[no-any-return]


@opens
def test_calls_of_a_program_are_counted_by_thread() -> None:
    told = live("thread")
    whole = told["counters"][f"process:{told['program']}"]
    # Threads are found some milliseconds after their birth: what they did before is not counted, and never more than was done.
    assert 0 < whole["yield_calls"] <= 700 and 0 < whole["poll_calls"] <= 320 and whole["ioctl_calls"] <= 210
    assert whole["migrations"] > 0 and whole["futex_calls"] > 0
    of_threads = [c for e, c in told["counters"].items() if e.startswith(f"thread:{told['program']}/")]
    for name in ("yield_calls", "migrations"):
        assert sum(c.get(name, 0) for c in of_threads) <= whole[name], "what ended threads did stays in the sum"
    assert {"yield_calls", "migrations"} <= set(told["lost"]), "a process that ends is lost, not 0"


@opens
def test_calls_are_counted_by_cpu() -> None:
    told = live("cpu")["counters"]
    assert told["cpu"]["yield_calls"] >= 700 and told["cpu"]["poll_calls"] >= 300 and told["cpu"]["ioctl_calls"] >= 200
    cpus = [c for e, c in told.items() if e.startswith("cpu:")]
    assert sum(c["yield_calls"] for c in cpus) == told["cpu"]["yield_calls"]
