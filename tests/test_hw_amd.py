"""AMD's package in the words of its own source: what it returns, what it raises, and that its library is missing here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.watched import Watched

from hoptrace.collectors.hardware.amd.gpus import AmdSource
from hoptrace.collectors.hardware.source import Roots


class AmdSmiLibraryException(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"Error code: {code}")
        self.code = code

    def get_error_code(self) -> int:
        return self.code


METRICS: dict[str, Any] = {
    "energy_accumulator": 15259, "pcie_bandwidth_acc": "N/A", "pcie_replay_count_acc": 3, "current_gfxclk": 255,
    "xgmi_read_data_acc": [1000, "N/A", 0, "N/A", "N/A", "N/A", "N/A", "N/A"], "xgmi_write_data_acc": [7] + ["N/A"] * 7,
    "average_socket_power": 65535, "temperature_hotspot": "N/A", "of_a_newer_release": 4,
}  # fmt: skip


class Smi:
    """Answers as amdsmi 7.0.2 does for two GPUs."""

    def __init__(self) -> None:
        self.error: int | None = None
        self.init_error: int | None = None
        self.metrics = dict(METRICS)
        self.shut = False

    def amdsmi_init(self) -> None:
        if self.init_error:
            raise AmdSmiLibraryException(self.init_error)

    def amdsmi_shut_down(self) -> None:
        self.shut = True

    def amdsmi_get_processor_handles(self) -> list[str]:
        return ["a", "b"]

    def amdsmi_get_gpu_device_bdf(self, handle: str) -> str:
        return {"a": "0000:C1:00.0", "b": "0000:c5:00.0"}[handle]

    def amdsmi_get_gpu_device_uuid(self, handle: str) -> str:
        return f"uuid-{handle}"

    def amdsmi_get_gpu_metrics_info(self, handle: str) -> dict[str, Any]:
        if self.error and handle == "b":
            raise AmdSmiLibraryException(self.error)
        return self.metrics

    def amdsmi_get_gpu_vram_usage(self, handle: str) -> dict[str, Any]:
        if self.error and handle == "b":
            raise AmdSmiLibraryException(self.error)
        return {"vram_total": 196592, "vram_used": 283}


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
    assert rows["xgmi:0000:c1:00.0/0", "data_bytes", "rx"] == 1000 * 1024
    assert rows["xgmi:0000:c1:00.0/0", "data_bytes", "tx"] == 7 * 1024 and rows["xgmi:0000:c1:00.0/2", "data_bytes", "rx"] == 0
    assert ("xgmi:0000:c1:00.0/1", "data_bytes", "rx") not in rows
    assert last["pcie:0000:c1:00.0", "replays"] == 3 and last["pcie:0000:c1:00.0", "bandwidth_acc"] == "unsupported"
    assert last["gpu:uuid-a", "memory_used_bytes"] == 283 << 20 and last["gpu:uuid-a", "temperature_c"] == "unsupported"
    assert last["gpu:uuid-a", "sm_clock_mhz"] == 255, "all ones of a narrower field are a value here: the package knows the width"
    assert smi.shut


def test_a_gpu_that_is_lost_and_comes_back(roots: Roots, tmp_path: Path) -> None:
    smi = Smi()
    w = Watched(AmdSource(roots, lambda: smi), tmp_path / "t.trace")
    w.probe()
    w.sample()
    smi.error = 54
    w.sample(2)
    smi.error = None
    w.sample()
    assert w.values("gpu:uuid-b", "energy_accumulator") == [15259, "lost", 15259]
    assert w.values("gpu:uuid-a", "energy_accumulator") == [15259]
    assert w.events() == [("device error", "gpu:uuid-b: Error code: 54"), ("device", "gpu:uuid-b answers again")]


@pytest.mark.parametrize(
    ("code", "status", "remedy"),
    [(10, "denied", "add the user to the groups video and render"), (34, "absent", None), (7, "error", None)],
)  # fmt: skip
def test_a_library_that_refuses(roots: Roots, code: int, status: str, remedy: str | None) -> None:
    smi = Smi()
    smi.init_error = code
    found = AmdSource(roots, lambda: smi).probe()
    assert (found.status, found.remedy) == (status, remedy)


def test_a_package_without_its_library_or_none_at_all(roots: Roots) -> None:
    def no_library() -> Any:
        raise KeyError("libamd_smi.so")

    def no_package() -> Any:
        raise ModuleNotFoundError("amdsmi")

    assert "can't load its library (KeyError" in str(AmdSource(roots, no_library).probe().reason)
    assert AmdSource(roots, no_package).probe().reason == "the package amdsmi is not installed"


def test_a_machine_without_the_driver_is_not_asked(tmp_path: Path) -> None:
    found = AmdSource(Roots(tmp_path / "proc", tmp_path / "sys")).probe()
    assert not found.available and found.remedy
    if not Path("/sys/module/amdgpu").exists():
        assert AmdSource().probe().reason == "the driver amdgpu is not loaded"
