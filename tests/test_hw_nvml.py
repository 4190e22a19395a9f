"""NVIDIA's GPUs through nvidia-ml-py and a stub of the driver's library: exact values, widths, what is not there, memory."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.nvml import GPUS, LINKS, PCIE, UUIDS, capture, compiled, two_gpus

from hoptrace.analysis.counters import counter_totals
from hoptrace.analysis.moves.ledger_links import link_uses
from hoptrace.collectors.hardware.nvidia.fields import decoded
from hoptrace.collectors.hardware.nvidia.nothing import Nothing
from hoptrace.collectors.hardware.source import Found

ALL_ONES = "18446744073709551615"
KIB = 1024
GRAPH = {
    "nodes": [{"name": "gpu0", "kind": "compute"}, {"name": "gpu1", "kind": "compute"}, {"name": "dram0", "kind": "dram"}],
    "links": [
        {"name": "pcie0", "a": "gpu0", "b": "dram0", "kind": "pcie", "bytes_per_s": 250_000_000, "entity": PCIE[0]},
        {"name": "nvlink0", "a": "gpu0", "b": "gpu1", "kind": "nvlink", "bytes_per_s": 25_000_000_000, "entity": LINKS[0][0]},
    ],
}


@pytest.mark.parametrize("flags", [(), ("-DOLD",)])
def test_the_stub_lays_out_its_structures_as_nvidia_ml_py_does(flags: tuple[str, ...]) -> None:
    library = compiled(*flags) / "libnvidia-ml.so.1"
    import pynvml

    text = ctypes.create_string_buffer(4096)
    assert 0 < ctypes.CDLL(str(library)).layouts(text, ctypes.c_size_t(len(text))) < len(text)
    lines = [line.split(" ") for line in text.value.decode().split("\n")]
    assert len(lines) == (7 if flags else 10)
    for name, size, *members in lines:
        theirs = getattr(pynvml, name)
        fields = [getattr(theirs, field) for field, _ in theirs._fields_]
        want = [f"{f.offset}:{f.size}" for f in fields]
        if name == "c_nvmlGpmMetricsGet_t":  # ends in a list, as long as there are metrics: of the stub's only one is laid out
            *want, rest = want
            *members, last = members
            assert last.split(":")[0] == rest.split(":")[0]
            assert int(rest.split(":")[1]) == pynvml.NVML_GPM_METRIC_MAX * int(last.split(":")[1])
        else:
            assert int(size) == ctypes.sizeof(theirs), name
        assert members == want, name


@given(st.integers(0, 6), st.integers(0, (1 << 64) - 1) | st.sampled_from([0, 0xFFFFFFFF, 1 << 31, 1 << 63, (1 << 64) - 1]))
def test_a_value_is_what_nvidia_ml_py_reads_there_or_none(kind: int, raw: int) -> None:
    pynvml = pytest.importorskip("pynvml", reason="needs nvidia-ml-py (the extra `nvidia`)")
    member = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")[kind]
    theirs = getattr(pynvml.c_nvmlValue_t.from_buffer_copy(raw.to_bytes(8, "little")), member)
    blank = {0: not math.isfinite(theirs), 1: theirs == 0xFFFFFFFF, 2: theirs == int(ALL_ONES), 3: theirs == int(ALL_ONES)}
    value, status = decoded(kind, raw, "gauge")
    assert (value, status) == (theirs, "ok") if not blank.get(kind) else value is None and status != "ok"
    counted, why = decoded(kind, raw, "cumulative")
    if kind == 1:
        assert (counted, why) == (theirs, "ok"), "32 bits of a count wrap"
    else:
        assert (counted, why) == ((None, "error") if value is not None and value < 0 else (value, status))


def test_bytes_of_each_nvlink_are_kept_apart_by_link_and_direction(tmp_path: Path) -> None:
    grown = {"f.0.138.0": "3:300", "f.0.139.1": "3:201", "f.1.138.1": "3:5000000000000", "f.1.139.0": "1:200"}
    wire = {"f.0.140.0": "3:110", "f.0.202.1": "3:77", "f.0.204.1": "3:78"}
    c = capture(tmp_path, two_gpus() | wire, {}, {"lines": grown})
    assert c.faults == {}
    assert [c.of(LINKS[0][0], "data_bytes", way) for way in ("tx", "rx")] == [[100 * KIB, 300 * KIB], [200 * KIB]]
    assert [c.of(LINKS[0][1], "data_bytes", way) for way in ("tx", "rx")] == [[101 * KIB], [201 * KIB]]
    assert [c.of(LINKS[1][1], "data_bytes", way) for way in ("tx", "rx")] == [[101 * KIB, 5_000_000_000_000 * KIB], [201 * KIB]]
    assert c.of(LINKS[0][0], "raw_bytes", "tx") == [110 * KIB], "with protocol: another counter"
    assert [c.of(LINKS[0][1], "nvlink5_bytes", way) for way in ("tx", "rx")] == [[77], [78]], "NVLink 5 counts bytes, not KiB"
    row = c.rows(LINKS[0][0], "data_bytes", "tx")[0]
    told = {k: row[k] for k in ("unit", "semantics", "width_bits", "source", "host")}
    assert told == {"unit": "bytes", "semantics": "cumulative", "width_bits": 64, "source": "nvml-0", "host": "h"}
    assert row["uncertainty_ns"] >= 0 and row["incarnation"].endswith("/580.82.07/0")
    # 32 bits of KiB are 42 bits of bytes; a value of another type is another series.
    assert c.column("width_bits", LINKS[1][0], "data_bytes", "rx") == [64, 42]
    assert {r["entity"] for r in c.counters if r["name"] == "data_bytes"} == {link for gpu in LINKS for link in gpu}


def test_links_to_the_cpu_are_told_one_by_one(tmp_path: Path) -> None:
    lines = {"f.1.170.0": "1:2", "f.1.171.0": "1:1", "f.1.171.1": "1:0", "f.1.232.1": "3:5", "gpm.1": "1", "g.1.100": "2"}
    c = capture(tmp_path, two_gpus() | lines, {}, {"lines": {"f.1.232.1": "3:6"}})
    assert [c.of(f"c2c:{UUIDS[1]}/{n}", "state") for n in range(2)] == [[1], [0]]
    assert [c.of(f"c2c:{UUIDS[1]}/{n}", "replay_errors") for n in range(2)] == [["unsupported"], [5, 6]]
    assert c.of(f"c2c:{UUIDS[1]}", "raw_bytes_per_s", "tx") == [2 << 20], "rates are of all links together"
    assert not any(r["entity"].startswith(f"c2c:{UUIDS[0]}") for r in c.counters), "a GPU that has none"


def test_links_that_are_not_told_one_by_one_are_told_as_their_sum(tmp_path: Path) -> None:
    lines = {k: v for k, v in two_gpus().items() if not k.startswith(("f.0.138", "f.0.139"))}
    c = capture(tmp_path, lines | {"f.0.138.4294967295": "3:7", "f.0.139.4294967295": "3:8"})
    assert c.of(f"nvlink:{UUIDS[0]}/all", "data_bytes", "tx") == [7 * KIB]
    assert c.of(f"nvlink:{UUIDS[0]}/all", "data_bytes", "rx") == [8 * KIB]
    assert c.of(LINKS[0][0], "data_bytes", "tx") == ["unsupported"]
    assert not any(r["entity"] == f"nvlink:{UUIDS[1]}/all" for r in c.counters), "else it would be counted twice"


def test_a_counter_that_wraps_is_told_apart_from_one_that_was_reset(tmp_path: Path) -> None:
    # PCIe 1.0 x1: 2^32 bytes take 17 s, so no two samples can be a whole range apart.
    slow = two_gpus() | {"gen.0": "1", "width.0": "1", "f.0.197.0": "1:4294967000", "f.0.198.0": "1:3000"}
    # The driver's type says 64 bits, but nvml.h that it may wrap: 32 until a value beyond was seen.
    slow |= {"f.1.197.0": "3:4294967295", "f.1.198.0": "3:4294967296"}
    c = capture(
        tmp_path, slow, {}, {"lines": {"f.0.197.0": "1:4294967295", "f.0.198.0": "1:5000", "f.0.138.0": "3:90"}},
        {"lines": {"f.0.197.0": "1:704", "f.0.198.0": "1:0", "f.1.197.0": "3:4294967296"}}, platform=GRAPH,
    )  # fmt: skip
    ways = ("tx", "rx")
    assert c.of(PCIE[0], "raw_bytes", "tx") == [4_294_967_000, 4_294_967_295, 704], "all ones of 32 bits are a count's value"
    assert c.of(PCIE[0], "raw_bytes", "rx") == [3000, 5000, 0]
    assert [c.column("width_bits", PCIE[0], "raw_bytes", way) for way in ways] == [[32], [32]]
    assert [c.column("width_bits", PCIE[1], "raw_bytes", way) for way in ways] == [[32, 64], [64]]
    assert c.said("ambiguous wrap") == []
    totals = {(r["entity"], r["name"], r["direction"]): r["total"] for r in counter_totals(c.trace).to_dicts()}
    assert [totals[PCIE[0], "raw_bytes", way] for way in ways] == [1000, 2000]
    used = {k.link: {w.counter.direction: w.counter for w in k.ways if w.counter} for k in link_uses(c.trace)[0]}
    sent, received = (used["pcie0"][way] for way in ways)
    assert (sent.counted_bytes, sent.falls) == (1000, 0), "beyond its end it went on"
    assert (received.counted_bytes, received.falls) == (None, 1), "the link can't have carried the rest of the range"
    assert used["nvlink0"]["tx"].falls == 1, "64 bits don't wrap"


def test_a_counter_that_may_have_gone_round_between_two_readings_is_told(tmp_path: Path) -> None:
    # PCIe 5.0 x16 carries 63 GB/s: 2^32 bytes in 68 ms, and it is read every 100.
    fast = two_gpus() | {"gen.0": "5", "width.0": "16", "gen.1": "5", "width.1": "16", "f.1.197.0": f"3:{1 << 32}"}
    c = capture(tmp_path, fast | {"f.1.198.0": f"3:{1 << 33}"}, {}, {}, every_s=0.1)
    (told,) = c.said("ambiguous wrap")
    assert told.startswith(f"{PCIE[0]}: raw_bytes wrap at 32 bits, at the link's full rate (63 GB/s) every 68.2 ms")


def test_absent_denied_and_zero_are_different(tmp_path: Path) -> None:
    lines = two_gpus() | {"f.0.140.0": "3:0", "f.0.186.0": "r:4", "f.0.83.0": "3:0", "f.0.75.0": "r:999"}
    lines.pop("f.0.139.0")
    c = capture(tmp_path, lines, {}, {"lines": {"f.0.139.0": "3:9", "f.0.75.0": "3:5000"}})
    assert c.of(LINKS[0][0], "raw_bytes", "tx") == [0] and c.of(GPUS[0], "energy_mj") == [0]
    assert c.of(LINKS[0][0], "data_bytes", "rx") == ["unsupported"], "and is not asked for again within the hour"
    assert c.of(GPUS[0], "power_mw") == ["denied"]
    assert c.of(GPUS[0], "thermal_throttle_ns") == ["error", 5000], "an error is"
    assert c.of(LINKS[0][0], "data_bytes", "tx") == [100 * KIB], "the others go on"
    assert len(c.rows(LINKS[0][0], "data_bytes", "rx")) == 1, "one row says it"


def test_values_that_are_none_are_dropped_and_counted_by_reason(tmp_path: Path) -> None:
    blank = {
        "f.0.138.0": f"3:{ALL_ONES}", "f.0.139.0": f"2:{ALL_ONES}", "f.0.186.0": "1:4294967295", "f.0.74.0": "0:nan",
        "f.0.75.0": "4:-1", "f.0.76.0": "9:1", "clock.0.1": "4294967295", "procs.0": f"4242:{ALL_ONES}",
    }  # fmt: skip
    c = capture(tmp_path, two_gpus() | blank, {}, {"lines": {"f.0.138.0": "3:40"}})
    assert c.of(LINKS[0][0], "data_bytes", "tx") == ["unsupported", 40 * KIB]
    assert c.of(LINKS[0][0], "data_bytes", "rx") == ["unsupported"]
    assert c.of(GPUS[0], "power_mw") == ["unsupported"] and c.of(GPUS[0], "sm_clock_mhz") == ["unsupported"]
    assert [c.of(GPUS[0], f"{why}_throttle_ns") for why in ("power", "thermal", "sync_boost")] == [["error"]] * 3
    assert c.of(GPUS[0], "other_processes") == [1] and c.of(GPUS[0], "other_processes_memory_bytes") == ["absent"]
    assert c.of(GPUS[1], "sm_clock_mhz") == [1980]
    assert set(c.dropped) == {
        "nvml-0: fields without a value (all ones, or none of their type)", "nvml-0: answers without a value (all ones)",
        "nvml-state-0: fields without a value (all ones, or none of their type)",
        "nvml-state-0: memory of processes without a value (all ones)",
    }  # fmt: skip
    assert all(n >= 2 for n in c.dropped.values())


def test_types_of_values_are_read_by_what_they_say(tmp_path: Path) -> None:
    first = {"f.0.186.0": "0:141.5", "f.0.83.0": "4:123456789012", "f.0.94.0": "5:7", "f.0.95.0": "6:65535"}
    c = capture(tmp_path, two_gpus() | first, {}, {"lines": {"f.0.186.0": "1:142", "f.0.83.0": "3:123456789013"}})
    assert c.of(GPUS[0], "power_mw") == [141.5, 142] and c.of(GPUS[0], "energy_mj") == [123456789012, 123456789013]
    assert (c.of(PCIE[0], "replays"), c.of(PCIE[0], "replay_rollovers")) == ([7], [65535])
    assert c.column("width_bits", PCIE[0], "replay_rollovers") == [16]


def test_memory_of_a_gpu_and_whose_it_is(tmp_path: Path) -> None:
    both = "{pid}:1000,77:400,77:24"  # 77 has two instances of the GPU
    c = capture(
        tmp_path, two_gpus() | {"procs.0": both, "drawing.0": "{pid}:1000,78:5", "procs.1": "{pid}:2000", "busy.0": "37"}, {},
        {"lines": {"procs.0": "77:400", "drawing.0": None}}, own_server=True,
    )  # fmt: skip
    names = ("total", "reserved", "used", "free")
    got = [c.of(GPUS[0], f"memory_{n}_bytes") for n in names]
    assert got == [[150754820096], [643825664], [33933459456], [116177534976]]
    mine = sorted({r["entity"] for r in c.counters if r["name"] == "gpu_memory_bytes"})
    assert [m.partition("/")[2] for m in mine] == list(GPUS) and len({m.partition("/")[0] for m in mine}) == 1, "one process"
    assert [c.of(m, "gpu_memory_bytes") for m in mine] == [[1000, "lost"], [2000]]
    assert c.of(GPUS[0], "other_processes") == [2, 1], "77 and 78, which draws"
    assert c.of(GPUS[0], "other_processes_memory_bytes") == [429, 400] and c.of(GPUS[1], "other_processes") == [0]
    assert c.of(GPUS[0], "kernel_active_percent") == [37] and c.of(GPUS[1], "kernel_active_percent") == ["unsupported"]
    assert c.of(GPUS[0], "memory_clock_mhz") == [3201] and c.of(GPUS[0], "throttle_reasons") == [4]
    assert (c.of(PCIE[0], "link_generation"), c.of(PCIE[0], "link_width")) == ([4], [8])


def test_rates_between_two_samples_where_the_gpu_has_them(tmp_path: Path) -> None:
    gpm = {"gpm.0": "1", "g.0.2": "55.5", "g.0.10": "80", "g.0.20": "3", "g.0.60": "10", "g.0.61": "20.5", "g.0.5": "nan"}
    c = capture(tmp_path, two_gpus() | gpm | {"win.1.0": "12", "win.1.1": "0"}, {}, {})
    why = c.found["nvml-gpm-1"]
    assert (why["status"], why["reason"]) == ("unsupported", "NVIDIA Stub has no performance monitoring through NVML")
    assert c.of(GPUS[0], "sm_active_ratio") == [0.555] and c.of(GPUS[0], "memory_active_ratio") == [0.8]
    assert c.of(PCIE[0], "raw_bytes_per_s", "tx") == [3 << 20]
    both = f"nvlink:{UUIDS[0]}/all"
    got = [c.of(both, "raw_bytes_per_s", way) for way in ("tx", "rx")]
    assert got == [[20.5 * (1 << 20)], [10 << 20]], "of NVLink the header names receive first"
    assert c.of(f"c2c:{UUIDS[0]}", "raw_bytes_per_s", "tx") == ["unsupported"] and c.of(GPUS[0], "tensor_active_ratio") == [
        "error"
    ]
    assert c.dropped["nvml-gpm-0: metrics without a value (no number, or below zero)"] >= 1
    (row, *_) = c.rows(both, "raw_bytes_per_s", "tx")
    assert (row["semantics"], row["unit"], row["window_ns"] % 100_000_000) == ("rate", "bytes/s", 0) and row["window_ns"]
    assert not any(r["source"] == "nvml-gpm-1" for r in c.counters)
    # The driver's own window of 20 ms, in KB of 1000 bytes; a GPU that has none says so at the start.
    assert c.found["nvml-pcie-0"]["status"] == "unsupported"
    assert [c.of(PCIE[1], "window_bytes_per_s", way) for way in ("tx", "rx")] == [[12_000], [0]]
    assert c.column("window_ns", PCIE[1], "window_bytes_per_s", "tx") == [20_000_000]


def test_a_driver_that_refuses_a_whole_list_is_asked_one_by_one(tmp_path: Path) -> None:
    odd = {"refused.0": "140", "gpm.1": "1", "g.1.2": "50", "g.1.100": "9", "g.first": "98"}
    c = capture(tmp_path, two_gpus() | odd, {}, {"lines": {"f.0.138.0": "3:300"}})
    assert c.faults == {} and c.of(LINKS[0][0], "data_bytes", "tx") == [100 * KIB, 300 * KIB]
    assert c.of(LINKS[0][1], "data_bytes", "rx") == [201 * KIB] and c.of(PCIE[0], "raw_bytes", "tx") == [1000]
    # Metrics that came after driver 550, in a list of an older one.
    assert c.of(GPUS[1], "sm_active_ratio") == [0.5] and c.of(f"c2c:{UUIDS[1]}", "raw_bytes_per_s", "tx") == ["unsupported"]


def test_an_xid_is_an_event_and_is_counted(tmp_path: Path) -> None:
    c = capture(
        tmp_path, two_gpus(), {}, {"lines": {"xid": "1:1:79"}}, {"lines": {"xid": "2:1:13"}}, {"lines": {"xid": "3:0:999"}}
    )
    who = [f"{gpu} ({pcie.removeprefix('pcie:')})" for gpu, pcie in zip(GPUS, PCIE, strict=True)]
    assert c.said("device error") == [
        f"{who[1]}: XID 79 (GPU has fallen off the bus)", f"{who[1]}: XID 13 (graphics engine exception)", f"{who[0]}: XID 999",
    ]  # fmt: skip
    assert c.of(GPUS[1], "xid_errors") == [0, 1, 2] and c.of(GPUS[0], "xid_errors") == [0, 1]


def test_an_old_driver_lacks_functions_and_the_rest_goes_on(tmp_path: Path) -> None:
    lines = two_gpus() | {"driver": "450.51", "procs.0": "5:6"}
    c = capture(tmp_path, lines, {}, folder=compiled("-DOLD"))
    assert c.faults == {} and c.found["nvml-0"]["sees"] == "NVIDIA Stub at 0000:17:00.0, 2 NVLinks", "links are tried one by one"
    assert c.found["nvml-events"]["status"] == "unsupported"
    assert "nvmlEventSetCreate: the driver's library has no such function (NVML 13)" in c.found["nvml-events"]["reason"]
    assert c.found["nvml-events"]["remedy"] == "a newer driver"
    assert c.of(LINKS[0][0], "data_bytes", "tx") == ["unsupported"] and c.of(PCIE[0], "raw_bytes", "tx") == ["unsupported"]
    assert c.of(GPUS[0], "sm_clock_mhz") == [1980], "a function that it has"
    assert c.of(GPUS[0], "throttle_reasons") == [4], "under its name until driver 535"
    assert c.of(GPUS[0], "memory_used_and_reserved_bytes") == [33933459456 + 643825664], "the first structure counts both as used"
    assert c.of(GPUS[0], "memory_used_bytes") == [] and c.of(GPUS[0], "other_processes") == [1]


@pytest.mark.parametrize(("driver", "first"), [("580.65.06", 251), ("580.82.07", 269)])
def test_throttled_time_is_asked_for_by_the_ids_of_the_driver(tmp_path: Path, driver: str, first: int) -> None:
    lines = two_gpus() | {"driver": driver} | {f"f.0.{n}.0": f"3:{n}" for n in (251, 252, 253, 269, 270, 271)}
    c = capture(tmp_path, lines)
    names = ("sw_thermal_throttle_ns", "hw_thermal_throttle_ns", "power_brake_throttle_ns")
    assert [c.of(GPUS[0], n) for n in names] == [[first + i] for i in range(3)]


def test_where_there_is_no_gpu_the_driver_is_not_said_to_have_come(tmp_path: Path) -> None:
    c = capture(tmp_path, {"count": "0", "driver": "580.82.07"})
    assert [(n, f["status"], f["reason"]) for n, f in c.found.items()] == [("nvml", "absent", "the driver sees no GPU")]
    assert c.found_later == c.found
    late = Nothing(Found("absent", "not loaded"), lambda: Found("ok"))
    assert not late.probe().available and late.probe().available, "a driver that is loaded later is told of"
