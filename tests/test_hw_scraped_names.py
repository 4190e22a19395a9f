"""What names mean, whoever prints them: every entry of the tables, literal values, the list in docs; files by their content."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.watched import Watched
from test_hw_scraped import HEAD, Exporter, exporter, served

from hoptrace.collectors.hardware.scraped import sources
from hoptrace.collectors.hardware.scraped.dcgm import DCGM, FIELDS
from hoptrace.collectors.hardware.scraped.docs import markdown
from hoptrace.collectors.hardware.scraped.followed import PcmSource
from hoptrace.collectors.hardware.scraped.hosts import CPU_TIMES, NODE
from hoptrace.collectors.hardware.scraped.known import meaning_of
from hoptrace.collectors.hardware.scraped.libraries import LIBRARIES, LMCACHE
from hoptrace.collectors.hardware.scraped.meaning import Meaning
from hoptrace.collectors.hardware.scraped.pcm_page import PCM
from hoptrace.collectors.hardware.source import Asked

__all__ = ["exporter"]


# -- the tables ------------------------------------------------------------------------------------------------------------

ALL: dict[str, Meaning] = {**DCGM, **NODE, **CPU_TIMES, **LIBRARIES, **LMCACHE, **PCM}
UNIT_OF_SUFFIX = {
    "_bytes_per_s": "bytes/s", "_bytes": "bytes", "_ns": "ns", "_ms": "ms", "_us": "us", "_uj": "uJ", "_mj": "mJ", "_w": "W",
    "_mhz": "MHz", "_ratio": "ratio", "_percent": "%", "_lanes": "lanes", "_cycles": "cycles", "_c": "°C", "_gt_per_s": "GT/s",
    "_tokens": "tokens",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(ALL))
def test_every_known_name_has_a_unit_that_its_own_name_agrees_with(name: str) -> None:
    m = ALL[name]
    assert m.unit and m.of and m.semantics in ("cumulative", "gauge", "rate")
    for suffix, unit in UNIT_OF_SUFFIX.items():
        if m.name.endswith(suffix):
            assert m.unit == unit
            break
    if m.unit == "bytes/s" and m.semantics == "gauge":
        assert m.name == "rate_bytes_per_s", "what a link can carry"
    if m.name in ("data_bytes", "raw_bytes", "nvlink5_bytes"):
        assert m.semantics == "cumulative" and m.direction is not None


@pytest.mark.parametrize(
    ("name", "read", "value", "unit", "semantics", "way"),
    [
        ("DCGM_FI_PROF_PCIE_TX_BYTES", 5.5, 5.5, "bytes/s", "rate", "tx"),
        ("DCGM_FI_PROF_PCIE_RX_BYTES_TOTAL", 5, 5, "bytes", "cumulative", "rx"),
        ("DCGM_FI_DEV_PCIE_RX_THROUGHPUT", 3, 3000, "bytes/s", "rate", "rx"),
        ("DCGM_FI_DEV_NVLINK_BANDWIDTH_L17", 2, 2_048_000, "bytes/s", "rate", None),
        ("DCGM_FI_DEV_NVLINK_TX_BANDWIDTH_TOTAL", 2, 2_048_000, "bytes/s", "rate", "tx"),
        ("DCGM_FI_PROF_NVLINK_L3_RX_BYTES", 7, 7, "bytes/s", "rate", "rx"),
        ("DCGM_FI_DEV_NVLINK_COUNT_TX_BYTES", 7, 7, "bytes", "cumulative", "tx"),
        ("DCGM_FI_DEV_FB_USED", 2, 2 << 20, "bytes", "gauge", None),
        ("DCGM_FI_DEV_BAR1_USED_BYTES", 2, 2, "bytes", "gauge", None),
        ("DCGM_FI_DEV_POWER_USAGE", 250.5, 250.5, "W", "gauge", None),
        ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 9, 9, "mJ", "cumulative", None),
        ("DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL", 9, 9000, "mJ", "cumulative", None),
        ("DCGM_FI_PROF_HOSTMEM_CACHE_HIT", 50, 0.5, "ratio", "rate", None),
        ("DCGM_FI_DEV_SM_CLOCK_HERTZ", 1_980_000_000, 1980.0, "MHz", "gauge", None),
        ("node_infiniband_port_data_transmitted_bytes_total", 8, 8, "bytes", "cumulative", "tx"),
        ("node_disk_io_time_seconds_total", 1.5, 1500, "ms", "cumulative", None),
        ("node_pressure_cpu_waiting_seconds_total", 0.25, 250_000_000, "ns", "cumulative", None),
        ("node_vmstat_pgpgin", 3, 3072, "bytes", "cumulative", None),
        ("node_vmstat_pgdemote_direct", 3, 3, "pages", "cumulative", None),
        ("node_pcidevice_current_link_transfers_per_second", 8e9, 8.0, "GT/s", "gauge", None),
        ("DRAM_Reads", 64, 64, "bytes", "cumulative", "read"), ("DRAM_Joules_Consumed", 1.5, 1_500_000, "uJ", "cumulative", None),
        ("agent_xfer_time_total", 7, 7, "us", "cumulative", None),
        ("mooncake_te_write_bytes_total", 7, 7, "bytes", "cumulative", "write"),
        ("lmcache_local_disk_write_bytes_total", 7, 7, "bytes", "cumulative", "write"),
    ],
)  # fmt: skip
def test_what_one_is(name: str, read: float, value: float, unit: str, semantics: str, way: str | None) -> None:
    m = meaning_of(name)
    assert m is not None
    assert m.value(read) == pytest.approx(value, rel=1e-12) and (m.unit, m.semantics, m.direction) == (unit, semantics, way)


@pytest.mark.parametrize(
    "name",
    ["DCGM_FI_DEV_GPU_UTIL_RATIO", "DCGM_FI_DEV_POWER_VIOLATION", "node_vmstat_nr_free_pages", "node_load1",
     "lmcache:retrieve_hit_rate", "Local_Memory_Bandwidth",
     "Utilization_Incoming_Data_Traffic_On_Link_0", "node_memory_numa_SwapFree", ""],
)  # fmt: skip
def test_what_has_no_sure_unit_is_not_known(name: str) -> None:
    assert meaning_of(name) is None


@pytest.mark.parametrize(
    ("line", "entity", "name", "way", "value"),
    [
        ('DRAM_Writes{socket="1",source="uncore"} 640', "imc:1", "data_bytes", "write", 640),
        ('Incoming_Data_Traffic_On_Link_2{aggregate="system",source="uncore",socket="0"} 64', "upi:0/2", "data_bytes", "rx", 64),
        ('Outgoing_Data_And_Non_Data_Traffic_On_Link_2{aggregate="system",source="uncore",socket="0"} 64', "upi:0/2",
         "raw_bytes", "tx", 64),
        ('Package_Joules_Consumed{socket="0",source="uncore"} 1.23457e+06', "rapl:package-0", "energy_uj",
         None, 1_234_570_000_000),
        ('node_pcidevice_current_link_width{bus="45",device="00",function="0",segment="0000"} 4', "pcie:0000:45:00.0",
         "link_width_lanes", None, 4),
        ('node_disk_read_bytes_total{device="nvme0n1"} 512', "block:nvme0n1", "data_bytes", "read", 512),
        ('node_cpu_seconds_total{cpu="3",mode="steal"} 0.5', "cpu:3", "steal_ns", None, 500_000_000),
        ('DCGM_FI_DEV_NVLINK_COUNT_RX_BYTES{UUID="GPU-1",nvlink="L4"} 9', "nvlink:GPU-1/4", "nvlink5_bytes", "rx", 9),
        ('lmcache_mp_l2_usage_bytes{l2_name="nvme"} 9', "lmcache/nvme", "l2_used_bytes", None, 9),
    ],
)  # fmt: skip
def test_whose_it_is(exporter: Exporter, tmp_path: Path, line: str, entity: str, name: str, way: str | None, value: int) -> None:
    (row,) = [r for r in served(exporter, tmp_path, line + "\n").rows() if r["name"] != "page"]
    assert (row["entity"], row["name"], row["direction"], row["value_int"]) == (entity, name, way, value)


@pytest.mark.parametrize("device", ["sda1", "nvme0n1p2", "nvme0c0n1", "dm-0", "md127", "loop3", "zram0", "vdb12", "mmcblk0p1"])
def test_what_would_count_bytes_twice_keeps_its_name(device: str) -> None:
    assert NODE["node_disk_read_bytes_total"].entity({"device": device}) is None


def test_a_connector_s_series_keep_their_names_and_get_units(exporter: Exporter, tmp_path: Path) -> None:
    w = served(
        exporter, tmp_path, 'vllm:nixl_bytes_transferred_sum{engine="0"} 4096\nvllm:nixl_xfer_time_seconds_sum{engine="0"} 0.5\n'
        'sglang:kv_transfer_latency_ms_sum 3\nlmcache:remote_time_to_get_sum 8\nnccl_bus_bandwidth_gbs{gpu="GPU0"} 40.5\n',
    )  # fmt: skip
    rows = {r["name"].split("{")[0]: (r["unit"], r["semantics"]) for r in w.rows() if r["name"] != "page"}
    assert rows == {
        "vllm:nixl_bytes_transferred_sum": ("bytes", "cumulative"), "vllm:nixl_xfer_time_seconds_sum": ("s", "cumulative"),
        "sglang:kv_transfer_latency_ms_sum": ("ms", "cumulative"), "lmcache:remote_time_to_get_sum": ("ms", "cumulative"),
        "nccl_bus_bandwidth_gbs": ("GB/s", "gauge"),
    }  # fmt: skip


def test_the_list_of_names_is_up_to_date() -> None:
    path = Path(__file__).parents[1] / "docs" / "scrape-names.md"
    assert path.read_text(encoding="utf-8") == markdown(), (
        f"python -m hoptrace.collectors.hardware.scraped.docs > docs/{path.name}"
    )


def test_the_list_has_every_field_and_name() -> None:
    text = markdown()
    for names, _ in FIELDS.values():
        assert all(f"`{re.sub(r'_L[0-9]+(?=_|$)', '_LN', n)}`" in text for n in names)
    assert all(f"`{name}`" in text for name in (*NODE, *LIBRARIES, *LMCACHE, *PCM))


# -- files -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "source"),
    [
        ("x", "vm:4711:\n  runtime: 5\n\n", "ucx x"), ("x", "\nvm:4711:uct_ep:{am:1 } \n", "ucx x"),
        ("ucx.txt", "", "ucx ucx.txt"),
        ("x", HEAD, "pcm x"), ("x", "2026-12-01,10:00:00.1,1,2\n", "pcm x"), ("x", "10:00:00,5\n", "pcm x"), ("x", "", "pcm x"),
        ("x", "\x00\x01\x02", "pcm x"), ("ucx.csv", HEAD, "pcm ucx.csv"),
    ],
)  # fmt: skip
def test_a_file_is_known_by_its_content(tmp_path: Path, name: str, text: str, source: str) -> None:
    (tmp_path / name).write_text(text)
    (found,) = sources(Asked(files=(tmp_path / name,)))
    assert found.name == source


def test_a_csv_that_becomes_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "counters"
    (source,) = sources(Asked(files=(path,)))
    path.write_text("vm:4711:\n  runtime: 5\n\n")
    assert source.name == "pcm counters" and source.probe().status == "unsupported"


def test_a_csv_of_odd_cells(tmp_path: Path) -> None:
    path = tmp_path / "pcm.csv"
    path.write_text(HEAD)
    w = Watched(PcmSource(path), tmp_path / "t.trace")
    w.sample()
    with path.open("a") as f:
        f.write("d,t,nan,inf,1e308,-\nd,t,x\nd,t," + "y" * 200_000 + "\n\nd,t,1,2,3,4,5,6,7,8\nd,t,1,2,3,4\n")
    w.sample()
    assert w.values("pcm:SKT0", "Mem Read (MB/s)") == ["absent", "error", 1e6]
    assert w.values("pcm:SKT0", "Mem Write (MB/s)") == ["error", 2e6]
    assert w.values("pcm:System", "CXL.mem_P0Read (MB/s)") == ["error", 3e6]


def test_a_csv_that_goes_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "pcm.csv"
    path.write_text(HEAD)
    w = Watched(PcmSource(path), tmp_path / "t.trace")
    w.sample()
    with path.open("a") as f:
        f.write("d,t,1,2,3,4\n")
    w.sample()
    path.rename(tmp_path / "elsewhere")
    w.sample(2)
    path.write_text(HEAD + "d,t,5,6,7,8\n")
    w.sample()
    assert w.values("pcm:SKT0", "Mem Read (MB/s)") == [1e6, "absent", 5e6]
    assert [k for k, _ in w.events()] == ["metrics vanished", "gap", "metrics"]
