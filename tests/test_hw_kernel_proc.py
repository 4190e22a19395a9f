"""Interrupts, softirqs, totals of /proc/stat and disks: recorded files, hostile ones, CPUs and disks that come and go."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.guests import copied, guest, roots_of
from support.watched import Watched

from hoptrace.collectors.hardware.kernel import stat
from hoptrace.collectors.hardware.kernel.block import BlockSource
from hoptrace.collectors.hardware.kernel.disks import chosen, lines_of, whole_disks
from hoptrace.collectors.hardware.kernel.interrupts import InterruptSource, table_of
from hoptrace.collectors.hardware.processes.machine import CpuSource
from hoptrace.collectors.hardware.source import Roots

DATA = Path(__file__).parent / "data" / "hardware" / "kernel"
GUEST = "cxl-volatile-6.12"


def last(w: Watched) -> dict[tuple[str, str, str | None], Any]:
    return {(r["entity"], r["name"], r["direction"]): r["value_int"] if r["status"] == "ok" else r["status"] for r in w.rows()}


# -- interrupts ------------------------------------------------------------------------------------------------------------


def test_vectors_bear_their_devices(tmp_path: Path) -> None:
    w = Watched(InterruptSource(roots_of(guest(GUEST))), tmp_path / "t.trace")
    assert w.probe().sees == "27 vectors, 17 other kinds"
    w.sample(2)
    rows = {r["entity"]: r for r in w.rows()}
    # By hand from the recorded /proc/stat and /proc/interrupts.
    assert rows["irq:46"]["value_int"] == 19 and rows["irq:46"]["width_bits"] == 32
    assert rows["irq:46"]["incarnation"].endswith("/PCI-MSIX-0000:00:06.0 1-edge nvme0q1")
    assert rows["irq:24"]["incarnation"].endswith("/PCI-MSI-0000:0c:00.0 0-edge PCIe PME, aerdrv, pciehp")
    assert rows["irq:48"]["value_int"] == 0  # a device's vector that never fired is 0, not unknown
    assert "irq:30" not in rows  # nobody's
    assert rows["irq:RES"]["value_int"] == 242 + 384 and rows["irq:CAL"]["value_int"] == 3213 + 4749
    assert rows["irq:TLB"]["value_int"] == 51 and "irq:ERR" not in rows
    assert rows["softirq:NET_RX"]["value_int"] == 9 and rows["softirq:SCHED"]["value_int"] == 16697


def test_a_cpu_that_goes_offline_makes_no_difference_wrong(tmp_path: Path) -> None:
    tree = copied(GUEST, tmp_path)
    source = InterruptSource(roots_of(tree))
    w = Watched(source, tmp_path / "t.trace")
    w.sample()
    lines = (tree / "proc/interrupts").read_text().splitlines()
    one = ["           CPU1"] + [line[:4] + line[15:] for line in lines[1:] if not line.startswith(("ERR", "MIS"))]
    (tree / "proc/interrupts").write_text("\n".join(one) + "\n")
    source._table_due_ns = 0
    w.sample()
    rows = [r for r in w.rows() if r["entity"] == "irq:CAL"]
    assert [(r["value_int"], r["status"], r["incarnation"].partition("/")[2]) for r in rows] == [
        (7962, "ok", "CPUs 0-1"), (None, "lost", "CPUs 0-1"), (4749, "ok", "CPUs 1"),
    ]  # fmt: skip
    assert [d for k, d in w.events() if k == "cpus"] == ["CPUs online: 1 (before: 0-1); calls between CPUs are counted anew"]


def test_a_vector_that_another_device_gets_is_another_series(tmp_path: Path) -> None:
    tree = copied(GUEST, tmp_path)
    source = InterruptSource(roots_of(tree))
    w = Watched(source, tmp_path / "t.trace")
    w.sample()
    table = tree / "proc/interrupts"
    table.write_text(table.read_text().replace("nvme0q1", "mlx5_comp0"))
    source._table_due_ns = 0
    w.sample()
    rows = [r for r in w.rows() if r["entity"] == "irq:46"]
    assert [(r["status"], r["incarnation"].split()[-1]) for r in rows] == [
        ("ok", "nvme0q1"), ("lost", "nvme0q1"), ("ok", "mlx5_comp0"),
    ]  # fmt: skip


def test_a_wide_machine_is_read_less_often(tmp_path: Path) -> None:
    cpus, vectors = 256, 1000
    head = " " * 11 + "".join(f"CPU{n:<8}" for n in range(cpus))
    rows = [f"{v}:" + " 1" * cpus + f"  PCI-MSIX 1-edge mlx5_comp{v}" for v in range(vectors)]
    rows.append("RES:" + " 4294967295" * cpus + "   Rescheduling interrupts")
    data = "\n".join([head, *rows, ""]).encode()
    table = table_of(data)
    assert table.cpus == "0-255" and len(table.owners) == vectors and table.sums == {"RES": 256 * 4294967295}
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "interrupts").write_bytes(data)
    (proc / "softirqs").write_text("CPU0\n")
    (proc / "stat").write_text("cpu 1 2\nintr " + "5 " * (vectors + 1) + "\n")
    source = InterruptSource(Roots(proc, tmp_path))
    w = Watched(source, tmp_path / "t.trace")
    w.sample()
    (proc / "interrupts").unlink()  # nobody looks for it so soon
    w.sample()
    found = last(w)
    assert found["irq:RES", "interrupts", None] == (256 * 4294967295) % 2**32
    assert found["irq:999", "interrupts", None] == 5


@pytest.mark.parametrize(
    "data",
    [b"", b"\n", b"CPU0", b"           CPU0\n", b"garbage\n1: 2 3\n", b"CPUx CPU-1\n 1: 5 a\n", b"\xff\xfe\n", b" CPU0\nRES: x\n",
     b" CPU0\nRES: -1 y\n", b" CPU0 CPU1\nRES: 1\n", b" CPU0\n:::\n 5:\n"],
)  # fmt: skip
def test_a_table_that_is_none_gives_no_numbers(data: bytes) -> None:
    assert table_of(data).sums == {}


@given(st.binary(max_size=300))
def test_no_content_raises(data: bytes) -> None:
    table_of(data)
    table_of(b"           CPU0       CPU1\n" + data)
    stat.vectors(data)
    stat.softirqs(b"cpu 1\nsoftirq " + data)
    stat.total(data, b"ctxt")
    lines_of(data)


@given(st.integers(0, 3000))
def test_a_table_that_is_cut_tells_nothing_else(cut: int) -> None:
    data = (DATA / "here/interrupts").read_bytes()
    whole, part = table_of(data), table_of(data[:cut])
    assert part.sums.items() <= whole.sums.items()
    assert all(whole.owners[v] == owner for v, owner in part.owners.items())


def test_totals_of_the_machine() -> None:
    data = (guest(GUEST) / "proc/stat").read_bytes()
    assert [stat.total(data, key) for key, *_ in stat.TOTALS] == [17547, 353, 54556, 2, 0]
    assert stat.total(b"cpu 1\nctxt x\n", b"ctxt") is None and stat.total(b"cpu 1\nctxt 5", b"ctxt") == 5
    assert stat.vectors(data)[46] == b"19" and stat.vectors(b"cpu 1\nintr 5 1 2") == []


def test_the_cpu_source_writes_them_from_its_one_read(tmp_path: Path) -> None:
    w = Watched(CpuSource(roots_of(guest(GUEST))), tmp_path / "t.trace")
    w.sample()
    found = w.last()
    assert found["cpu", "context_switches"] == 17547 and found["cpu", "forks"] == 353
    assert found["cpu", "running_threads"] == 2 and found["cpu", "blocked_threads"] == 0


def test_files_that_are_gone_are_status_rows(tmp_path: Path) -> None:
    tree = copied(GUEST, tmp_path)
    source = InterruptSource(roots_of(tree))
    w = Watched(source, tmp_path / "t.trace")
    w.sample()
    for name in ("stat", "interrupts"):
        (tree / "proc" / name).unlink()
    source._stat.close()
    source._table.close()
    source._table_due_ns = 0
    w.sample()
    found = last(w)
    assert found["irq:46", "interrupts", None] == found["irq:RES", "interrupts", None] == "absent"
    assert found["softirq:RCU", "softirqs", None] == "absent"


# -- disks -----------------------------------------------------------------------------------------------------------------


def test_multipath_is_counted_once(tmp_path: Path) -> None:
    w = Watched(BlockSource(roots_of(guest(GUEST))), tmp_path / "t.trace")
    found = w.probe()
    assert found.sees == "nvme0n1, vda" and found.reason == "1 of them by multipath, each counted once"
    w.sample()
    told = last(w)
    assert {e for e, _, _ in told} == {"block:nvme0n1", "block:vda"}
    # By hand from the recorded line: 20 reads of 17,432 sectors, 16 writes of 16,384.
    assert told["block:nvme0n1", "data_bytes", "read"] == 17432 * 512
    assert told["block:nvme0n1", "data_bytes", "write"] == 16384 * 512
    assert told["block:nvme0n1", "ops", "read"] == 20 and told["block:nvme0n1", "ops", "write"] == 16
    assert told["block:nvme0n1", "wait_ms", "read"] == 68 and told["block:nvme0n1", "busy_ms", None] == 152


def test_where_the_namespace_counts_nothing_its_paths_are_added(tmp_path: Path) -> None:
    """Kernels before 6.4."""
    proc = tmp_path / "proc"
    proc.mkdir()
    zero = " ".join("0" * 17)
    two = "259 0 nvme0c0n1 1 0 8 2 3 0 16 4 0 5 6 0 0 0 0 0 0\n259 1 nvme0c1n1 1 0 8 2 3 0 16 4 1 5 6 0 0 0 0 0 0\n"
    (proc / "diskstats").write_text(two + f"259 2 nvme0n1 {zero}\n")
    w = Watched(BlockSource(Roots(proc, tmp_path)), tmp_path / "t.trace")
    w.sample()
    (proc / "diskstats").write_text(two.splitlines()[0] + f"\n259 2 nvme0n1 {zero}\n")  # a path less: no fall of the sum
    w.sample()
    rows = [r for r in w.rows() if r["name"] == "data_bytes" and r["direction"] == "read"]
    assert [(r["entity"], r["value_int"], r["incarnation"]) for r in rows] == [
        ("block:nvme0n1", 8192, "/nvme0c0n1+nvme0c1n1"), ("block:nvme0n1", 4096, "/nvme0c0n1"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "disks"),
    [
        (["sda", "sda1", "sda2", "sdb", "sr0"], ["sda", "sdb"]),
        (["nvme0n1", "nvme0n1p1", "nvme0n1p12", "nvme10n1"], ["nvme0n1", "nvme10n1"]),
        (["mmcblk0", "mmcblk0p1", "mmcblk0boot0"], ["mmcblk0", "mmcblk0boot0"]),
        (["xvda1", "vda", "vda1"], ["vda", "xvda1"]),
        (["dm-0", "md127", "md127p1", "loop7", "ram0", "zram0", "nbd15", "sdc"], ["sdc"]),
        (["md0", "md0p1", "sdaa", "sdaa1", "sd", "p1"], ["p1", "sd", "sdaa"]),
    ],
)
def test_whole_disks(names: list[str], disks: list[str]) -> None:
    assert whole_disks(names) == sorted(disks)


@given(st.lists(st.sampled_from(["nvme0n1", "nvme0c0n1", "nvme0c1n1", "nvme1c0n2", "sda"]), unique=True))
def test_each_namespace_is_one_disk(names: list[str]) -> None:
    found: Mapping[str, list[str]] = chosen(names)
    assert {n.replace("c0", "").replace("c1", "") for n in names} == set(found)
    assert sorted(p for paths in found.values() for p in paths) == sorted(n for n in names if "c" in n)


def test_a_disk_that_goes_and_comes_back(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    proc.mkdir()
    path = proc / "diskstats"
    line = "8 0 sda 1 0 8 2 3 0 16 4 0 5 6\n8 16 sdb 9 0 80 2 3 0 16 4 0 5 6\n"  # 11 fields: Linux before 4.18
    path.write_text(line)
    w = Watched(BlockSource(Roots(proc, tmp_path)), tmp_path / "t.trace")
    w.sample()
    path.write_text(line.splitlines()[0] + "\n")
    w.sample()
    path.write_text(line.replace("80", "8000"))  # it counts anew, and is past where it was already
    w.sample()
    rows = [r for r in w.rows() if (r["entity"], r["name"], r["direction"]) == ("block:sdb", "data_bytes", "read")]
    assert [(r["value_int"], r["status"], r["incarnation"]) for r in rows] == [
        (40960, "ok", ""), (None, "lost", ""), (4096000, "ok", "/1"),
    ]  # fmt: skip
    assert w.events() == [("device", "disk sdb is gone"), ("device", "disk sdb is there now")]


def test_a_line_that_breaks_is_an_error_of_that_disk(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    proc.mkdir()
    shutil.copy(DATA / "here/diskstats", proc / "diskstats")
    w = Watched(BlockSource(Roots(proc, tmp_path)), tmp_path / "t.trace")
    assert w.probe().sees == "vda"
    w.sample()
    (proc / "diskstats").write_text("254 0 vda 1 x 3 -4 5 6 7 8 9 10 11\n8 0 sda 1 0 8 2 3 0 16 4 0 5 6\n")
    w.sample()
    found = last(w)
    assert found["block:vda", "data_bytes", "read"] == "error" and found["block:sda", "data_bytes", "read"] == 4096


def test_no_disks(tmp_path: Path) -> None:
    source = BlockSource(Roots(tmp_path, tmp_path))
    assert source.probe().status == "absent"
    (tmp_path / "diskstats").write_text("7 0 loop0 1 0 8 2 3 0 16 4 0 5 6\n")
    assert (source.probe().reason or "").startswith("no disk of its own")


def test_lines_that_change_places(tmp_path: Path) -> None:
    """As many lines as before, another order, and one that is no text: each disk keeps its own numbers."""
    proc = tmp_path / "proc"
    proc.mkdir()
    path = proc / "diskstats"
    a, b, c = b"8 0 sda 1 0 8 2 3 0 16 4 0 5 6\n", b"8 16 sdb 9 0 80 2 3 0 16 4 0 5 6\n", b"7 0 \xff\xfe 9 0 1 2 3 0 16 4 0 5 6\n"
    w = Watched(BlockSource(Roots(proc, tmp_path)), tmp_path / "t.trace")
    for order in ((a, b, c), (b, c, a), (c, a, b)):
        path.write_bytes(b"".join(order))
        w.sample()
    rows = {(r["entity"], r["value_int"]) for r in w.rows() if r["name"] == "data_bytes" and r["direction"] == "read"}
    assert {r for r in rows if r[0].startswith("block:sd")} == {("block:sda", 4096), ("block:sdb", 40960)}
