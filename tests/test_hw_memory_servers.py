"""Memory of the servers' processes and control groups; swap.

Control groups of the first version are recorded ones (of the project's machine), those of the second are written by its
documentation (admin-guide/cgroup-v2.rst), as are numa_maps and zram: no machine with them was at hand.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.guests import copied, guest, roots_of
from support.watched import Watched

from hoptrace.collectors.hardware.listener import Found as FoundProcess
from hoptrace.collectors.hardware.memory.cgroup import CgroupMemorySource
from hoptrace.collectors.hardware.memory.cgroup_files import FILES, memory_of
from hoptrace.collectors.hardware.memory.damon import DamonSource
from hoptrace.collectors.hardware.memory.numa_maps import NumaMapsSource, bytes_by_node
from hoptrace.collectors.hardware.memory.swap import SwapSource, areas, zram_bytes
from hoptrace.collectors.hardware.source import Roots, Server

STAT = f"77 (x) S 1 {'0 ' * 17} 5000 0 9 {'0 ' * 20}\n"
GROUP = "cgroup:/a/b"


def process(tree: Path, cgroup: str = "") -> Path:
    folder = tree / "proc/77"
    (folder / "task").mkdir(parents=True)
    (folder / "stat").write_text(STAT)
    (folder / "cmdline").write_bytes(b"x\0")
    (folder / "cgroup").write_text(cgroup)
    return folder


def server(pid: int | None = 77) -> Server:
    return Server("s", lambda: FoundProcess(pid, None if pid else "nobody listens"))


# -- numa_maps


def test_where_a_process_lies() -> None:
    data = (
        b"55d0 default file=/bin/x mapped=3 N0=3 kernelpagesize_kB=4\n"
        b"7f00 bind:3 anon=2 dirty=2 N0=1 N3=1 kernelpagesize_kB=2048\n7f10 default\n7f20 N1=x N2=\n7f30 default N0=9"
    )
    assert bytes_by_node(data) == {0: 3 * 4096 + (2 << 20), 3: 2 << 20}
    one = NumaMapsSource(Server("s", lambda: FoundProcess(os.getpid())), roots_of(guest("plain-vm")))
    assert one.probe().reason == "there is one memory node: all lies there"


def test_a_process_that_moves_to_another_node_and_ends(tmp_path: Path) -> None:
    tree = copied("hmat-only-6.12", tmp_path)
    folder = process(tree)
    (folder / "numa_maps").write_text("7f00 default anon=5 N0=2 N2=3 kernelpagesize_kB=4\n")
    source = NumaMapsSource(server(), roots_of(tree))
    w = Watched(source, tmp_path / "t.trace")
    assert w.probe().available
    w.sample()
    (folder / "numa_maps").write_text("7f00 default anon=5 N2=5 kernelpagesize_kB=4\n")
    source._rest_until_s = 0.0
    w.sample()
    (folder / "numa_maps").write_text("")
    source._rest_until_s = 0.0
    w.sample()
    assert w.values("process:77", "node0_bytes") == [8192, 0, "lost"]
    assert w.values("process:77", "node1_bytes") == [0, "lost"]
    assert w.values("process:77", "node2_bytes") == [12288, 20480, "lost"]


def test_a_process_that_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = copied("hmat-only-6.12", tmp_path)
    (process(tree) / "numa_maps").write_text("")
    real = Path.read_bytes

    def closed(path: Path) -> bytes:
        if path.name == "numa_maps":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", closed)
    w = Watched(NumaMapsSource(server(), roots_of(tree)), tmp_path / "t.trace")
    found = w.probe()
    assert found.status == "denied" and "root" in str(found.remedy)
    w.sample()
    monkeypatch.undo()
    assert set(w.last().values()) == {"denied"}


# -- control groups


V1 = {
    "memory.usage_in_bytes": "115961856\n", "memory.limit_in_bytes": "9223372036854771712\n", "memory.failcnt": "0\n",
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n",
    "memory.stat": "cache 1\nrss 2\ntotal_cache 82075648\ntotal_rss 2306048\ntotal_swap 0\ntotal_pgmajfault 56\n",
    "memory.numa_stat": "total=20598 N0=20598\nanon=1 N0=1\nhierarchical_file=20038 N0=20038\nhierarchical_anon=560 N0=560\n",
}  # fmt: skip
V2 = {
    "memory.current": "500\n", "memory.max": "1073741824\n", "memory.swap.current": "0\n",
    "memory.stat": "anon 300\nfile 200\npgmajfault 4\npgpromote_success 11\npgdemote_kswapd 12\npgdemote_proactive 1\n",
    "memory.numa_stat": "anon N0=100 N3=200\nfile N0=200 N3=0\nunevictable N0=9\n",
}  # fmt: skip


def grouped(tmp_path: Path, files: dict[str, str], top: str, line: str) -> tuple[Roots, Path]:
    group = tmp_path / f"sys/fs/cgroup/{top}/a/b"
    group.mkdir(parents=True)
    for name, text in files.items():
        (group / name).write_text(text)
    process(tmp_path, line)
    return Roots(tmp_path / "proc", tmp_path / "sys"), group


def test_the_first_version(tmp_path: Path) -> None:
    roots, _ = grouped(tmp_path, V1, "memory", "4:memory:/a/b\n1:cpu:/\n0::/\n")
    w = Watched(CgroupMemorySource([server()], roots), tmp_path / "t.trace")
    assert w.probe().sees == "/a/b (cgroup v1: nothing by tier)"
    w.sample()
    assert w.last() == {
        (GROUP, "memory_used_bytes"): 115961856, (GROUP, "limit_bytes"): "absent", (GROUP, "limit_hits"): 0,
        (GROUP, "oom_kills"): 0, (GROUP, "anonymous_bytes"): 2306048, (GROUP, "cached_bytes"): 82075648,
        (GROUP, "swap_bytes"): 0, (GROUP, "pgmajfault"): 56,
        # pages: 560 × 4096 is what total_rss and the page tables are about
        (GROUP, "node0_anonymous_bytes"): 560 * os.sysconf("SC_PAGE_SIZE"),
        (GROUP, "node0_cached_bytes"): 20038 * os.sysconf("SC_PAGE_SIZE"),
    }  # fmt: skip


def test_the_second_version_and_a_group_that_goes(tmp_path: Path) -> None:
    roots, group = grouped(tmp_path, V2, "", "0::/a/b\n")
    w = Watched(CgroupMemorySource([server(), server()], roots), tmp_path / "t.trace")
    assert w.probe().sees == "/a/b"
    w.sample()
    (group / "memory.max").write_text("max\n")
    (group / "memory.stat").write_text("anon 310\nfile 2")
    w.sample()
    shutil.rmtree(group)
    w.source.close()  # what the kernel does to open files of a group that has gone
    w.sample()
    assert w.values(GROUP, "limit_bytes") == [1 << 30, "absent", "lost"]
    assert w.values(GROUP, "anonymous_bytes") == [300, 310, "lost"]
    assert w.values(GROUP, "cached_bytes") == [200, "absent", "lost"]
    assert w.values(GROUP, "pgdemote_kswapd") == [12, "absent", "lost"]
    assert w.values(GROUP, "node3_anonymous_bytes") == [200, "lost"]
    assert w.values(GROUP, "memory_used_bytes") == []  # the kernel's groups source has it


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("0::/../x\n", "its control group lies outside this container"),
        ("4:memory:/\n0::/\n", "it is in the root group (cgroup v1), whose memory is the machine's"),
        ("0::/\n", "no control group counts its memory"), ("nonsense\n", "no control group counts its memory"),
        ("", "no control group counts its memory"),
    ],
)  # fmt: skip
def test_a_process_without_a_group_says_why(line: str, reason: str, tmp_path: Path) -> None:
    roots, _ = grouped(tmp_path, V1, "memory", line)
    assert memory_of(77, roots.proc, roots.sys).reason == reason
    assert CgroupMemorySource([server()], roots).probe().reason == reason
    assert CgroupMemorySource([server(None)], roots).probe().reason == "nobody listens"
    assert CgroupMemorySource([server(78)], roots).probe().status == "absent"


@given(st.binary(max_size=60))
def test_whatever_a_group_s_file_holds(data: bytes) -> None:
    for files in FILES.values():
        for read in files.values():
            assert all(value is None or value >= 0 for value, _, _ in read(data).values())


# -- swap


SWAPS = (
    "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"
    "/dev/zram0                              partition\t8388604\t\t1024\t\t100\n"
    "/swap\\040file                           file\t\t1048572\t\t0\t\t-2\n"
)


def test_swap_areas_and_compressed_memory(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "sys/block/zram0").mkdir(parents=True)
    (tmp_path / "sys/block/zram0/disksize").write_text("8589934592\n")
    (tmp_path / "sys/block/zram0/mm_stat").write_text(" 1048576   262144   311296 0 311296 0 0 0 0\n")
    swaps = tmp_path / "proc/swaps"
    swaps.write_text(SWAPS)
    w = Watched(SwapSource(Roots(tmp_path / "proc", tmp_path / "sys")), tmp_path / "t.trace")
    assert w.probe().sees == "2 swap areas, 1 zram"
    w.sample()
    swaps.write_text(SWAPS[: SWAPS.index("/swap")])
    (tmp_path / "sys/block/zram0/mm_stat").write_text("1048")
    w.sample()
    assert w.values("swap:/dev/zram0", "used_bytes") == [1 << 20]
    assert w.values("swap:/swap file", "size_bytes") == [1048572 * 1024, "lost"]
    assert w.values("swap:/swap file", "priority") == [-2, "lost"]
    assert w.values("zram:zram0", "held_bytes") == [1048576, "error"]
    assert w.values("zram:zram0", "used_bytes") == [311296, "error"]
    assert w.events() == [("configuration change", "swap area /swap file is off")]


def test_swap_that_is_odd() -> None:
    assert areas(SWAPS.encode()[:-1]) == {"/dev/zram0": (8388604 * 1024, 1 << 20, 100)}  # the last line lacks its end
    assert areas(b"") == {} and areas(b"Filename\n/x file a b c\n\xff\n") == {}
    assert zram_bytes(b"1 2 -3\n") is None and zram_bytes(b"") is None and zram_bytes(b"1 2 3\n") is not None


def test_damon_is_only_told_of() -> None:
    there = DamonSource(roots_of(guest("cxl-volatile-6.12"))).probe()
    assert there.status == "unsupported" and "actively" in str(there.reason)
    assert DamonSource(roots_of(guest("plain-vm"))).probe().status == "absent"
