"""perf's counters: what is read, what is refused and why, and a program that makes a known number of calls, counted live."""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hoptrace
from hoptrace.collectors.hardware.listener import Found as FoundProcess
from hoptrace.collectors.hardware.perf import by_cpu, counted, sources, threads, tracepoints
from hoptrace.collectors.hardware.perf.by_cpu import CpuTracepoints
from hoptrace.collectors.hardware.perf.counted import Counted
from hoptrace.collectors.hardware.perf.events import SOFTWARE, Count, Event, PerfEvent, make_room, why_not
from hoptrace.collectors.hardware.perf.hardware import hardware_events
from hoptrace.collectors.hardware.perf.threads import ThreadEvents
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Asked, Roots, Server
from hoptrace.manifest import Manifest
from hoptrace.writer import TraceWriter

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


_SPAN = st.integers(0, 1 << 32)
_STEP = st.tuples(st.integers(0, 1 << 40), _SPAN, _SPAN).map(lambda t: (t[0], max(t[1:]), min(t[1:])))


@given(st.lists(_STEP, max_size=20))
def test_a_count_never_falls_however_the_hardware_is_shared(steps: list[tuple[int, int, int]]) -> None:
    """Each step: how much more was counted, how long the event was enabled, how long it had a hardware counter."""
    event = PerfEvent.__new__(PerfEvent)
    event._fd, event._last, event._count, event._scaled = -1, (0, 0, 0), 0, False
    value = enabled = running = seen = 0
    with pytest.MonkeyPatch.context() as patch:
        for more, on, had in steps:
            value, enabled, running = value + (more if had else 0), enabled + on, running + had
            now = (value, enabled, running)
            patch.setattr(os, "read", lambda fd, n, now=now: struct.pack("=QQQ", *now))
            told = event.read()
            assert (told.value is None) == (running == 0 and enabled > 0), "what never had a counter is null, not 0"
            n = told.value or 0
            assert n >= seen
            assert n == event.read().value or told.value is None, "reading twice changes nothing"
            if enabled == running:
                assert n == value and not told.scaled
            else:
                assert running == 0 or n >= value, "a share is scaled up, never down"
            seen = n


class Fake:
    """A counter that a test sets."""

    opened: list[Fake]
    refuses: OSError | None = None

    def __init__(self, event: Event, *, pid: int = -1, cpu: int = -1, user_only: bool = False) -> None:
        if self.refuses is not None and (not user_only or self.refuses.errno != errno.EACCES):
            raise self.refuses
        self.event, self.pid, self.cpu, self.user_only, self.closed = event, pid, cpu, user_only, False
        self.n: int | OSError | None = 0
        type(self).opened.append(self)

    def read(self) -> Count:
        assert not self.closed
        if isinstance(self.n, OSError):
            raise self.n
        return Count(self.n)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Fake]]:
    kind = type("Fake", (Fake,), {"opened": [], "refuses": None})
    for module in (counted, threads, by_cpu):
        monkeypatch.setattr(module, "PerfEvent", kind)
    yield kind
    assert all(e.closed for e in kind.opened), "every file is closed"


EVENTS = {"migrations": (Event(SOFTWARE, 4),), "futex_calls": (Event(2, 1), Event(2, 2))}


@given(st.lists(st.one_of(st.just("born"), st.just("end"), st.integers(0, 1000)), max_size=40))
def test_the_sum_over_threads_never_falls_and_is_what_all_have_counted(steps: list[str | int]) -> None:
    kind = type("Fake", (Fake,), {"opened": []})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counted, "PerfEvent", kind)
        process = Counted(1, 5, EVENTS)
        truth, last, born = dict.fromkeys(EVENTS, 0), dict.fromkeys(EVENTS, 0), 0
        for step in steps:
            if step == "born":
                born += 1
                process.begin(born)
            elif step == "end" and process.threads:
                process.read()
                process.end(min(process.threads))
            elif isinstance(step, int) and process.threads:
                for e in kind.opened:
                    if e.pid == max(process.threads):
                        assert isinstance(e.n, int)
                        e.n += step
                        truth["migrations" if e.event.type == SOFTWARE else "futex_calls"] += step
            process.read()
            totals = {name: process.total(name) for name in EVENTS}
            assert totals == truth
            assert all((totals[n] or 0) >= last[n] for n in EVENTS)
            last = {n: totals[n] or 0 for n in EVENTS}
        process.close()
        assert all(e.closed for e in kind.opened)


def test_without_one_thread_there_is_no_sum(fake: type[Fake]) -> None:
    process = Counted(1, 5, EVENTS)
    process.begin(10)
    process.begin(11)
    fake.opened[3].n = None  # of the second thread
    process.read()
    assert process.counts[11] == {"migrations": None, "futex_calls": 0}
    assert (process.total("migrations"), process.total("futex_calls")) == (None, 0)
    fake.opened[3].n = 7
    process.read()
    assert process.total("migrations") == 7
    fake.opened[3].n = OSError(errno.ENODEV, "gone")
    process.read()
    assert process.end(11) == 1
    assert process.total("migrations") is None, "what an ended thread did not tell is never known"
    process.whole = False
    assert process.total("futex_calls") is None
    process.close()


def test_a_thread_whose_second_event_is_refused_leaves_no_file(fake: type[Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    process = Counted(1, 5, EVENTS)
    begin = fake.__init__

    def refuse(self: Any, event: Event, **kwargs: Any) -> None:
        if event.config == 2:
            raise OSError(errno.EMFILE, "Too many open files")
        begin(self, event, **kwargs)

    monkeypatch.setattr(fake, "__init__", refuse)
    with pytest.raises(OSError, match="Too many"):
        process.begin(10)
    assert not process.threads and len(fake.opened) == 2


class Watched:
    """A source with a trace of its own."""

    def __init__(self, source: Any, folder: Path) -> None:
        self.source = source
        self.writer = TraceWriter(folder / "t.trace", Manifest(origin="recorded"), background=False)
        self.sink = Sink(self.writer, "h", source.name)

    def sample(self) -> None:
        self.source.sample(self.sink)
        self.sink.settle()
        self.sink.flush()

    def rows(self, table: str = "counters") -> list[dict[str, Any]]:
        self.writer.flush()
        return hoptrace.open(self.writer.path).table(table).collect().to_dicts()

    def values(self, entity: str, name: str) -> list[tuple[int | None, str]]:
        return [(r["value_int"], r["status"]) for r in self.rows() if (r["entity"], r["name"]) == (entity, name)]

    def close(self) -> None:
        self.source.close()
        self.writer.close()


def own_process(events: dict[str, Any], **more: Any) -> ThreadEvents:
    return ThreadEvents("perf-x", "?", Server("s", lambda: FoundProcess(os.getpid())), events, "times", **more)


def test_this_user_may_count_outside_the_kernel_only(fake: type[Fake], tmp_path: Path) -> None:
    fake.refuses = OSError(errno.EACCES, "Permission denied")
    assert own_process(EVENTS).probe().status == "denied"
    source = own_process(EVENTS, user_mode=True)
    found = source.probe()
    assert found.status == "ok" and "outside the kernel" in str(found.reason)
    assert found.sees == "migrations_user, futex_calls_user", "another quantity has another name"
    watched = Watched(source, tmp_path)
    watched.sample()
    assert all(e.user_only for e in fake.opened)
    assert watched.values(f"process:{os.getpid()}", "migrations_user") == [(0, "ok")]
    watched.close()


def test_threads_that_can_t_be_opened_take_the_sum_away(fake: type[Fake], tmp_path: Path) -> None:
    source = own_process(EVENTS)
    source.probe()
    fake.refuses = OSError(errno.EMFILE, "Too many open files")
    watched = Watched(source, tmp_path)
    watched.sample()
    assert watched.values(f"process:{os.getpid()}", "migrations") == [(None, "error")]
    watched.close()


def test_more_threads_than_files(fake: type[Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "room", lambda: 2)  # a thread needs three
    source = own_process(EVENTS)
    source.probe()
    watched = Watched(source, tmp_path)
    watched.sample()
    watched.sample()
    assert {s for _, s in watched.values(f"process:{os.getpid()}", "futex_calls")} == {"error"}
    assert [e["kind"] for e in watched.rows("events")] == ["gap"], "told once"
    watched.close()


def test_a_cpu_that_goes_offline_begins_another_incarnation(fake: type[Fake], tmp_path: Path) -> None:
    sys_ = tmp_path / "sys"
    (sys_ / "devices/system/cpu").mkdir(parents=True)
    (sys_ / "devices/system/cpu/online").write_text("0-2\n")
    source = CpuTracepoints(Roots(tmp_path / "proc", sys_))
    source._events = {"yield_calls": (Event(2, 9),)}
    watched = Watched(source, tmp_path)
    watched.sample()
    for e, n in zip(fake.opened, (1, 20, 300), strict=True):
        e.n = n
    watched.sample()
    fake.opened[1].n = OSError(errno.ENODEV, "gone")
    watched.sample()
    (sys_ / "devices/system/cpu/online").write_text("0,2\n")
    watched.sample()
    assert watched.values("cpu", "yield_calls") == [(0, "ok"), (321, "ok"), (None, "error"), (0, "ok")]
    assert {r["incarnation"] for r in watched.rows() if r["entity"] == "cpu:2"} == {"", "/2"}
    assert [e["kind"] for e in watched.rows("events")] == ["cpus"]
    watched.close()


@pytest.mark.parametrize(
    ("vendor", "name", "event"),
    [("GenuineIntel", "llc_misses", Event(0, 3)), ("AuthenticAMD", "llc_read_misses", Event(3, 0x10002)),
     (None, "llc_read_misses", Event(3, 0x10002))],
)  # fmt: skip
def test_cache_misses_are_of_the_last_level_or_not_told(vendor: str | None, name: str, event: Event, tmp_path: Path) -> None:
    if vendor:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    events = hardware_events(tmp_path)
    assert [n for n in events if "llc" in n] == [name] and events[name] == (event,)


@opens
def test_another_user_is_told_what_it_lacks() -> None:
    if os.geteuid() != 0 or int(Path("/proc/sys/kernel/perf_event_paranoid").read_text()) < 2:
        pytest.skip("needs root to become another user, and a kernel that keeps others out")
    read, write = os.pipe()
    child = os.fork()
    if not child:  # pragma: no cover
        try:
            os.setgid(65534)
            os.setuid(65534)
            (source,) = [s for s in sources(Asked(servers=[Server("a", lambda: FoundProcess(os.getppid()))])) if "soft" in s.name]
            found = source.probe()
            os.write(write, json.dumps([found.status, found.reason, found.remedy]).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as file:
        status, reason, remedy = json.loads(file.read())
    assert status == "denied" and "perf_event_paranoid is" in reason and "CAP_PERFMON" in remedy


def live(mode: str) -> dict[str, Any]:
    if os.geteuid() != 0:
        pytest.skip("needs root: tracefs is mounted in a mount namespace of its own")
    command = ["unshare", "--mount", sys.executable, str(LIVE), mode]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if done.returncode and "unshare:" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    if "cannot" in told:
        pytest.skip(f"cannot {told['cannot']}")
    return told  # type: ignore[no-any-return]


CALLS = {"yield_calls": 700, "poll_calls": 300, "ioctl_calls": 200, "sleep_calls": 50}
"""What the thread of support/perf_live.py does, and the C library and the interpreter of it do not."""


@opens
def test_what_a_program_s_threads_do_is_counted_by_thread() -> None:
    told = live("thread")
    process, worker = f"process:{told['program']}", f"thread:{told['program']}/{told['worker']}"
    last, first = told["last"], told["first"]
    for name, n in CALLS.items():
        assert last[worker][name] == n
        assert last[process][name] == n, "the thread has ended, its calls are still in the sum"
    # Beside its 400 calls the interpreter waits for its lock now and then.
    assert 400 <= last[worker]["futex_calls"] <= 440
    assert 400 <= last[process]["futex_calls"] <= 600
    # Of /proc: 500 pages touched first, 50 sleeps; a few more of the interpreter.
    assert 500 <= last[worker]["minor_faults"] - first[worker]["minor_faults"] <= 550
    assert 50 <= last[worker]["voluntary_switches"] - first[worker]["voluntary_switches"] <= 70
    if len(os.sched_getaffinity(0)) > 1:
        # 100 times it asked to be elsewhere; the first time it may have been there.
        assert 99 <= last[f"thread:{told['program']}/{told['mover']}"]["migrations"] <= 105
    assert {"yield_calls", "migrations", "on_cpu_ns"} <= set(told["lost"]), "a process that ends is lost, not 0"


@opens
def test_calls_are_counted_by_cpu() -> None:
    told = live("cpu")["last"]
    for name, n in CALLS.items():
        assert told["cpu"][name] >= n, "others of this machine call too"
        assert sum(c[name] for e, c in told.items() if e.startswith("cpu:")) == told["cpu"][name]
