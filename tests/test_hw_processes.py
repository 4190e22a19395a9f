"""The server's threads: laws of the sums, files that can't be read, and what is read of a process held to what it says itself."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hoptrace
from hoptrace.collectors.hardware.listener import Found as FoundProcess
from hoptrace.collectors.hardware.processes import sources
from hoptrace.collectors.hardware.processes import threads as module
from hoptrace.collectors.hardware.processes.machine import cpu_ticks
from hoptrace.collectors.hardware.processes.process import ProcessSource
from hoptrace.collectors.hardware.processes.thread_rows import faults_and_start, switches
from hoptrace.collectors.hardware.processes.threads import KEPT, Threads, schedstat_of
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Asked, Server
from hoptrace.manifest import Manifest
from hoptrace.writer import TraceWriter

STAT = b"7 (a) b (c) S 1 7 7 0 -1 4194304 60184 11 7 12 100 114 0 0 20 0 14 0 5000 1612623872 87252 18446744073709551615 1 1 0\n"


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"1000 10 3\n", (1000, 10, 3)), (b"5 6 7 8\n", (5, 6, 7)), (b"18446744073709551615 0 0\n", ((1 << 64) - 1, 0, 0)),
        (b"", None), (b"1 2\n", None), (b"a 2 3\n", None), (b"-1 2 3\n", None), (b"1.5 2 3\n", None), (b"\xff 2 3", None),
    ],
)  # fmt: skip
def test_schedstat(data: bytes, told: tuple[int, int, int] | None) -> None:
    if told is None:
        with pytest.raises(ValueError):
            schedstat_of(data)
    else:
        assert schedstat_of(data) == told


def test_faults_and_start_of_a_stat_file() -> None:
    assert faults_and_start(STAT) == (60184, 7, 5000)
    for bad in (b"", b"7 (x", STAT[:60], STAT.replace(b"60184", b"x"), b"7 (x) S 1 2 3\n"):
        with pytest.raises(ValueError):
            faults_and_start(bad)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"Name:\tx\nvoluntary_ctxt_switches:\t23\nnonvoluntary_ctxt_switches:\t5\n", (23, 5)),
        (b"Name:\tvoluntary_ctxt_switches:\t9\nvoluntary_ctxt_switches:\t23\nnonvoluntary_ctxt_switches:\t5", (23, 5)),
        (b"Name:\tx\nvoluntary_ctxt_switches:\t23\n", None), (b"", None),
        (b"\nvoluntary_ctxt_switches:\t-3\nnonvoluntary_ctxt_switches:\t5\n", None),
    ],
)  # fmt: skip
def test_switches(data: bytes, told: tuple[int, int] | None) -> None:
    assert switches(data) == told


@pytest.mark.parametrize(
    ("line", "ticks"),
    [
        (b"cpu  1 2 3 4 5 6 7 8 9 10", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]), (b"cpu0 1 2 3 4", [1, 2, 3, 4]), (b"cpu 1 2", None),
        (b"intr 1 2 3 4 5", None), (b"cpu1 1 2 -3 4", None), (b"cpu1 1 2 x 4", None), (b"", None),
    ],
)  # fmt: skip
def test_a_line_of_cpu_times(line: bytes, ticks: list[int] | None) -> None:
    assert cpu_ticks(line) == ticks


class Folder:
    """A task folder on disk that a test can change."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "task").mkdir(parents=True)

    def set(self, tid: int, on_cpu: int, delay: int = 0, slices: int = 0) -> None:
        folder = self.root / "task" / str(tid)
        folder.mkdir(exist_ok=True)
        (folder / "schedstat").write_text(f"{on_cpu} {delay} {slices}\n")

    def end(self, tid: int) -> None:
        """It ends: files that are open give nothing more, and there are none to open."""
        file = self.root / "task" / str(tid) / "schedstat"
        file.write_text("")
        file.unlink()
        file.parent.rmdir()


_DO = st.one_of(
    st.just(("born",)), st.tuples(st.just("end"), st.integers(0, 9)),
    st.tuples(st.just("run"), st.integers(0, 9), st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 5)),
    st.just(("read",)),
)  # fmt: skip


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 10**12)), min_size=1, max_size=4), st.lists(_DO, max_size=25))
def test_the_sums_never_fall_and_are_what_the_threads_did_since(begin: list[tuple[int, int]], steps: list[Any]) -> None:
    """Whatever is born, runs and ends, as long as each is read once before it ends."""
    with tempfile.TemporaryDirectory() as name:
        folder = Folder(Path(name) / "7")
        alive: dict[int, list[int]] = {}
        for tid, (on_cpu, delay) in enumerate(begin, start=100):
            alive[tid] = [on_cpu, delay, 1]
            folder.set(tid, on_cpu, delay, 1)
        threads = Threads(folder.root, 5)
        threads.look()
        assert (threads.on_cpu_ns, threads.run_delay_ns, threads.timeslices) == (0, 0, 0), (
            "what was before is not of this capture"
        )
        truth, seen, born = [0, 0, 0], (0, 0, 0), 200
        for step in steps:
            if step[0] == "born":
                born += 1
                alive[born] = [0, 0, 0]
                folder.set(born, 0)
            elif step[0] == "end" and len(alive) > 1:
                threads.look()
                tid = sorted(alive)[step[1] % len(alive)]
                del alive[tid]
                folder.end(tid)
            elif step[0] == "run":
                tid = sorted(alive)[step[1] % len(alive)]
                for i, more in enumerate(step[2:]):
                    alive[tid][i] += more
                    truth[i] += more
                folder.set(tid, *alive[tid])
            elif step[0] == "read":
                threads.read()
            now = (threads.on_cpu_ns, threads.run_delay_ns, threads.timeslices)
            assert all(n >= s for n, s in zip(now, seen, strict=True))
            seen = now
        threads.look()
        assert [threads.on_cpu_ns, threads.run_delay_ns, threads.timeslices] == truth
        assert set(threads.known) == set(alive)
        threads.close()


def test_a_file_that_can_t_be_read_for_a_while_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path / "7")
    folder.set(100, 5_000)
    folder.set(101, 9_000)
    threads = Threads(folder.root, 5)
    threads.look()
    folder.set(100, 5_100)
    folder.set(101, 9_300)
    pread = os.pread
    broken = {threads.known[101].fd: OSError(errno.EIO, "Input/output error")}

    def read(fd: int, n: int, at: int) -> bytes:
        if fd in broken:
            raise broken[fd]
        return pread(fd, n, at)

    monkeypatch.setattr(os, "pread", read)
    threads.read()
    assert threads.on_cpu_ns == 100
    broken.clear()
    threads.read()
    assert threads.on_cpu_ns == 400, "not all that it ever ran"
    folder.set(101, 9_400)
    (folder.root / "task/101/schedstat").write_text("nonsense\n")
    threads.look()
    assert threads.on_cpu_ns == 400 and set(threads.known) == {100, 101}
    threads.close()


def test_no_descriptor_for_a_thread_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path / "7")
    folder.set(100, 5_000)
    threads = Threads(folder.root, 5)
    opens = os.open

    def refuse(*_: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", refuse)
    threads.look()
    assert not threads.known
    monkeypatch.setattr(os, "open", opens)
    threads.look()
    folder.set(100, 5_010)
    threads.look()
    assert threads.on_cpu_ns == 10, "it was there at the first look: what it ran before is not of this capture"
    threads.close()


def test_threads_beyond_those_that_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SUMMED_THREADS", 3)
    folder = Folder(tmp_path / "7")
    for tid in range(100, 105):
        folder.set(tid, 1_000_000)
    threads = Threads(folder.root, 5)
    threads.look()
    folder.end(100)
    folder.end(101)
    threads.look()
    assert set(threads.known) == {102, 103, 104} and threads.on_cpu_ns == 0
    folder.set(50, 70)  # a number below those that are read: a new thread, for which there is no room
    folder.set(104, 1_000_500)
    threads.look()
    assert set(threads.known) == {102, 103, 104} and threads.on_cpu_ns == 500
    threads.close()


def test_files_beyond_a_limit_are_not_kept_open(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "7")
    for tid in range(100, 100 + KEPT + 6):
        folder.set(tid, 1)
    threads = Threads(folder.root, 5)
    threads.look()
    assert sum(t.fd >= 0 for t in threads.known.values()) == KEPT
    folder.set(100, 5)
    folder.set(100 + KEPT, 11)
    threads.read()
    assert threads.on_cpu_ns == 4
    threads.look()
    assert threads.on_cpu_ns == 14
    threads.close()
    assert not any(t.fd >= 0 for t in threads.known.values())


def test_several_servers_share_the_machine_s_rows() -> None:
    servers = [Server(n, lambda: FoundProcess(os.getpid())) for n in ("a", "b")]
    names = [s.name for s in sources(Asked(servers=servers))]
    assert names.count("cpu") == names.count("pressure") == 1
    assert [n for n in names if n.startswith("process")] == ["process@a", "process@b"]
    assert [s.name for s in sources(Asked(servers=servers[:1]))] == ["cpu", "pressure", "process"]


# A program and one that takes its core: it says what the kernel told it, before it works, after, and when it was read.
_SERVER = """
import json, os, sys, threading
other = int(sys.argv[1])
cpu = min(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cpu})
own = lambda: [int(v) for v in open(f"/proc/self/task/{threading.get_native_id()}/schedstat").read().split()]
def say(*what):
    print(json.dumps(what), flush=True)
    sys.stdin.readline()
say()
before = own()
while own()[1] - before[1] < 20_000_000 and own()[0] - before[0] < 10_000_000_000:
    sum(range(1000))
say(before, own())
say(own())
"""
_THIEF = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print(flush=True)
while os.getppid() == int(sys.argv[1]):
    sum(range(100000))
"""


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs schedstat")
def test_another_process_that_takes_the_core_is_seen(tmp_path: Path) -> None:
    """Held to the process's own count: what is read between two of its own readings lies between them."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    thief = subprocess.Popen([sys.executable, "-c", _THIEF, str(os.getpid())], stdout=subprocess.PIPE, text=True)
    server = subprocess.Popen([sys.executable, "-c", _SERVER, str(thief.pid)], **pipes)
    assert server.stdin and server.stdout and thief.stdout
    try:
        thief.stdout.readline()
        server.stdout.readline()
        source = ProcessSource(Server("s", lambda: FoundProcess(server.pid)))
        assert source.probe().available
        with TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded"), background=False) as writer:
            sink = Sink(writer, "h", "process")
            source.open(sink)
            source.sample(sink)
            server.stdin.write("\n")
            server.stdin.flush()
            before, after = json.loads(server.stdout.readline())
            source._threads_due_ns = 0
            source.sample(sink)
            server.stdin.write("\n")
            server.stdin.flush()
            (later,) = json.loads(server.stdout.readline())
            source.close()
            sink.settle()
            sink.flush()
        rows = hoptrace.open(tmp_path / "t.trace").table("counters").collect().sort("time_ns").to_dicts()
    finally:
        thief.kill()
        server.kill()
        thief.wait()
        server.wait()

    def told(entity: str, name: str) -> list[int]:
        return [r["value_int"] for r in rows if (r["entity"], r["name"]) == (entity, name)]

    for name, i in (("on_cpu_ns", 0), ("run_delay_ns", 1), ("timeslices", 2)):
        first, *_, last = told(f"thread:{server.pid}/{server.pid}", name)
        assert first <= before[i] <= after[i] <= last <= later[i]
        assert told(f"process:{server.pid}", name)[-1] == last - first, "one thread: the sum is its own"
    assert after[1] - before[1] >= 20_000_000, "the other process did take its core"
    assert told(f"process:{server.pid}", "run_delay_ns")[-1] >= 20_000_000


class Noted:
    """What a source puts, by name. A trace's threads do not live in a forked child."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.told: dict[str, tuple[Any, str]] = {}

    def now_ns(self) -> int:
        return 1

    def at(self, before_ns: int, after_ns: int) -> None: ...

    def event(self, *_: Any) -> None: ...

    def series(self, entity: str, name: str, *_: Any, **__: Any) -> int:
        self.names.append(name)
        return len(self.names) - 1

    def put(self, series: int, value: Any, status: str = "ok") -> None:
        self.told[self.names[series]] = (value, status)

    put_all, fail = Sink.put_all, Sink.fail


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_s_io_is_denied_and_the_rest_is_told() -> None:
    read, write = os.pipe()
    child = os.fork()
    if not child:  # pragma: no cover
        try:
            os.setgid(65534)
            os.setuid(65534)
            source, out = ProcessSource(Server("s", lambda: FoundProcess(os.getppid()))), Noted()
            source.probe()
            source.open(out)  # type: ignore[arg-type]
            source.sample(out)  # type: ignore[arg-type]
            os.write(write, json.dumps(out.told).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        told = json.loads(file.read())
    os.waitpid(child, 0)
    for name in ("read_calls", "disk_read_bytes"):
        assert told[name] == [None, "denied"]
    assert told["rss_bytes"][0] > 0 and told["swap_bytes"][1] == "ok"
    if "run_delay_ns" in told:
        assert told["voluntary_switches"][1] == told["run_delay_ns"][1] == "ok"
