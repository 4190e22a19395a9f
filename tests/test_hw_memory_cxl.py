"""CXL devices and regions of recorded guests, and the graph of memory that is made of their trees."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.guests import copied, guest, roots_of
from support.watched import Watched

from hoptrace.collectors.hardware.memory.cxl import CxlSource
from hoptrace.collectors.hardware.topology.memory import cxl_nodes, memory_graph

HALF_GIB = 0x20000000


def test_devices_and_regions(tmp_path: Path) -> None:
    w = Watched(CxlSource(roots_of(guest("cxl-volatile-6.12"))), tmp_path / "t.trace")
    assert w.probe().sees == "2 devices, 1 region"
    w.sample()
    assert w.last() == {
        ("cxl:mem0", "ram_bytes"): 0, ("cxl:mem0", "persistent_bytes"): HALF_GIB, ("cxl:mem0", "numa_node"): "absent",
        ("cxl:mem0", "decoders_committed"): 0,
        ("cxl:mem1", "ram_bytes"): HALF_GIB, ("cxl:mem1", "persistent_bytes"): 0, ("cxl:mem1", "numa_node"): "absent",
        ("cxl:mem1", "decoders_committed"): 1,
        ("cxl:region0", "size_bytes"): HALF_GIB, ("cxl:region0", "committed"): 1, ("cxl:region0", "interleave_ways"): 1,
        ("cxl:region0", "interleave_granularity_bytes"): 256, ("cxl:region0", "numa_node"): 3,
    }  # fmt: skip


def test_a_region_that_is_not_committed(tmp_path: Path) -> None:
    w = Watched(CxlSource(roots_of(guest("hmat-only-6.12"))), tmp_path / "t.trace")
    w.sample()
    assert w.last()["cxl:region0", "committed"] == 0 and w.last()["cxl:region0", "numa_node"] == "absent"


def test_one_that_goes_and_comes_back(tmp_path: Path) -> None:
    tree = copied("cxl-volatile-6.12", tmp_path)
    w = Watched(CxlSource(roots_of(tree)), tmp_path / "t.trace")
    w.sample()
    region = tree / "sys/bus/cxl/devices/region0"
    target = region.readlink()
    region.unlink()
    w.sample()
    region.symlink_to(target)
    (region / "commit").write_text("0\n")
    w.sample()
    (region / "commit").write_text("1\n")
    w.sample()
    assert w.values("cxl:region0", "size_bytes") == [HALF_GIB, "lost", HALF_GIB]
    assert w.values("cxl:region0", "committed") == [1, "lost", 0, 1]
    assert w.values("cxl:mem1", "ram_bytes") == [HALF_GIB]
    assert w.events() == [
        ("device error", "CXL region0 is gone"), ("device", "CXL region0 came"),
        ("configuration change", "CXL region0: committed 0 -> 1"),
    ]  # fmt: skip


def test_a_file_that_can_t_be_read_or_is_no_number(tmp_path: Path) -> None:
    tree = copied("cxl-volatile-6.12", tmp_path)
    base = tree / "sys/bus/cxl/devices"
    w = Watched(CxlSource(roots_of(tree)), tmp_path / "t.trace")
    w.sample()
    (base / "mem1/ram/size").write_text("lots\n")
    (base / "region0/commit").unlink()
    (base / "region0/commit").mkdir()
    w.sample()
    assert w.values("cxl:mem1", "ram_bytes") == [HALF_GIB, "error"]
    assert w.values("cxl:region0", "committed") == [1, "error"]
    assert w.values("cxl:region0", "size_bytes") == [HALF_GIB]


def test_a_machine_without_cxl() -> None:
    found = CxlSource(roots_of(guest("plain-vm"))).probe()
    assert found.status == "absent" and "CONFIG_CXL_MEM" in str(found.remedy)


@pytest.mark.parametrize("name", ["cxl-volatile-6.12", "cxl-pmem-6.1"])
def test_the_node_of_a_region_by_its_dax_device(name: str) -> None:
    assert cxl_nodes(roots_of(guest(name))) == {3: "region0"}


@pytest.mark.parametrize("name", ["cxl-volatile-6.12", "cxl-pmem-6.1"])
def test_the_node_of_a_region_that_the_firmware_made_is_found_by_its_memory(name: str, tmp_path: Path) -> None:
    tree = copied(name, tmp_path)
    for bus in ("dax", "nd"):
        shutil.rmtree(tree / f"sys/bus/{bus}")
    blocks = tree / "sys/devices/system/memory"
    blocks.mkdir(parents=True, exist_ok=True)
    (blocks / "block_size_bytes").write_text("8000000\n")
    assert cxl_nodes(roots_of(tree)) == {3: "region0"}
    (tree / "sys/bus/cxl/devices/region0/commit").write_text("0\n")
    assert cxl_nodes(roots_of(tree)) == {}


def test_persistent_memory_that_is_no_cxl(tmp_path: Path) -> None:
    tree = copied("hmat-only-6.12", tmp_path)
    nfit = tree / "sys/devices/LNXSYSTM:00/ACPI0012:00/ndbus1/region0/dax0.0"
    nfit.mkdir(parents=True)
    (nfit / "target_node").write_text("2\n")
    bus = tree / "sys/bus/dax/devices"
    bus.mkdir(parents=True, exist_ok=True)
    (bus / "dax0.0").symlink_to(nfit)
    assert cxl_nodes(roots_of(tree)) == {}


def test_the_graph_of_memory() -> None:
    nodes, links = memory_graph(roots_of(guest("cxl-volatile-6.12")))
    by_name = {n["name"]: n for n in nodes}
    assert [(n, by_name[n]["kind"], by_name[n].get("tier")) for n in by_name] == [
        ("socket0", "compute", None), ("dram0", "dram", 4), ("dram1", "dram", 4), ("memory2", "memory", 918), ("cxl3", "cxl", 22),
    ]  # fmt: skip
    assert by_name["cxl3"]["capacity_bytes"] == 512 << 20 and by_name["cxl3"]["distances"] == [20, 20, 20, 10]
    assert by_name["dram0"]["memory_side_caches"] == [{"level": 1, "size_bytes": 16384, "line_bytes": 64}]
    assert by_name["memory2"]["best_initiators"] == [0] and by_name["memory2"]["interleave_weight"] == 1
    to = {k["b"]: k for k in links}
    # 255 ns and 25,600 MB/s of the firmware's table; MB are 10⁶ bytes (numaperf.rst).
    assert (to["memory2"]["latency_ns"], to["memory2"]["read_bytes_per_s"]) == (255, 25_600_000_000)
    assert to["cxl3"]["entity"] == "cxl:mem1" and "latency_ns" not in to["cxl3"]


def test_the_graph_of_a_machine_with_one_node() -> None:
    nodes, links = memory_graph(roots_of(guest("plain-vm")))
    assert [n["name"] for n in nodes] == ["socket0", "dram0"]
    assert [(k["a"], k["b"], k["kind"]) for k in links] == [("socket0", "dram0", "ddr")]
