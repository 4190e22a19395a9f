"""Counters of a process from recorded /proc trees, and who listens on a port."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

import hoptrace
from hoptrace.collectors.hardware import procfs
from hoptrace.collectors.hardware.file import KeptFile
from hoptrace.collectors.hardware.listener import Found, find_listener, lately
from hoptrace.collectors.hardware.pressure import pressure_totals
from hoptrace.collectors.hardware.processes.machine import CpuSource, PressureSource
from hoptrace.collectors.hardware.processes.process import MAX_THREADS, ProcessSource
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found as Finding
from hoptrace.collectors.hardware.source import Roots, Server
from hoptrace.manifest import Manifest
from hoptrace.writer import TraceWriter

TICK = procfs.TICK_NS


def stat_line(pid: int, command: str, user: int, start: int, state: str = "S", parent: int = 1) -> str:
    """A /proc/PID/stat line: 52 fields, those that are not read are 0."""
    fields = [
        state,
        str(parent),
        "0",
        "0",
        "0",
        "-1",
        "0",
        "60184",
        "0",
        "7",
        "0",
        str(user),
        "114",
        "0",
        "0",
        "20",
        "0",
        "14",
        "0",
    ]
    return f"{pid} ({command}) {' '.join(fields)} {start} 1612623872 87252 {'0 ' * 28}\n"


class Tree:
    """A /proc tree on disk that a test can change."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "sys/kernel/random").mkdir(parents=True)
        (root / "sys/kernel/random/boot_id").write_text("9752d5b1-397b-4db3-8a4a-8b42a342a85e\n")
        (root / "stat").write_text(
            "cpu  1000 20 300 6000 25 0 6 2 0 0\ncpu0 1 0 0 0 0 0 0 0 0 0\ncpu1 1 0 0 0 0 0 0 0 0 0\nintr 5\n"
        )
        (root / "pressure").mkdir()
        (root / "pressure/cpu").write_text("some avg10=48.41 avg60=26.39 avg300=17.30 total=211727629\n")
        (root / "net").mkdir()

    def process(
        self, pid: int, command: str = "llama-server", user: int = 100, start: int = 5000, state: str = "S", parent: int = 1
    ) -> None:
        (self.root / str(pid) / "task").mkdir(parents=True, exist_ok=True)
        (self.root / str(pid) / "stat").write_text(stat_line(pid, command, user, start, state, parent))
        (self.root / str(pid) / "comm").write_text(command + "\n")

    def thread(self, pid: int, tid: int, on_cpu: int, delay: int, slices: int = 1, start: int = 5000) -> None:
        folder = self.root / str(pid) / "task" / str(tid)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "stat").write_text(stat_line(tid, "worker", 1, start))
        (folder / "schedstat").write_text(f"{on_cpu} {delay} {slices}\n")
        (folder / "status").write_text("Name:\tworker\nvoluntary_ctxt_switches:\t23\nnonvoluntary_ctxt_switches:\t5\n")

    def end(self, pid: int, tid: int | None = None) -> None:
        """It ends: files that are open already give nothing more (the kernel says ESRCH), and there are none to open."""
        folder = self.root / str(pid) if tid is None else self.root / str(pid) / "task" / str(tid)
        for path in folder.rglob("*"):
            if path.is_file():
                path.write_text("")
        shutil.rmtree(folder)

    def listens(self, port: int, inode: int, pid: int | None, table: str = "tcp") -> None:
        line = (
            f"   0: 0100007F:{port:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 {inode} 1 0 100\n"
        )
        (self.root / "net" / table).write_text("  sl  local_address rem_address   st …\n" + line)
        if pid is not None:
            (self.root / str(pid) / "fd").mkdir(exist_ok=True)
            (self.root / str(pid) / "fd/3").symlink_to(f"socket:[{inode}]")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "proc")


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    with TraceWriter(tmp_path / "t.trace", Manifest(origin="recorded")) as writer:
        yield writer


def rows(writer: TraceWriter, table: str = "counters") -> list[dict[str, Any]]:
    writer.flush()
    return hoptrace.open(writer.path).table(table).collect().to_dicts()


def values(writer: TraceWriter, entity: str, name: str) -> list[int | None]:
    return [r["value_int"] for r in rows(writer) if (r["entity"], r["name"]) == (entity, name)]


class Watched:
    """A source with its sink, sampled by hand."""

    def __init__(self, source: Any, writer: TraceWriter | None) -> None:
        self.source = source
        self.sink = Sink(writer, "h", source.name) if writer else None
        self.opened = False

    def probe(self) -> Finding:
        return self.source.probe()  # type: ignore[no-any-return]

    def sample(self) -> None:
        assert self.sink is not None
        if not self.opened:
            self.source.open(self.sink)
            self.opened = True
        self.source.sample(self.sink)
        self.sink.settle()
        self.sink.flush()

    @property
    def pid(self) -> int | None:
        return self.source.pid  # type: ignore[no-any-return]


def collector(tree: Tree, writer: TraceWriter | None, pid: int | None = 42) -> Watched:
    found = Found(pid) if pid else Found(None, "nobody")
    return Watched(ProcessSource(Server("llamacpp", lambda: found), Roots(tree.root)), writer)


def test_the_machine(tree: Tree, writer: TraceWriter) -> None:
    cpu, pressure = Watched(CpuSource(Roots(tree.root)), writer), Watched(PressureSource(Roots(tree.root)), writer)
    assert cpu.probe() == Finding("ok", sees="2 CPUs") and pressure.probe() == Finding("ok", sees="cpu")
    for _ in range(2):
        cpu.sample()
        pressure.sample()
    assert values(writer, "cpu", "user_ns") == [1000 * TICK] * 2
    assert values(writer, "cpu", "steal_ns") == [2 * TICK] * 2
    assert values(writer, "cpu", "cpus") == [2]
    assert values(writer, "cpu:1", "user_ns") == [1 * TICK]
    assert values(writer, "pressure", "cpu_some_ns") == [211727629_000] * 2
    assert len(values(writer, f"hoptrace:{os.getpid()}", "on_cpu_ns")) == 2


def test_a_cpu_that_goes_offline_and_a_stat_that_is_none(tree: Tree, writer: TraceWriter) -> None:
    cpu = Watched(CpuSource(Roots(tree.root)), writer)
    cpu.probe()
    cpu.sample()
    (tree.root / "stat").write_text("cpu  1001 20 300 6000 25 0 6 2 0 0\ncpu0 1 0 0 0 0 0 0 0 0 0\nintr 5\n")
    cpu.source._each_due_ns = 0
    cpu.sample()
    assert values(writer, "cpu", "cpus") == [2, 1]
    (tree.root / "stat").write_text("btime 1\n")
    assert CpuSource(Roots(tree.root)).probe().status == "error"
    assert CpuSource(Roots(tree.root / "none")).probe().status == "absent"
    assert PressureSource(Roots(tree.root / "none")).probe().status == "absent"


@pytest.mark.parametrize(
    ("data", "totals"),
    [
        (b"some avg10=0.00 avg60=0.00 avg300=0.00 total=5\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=18446744073709551616\n",
         [(b"some", 5), (b"full", 1 << 64)]),
        (b"some avg10=0.00 total=\n", []), (b"", []), (b"some total=-4\nfull total=7", [(b"full", 7)]), (b"total=5\n", []),
        (b"\xff\xfe total=3\nsome total=x1\n", []),
    ],
)  # fmt: skip
def test_pressure_files(data: bytes, totals: list[tuple[bytes, int]]) -> None:
    assert pressure_totals(data) == totals


def test_what_a_process_read_wrote_and_swapped(tree: Tree, writer: TraceWriter) -> None:
    tree.process(42)
    tree.thread(42, 42, on_cpu=1, delay=0)
    (tree.root / "42/status").write_text("Name:\tx\nVmRSS:\t  9 kB\nVmSwap:\t      12 kB\nThreads:\t1\n")
    (tree.root / "42/io").write_text(
        "rchar: 11\nwchar: 12\nsyscr: 13\nsyscw: 14\nread_bytes: 15\nwrite_bytes: 16\ncancelled_write_bytes: 17\n"
    )
    c = collector(tree, writer)
    c.probe()
    c.sample()
    assert values(writer, "process:42", "swap_bytes") == [12 * 1024]
    names = ("read_call_bytes", "write_call_bytes", "read_calls", "write_calls", "disk_read_bytes", "disk_write_bytes")
    assert [values(writer, "process:42", n) for n in names] == [[11], [12], [13], [14], [15], [16]]
    assert values(writer, "process:42", "swap_bytes") == [12 * 1024]


def test_what_may_not_be_read_is_denied(tree: Tree, writer: TraceWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    read = KeptFile.read

    def refused(self: KeptFile) -> bytes:
        if self.path.name == "io":
            raise PermissionError(errno.EACCES, "Permission denied", str(self.path))
        return read(self)

    tree.process(42)
    tree.thread(42, 42, on_cpu=1, delay=0)
    monkeypatch.setattr(KeptFile, "read", refused)
    c = collector(tree, writer)
    c.probe()
    c.sample()
    assert {(r["value_int"], r["status"]) for r in rows(writer) if r["name"] == "disk_read_bytes"} == {(None, "denied")}
    assert values(writer, "process:42", "cpu_user_ns") == [100 * TICK]


def test_the_process(tree: Tree, writer: TraceWriter) -> None:
    tree.process(42)
    tree.thread(42, 42, on_cpu=1000, delay=10)
    tree.thread(42, 43, on_cpu=5000, delay=20)
    c = collector(tree, writer)
    assert (c.probe()).available
    c.sample()
    tree.thread(42, 43, on_cpu=5700, delay=320, slices=4)
    c.sample()
    assert values(writer, "process:42", "cpu_user_ns") == [100 * TICK] * 2
    assert values(writer, "process:42", "cpu_system_ns") == [114 * TICK] * 2
    assert values(writer, "process:42", "rss_bytes") == [87252 * procfs.PAGE_BYTES] * 2
    assert values(writer, "process:42", "threads") == [14, 14]
    assert values(writer, "process:42", "major_faults") == [7, 7]
    assert values(writer, "process:42", "on_cpu_ns") == [0, 700]
    assert values(writer, "process:42", "run_delay_ns") == [0, 300]
    assert values(writer, "thread:42/43", "voluntary_switches") == [23]
    assert {r["incarnation"] for r in rows(writer) if r["entity"] == "process:42"} == {"9752d5b1/5000"}
    assert all(r["uncertainty_ns"] >= 0 for r in rows(writer))


def test_threads_that_come_and_go_never_make_the_sum_fall(tree: Tree, writer: TraceWriter) -> None:
    tree.process(42)
    tree.thread(42, 42, on_cpu=1000, delay=0)
    tree.thread(42, 43, on_cpu=9000, delay=0)
    c = collector(tree, writer)
    c.probe()
    c.sample()
    tree.end(42, 43)
    tree.thread(42, 44, on_cpu=250, delay=0)
    c.source._threads_due_ns = 0  # a second later
    c.sample()
    tree.thread(42, 44, on_cpu=50, delay=0)  # the number was given to a new thread
    c.source._threads_due_ns = 0  # a second later
    c.sample()
    assert values(writer, "process:42", "on_cpu_ns") == [0, 250, 300]


def test_threads_that_ended_between_two_samples_are_in_the_cpu_time_and_told(
    tree: Tree, writer: TraceWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hoptrace.collectors.hardware.processes.process.SUMMED_THREADS", 13)  # the process has 14
    tree.process(42, user=100)
    tree.thread(42, 42, on_cpu=0, delay=0)
    c = collector(tree, writer)
    c.probe()
    c.sample()
    for user, on_cpu in ((130, 300_000_000), (182, 300_000_000), (183, 800_000_000), (300, 810_000_000)):
        tree.process(42, user=user)
        tree.thread(42, 42, on_cpu=on_cpu, delay=7)
        c.source._threads_due_ns = 0
        c.sample()
    # The process's own ticks lead by what no thread has; two ticks are its files' coarseness.
    assert values(writer, "process:42", "unread_cpu_ns") == [0, 0, 500_000_000, 500_000_000, 1_170_000_000]
    assert values(writer, "process:42", "on_cpu_ns") == [0, 300_000_000, 800_000_000, 1_300_000_000, 1_980_000_000]
    assert values(writer, "process:42", "run_delay_ns")[-1] == 7
    (event,) = (e["detail"] for e in rows(writer, "events") if "are read" in e["detail"])
    assert event == "process 42 has 14 threads, of which 13 are read"


def test_rows_of_threads_are_bounded_to_the_busiest(tree: Tree, writer: TraceWriter) -> None:
    tree.process(42)
    for tid in range(42, 242):
        tree.thread(42, tid, on_cpu=0, delay=0)
    c = collector(tree, writer)
    c.probe()
    c.sample()
    first = max(r["time_ns"] for r in rows(writer))
    for tid in range(142, 242):
        tree.thread(42, tid, on_cpu=tid, delay=0)
    c.source._threads_due_ns = 0
    c.sample()
    named = {r["entity"] for r in rows(writer) if r["entity"].startswith("thread:") and r["time_ns"] > first}
    assert named == {f"thread:42/{tid}" for tid in range(242 - MAX_THREADS, 242)}
    assert values(writer, "process:42", "on_cpu_ns") == [0, sum(range(142, 242))], "the sum is over all of them"


def test_a_thread_born_during_the_capture_began_at_0(tree: Tree, writer: TraceWriter) -> None:
    from hoptrace.analysis.counters import counter_totals

    (tree.root / "uptime").write_text("100.00 350.00\n")  # the threads there are began at 50 s
    tree.process(42)
    tree.thread(42, 42, on_cpu=1000, delay=10)
    tree.thread(42, 43, on_cpu=900, delay=10, start=10_001)  # one tick younger than the capture, but it was there
    c = collector(tree, writer)
    c.probe()
    c.sample()
    began = min(r["time_ns"] for r in rows(writer) if r["entity"] == "thread:42/42")
    tree.thread(42, 44, on_cpu=5_000_000, delay=300, slices=7, start=10_000)
    for _ in range(2):
        c.source._threads_due_ns = 0
        c.sample()
    assert values(writer, "thread:42/42", "voluntary_switches") == [23] * 3
    assert values(writer, "thread:42/43", "on_cpu_ns") == [900] * 3
    for name, value in {"voluntary_switches": 23, "involuntary_switches": 5, "on_cpu_ns": 5_000_000, "timeslices": 7}.items():
        assert values(writer, "thread:42/44", name) == [0, value, value]
    born = min(r["time_ns"] for r in rows(writer) if r["entity"] == "thread:42/44")
    assert abs(born - began) < 2 * TICK
    totals = {(r["entity"], r["name"]): r for r in counter_totals(hoptrace.open(writer.path)).to_dicts()}
    assert totals["thread:42/44", "voluntary_switches"]["total"] == 23
    assert totals["thread:42/44", "voluntary_switches"]["breaks"] == 0
    assert totals["thread:42/42", "voluntary_switches"]["total"] == 0


def test_a_process_that_dies_is_lost_and_not_zero(tree: Tree, writer: TraceWriter) -> None:
    tree.process(42)
    tree.thread(42, 42, on_cpu=1, delay=0)
    c = collector(tree, writer)
    c.probe()
    c.sample()
    tree.end(42)
    c.sample()
    lost = [r for r in rows(writer) if r["status"] == "lost"]
    assert {r["value_int"] for r in lost} == {None} and {r["entity"] for r in lost} == {"process:42", "thread:42/42"}
    read = {(r["entity"], r["name"]) for r in rows(writer) if r["status"] == "ok" and ":42" in r["entity"]}
    assert {(r["entity"], r["name"]) for r in lost} == read and len(lost) == len(read) == 17, "each counter is lost, once"
    assert [e["kind"] for e in rows(writer, "events")] == ["stop"]


@pytest.mark.parametrize("state", ["Z", "S"])
def test_a_zombie_and_a_reused_number_are_not_the_server(tree: Tree, writer: TraceWriter, state: str) -> None:
    tree.process(42, start=5000)
    tree.thread(42, 42, on_cpu=1, delay=0)
    c = collector(tree, writer)
    c.probe()
    tree.process(42, "somebody", user=9, start=5000 if state == "Z" else 7777, state=state)
    c.sample()
    assert c.pid is None
    assert 9 * TICK not in values(writer, "process:42", "cpu_user_ns")


def test_a_new_process_is_found_again_as_a_new_incarnation(tree: Tree, writer: TraceWriter) -> None:
    tree.process(42)
    tree.thread(42, 42, on_cpu=1, delay=0)
    now = [Found(42)]
    c = Watched(ProcessSource(Server("s", lambda: now[0]), Roots(tree.root)), writer)
    c.probe()
    tree.end(42)
    c.sample()
    tree.process(77, start=9000)
    tree.thread(77, 77, on_cpu=8, delay=0)
    now[0] = Found(77)
    c.source._search_due_ns = 0
    c.sample()
    assert c.pid == 77
    assert {r["incarnation"] for r in rows(writer) if r["entity"] == "process:77"} == {"9752d5b1/9000"}
    assert [e["kind"] for e in rows(writer, "events")] == ["stop", "start"]


def test_a_kernel_without_schedstat_gives_the_rest(tree: Tree, writer: TraceWriter) -> None:
    tree.process(42)
    tree.thread(42, 42, on_cpu=1, delay=0)
    (tree.root / "42/task/42/schedstat").unlink()
    c = collector(tree, writer)
    finding = c.probe()
    c.sample()
    assert finding.available and "no schedstat" in str(finding.reason)
    assert values(writer, "process:42", "run_delay_ns") == []
    assert values(writer, "process:42", "cpu_user_ns") == [100 * TICK]


def test_probing_without_a_process_or_without_proc(tree: Tree, tmp_path: Path) -> None:
    assert (collector(tree, None, None).probe()).reason == "nobody"
    assert not (collector(tree, None, 4242).probe()).available
    empty = Watched(ProcessSource(Server("s", lambda: Found(1)), Roots(tmp_path / "none")), None)
    assert (empty.probe()).reason == "this system has no Linux /proc"


def test_a_command_with_spaces_and_parentheses(tree: Tree) -> None:
    tree.process(7, command="a) S (b 1 2")
    stat = procfs.process_stat(tree.root / "7")
    assert (stat.command, stat.state, stat.start_ticks) == ("a) S (b 1 2", "S", 5000)


def test_files_that_are_not_the_kernels(tree: Tree) -> None:
    (tree.root / "7").mkdir()
    (tree.root / "7/stat").write_text("7 (x) S 1\n")
    with pytest.raises(ValueError, match="fields"):
        procfs.process_stat(tree.root / "7")
    (tree.root / "stat").write_text("btime 1\n")
    with pytest.raises(ValueError, match="no line for all CPUs"):
        procfs.cpu_times(tree.root)
    assert procfs.boot_id(tree.root / "none") == ""


@pytest.mark.parametrize("table", ["tcp", "tcp6"])
def test_who_listens(tree: Tree, table: str) -> None:
    tree.process(42)
    tree.process(40, "other")
    tree.listens(8310, 36468, 42, table)
    assert find_listener("http://127.0.0.1:8310", proc=tree.root) == Found(42)


def test_the_oldest_of_forked_workers(tree: Tree) -> None:
    for pid in (52, 41, 60):
        tree.process(pid)
        tree.listens(8310, 36468, pid)
    assert find_listener("http://127.0.0.1:8310", proc=tree.root).pid == 41


@pytest.mark.parametrize(
    ("command", "holder", "port", "words"),
    [
        ("docker-proxy", 42, 8310, "only forwards"),
        ("llama-server", None, 8310, "no process here holds the socket"),
        ("llama-server", 42, 9999, "listens on port 9999"),
    ],
)
def test_why_a_listener_is_not_known(tree: Tree, command: str, holder: int | None, port: int, words: str) -> None:
    tree.process(42, command)
    tree.listens(8310, 36468, holder)
    found = find_listener(f"http://127.0.0.1:{port}", proc=tree.root)
    assert found.pid is None and words in str(found.reason) and "--pid" in str(found.reason)


def test_another_machine(tree: Tree) -> None:
    found = find_listener("http://192.0.2.7:8310", proc=tree.root, local={"192.0.2.1"})
    assert found.pid is None and "another machine" in str(found.reason)
    tree.process(42)
    tree.listens(8310, 1, 42)
    assert find_listener("http://192.0.2.7:8310", proc=tree.root, local={"192.0.2.7"}).pid == 42


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux only")
def test_on_this_machine() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        assert find_listener(f"http://127.0.0.1:{s.getsockname()[1]}").pid == os.getpid()


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs schedstat")
def test_this_very_process(writer: TraceWriter) -> None:
    c = Watched(ProcessSource(Server("s", lambda: Found(os.getpid()))), writer)
    assert (c.probe()).available
    c.sample()
    assert sum(i * i for i in range(200_000)) > 0
    c.sample()
    on_cpu = values(writer, f"process:{os.getpid()}", "on_cpu_ns")
    assert on_cpu[0] == 0 and on_cpu[1] is not None and on_cpu[1] > 0


def three(tree: Tree) -> None:
    """A server of three processes: one that listens, an engine below it, a worker below that."""
    tree.process(42, "python")
    tree.process(50, "VLLM::EngineCore", parent=42)
    tree.process(60, "VLLM::Worker", parent=50)
    (tree.root / "50/cmdline").write_bytes(b"VLLM::EngineCore\0\0\0")
    (tree.root / "60/cmdline").write_bytes(b"VLLM::Worker_TP0\0")
    for pid, on_cpu in ((42, 10), (50, 20), (60, 30)):
        tree.thread(pid, pid, on_cpu=on_cpu, delay=1)


def test_every_process_of_the_server_has_rows(tree: Tree, writer: TraceWriter) -> None:
    three(tree)
    tree.process(70, "sleep")
    c = collector(tree, writer)
    c.probe()
    c.sample()
    tree.thread(60, 60, on_cpu=530, delay=4)
    c.sample()
    assert {r["entity"] for r in rows(writer) if r["name"] == "rss_bytes"} == {"process:42", "process:50", "process:60"}
    assert values(writer, "process:60", "on_cpu_ns") == [0, 500] and values(writer, "process:50", "on_cpu_ns") == [0, 0]
    told = [e["detail"] for e in rows(writer, "events") if e["kind"] == "process"]
    assert "process 50 is the server's: engine (VLLM::EngineCore)" in told
    assert "process 60 is the server's: worker (VLLM::Worker_TP0)" in told


def test_a_worker_that_dies_is_lost_and_the_server_is_not(tree: Tree, writer: TraceWriter) -> None:
    three(tree)
    c = collector(tree, writer)
    c.probe()
    c.sample()
    tree.end(60)
    c.sample()
    c.sample()
    lost = [r for r in rows(writer) if r["entity"] == "process:60" and r["status"] == "lost"]
    assert {r["value_int"] for r in lost} == {None} and len({r["name"] for r in lost}) == len(lost) == 10
    events = rows(writer, "events")
    assert [e["detail"] for e in events if "gone" in e["detail"]] == ["process 60 is gone (worker)"]
    assert {e["kind"] for e in events} == {"process"}, "the server has not stopped"
    assert c.pid == 42
    # A new worker in its place is found at the next look, as a new incarnation.
    tree.process(61, "VLLM::Worker", start=7000, parent=50)
    tree.thread(61, 61, on_cpu=1, delay=0)
    c.source._tree_due_ns = 0
    c.sample()
    assert {r["incarnation"] for r in rows(writer) if r["entity"] == "process:61"} == {"9752d5b1/7000"}


def test_the_busiest_threads_of_all_processes_get_rows(tree: Tree, writer: TraceWriter) -> None:
    three(tree)
    for i in range(MAX_THREADS):
        tree.thread(50, 1000 + i, on_cpu=0, delay=0)
    c = collector(tree, writer)
    c.probe()
    c.sample()
    for i in range(MAX_THREADS - 1):
        tree.thread(50, 1000 + i, on_cpu=100 + i, delay=0)
    tree.thread(60, 60, on_cpu=10_000, delay=0)
    c.source._threads_due_ns = 0
    before = {r["entity"] for r in rows(writer) if r["entity"].startswith("thread:")}
    c.sample()
    after = [r for r in rows(writer) if r["name"] == "on_cpu_ns" and "thread:" in r["entity"] and r["value_int"] >= 100]
    assert len(before) == MAX_THREADS, "64 in all, not of each"
    assert {r["entity"] for r in after} == {f"thread:50/{1000 + i}" for i in range(MAX_THREADS - 1)} | {"thread:60/60"}


def test_the_server_that_goes_takes_its_tree_with_it(tree: Tree, writer: TraceWriter) -> None:
    three(tree)
    c = collector(tree, writer)
    c.probe()
    c.sample()
    tree.end(42)
    n = len(rows(writer))
    c.sample()
    new = rows(writer)[n:]
    assert {r["entity"] for r in rows(writer) if r["status"] == "lost"} == {"process:42", "thread:42/42"}
    assert c.pid is None and new


def test_a_process_that_lives_is_looked_for_once(tree: Tree) -> None:
    tree.process(42)
    asked = []

    def find() -> Found:
        asked.append(1)
        return Found(42 if len(asked) < 3 else None, "nobody")

    ask = lately(find, tree.root)
    assert [ask().pid for _ in range(3)] == [42, 42, 42] and len(asked) == 1
    tree.process(42, state="Z")
    assert ask().pid == 42 and len(asked) == 2, "a zombie is no answer that is kept"
    tree.process(42, start=9000)
    assert ask().pid is None and len(asked) == 3
    assert ask().pid is None and len(asked) == 4
