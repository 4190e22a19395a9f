"""The platform graph of recorded machines, by literal values; texts of nvidia-smi; graphs that merge."""

from __future__ import annotations

import json
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command import run
from support.guests import copied, guest, roots_of

from hoptrace.collectors.hardware.file import cpu_list
from hoptrace.collectors.hardware.source import Roots
from hoptrace.collectors.hardware.topology.discover import discover, merged
from hoptrace.collectors.hardware.topology.memory import cxl_nodes, memory_graph
from hoptrace.collectors.hardware.topology.pci import link_bytes_per_s, pci_devices
from hoptrace.collectors.hardware.topology.text import graph_text
from hoptrace.collectors.hardware.topology.topo_text import as_graph, topo_of
from hoptrace.errors import InputError
from hoptrace.manifest import Manifest
from hoptrace.platform import graph_of


def test_a_guest_with_cxl_memory(snapshot: object) -> None:
    graph = discover(roots_of(guest("cxl-volatile-6.12")))
    nodes = {n["name"]: n for n in graph["nodes"]}
    links = {k["b"]: k for k in graph["links"] if k["a"] == "socket0"}
    assert nodes["cxl3"]["kind"] == "cxl" and nodes["cxl3"]["capacity_bytes"] == 512 << 20
    assert (nodes["memory2"]["tier"], nodes["cxl3"]["tier"], nodes["dram0"]["tier"]) == (918, 22, 4), "the kernel's numbers"
    assert nodes["cxl3"]["distances"] == [20, 20, 20, 10], "a default, of which no latency is made"
    assert (links["memory2"]["latency_ns"], links["memory2"]["read_bytes_per_s"]) == (255, 25_600 * 10**6)
    assert (links["dram0"]["latency_ns"], links["dram0"]["bytes_per_s"]) == (10, 204_800 * 10**6)
    assert "latency_ns" not in links["cxl3"] and "bytes_per_s" not in links["cxl3"], "nobody tells"
    assert links["cxl3"]["entity"] == "cxl:mem1", "its region has one device: what counts that counts the link"
    assert graph["coherent"] == [["socket0", "dram0", "dram1", "memory2", "cxl3"]]
    assert graph_text(graph) == snapshot


def test_persistent_cxl_memory_of_an_older_kernel(snapshot: object) -> None:
    graph = discover(roots_of(guest("cxl-pmem-6.1")))
    assert next(n for n in graph["nodes"] if n["name"] == "cxl3")["kind"] == "cxl"
    assert graph_text(graph) == snapshot


def test_a_plain_machine(snapshot: object) -> None:
    assert cxl_nodes(roots_of(guest("plain-vm"))) == {}
    assert graph_text(discover(roots_of(guest("plain-vm")))) == snapshot


def test_disks_are_listed_once_though_a_namespace_has_two_names(tmp_path: Path) -> None:
    base = tmp_path / "sys"
    device = base / "devices/pci0000:00/0000:00:06.0"
    (device / "nvme/nvme0").mkdir(parents=True)
    for name, value in {
        "class": "0x010802", "numa_node": "0", "current_link_speed": "16.0 GT/s PCIe", "current_link_width": "4",
        "max_link_speed": "32.0 GT/s PCIe", "max_link_width": "4",
    }.items():  # fmt: skip
        (device / name).write_text(value + "\n")
    (base / "class/nvme").mkdir(parents=True)
    (base / "class/nvme/nvme0").symlink_to(device / "nvme/nvme0")
    for name in ("nvme0n1", "nvme0c0n1", "loop0", "dm-0", "md127", "zram0"):
        (base / "block" / name).mkdir(parents=True)
        (base / "block" / name / "size").write_text("2097152\n")
    node = base / "devices/system/node/node0"
    node.mkdir(parents=True)
    (node / "cpulist").write_text("0-3\n")
    (node / "meminfo").write_text("Node 0 MemTotal: 1024 kB\n")
    graph = discover(Roots(tmp_path / "proc", base))
    assert [n["name"] for n in graph["nodes"] if n["kind"] in ("nvme", "disk")] == ["nvme0n1"]
    (link,) = [k for k in graph["links"] if k["kind"] == "nvme"]
    assert (link["a"], link["b"], link["entity"], link["generation"], link["width"]) == (
        "dram0",
        "nvme0n1",
        "block:nvme0n1",
        4,
        4,
    )
    assert link["bytes_per_s"] == pytest.approx(32e9 * 128 / 130 * 4 / 8), "what it could do: it has trained down"


@pytest.mark.parametrize(
    ("generation", "width", "rate"),
    [
        (1, 1, 0.25e9), (3, 16, 15.754e9), (4, 16, 31.508e9), (5, 16, 63.015e9), (6, 16, 121.0e9), (None, 16, None),
        (5, None, None), (9, 1, None),
    ],
)  # fmt: skip
def test_pcie_rates(generation: int | None, width: int | None, rate: float | None) -> None:
    got = link_bytes_per_s(generation, width)
    assert got is None if rate is None else got == pytest.approx(rate, rel=1e-4)


def test_bridges_that_devices_share(tmp_path: Path) -> None:
    top = tmp_path / "sys/devices/pci0000:15/0000:15:01.0"
    for bdf, kind in (("0000:17:00.0", "0x030200"), ("0000:18:00.0", "0x020700")):
        device = top / "0000:16:00.0" / bdf
        device.mkdir(parents=True)
        (device / "class").write_text(kind)
        (device / "current_link_width").write_text("255\n")
        (device / "numa_node").write_text("-1\n")
    gpu, nic = [d for d in pci_devices(Roots(tmp_path / "proc", tmp_path / "sys")) if d.kind in ("gpu", "nic")]
    assert gpu.bridges == nic.bridges == ("0000:15:01.0", "0000:16:00.0")
    assert gpu.width is None and gpu.numa is None and gpu.bytes_per_s is None, "255 and -1 stand for unknown"


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0-3,8", {0, 1, 2, 3, 8}), ("", set()), (None, set()), ("2", {2}), ("x-3", set()), ("3-", set()), ("5-4", set()),
        (" 1 , 2 ", {1, 2}), ("1-x,4", {4}), ("x-2,-,5-", set()), ("0-99999999999", set(range(65_537))),
        ("9" * 5000, set()), ("1-" + "9" * 5000, set()),
    ],
)  # fmt: skip
def test_kernel_lists(text: str | None, numbers: set[int]) -> None:
    assert cpu_list(text) == numbers


def test_nothing_at_all(tmp_path: Path) -> None:
    graph = discover(Roots(tmp_path / "proc", tmp_path / "sys"))
    assert graph == {"nodes": [], "links": [], "coherent": []}
    assert graph_text(graph) == "  nothing is told of this machine"


def test_a_tree_with_files_that_can_t_be_read(tmp_path: Path) -> None:
    tree = copied("cxl-volatile-6.12", tmp_path)
    for path in (tree / "sys/devices/system/node").rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.write_bytes(b"\xff\xfe\x00junk")
    discover(roots_of(tree))


def test_graphs_merge_and_the_capture_s_stays() -> None:
    session = {
        "nodes": [{"name": "client"}, {"name": "dram0", "kind": "mine"}],
        "links": [{"name": "l", "a": "client", "b": "s"}],
    }
    found = {
        "nodes": [{"name": "dram0", "kind": "dram"}, {"name": "gpu0"}],
        "links": [{"name": "l"}, {"name": "m"}],
        "coherent": [["a", "b"]],
    }
    graph = merged(session, found)
    assert [n["name"] for n in graph["nodes"]] == ["client", "dram0", "gpu0"] and graph["nodes"][1]["kind"] == "mine"
    assert [k["name"] for k in graph["links"]] == ["l", "m"] and graph["coherent"] == [["a", "b"]]
    read = graph_of(Manifest(origin="recorded", platform=graph))
    assert set(read.nodes) == {"client", "dram0", "gpu0"}


# -- nvidia-smi topo -m ----------------------------------------------------------------------------------------------------

TABBED = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPXB\t0-55,112-167\t0\t\tN/A\nGPU1\tNV18\t X \tSYS\t56-111\t1\t\tN/A\nNIC0\tPXB\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)
BLANKS = (
    "$ nvidia-smi topo -m\n        GPU0    GPU1    CPU Affinity    NUMA Affinity   GPU NUMA ID\n"
    "GPU0     X      PHB     0-63            0               N/A\nGPU1    PHB      X      0-63            0               N/A\n"
)


def test_a_text_with_tabs_colours_and_adapters() -> None:
    topology = topo_of(TABBED)
    assert topology.names == ("GPU0", "GPU1", "NIC0") and topology.numa == {"GPU0": 0, "GPU1": 1}
    assert topology.between["GPU0", "GPU1"] == "NV18" and topology.nics == {"NIC0": "mlx5_0"}
    graph = as_graph(topology)
    assert graph["links"][0] == {
        "name": "gpu0-gpu1", "a": "gpu0", "b": "gpu1", "kind": "nvlink", "width": 18, "source": "nvidia-smi topo -m",
    }  # fmt: skip
    assert graph["links"][1]["crosses"] == "PXB" and graph["links"][1]["b"] == "mlx5_0"


def test_a_text_with_blanks() -> None:
    topology = topo_of(BLANKS)
    assert topology.between == {("GPU0", "GPU1"): "PHB", ("GPU1", "GPU0"): "PHB"} and topology.numa == {"GPU0": 0, "GPU1": 0}


def test_a_text_beside_what_the_machine_tells() -> None:
    roots = roots_of(guest("hmat-only-6.12"))
    plain, graph = discover(roots), discover(roots, TABBED)
    assert graph["nodes"][: len(plain["nodes"])] == plain["nodes"] and graph["coherent"] == plain["coherent"]
    assert {n["name"]: n.get("numa") for n in graph["nodes"][len(plain["nodes"]) :]} == {"gpu0": 0, "gpu1": 1, "mlx5_0": None}
    assert [(k["name"], k["kind"]) for k in graph["links"][len(plain["links"]) :]] == [
        ("gpu0-gpu1", "nvlink"), ("gpu0-mlx5_0", "pcie"), ("gpu1-mlx5_0", "pcie"),
    ]  # fmt: skip
    with pytest.raises(InputError, match="no output of `nvidia-smi topo -m`"):
        discover(roots, "GPU 0: NVIDIA H100\n")


def test_the_command_reads_a_text(tmp_path: Path) -> None:
    file = tmp_path / "topo.txt"
    file.write_text(TABBED)
    done = run("doctor", "--graph", "--json", "--topo", str(file))
    assert done.returncode == 0, done.stderr
    assert any(k.get("source") == "nvidia-smi topo -m" for k in json.loads(done.stdout)["links"])
    file.write_text("nothing of the kind")
    done = run("doctor", "--graph", "--topo", str(file))
    assert done.returncode == 3 and "no output of `nvidia-smi topo -m`" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "no line of column names"), ("\tGPU0\tGPU1\n", "no row"), ("\tGPU0\tGPU1\nGPU0\t X \n", "has 1 columns"),
     ("\tGPU0\tGPU1\nGPU0\t X \tWAT\n", "columns")],
)  # fmt: skip
def test_texts_that_are_none(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        topo_of(text)


@given(st.text("GPU01NICX \t\nPBHSYSV8", max_size=200))
def test_any_text_is_a_matrix_or_an_error(text: str) -> None:
    with suppress(InputError):
        as_graph(topo_of(text))


@pytest.mark.parametrize("name", ["nvidia-dgx-gb10.tar.bz2", "fakeheteromemtiers.tar.bz2"])
def test_trees_of_hwloc_s_tests(name: str, tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "shared/traces/topology/sysfs" / name
    if not path.exists():
        pytest.skip("needs ../shared")
    with tarfile.open(path) as tar:
        tar.extractall(tmp_path, filter="fully_trusted")
    base = tmp_path / name.split(".")[0]
    graph = discover(Roots(base / "proc", base / "sys"))
    nodes = {n["name"]: n for n in graph["nodes"]}
    if "gb10" in name:
        # hwloc's own reading of this tree: one NUMA node of 128,520,671,232 bytes
        assert nodes["dram0"]["capacity_bytes"] == 128_520_671_232
    else:
        assert sorted(n["numa"] for n in nodes.values() if "numa" in n) == [0, 1, 2, 4, 6, 8, 9]
        link = next(k for k in graph["links"] if k["b"] == "dram2")
        assert link["read_bytes_per_s"] == 10_000 * 10**6 and "latency_ns" not in link, "0 ns is an entry that is not there"


@pytest.mark.parametrize(
    ("whole_kib", "blocks", "states", "want"),
    [
        (6_121_244, 192, "online", 6_121_244 * 1024),  # they agree
        (24_683_652, 189, "online", 189 << 27),  # memory that was added while running: the node's own file has not got it
        (24_683_652, 189, "offline", None),
        (24_683_652, 60, "online", None),
    ],
)
def test_a_node_whose_file_lacks_memory_of_the_machine(
    tmp_path: Path, whole_kib: int, blocks: int, states: str, want: int | None
) -> None:
    node = tmp_path / "sys/devices/system/node/node0"
    node.mkdir(parents=True)
    (node.parent / "online").write_text("0\n")
    (node / "cpulist").write_text("0-1\n")
    (node / "meminfo").write_text("Node 0 MemTotal:        6121244 kB\n")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal:       {whole_kib} kB\n")
    (tmp_path / "sys/devices/system/memory").mkdir()
    (tmp_path / "sys/devices/system/memory/block_size_bytes").write_text("8000000\n")
    for i in range(blocks):
        (node / f"memory{i}").mkdir()
        (node / f"memory{i}/state").write_text(f"{states}\n")
    nodes, _ = memory_graph(Roots(proc=tmp_path / "proc", sys=tmp_path / "sys"))
    assert next(n for n in nodes if n["name"] == "dram0").get("capacity_bytes") == want


@pytest.mark.parametrize("junk", ["-1", "18446744073709551615", "4294967295", "0", "x", ""])
def test_firmware_s_figures_that_are_none(tmp_path: Path, junk: str) -> None:
    tree = copied("hmat-only-6.12", tmp_path / "g")
    folder = tree / "sys/devices/system/node/node2/access1/initiators"
    for name in ("read_bandwidth", "write_bandwidth", "write_latency"):
        (folder / name).write_text(f"{junk}\n")
    (folder / "read_latency").write_text("250\n")
    link = next(k for k in discover(roots_of(tree))["links"] if k["b"] == "memory2")
    assert link["latency_ns"] == 250 and not {"bytes_per_s", "read_bytes_per_s", "write_bytes_per_s", "write_latency_ns"} & set(
        link
    )
