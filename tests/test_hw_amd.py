"""AMD GPUs: the real package over a library of ours where both can be had, else answers in the words of its source."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import amdsmi_stub
from support.watched import Watched

from hoptrace.collectors.hardware.amd.gpus import AmdSource, load
from hoptrace.collectors.hardware.amd.metrics import FIELDS, by_link, value_of
from hoptrace.collectors.hardware.source import Roots


class AmdSmiLibraryException(Exception):
    """As amdsmi_exception.py has it."""

    def __init__(self, code: int) -> None:
        super().__init__(f"Error code:\n\t{code} | words")
        self.code = code

    def get_error_code(self) -> int:
        return self.code


METRICS: dict[str, Any] = {
    "common_header.format_revision": 1, "energy_accumulator": 1_000_000, "pcie_bandwidth_acc": "N/A",
    "pcie_replay_count_acc": 3, "current_gfxclk": "N/A", "current_gfxclks": [132, 140, "N/A"], "current_uclk": 900,
    "xgmi_read_data_acc": [1000, "N/A", 0, "N/A", "N/A", "N/A", "N/A", "N/A"], "xgmi_write_data_acc": [7] + ["N/A"] * 7,
    "average_socket_power": 65535, "current_socket_power": 141, "temperature_hotspot": "N/A", "throttle_status": True,
    "of_a_newer_release": 4,
}  # fmt: skip


class Smi:
    """Answers as amdsmi 7.0.2 does for two GPUs. ``opened``: how often it was; handles are new each time."""

    def __init__(self) -> None:
        self.error: int | None = None
        self.init_error: int | None = None
        self.vram_error: int | None = None
        self.metrics = dict(METRICS)
        self.opened = self.vram_calls = 0
        self.is_open = False

    def amdsmi_init(self) -> None:
        if self.init_error:
            raise AmdSmiLibraryException(self.init_error)
        self.opened += 1
        self.is_open = True

    def amdsmi_shut_down(self) -> None:
        self.is_open = False

    def amdsmi_get_processor_handles(self) -> list[str]:
        return [f"a{self.opened}", f"b{self.opened}"]

    def amdsmi_get_gpu_device_bdf(self, handle: str) -> str:
        return {"a": "0000:C1:00.0", "b": "0000:c5:00.0"}[handle[0]]

    def amdsmi_get_gpu_device_uuid(self, handle: str) -> str:
        return f"uuid-{handle[0]}"

    def amdsmi_get_energy_count(self, handle: str) -> dict[str, Any]:
        return {"energy_accumulator": 1_000_000, "counter_resolution": 15.25, "timestamp": 1}

    def amdsmi_get_gpu_metrics_info(self, handle: str) -> dict[str, Any]:
        self._may(handle)
        return self.metrics

    def amdsmi_get_gpu_vram_usage(self, handle: str) -> dict[str, Any]:
        self._may(handle)
        self.vram_calls += 1
        if self.vram_error:
            raise AmdSmiLibraryException(self.vram_error)
        return {"vram_total": 196592, "vram_used": 283}

    def _may(self, handle: str) -> None:
        if not self.is_open or handle[1:] != str(self.opened):
            raise AmdSmiLibraryException(32)
        if self.error and handle[0] == "b":
            raise AmdSmiLibraryException(self.error)


@pytest.fixture
def roots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Roots:
    monkeypatch.setattr(Roots, "live", True)
    (tmp_path / "sys/module/amdgpu").mkdir(parents=True)
    return Roots(tmp_path / "proc", tmp_path / "sys")


def test_what_two_gpus_say(roots: Roots, tmp_path: Path) -> None:
    smi = Smi()
    w = Watched(AmdSource(roots, lambda: smi), tmp_path / "t.trace")
    assert w.probe().sees == "2 GPUs"
    w.sample()
    last = w.last()
    rows = {(r["entity"], r["name"], r["direction"]): r["value_int"] for r in w.rows()}
    assert rows["xgmi:0000:c1:00.0/0", "data_bytes", "rx"] == 1_024_000, "1000 KiB"
    assert rows["xgmi:0000:c1:00.0/0", "data_bytes", "tx"] == 7168 and rows["xgmi:0000:c1:00.0/2", "data_bytes", "rx"] == 0
    assert ("xgmi:0000:c1:00.0/1", "data_bytes", "rx") not in rows
    assert last["pcie:0000:c1:00.0", "replays"] == 3 and last["pcie:0000:c1:00.0", "pcie_bandwidth_acc"] == "unsupported"
    assert last["gpu:uuid-a", "memory_used_bytes"] == 296_747_008 and last["gpu:uuid-a", "temperature_c"] == "unsupported"
    assert last["gpu:uuid-a", "energy_mj"] == 15_250.0, "a million counts of 15.25 µJ"
    assert last["gpu:uuid-a", "sm_clock_mhz"] == 132, "newer tables have one for each part of the GPU"
    assert last["gpu:uuid-a", "power_w"] == "unsupported", "all ones of 16 bits are no 65,535 W"
    assert last["gpu:uuid-a", "instant_power_w"] == 141 and last["gpu:uuid-a", "throttled"] == 1
    assert {r["unit"] for r in w.rows() if r["name"] == "pcie_bandwidth_acc"} == {"1"}
    assert not smi.is_open


def test_a_table_of_an_apu_has_other_units_and_is_not_read(roots: Roots, tmp_path: Path) -> None:
    smi = Smi()
    smi.metrics["common_header.format_revision"] = 2
    w = Watched(AmdSource(roots, lambda: smi), tmp_path / "t.trace")
    w.probe()
    w.sample()
    names = {n for _, n in w.last()}
    assert "instant_power_w" not in names and "memory_used_bytes" in names


def test_a_gpu_that_is_lost_and_comes_back_is_read_by_a_new_handle(roots: Roots, tmp_path: Path) -> None:
    smi = Smi()
    source = AmdSource(roots, lambda: smi)
    w = Watched(source, tmp_path / "t.trace")
    w.probe()
    w.sample()
    smi.error = 54
    w.sample(3)
    assert smi.opened == 1 and 0 < source._again_s < float("inf"), "looked for in a second, not at each beat"
    source._again_s = 0.0
    w.sample(2)
    assert smi.opened == 2 and source._wait_s == 2.0
    smi.error = None
    w.sample(2)
    source._again_s = 0.0
    w.sample()
    assert source._again_s == float("inf")
    assert w.values("gpu:uuid-b", "throttled") == [1, "lost", 1]
    assert w.values("gpu:uuid-a", "throttled") == [1], "the other is not lost"
    assert w.events() == [("device error", "gpu:uuid-b: Error code: 54 | words"), ("device", "gpu:uuid-b answers again")]
    lives = {
        r["incarnation"] for r in w.rows() if (r["entity"], r["name"]) == ("pcie:0000:c5:00.0", "replays") and r["value_int"]
    }
    assert len(lives) == 2, "its counters began anew: no difference spans the loss"


def test_a_driver_that_stays_away(roots: Roots, tmp_path: Path) -> None:
    smi = Smi()
    source = AmdSource(roots, lambda: smi)
    w = Watched(source, tmp_path / "t.trace")
    w.probe()
    w.sample()
    smi.error, smi.init_error = 54, 34
    w.sample()
    for _ in range(9):
        source._again_s = 0.0
        w.sample()
    assert source._wait_s == 60.0
    assert w.last()["gpu:uuid-a", "throttled"] == "lost", "the library is closed: the other GPU can't be read either"
    assert [d for k, d in w.events()] == ["gpu:uuid-b: Error code: 54 | words", "gpu:uuid-a: Error code: 32 | words"]


def test_memory_that_is_not_supported_is_asked_for_once(roots: Roots, tmp_path: Path) -> None:
    smi = Smi()
    smi.vram_error = 2
    source = AmdSource(roots, lambda: smi)
    w = Watched(source, tmp_path / "t.trace")
    w.probe()
    for _ in range(3):
        w.sample()
        for gpu in source._gpus:
            gpu.slow_due_s = 0.0
    assert smi.vram_calls == 2 and w.last()["gpu:uuid-a", "memory_used_bytes"] == "unsupported"


@pytest.mark.parametrize(
    ("code", "status", "remedy"),
    [
        (10, "denied", "add the user to the groups video and render"), (34, "absent", "see dmesg for amdgpu"),
        (7, "error", "see dmesg for amdgpu"),
    ],
)  # fmt: skip
def test_a_library_that_refuses(roots: Roots, code: int, status: str, remedy: str) -> None:
    smi = Smi()
    smi.init_error = code
    found = AmdSource(roots, lambda: smi).probe()
    assert (found.status, found.remedy, found.reason) == (status, remedy, f"amdsmi: Error code: {code} | words")


def test_a_package_without_its_library_or_none_at_all(roots: Roots) -> None:
    def no_library() -> Any:
        raise KeyError("libamd_smi.so")

    def no_package() -> Any:
        raise ModuleNotFoundError("amdsmi")

    assert "can't load libamd_smi.so (KeyError" in str(AmdSource(roots, no_library).probe().reason)
    assert AmdSource(roots, no_package).probe().reason == "the package amdsmi is not installed"


def test_a_machine_without_the_driver_is_not_asked(tmp_path: Path) -> None:
    found = AmdSource(Roots(tmp_path / "proc", tmp_path / "sys")).probe()
    assert not found.available and found.remedy
    if not Path("/sys/module/amdgpu").exists():
        assert AmdSource().probe().reason == "the driver amdgpu is not loaded"


@given(st.one_of(st.none(), st.text(), st.floats(), st.integers(), st.lists(st.integers()), st.booleans()))
def test_whatever_a_field_holds_is_a_value_or_none(value: Any) -> None:
    for bits in {f.bits for f in FIELDS.values()}:
        known = value_of(value, bits)
        assert known is None or (known == value and 0 <= known < (1 << bits) - 1)
    assert all(isinstance(v, int) for _, v in by_link(value))


@pytest.mark.skipif(amdsmi_stub.missing() is not None, reason=str(amdsmi_stub.missing()))
def test_amd_s_own_package_over_a_library_of_ours(tmp_path: Path) -> None:
    """The package's structures, "N/A"s and exceptions are its own; the GPU is lost and comes back."""
    amdsmi_stub.build(tmp_path / "rocm")
    (tmp_path / "rocm/sys/module/amdgpu").mkdir(parents=True)
    table = {
        "xgmi_read_data_acc": [5, 6], "xgmi_write_data_acc": [9], "pcie_nak_sent_count_acc": 2, "throttle_status": 0,
        "energy_accumulator": 2_000_000, "current_gfxclks": [2100], "temperature_hotspot": 55,
    }  # fmt: skip
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, str(here / "support/amdsmi_run.py"), str(tmp_path / "t.trace"), json.dumps(table)],
        capture_output=True, text=True, check=False,
        env=os.environ | {"ROCM_PATH": str(tmp_path / "rocm"), "PYTHONPATH": str(here)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert first == "Found(status='ok', reason=None, remedy=None, sees='1 GPUs')", "what it prints by itself is swallowed"
    told = json.loads(last)
    gpu, pcie = "gpu:fcff7460-0000-1000-80d1-2f3b9d2c9a11", "pcie:0000:c1:00.0"
    rows = {(e, n, d): (i if i is not None else f if f is not None else s) for e, n, d, i, f, s in told["rows"]}
    assert rows["xgmi:0000:c1:00.0/0", "data_bytes", "rx"] == 5120 and rows["xgmi:0000:c1:00.0/0", "data_bytes", "tx"] == 9216
    assert rows["xgmi:0000:c1:00.0/1", "data_bytes", "rx"] == 6144
    assert {e for e, *_ in rows} == {gpu, pcie, "xgmi:0000:c1:00.0/0", "xgmi:0000:c1:00.0/1"}
    assert rows[pcie, "naks_sent", None] == 2 and rows[pcie, "naks_received", None] == "unsupported"
    assert rows[pcie, "replays", None] == "unsupported", "all ones of 64 bits"
    assert (
        rows[gpu, "throttled", None] == 0
        and rows[gpu, "sm_clock_mhz", None] == 2100
        and rows[gpu, "power_w", None] == "unsupported"
    )
    assert rows[gpu, "temperature_c", None] == 55 and rows[gpu, "memory_total_bytes", None] == 196_592 << 20
    assert rows[gpu, "energy_mj", None] == pytest.approx(30_600, rel=1e-6), "the resolution is a float of 32 bits"
    assert [k for k, _ in told["events"]] == ["device error", "device"]
    assert "AMDSMI_STATUS_AMDGPU_RESTART_ERR" in told["events"][0][1]


@pytest.mark.skipif(amdsmi_stub.missing() is not None, reason=str(amdsmi_stub.missing()))
def test_the_package_without_a_library_says_nothing_on_its_own(capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    with pytest.raises(Exception, match="libamd_smi"):
        load()
    assert capfd.readouterr() == ("", "")
