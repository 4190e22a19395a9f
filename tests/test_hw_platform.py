"""The graph in a manifest, what a replay on the trace's own machine computes with, and what it refuses."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command import run
from support.workloads import MS

from hoptrace.errors import InputError
from hoptrace.manifest import Manifest, ReplayInfo, Server
from hoptrace.model_catalogue import load_model
from hoptrace.platform import Link, Node, component, graph_of, platforms
from hoptrace.platform_file import checked
from hoptrace.platform_seen import DEVICES, device_named, platform_seen
from hoptrace.reader import open_trace
from hoptrace.replay.cost import choose
from hoptrace.writer import TraceWriter

GEN4_X16 = 16e9 * 128 / 130 * 16 / 8
H100 = "NVIDIA H100 80GB HBM3"
Graph = dict[str, list[Any]]


def node(model: str = H100, gpus: int = 8, nvlinks: int = 12, pcie: float | None = GEN4_X16, nic: float = 50e9) -> Graph:
    """A node as `topology.discover` writes it. NVLinks at 26.562 GB/s, as NVML tells of generation 4 before the encoding."""
    nodes: list[Any] = [
        {"name": "socket0", "kind": "compute", "model": "Intel(R) Xeon(R) Platinum 8480C", "cores": 112},
        {"name": "dram0", "kind": "dram", "numa": 0, "capacity_bytes": 1 << 40},
        {"name": "nvswitch", "kind": "switch"},
    ]
    links: list[Any] = []
    for i in range(gpus):
        uuid, bdf = f"GPU-{i:08x}", f"0000:{16 + i:02x}:00.0"
        nodes.append({"name": f"gpu{i}", "kind": "compute", "model": model, "uuid": uuid, "bdf": bdf, "numa": 0})
        nodes.append({"name": f"hbm{i}", "kind": "hbm", "capacity_bytes": 85_520_809_984})
        links.append({"name": f"gpu{i}-hbm{i}", "a": f"gpu{i}", "b": f"hbm{i}", "kind": "hbm"})
        host = {"name": f"gpu{i}-dram0", "a": f"gpu{i}", "b": "dram0", "kind": "pcie", "entity": f"pcie:{bdf}",
                "generation": 4, "width": 16, "source": "PCIe generation and width (NVML)"}  # fmt: skip
        links.append(host if pcie is None else host | {"bytes_per_s": pcie})
        links += [
            {"name": f"gpu{i}-nvlink{k}", "a": f"gpu{i}", "b": "nvswitch", "kind": "nvlink", "entity": f"nvlink:{uuid}/{k}",
             "bytes_per_s": 26.562e9, "source": "NVML"}
            for k in range(nvlinks)
        ]  # fmt: skip
        nodes.append({"name": f"mlx5_{i}", "kind": "nic", "numa": 0})
        links.append({"name": f"mlx5_{i}/1", "a": f"mlx5_{i}", "b": "network", "kind": "infiniband", "bytes_per_s": nic})
    return {"nodes": nodes, "links": links, "coherent": [["socket0", "dram0"]]}


def seen(graph: Any, **more: Any) -> tuple[dict[str, Any] | None, str]:
    found, said = platform_seen(Manifest(origin="recorded", platform=graph, **more))
    return found, "\n".join(said)


# The graph


def test_what_the_graph_tells_of_nodes_and_links() -> None:
    graph = graph_of(Manifest(origin="recorded", platform=node(gpus=1, nvlinks=1)))
    assert graph.nodes["gpu0"] == Node(
        "gpu0", "compute", model=H100, uuid="GPU-00000000", numa=0, bdf="0000:10:00.0"
    )  # fmt: skip
    assert graph.nodes["socket0"].cores == 112
    link = graph.links["gpu0-dram0"]
    assert (link.generation, link.width, link.source) == (4, 16, "PCIe generation and width (NVML)")
    assert graph.coherent == (("socket0", "dram0"),)


def test_older_graphs_and_damaged_ones() -> None:
    graph = graph_of(Manifest(origin="recorded", platform={"nodes": [{"name": "client", "kind": "client"}]}))
    assert graph.nodes == {"client": Node("client", "client")} and graph.links == {} and graph.coherent == ()
    bad = {
        "nodes": [{"name": "gpu0", "model": 7, "uuid": None, "numa": -1, "bdf": ["x"]}],
        "links": [{"name": "k", "generation": "4", "width": float("nan"), "read_bytes_per_s": float("inf"), "source": 3}],
        "coherent": ["dram0", None, ["dram0"], ["a", 3, "b"]],
    }
    graph = graph_of(Manifest(origin="recorded", platform=bad))
    assert graph.nodes["gpu0"] == Node("gpu0") and graph.links["k"] == Link("k") and graph.coherent == (("a", "b"),)


# What it is replayed on


def test_eight_h100_on_pcie_gen4_with_twelve_nvlinks_each() -> None:
    found, said = seen(node())
    assert found is not None and checked(found, "found") == found
    assert (found["name"], found["base"]) == ("h100-sxm-80gb-as-found", "h100-sxm-80gb")
    assert (found["flops_per_s"], found["memory_bytes_per_s"]) == (989e12, 3350e9)
    assert found["memory_bytes"] == 85_520_809_984
    pcie = found["links"]["pcie"]
    # 31.508 of 63.0 GB/s: a half of what is attained (55, both ways 83.4 and 68.5, to a peer 49).
    assert pcie["bytes_per_s"] == pytest.approx(31.5077e9, rel=1e-5)
    rates = {k: round(v / 1e9, 3) for k, v in pcie.items() if k != "source"}
    assert rates == {
        "bytes_per_s": 31.508, "attained_bytes_per_s": 27.507, "both_bytes_per_s": 41.71, "both_kernel_bytes_per_s": 34.258,
        "peer_bytes_per_s": 24.506,
    }  # fmt: skip
    assert "PCIe Gen4 x16" in pcie["source"] and "(NVML)" in pcie["source"] and "an assumption" in pcie["source"]
    # Two thirds of 450 GB/s: NVML's 26.562 of a link is before the encoding.
    assert found["links"]["peer"]["bytes_per_s"] == 300e9 and "12 of 18 NVLinks" in found["links"]["peer"]["source"]
    assert found["links"]["nic"]["bytes_per_s"] == 50e9 and found["links"]["nic"]["attained_bytes_per_s"] == 44e9
    assert "expander" not in found and "pool" not in found
    for words in (
        "8 × NVIDIA H100 80GB HBM3", "links.pcie: 31.51 GB/s instead of 63", "in proportion (assumed)",
        "links.peer: 300 GB/s instead of 450", "all-reduces are the catalogue's", "No CXL memory was found",
    ):  # fmt: skip
        assert words in said, words


def test_what_is_not_less_is_the_catalogues() -> None:
    found, said = seen(node(nvlinks=18, pcie=GEN4_X16 * 2))
    usual = component("h100-sxm-80gb")
    assert found is not None and {k: found["links"][k] for k in ("pcie", "peer")} == usual["links"]
    assert "instead of" not in said and found["constants"] == usual["constants"]


def test_one_narrow_link_is_the_rate_of_all() -> None:
    graph = node(gpus=2, nvlinks=18, pcie=GEN4_X16 * 2)
    graph["links"] = [k for k in graph["links"] if k["name"] != "gpu1-nvlink7"]
    next(k for k in graph["links"] if k["name"] == "gpu1-dram0")["bytes_per_s"] = GEN4_X16 / 2
    found, said = seen(graph)
    assert found is not None and found["links"]["peer"]["bytes_per_s"] == 425e9
    assert found["links"]["pcie"]["bytes_per_s"] == GEN4_X16 / 2 and "gpu1-dram0" in said


def test_what_is_not_told_is_not_made_up() -> None:
    graph = node(nvlinks=0, pcie=None)
    graph["links"] = [k for k in graph["links"] if k["kind"] != "infiniband"]
    found, said = seen(graph)
    assert found is not None and "peer" not in found["links"] and "nic" not in found
    assert found["links"]["pcie"]["bytes_per_s"] == 63e9
    assert "rate to peers is not known" in said and "carry is not told" in said and "No RDMA adapter was found" in said
    # Pairs of nvidia-smi topo -m: of a switch every pair names the same links.
    pairs = {"nodes": graph["nodes"], "links": [{"name": "x", "a": "gpu0", "b": "gpu1", "kind": "nvlink", "width": 12}]}
    found, _ = seen(pairs)
    assert found is not None and "peer" not in found["links"]


def test_slower_adapters() -> None:
    found, said = seen(node(nic=25e9))
    assert found is not None
    rates = {k: v for k, v in found["links"]["nic"].items() if k != "source"}
    assert rates == {"bytes_per_s": 25e9, "attained_bytes_per_s": 22e9, "together_bytes_per_s": 11.875e9}
    assert "links.nic: 25 GB/s instead of 50" in said


def test_cxl_memory_by_the_firmwares_figures() -> None:
    graph = node()
    graph["nodes"] += [{"name": "cxl2", "kind": "cxl", "numa": 2}, {"name": "cxl3", "kind": "cxl", "numa": 3}]
    told = {"a": "socket0", "kind": "cxl", "source": "HMAT"}
    graph["links"] += [
        told | {"name": "socket0-cxl2", "b": "cxl2", "latency_ns": 255, "read_bytes_per_s": 25.6e9, "write_bytes_per_s": 20e9},
        told | {"name": "socket0-cxl3", "b": "cxl3", "latency_ns": 240, "read_bytes_per_s": 30e9, "write_bytes_per_s": 21e9},
    ]
    found, said = seen(graph)
    assert found is not None and checked(found, "found")
    assert found["constants"]["cxl_load_ns"] == {"value": 255, "low": 240, "high": 255, "source": "HMAT."}
    rates = {k: v for k, v in found["links"]["cxl"].items() if k != "source"}
    assert rates == {"bytes_per_s": 25.6e9, "read_bytes_per_s": 25.6e9, "write_bytes_per_s": 20e9}
    assert "expander" in found and "latency and bandwidth as the firmware tells it" in said
    for link in graph["links"][-2:]:
        for key in ("latency_ns", "read_bytes_per_s", "write_bytes_per_s"):
            del link[key]
    found, said = seen(graph)
    assert found is not None and "cxl_load_ns" not in found["constants"] and "cxl" not in found["links"]
    assert "latency and bandwidth is not told; that of the catalogue's expander is assumed" in said


def test_names_are_matched_whole() -> None:
    assert set(DEVICES.values()) <= set(platforms())
    assert device_named("NVIDIA A100 80GB PCIe") == "a100-pcie-80gb" and device_named("A100-SXM4-80GB") == "a100-sxm-80gb"
    assert device_named("  NVIDIA   H200 ") == "h200-sxm"
    for other in ("NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-40GB", "NVIDIA", "", None,
                  "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GH200 144G HBM3e", "NVIDIA B200 NVL"):  # fmt: skip
        assert device_named(other) is None, other


@given(st.sampled_from(sorted(DEVICES)), st.integers(1, 8), st.integers(0, 20), st.floats(1e9, 1e12), st.floats(1e9, 1e12))
def test_a_machine_is_never_better_than_the_catalogue(model: str, gpus: int, nvlinks: int, pcie: float, nic: float) -> None:
    found, _ = seen(node(model, gpus, nvlinks, pcie, nic))
    assert found is not None and checked(found, "found") == found
    usual = component(DEVICES[model])
    for name, link in found["links"].items():
        most = component("nic-hdr200" if "a100" in DEVICES[model] else found["nic"]) if name == "nic" else usual
        for key, value in link.items():
            assert key == "source" or value <= most["links"][name][key] * (1 + 1e-12)


# What is refused


def test_several_kinds_of_gpus_are_refused_by_name() -> None:
    graph = node(gpus=2)
    next(n for n in graph["nodes"] if n["name"] == "gpu1")["model"] = "NVIDIA A100-SXM4-80GB"
    found, said = seen(graph)
    assert found is None and "gpu0 (NVIDIA H100 80GB HBM3); gpu1 (NVIDIA A100-SXM4-80GB): several kinds of GPUs" in said
    manifest = Manifest(origin="recorded", platform=graph)
    with pytest.raises(InputError, match=r"from-trace: .*several kinds of GPUs"):
        choose("roofline", None, load_model("llama-3.1-8b").on(Server(name="s")), platform="from-trace", manifest=manifest)


def test_gpus_of_no_known_name_and_no_gpus() -> None:
    assert seen(node("NVIDIA H100 NVL", 1)) == (None, "gpu0 (NVIDIA H100 NVL): the catalogue has no GPU of that name.")
    cpu = {"nodes": [{"name": "socket0", "kind": "compute", "model": "AMD EPYC", "cores": 2}, {"name": "dram0", "kind": "dram"}]}
    assert seen(cpu) == (None, "socket0 (AMD EPYC, 2 CPUs): no rates are known of it.")
    manifest = Manifest(origin="recorded", platform=cpu)
    own = load_model("llama-3.1-8b").on(Server(name="s"))
    with pytest.raises(InputError, match=r"recorded on\. socket0 \(AMD EPYC, 2 CPUs\): no rates are known of it") as e:
        choose("roofline", None, own, platform="from-trace", manifest=manifest)
    assert "--platform" in (e.value.hint or "")
    assumed = choose("roofline", None, own, manifest=manifest)
    assert any("socket0 (AMD EPYC, 2 CPUs)" in n and "h100-sxm-80gb is assumed" in n for n in assumed.notes)


@pytest.mark.parametrize("graph", [{}, {"nodes": [{"name": "client", "kind": "client"}], "links": []}, {"nodes": 3}])
def test_an_older_trace(graph: Any) -> None:
    assert seen(graph) == (None, "")
    with pytest.raises(InputError, match=r"from-trace: the trace does not say what machine it was recorded on\. Name it"):
        choose("roofline", None, load_model("llama-3.1-8b").on(Server(name="s")), platform="from-trace",
               manifest=Manifest(origin="recorded", platform=graph))  # fmt: skip


def test_a_figure_out_of_all_proportion() -> None:
    found, said = seen(node(pcie=5.0))
    assert found is None and "links.pcie" in said


def test_a_replay_is_of_the_platform_that_it_was_made_for() -> None:
    h200 = component("h200-sxm")
    made = {"parent": "p", "policy": {}, "cost_model": {"kind": "roofline", "platform": h200}}
    found, said = seen(node(), replay=ReplayInfo(**made))
    assert found == h200 and "made for h200-sxm" in said
    found, _ = seen(node(), replay=ReplayInfo(parent="p", policy={}, cost_model={"kind": "fitted"}))
    assert found is not None and found["base"] == "h100-sxm-80gb"
    found, said = seen(node(), replay=ReplayInfo(parent="p", policy={"platform": "mine.toml"}, cost_model={}))
    assert found is None and "mine.toml" in said


# Step costs


def test_step_costs_from_the_trace() -> None:
    own = load_model("llama-3.1-8b").on(Server(name="s"))
    manifest = Manifest(origin="recorded", platform=node(), servers=[own])
    for platform in ("from-trace", None):
        got = choose("roofline", None, own, platform=platform, manifest=manifest)
        assert got.how["platform"]["name"] == "h100-sxm-80gb-as-found" and any("Platform from the trace" in n for n in got.notes)
        assert (got.server.kv_capacity_tokens or 0) == (int(0.92 * 85_520_809_984) - 16_060_522_496) // 131_072
    got = choose("roofline", None, own, manifest=manifest, recorded_on="h200-sxm")
    assert got.how["platform"]["name"] == "h200-sxm"
    rows = [(1, 64 + i, 0, i % 3, 100 * (i % 3), 0, 5_000_000 + 10_000 * i) for i in range(80)]
    names = ["prefill_requests", "prefill_tokens", "prefill_context_tokens", "decode_requests", "decode_context_tokens"]
    steps = pl.DataFrame(rows, schema=[*names, "start_ns", "end_ns"], orient="row")
    fitted = choose("fitted", steps, own, platform="h200-sxm", manifest=manifest)
    assert fitted.how["recorded_on"]["name"] == "h100-sxm-80gb"
    assert choose("fitted", steps, own, platform="from-trace", manifest=manifest).how == {"kind": "fitted"}
    assert choose("fitted", steps, own, platform="h100-sxm-80gb", manifest=manifest).how == {"kind": "fitted"}


# The command line


def trace(path: Path, graph: Any) -> Path:
    own = load_model("llama-3.1-8b").on(Server(name="gpu", kv_capacity_tokens=4096, block_size_tokens=16, prefix_caching=True))
    rows = [
        {"request": i, "arrival_ns": i * 50 * MS, "arrival_of": "received", "received_ns": i * 50 * MS, "prompt_tokens": 600 + i,
         "output_tokens": 5, "source": "t"}
        for i in range(6)
    ]  # fmt: skip
    manifest = Manifest(origin="recorded", servers=[own], platform=graph)
    with TraceWriter(path, manifest) as out:
        out.append("requests", rows)
    return path


def test_a_replay_on_the_traces_own_machine(tmp_path: Path) -> None:
    recorded = trace(tmp_path / "t.trace", node())
    out = tmp_path / "split.trace"
    p = run("replay", recorded, "--cost", "roofline", "--platform", "from-trace", "--set", "split.prefill=1", "--set",
            "split.decode=1", "-o", out, "--intervals", "0")  # fmt: skip
    assert p.returncode == 0, p.stderr
    assert "links.pcie: 31.51 GB/s instead of 63" in p.stdout
    made = open_trace(out).manifest
    assert made.replay is not None
    assert made.replay.cost_model["platform"]["name"] == made.replay.policy["platform"]["name"] == "h100-sxm-80gb-as-found"
    rates = {k.name: k.bytes_per_s for k in graph_of(made).links.values() if "@" in k.name}
    assert rates["pcie.d2h@prefill-0"] == pytest.approx(55e9 * GEN4_X16 / 63e9, rel=1e-9)
    assert rates["nic.tx@prefill-0"] == rates["nic.rx@decode-0"] == 44e9
    assert any("PCIe Gen4 x16" in s for s in made.replay.policy["sources"])
    # A replay of it goes by the same machine (law 3).
    again = tmp_path / "again.trace"
    p = run("replay", out, "--cost", "roofline", "--platform", "from-trace", "-o", again, "--intervals", "0")
    assert p.returncode == 0, p.stderr
    more = open_trace(again).manifest
    assert more.replay is not None and more.replay.policy["platform"] == made.replay.policy["platform"]
    assert {k.name: k.bytes_per_s for k in graph_of(more).links.values() if "@" in k.name} == rates


def test_what_a_replay_on_the_traces_own_machine_refuses(tmp_path: Path) -> None:
    cpu = {"nodes": [{"name": "socket0", "kind": "compute", "model": "AMD EPYC", "cores": 2}]}
    recorded = trace(tmp_path / "t.trace", cpu)
    p = run("replay", recorded, "--cost", "fixed:5,2", "--platform", "from-trace", "--policy", "pd-1-1", "-o", tmp_path / "a",
            "--set", "split.link=[]")  # fmt: skip
    assert p.returncode != 0
    p = run("replay", recorded, "--cost", "fixed:5,2", "--platform", "from-trace", "--set", "split.prefill=1", "--set",
            "split.decode=1", "-o", tmp_path / "b")  # fmt: skip
    assert p.returncode == 3 and "socket0 (AMD EPYC, 2 CPUs): no rates are known of it" in p.stderr, p.stderr
    p = run("platforms", "--show", recorded)
    assert p.returncode == 3 and "socket0 (AMD EPYC, 2 CPUs): no rates are known of it" in p.stderr
    # Without CXL memory in the machine a tier in it is refused.
    recorded = trace(tmp_path / "u.trace", node())
    policy = tmp_path / "tier.toml"
    policy.write_text('[[tiers]]\nkind = "cxl_expander"\ncapacity_tokens = 10000\n')
    p = run("replay", recorded, "--cost", "roofline", "--platform", "from-trace", "--policy", policy, "-o", tmp_path / "c")
    assert p.returncode == 3 and "h100-sxm-80gb-as-found" in p.stderr, p.stderr


def test_show(tmp_path: Path) -> None:
    recorded = trace(tmp_path / "t.trace", node())
    p = run("platforms", "--show", recorded)
    assert p.returncode == 0, p.stderr
    found = tomllib.loads(p.stdout)
    want, _ = seen(node())
    assert want is not None and found == {k: v for k, v in want.items() if k != "base"}
    assert p.stdout.startswith("# Platform from the trace: 8 × NVIDIA H100 80GB HBM3")
    mine = tmp_path / "mine.toml"
    mine.write_text(p.stdout, encoding="utf-8")
    assert component(str(mine)) == found
    assert json.loads(run("platforms", "--show", recorded, "--json").stdout) == found
