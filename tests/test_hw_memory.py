"""Memory counters on recorded guests with CXL memory and tiers, whose kernel really moved pages between them."""

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

import hoptrace
from hoptrace.analysis.moves.tiering import tier_pages
from hoptrace.collectors.hardware.listener import Found as FoundProcess
from hoptrace.collectors.hardware.memory import sources
from hoptrace.collectors.hardware.memory.keyed import Keyed, pairs
from hoptrace.collectors.hardware.memory.meminfo import MeminfoSource, meminfo_bytes
from hoptrace.collectors.hardware.memory.nodes import NodesSource
from hoptrace.collectors.hardware.memory.tiers import TiersSource
from hoptrace.collectors.hardware.memory.vmstat import VmstatSource, unit_of
from hoptrace.collectors.hardware.source import Asked, Roots, Server


@pytest.mark.parametrize(("name", "demoted", "promoted"), [("hmat-only-6.12", 11_776, 3_072), ("cxl-volatile-6.12", 2_883, 369)])
def test_pages_that_a_real_kernel_moved_between_tiers(name: str, demoted: int, promoted: int, tmp_path: Path) -> None:
    tree = copied(name, tmp_path)
    w = Watched(VmstatSource(roots_of(tree)), tmp_path / "t.trace")
    shutil.copy(tree / "cmd/vmstat-t0.txt", tree / "proc/vmstat")
    assert w.probe().available and w.probe().reason is None
    for stage in ("t0", "t1-demote", "t2-promote"):
        (tree / "proc/vmstat").write_bytes((tree / f"cmd/vmstat-{stage}.txt").read_bytes())
        w.sample()
    rows = w.rows()
    read = {}
    for r in rows:
        read.setdefault(r["name"], []).append(r["value_int"])
    moved = {n: v[-1] - v[0] for n, v in read.items()}
    assert sum(n for name, n in moved.items() if name.startswith("pgdemote_")) == demoted
    assert moved["pgpromote_success"] == promoted
    assert {r["unit"] for r in rows if r["name"].startswith("pg") and "fault" not in r["name"]} - {"bytes"} == {"pages"}
    page = os.sysconf("SC_PAGE_SIZE")
    assert read["page_size_bytes"] == [page]
    told = tier_pages(hoptrace.open(tmp_path / "t.trace"))
    assert {(t.node, t.page_bytes, t.page_basis) for t in told} == {("memory", page, "counted")}
    assert sum(t.bytes for t in told if t.direction == "out") == demoted * page
    assert sum(t.bytes for t in told if t.direction == "in") == promoted * page


def test_nodes_of_a_guest_with_cxl_memory(tmp_path: Path) -> None:
    w = Watched(NodesSource(roots_of(guest("cxl-volatile-6.12"))), tmp_path / "t.trace")
    assert w.probe().sees == "4 nodes"
    w.sample()
    last = w.last()
    assert {e for e, _ in last} == {"node:0", "node:1", "node:2", "node:3"}
    assert last["node:3", "total_bytes"] == 512 << 20
    assert last["node:3", "numa_hit"] == 8274 and last["node:3", "other_node"] == 8274 and last["node:3", "numa_miss"] == 0
    assert {"pgpromote_success", "pgdemote_kswapd", "pgdemote_direct", "pgdemote_khugepaged"} <= {
        n for e, n in last if e == "node:2"
    }


def test_a_node_that_goes_offline_and_comes_back(tmp_path: Path) -> None:
    tree = copied("cxl-volatile-6.12", tmp_path)
    base = tree / "sys/devices/system/node"
    source = NodesSource(roots_of(tree))
    w = Watched(source, tmp_path / "t.trace")
    w.sample()
    hidden = base / "node3"
    hidden.rename(tree / "away")
    for path in (tree / "away").glob("*"):
        if path.is_file():
            path.write_text("")
    if (base / "online").exists():
        (base / "online").write_text("0-2\n")
    source._due_s = 0.0
    w.sample()
    (tree / "away").rename(hidden)
    (hidden / "meminfo").write_text("Node 3 MemTotal:         524288 kB\n")
    if (base / "online").exists():
        (base / "online").write_text("0-3\n")
    source._due_s = 0.0
    w.sample()
    assert w.values("node:3", "total_bytes") == [512 << 20, "lost", 512 << 20]
    assert w.events() == [("memory node", "node 3 went offline"), ("memory node", "node 3 came online")]
    assert w.values("node:0", "numa_miss") == [0]


def test_a_node_whose_folder_goes_before_it_is_said_to_be_offline(tmp_path: Path) -> None:
    tree = copied("cxl-volatile-6.12", tmp_path)
    folder = tree / "sys/devices/system/node/node3"
    source = NodesSource(roots_of(tree))
    w = Watched(source, tmp_path / "t.trace")
    w.sample()
    source.close()  # what the kernel does to open files of a device that has gone
    folder.rename(tree / "away")
    source._due_s = 0.0
    w.sample(2)
    source._due_s = 0.0
    w.sample()
    (tree / "away").rename(folder)
    (folder / "numastat").write_text("numa_hit 5\nnuma_miss 0\n")
    source._due_s = 0.0
    w.sample()
    assert w.events() == [("memory node", "node 3 went offline"), ("memory node", "node 3 came online")]
    assert w.values("node:3", "numa_hit") == [8274, "lost", 5]
    lives = [r["incarnation"] for r in w.rows() if (r["entity"], r["name"]) == ("node:3", "numa_hit")]
    assert lives[0].endswith("/1") and lives[-1].endswith("/2")  # 5 is no difference to 8274
    assert w.values("node:2", "numa_miss") == [0]


def test_a_file_that_can_t_be_read_is_an_error_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = copied("hmat-only-6.12", tmp_path)
    w = Watched(NodesSource(roots_of(tree)), tmp_path / "t.trace")
    w.sample()
    real = os.pread

    def broken(fd: int, n: int, at: int) -> bytes:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if path.name == "numastat":
            raise OSError(errno.EIO, "Input/output error")
        if path.name == "vmstat" and path.parent.name == "node1":
            raise OSError(errno.EACCES, "Permission denied")
        return real(fd, n, at)

    monkeypatch.setattr(os, "pread", broken)
    w.sample()
    monkeypatch.undo()
    w.sample()
    hit = w.values("node:0", "numa_hit")
    assert hit[1] == "error" and hit[0] == hit[2]
    assert w.values("node:1", "pgdemote_direct")[1] == "denied" and "denied" not in w.values("node:0", "pgdemote_direct")
    assert "error" not in w.values("node:0", "total_bytes")
    assert not w.events()


def test_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    tree = copied("hmat-only-6.12", tmp_path)
    (tree / "sys/devices/system/node/node1/vmstat").unlink()
    (tree / "sys/devices/system/node/node1/vmstat").mkdir()
    w = Watched(NodesSource(roots_of(tree)), tmp_path / "t.trace")
    w.sample(2)
    last = w.last()
    assert ("node:1", "numa_hit") in last and ("node:1", "pgpromote_success") not in last
    assert ("node:0", "pgpromote_success") in last


def test_a_counters_file_that_shrinks(tmp_path: Path) -> None:
    tree = copied("hmat-only-6.12", tmp_path)
    w = Watched(VmstatSource(roots_of(tree)), tmp_path / "t.trace")
    w.probe()
    w.sample()
    whole = (tree / "proc/vmstat").read_bytes()
    (tree / "proc/vmstat").write_bytes(b"pswpin 7\npswpout 8\npgmajfault 1")
    w.sample()
    (tree / "proc/vmstat").write_bytes(whole)
    w.sample()
    assert w.values("memory", "pgpromote_success")[1] == "absent"
    assert 7 in w.values("memory", "pswpin") and w.values("memory", "pgmajfault")[1] == "absent"


def test_tiers_and_switches_and_their_changes(tmp_path: Path) -> None:
    tree = copied("cxl-volatile-6.12", tmp_path)
    w = Watched(TiersSource(roots_of(tree)), tmp_path / "t.trace")
    found = w.probe()
    assert found.sees == "3 tiers"
    w.sample()
    (tree / "sys/devices/virtual/memory_tiering/memory_tier22/nodelist").write_text("\n")
    (tree / "sys/devices/virtual/memory_tiering/memory_tier918/nodelist").write_text("2-3\n")
    (tree / "sys/kernel/mm/numa/demotion_enabled").write_text("false\n")
    w.sample()
    last = w.last()
    assert [last[f"node:{n}", "tier"] for n in range(4)] == [4, 4, 918, 918]
    assert last["node:2", "interleave_weight"] == 1
    assert ("configuration change", "node:3: tier 22 -> 918") in w.events()
    assert w.values("memory", "demotion_enabled") == [1, 0]
    assert ("configuration change", "memory: demotion_enabled 1 -> 0") in w.events()


def test_switches_that_are_off_are_told_from_nothing_that_moved(tmp_path: Path) -> None:
    tree = copied("hmat-only-6.12", tmp_path)
    switch, mode = tree / "sys/kernel/mm/numa/demotion_enabled", tree / "proc/sys/kernel/numa_balancing"
    mode.parent.mkdir(parents=True, exist_ok=True)
    told = []
    for on, balancing in (("true", "2"), ("true", "1"), ("false", "3"), ("0", "0"), ("maybe", "2")):
        switch.write_text(f"{on}\n")
        mode.write_text(f"{balancing}\n")
        told.append(TiersSource(roots_of(tree)).probe().reason)
    assert told == [
        None, "promotions are switched off: their counters stay 0", "demotions are switched off: their counters stay 0",
        "demotions and promotions are switched off: their counters stay 0", "demotions are switched off: their counters stay 0",
    ]  # fmt: skip
    w = Watched(TiersSource(roots_of(tree)), tmp_path / "t.trace")
    w.sample()
    assert ("memory", "demotion_enabled") not in w.last()  # neither on nor off
    assert w.last()["memory", "numa_balancing"] == 2


def test_a_tier_that_loses_its_node(tmp_path: Path) -> None:
    tree = copied("cxl-volatile-6.12", tmp_path)
    w = Watched(TiersSource(roots_of(tree)), tmp_path / "t.trace")
    w.sample()
    (tree / "sys/devices/virtual/memory_tiering/memory_tier22/nodelist").write_text("\n")
    w.sample()
    assert w.values("node:3", "tier") == [22, "absent"]
    assert w.events() == [("configuration change", "node:3: tier 22 -> none")]


def test_meminfo(tmp_path: Path) -> None:
    w = Watched(MeminfoSource(roots_of(guest("plain-vm"))), tmp_path / "t.trace")
    assert str(w.probe().sees).endswith("GiB")
    w.sample()
    assert 0 < w.last()["memory", "available_bytes"] <= w.last()["memory", "total_bytes"]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"MemTotal:  10 kB\nHugePages_Total:    3\n", {"total_bytes": 10240, "huge_pages": 3}),
        (b"Node 3 MemTotal:  2 kB\nNode 3 MemUsed: 1 kB\n", {"total_bytes": 2048, "used_bytes": 1024}),
        (b"MemTotal: -5 kB\nMemFree: x kB\nMemAvailable:", {}), (b"", {}), (b"\xff\xfe\n", {}),
        (b"MemTotal: 5\nMemFree: 12 kB", {}), (b"MemTotal: " + b"9" * 5000 + b" kB\n", {}),
    ],
)  # fmt: skip
def test_meminfo_that_is_odd(data: bytes, found: dict[str, int]) -> None:
    assert meminfo_bytes(data) == found


names = st.text("abcdefgh_", min_size=1, max_size=6)


@given(st.lists(st.dictionaries(names, st.integers(0, 1 << 64), max_size=8), min_size=1, max_size=4), st.sets(names, max_size=5))
def test_keyed_reading_is_reading_all(files: list[dict[str, int]], kept: set[str]) -> None:
    keyed = Keyed(lambda name: name in kept)
    for file in files:
        data = "".join(f"{k} {v}\n" for k, v in file.items()).encode()
        assert keyed.read(data) == {k: v for k, v in pairs(data) if k in kept}


NUMBERS = st.dictionaries(names, st.integers(0, 1 << 64), min_size=1, max_size=8)


@given(NUMBERS, st.data())
def test_a_file_that_was_cut_off_gives_no_other_number(numbers: dict[str, int], data: st.DataObject) -> None:
    whole = "".join(f"{k} {v}\n" for k, v in numbers.items()).encode()
    keyed = Keyed(lambda name: True)
    assert keyed.read(whole) == numbers
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    assert keyed.read(cut).items() <= numbers.items()
    assert keyed.read(whole) == numbers


def test_lines_that_are_none() -> None:
    data = b"a 1\nb -2\nc 0x3\nd 4 5\ne\n\nf " + b"9" * 5000 + b"\n\xff 6\ng 18446744073709551615\n"
    assert dict(pairs(data)) == {"a": 1, "\ufffd": 6, "g": (1 << 64) - 1}


def test_units() -> None:
    assert [unit_of(n) for n in ("pgdemote_direct", "numa_hint_faults", "allocstall_movable", "pswpin", "thp_split_page")] == [
        "pages", "faults", "times", "pages", "times",
    ]  # fmt: skip


def test_every_source_says_what_is_missing(tmp_path: Path) -> None:
    servers = [Server("s", lambda: FoundProcess(None, "nobody"))]
    for source in sources(Asked(Roots(tmp_path / "proc", tmp_path / "sys"), servers)):
        found = source.probe()
        assert not found.available and found.reason, source.name
