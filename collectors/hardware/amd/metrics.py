"""Fields of amdsmi_get_gpu_metrics_info that are kept, with unit and width.

They are the tables gpu_metrics_v1_x of the amdgpu driver (drivers/gpu/drm/amd/include/kgd_pp_interface.h). Tables of format 2 and
3 are of APUs, whose power is in mW and whose temperatures are in hundredths: they are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hoptrace.collectors.hardware.sink import Direction, Semantics

__all__ = ["FIELDS", "KILOBYTE", "LINKS", "Field", "by_link", "format_of", "value_of"]

KILOBYTE = 1024
"""The header says KiloBytes and no more; if it meant 1,000 bytes, ours are 2.4 % too many."""


@dataclass(frozen=True, slots=True)
class Field:
    """``kind``: of the entity. ``bits``: its width in the table, of which all ones mean that there is none. ``instead``: the
    field that newer tables have for it."""

    kind: Literal["gpu", "pcie"]
    name: str
    unit: str
    semantics: Semantics
    bits: int
    instead: str | None = None


# pcie_bandwidth_acc is a sum of GB/s up to table 1.5 and of Mbit/s from 1.6 on, one for each step of the accumulation counter: no
# bytes can be told from it, so it keeps its own name and no unit. Residencies count steps of that counter too.
FIELDS: Mapping[str, Field] = {
    "pcie_bandwidth_acc": Field("pcie", "pcie_bandwidth_acc", "1", "cumulative", 64),
    "pcie_replay_count_acc": Field("pcie", "replays", "times", "cumulative", 64),
    "pcie_replay_rover_count_acc": Field("pcie", "replay_rollovers", "times", "cumulative", 64),
    "pcie_l0_to_recov_count_acc": Field("pcie", "l0_to_recovery", "times", "cumulative", 64),
    "pcie_nak_sent_count_acc": Field("pcie", "naks_sent", "times", "cumulative", 32),
    "pcie_nak_rcvd_count_acc": Field("pcie", "naks_received", "times", "cumulative", 32),
    "accumulation_counter": Field("gpu", "accumulation_counter", "steps", "cumulative", 64),
    "prochot_residency_acc": Field("gpu", "prochot_residency", "steps", "cumulative", 64),
    "ppt_residency_acc": Field("gpu", "power_limit_residency", "steps", "cumulative", 64),
    "socket_thm_residency_acc": Field("gpu", "socket_thermal_residency", "steps", "cumulative", 64),
    "vr_thm_residency_acc": Field("gpu", "regulator_thermal_residency", "steps", "cumulative", 64),
    "hbm_thm_residency_acc": Field("gpu", "hbm_thermal_residency", "steps", "cumulative", 64),
    "throttle_status": Field("gpu", "throttled", "1", "gauge", 32),
    "current_gfxclk": Field("gpu", "sm_clock_mhz", "MHz", "gauge", 16, "current_gfxclks"),
    "current_uclk": Field("gpu", "memory_clock_mhz", "MHz", "gauge", 16),
    "average_socket_power": Field("gpu", "power_w", "W", "gauge", 16),
    "current_socket_power": Field("gpu", "instant_power_w", "W", "gauge", 16),
    "temperature_hotspot": Field("gpu", "temperature_c", "°C", "gauge", 16),
    "temperature_mem": Field("gpu", "memory_temperature_c", "°C", "gauge", 16),
    "average_gfx_activity": Field("gpu", "kernel_running_percent", "%", "gauge", 16),
    "average_umc_activity": Field("gpu", "memory_busy_percent", "%", "gauge", 16),
}
LINKS: tuple[tuple[str, Direction], ...] = (("xgmi_read_data_acc", "rx"), ("xgmi_write_data_acc", "tx"))
"""What the GPU read over a link came in by it."""


def format_of(metrics: Mapping[str, Any]) -> int | None:
    """Format of the table: 1 for GPUs; null where the package does not tell."""
    return value_of(metrics.get("common_header.format_revision"), 8)


def value_of(value: Any, bits: int) -> int | None:
    """A value of a field; null for "N/A" (what the package makes of all ones), for all ones themselves, and for what is none."""
    if isinstance(value, bool):
        return int(value)  # throttle_status: the package tells whether any bit is set
    if isinstance(value, int) and 0 <= value < (1 << bits) - 1:
        return value
    return None


def by_link(values: Any) -> Iterator[tuple[int, int]]:
    """Number and value of each link that has one. The table has room for more links than a GPU has."""
    for link, value in enumerate(values if isinstance(values, list | tuple) else ()):
        if (known := value_of(value, 64)) is not None:
            yield link, known
