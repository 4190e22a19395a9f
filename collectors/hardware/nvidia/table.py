"""NVML's fields that are recorded: id, what it is called here, unit, what kind of number.

Ids, units and meanings: nvml.h 13.5.37 (`NVML_FI_DEV_*`). KiB are made bytes; nanoseconds, millijoules and milliwatts are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hoptrace.collectors.hardware.sink import Direction, Semantics

__all__ = ["ALL_LINKS", "C2C", "C2C_COUNT", "Field", "LINK_BYTES", "LINK_COUNT", "LINK_ERRORS", "LINK_STATE", "ONCE_A_SECOND",
           "PCIE_BYTES", "POWER", "throttle_times"]  # fmt: skip

Of = Literal["gpu", "pcie", "nvlink", "c2c"]

ALL_LINKS = 0xFFFFFFFF
"""As scope of a field of NVLink: the sum over the links."""

LINK_COUNT, C2C_COUNT = 91, 170


@dataclass(frozen=True, slots=True)
class Field:
    """``of``: whose it is. ``scale``: what one is, in the unit. ``may_be_32``: the driver may wrap it at 32 bits whatever its
    type says (nvml.h: "Value can be wrapped")."""

    id: int
    of: Of
    name: str
    unit: str
    semantics: Semantics = "cumulative"
    direction: Direction | None = None
    scale: int = 1
    may_be_32: bool = False


# A published comparison on an RTX 2000 Ada (driver 580) found 8 to 10 % more bytes than were copied: headers are in them.
PCIE_BYTES = (
    Field(197, "pcie", "raw_bytes", "bytes", direction="tx", may_be_32=True),
    Field(198, "pcie", "raw_bytes", "bytes", direction="rx", may_be_32=True),
)
LINK_BYTES = (
    Field(138, "nvlink", "data_bytes", "bytes", direction="tx", scale=1024),
    Field(139, "nvlink", "data_bytes", "bytes", direction="rx", scale=1024),
    Field(140, "nvlink", "raw_bytes", "bytes", direction="tx", scale=1024),
    Field(141, "nvlink", "raw_bytes", "bytes", direction="rx", scale=1024),
    # NVLink 5 (Blackwell). The header does not say whether protocol is in them: they keep a name of their own.
    Field(202, "nvlink", "nvlink5_bytes", "bytes", direction="tx"),
    Field(204, "nvlink", "nvlink5_bytes", "bytes", direction="rx"),
)
POWER = (Field(186, "gpu", "power_mw", "mW", "gauge"),)

LINK_STATE = (
    Field(165, "nvlink", "state", "state", "gauge"),
    Field(167, "nvlink", "low_power", "state", "gauge"),
)
LINK_ERRORS = (
    Field(161, "nvlink", "replay_errors", "errors"),
    Field(162, "nvlink", "recovery_errors", "errors"),
    Field(163, "nvlink", "crc_errors", "errors"),
    # NVLink 5
    Field(201, "nvlink", "packets", "packets", direction="tx"),
    Field(203, "nvlink", "packets", "packets", direction="rx"),
    Field(206, "nvlink", "malformed_packets", "packets", direction="rx"),
    Field(207, "nvlink", "overrun_packets", "packets", direction="rx"),
    Field(208, "nvlink", "error_packets", "packets", direction="rx"),
    Field(209, "nvlink", "remote_error_packets", "packets", direction="rx"),
    Field(211, "nvlink", "integrity_errors", "errors"),
    Field(212, "nvlink", "discarded_packets", "packets", direction="tx"),
    Field(213, "nvlink", "recoveries", "events"),
    Field(214, "nvlink", "failed_recoveries", "events"),
    Field(219, "nvlink", "effective_errors", "errors"),
    Field(221, "nvlink", "symbol_errors", "errors", direction="rx"),
)
ONCE_A_SECOND = (
    # Energy takes the driver milliseconds, and so does the averaged power: not for every tick.
    # nvml.h: 191, of newer drivers, is the same.
    Field(83, "gpu", "energy_mj", "mJ"),
    Field(185, "gpu", "average_power_mw", "mW", "gauge"),
    Field(74, "gpu", "power_throttle_ns", "ns"),
    Field(75, "gpu", "thermal_throttle_ns", "ns"),
    Field(76, "gpu", "sync_boost_throttle_ns", "ns"),
    Field(3, "gpu", "ecc_corrected_errors", "errors"),
    Field(4, "gpu", "ecc_uncorrected_errors", "errors"),
    Field(142, "gpu", "remapped_rows_corrected", "rows", "gauge"),
    Field(143, "gpu", "remapped_rows_uncorrected", "rows", "gauge"),
    Field(144, "gpu", "remapping_pending", "state", "gauge"),
    Field(145, "gpu", "remapping_failed", "state", "gauge"),
    Field(94, "pcie", "replays", "events"),
    Field(95, "pcie", "replay_rollovers", "events"),
    Field(169, "pcie", "l0_to_recovery", "events"),
    Field(173, "pcie", "correctable_errors", "errors"),
    Field(174, "pcie", "naks", "events", direction="rx"),
    Field(175, "pcie", "receiver_errors", "errors"),
    Field(176, "pcie", "bad_tlps", "errors"),
    Field(177, "pcie", "naks", "events", direction="tx"),
    Field(178, "pcie", "bad_dllps", "errors"),
    Field(179, "pcie", "nonfatal_errors", "errors"),
    Field(180, "pcie", "fatal_errors", "errors"),
    Field(181, "pcie", "unsupported_requests", "errors"),
    Field(182, "pcie", "lcrc_errors", "errors"),
    Field(183, "pcie", "lane_errors", "errors"),
)
# Of one link, as the scope says; nvml.h does not say so, NCCL and UCX ask in this way.
C2C = (
    Field(171, "c2c", "state", "state", "gauge"),
    Field(231, "c2c", "crc_errors", "errors"),
    Field(232, "c2c", "replay_errors", "errors"),
    Field(233, "c2c", "replay_b2b_errors", "errors"),
    Field(234, "c2c", "low_power", "state", "gauge"),
)

_RENUMBERED = (580, 82)


def throttle_times(driver: tuple[int, ...] | None) -> tuple[Field, ...]:
    """Time at reduced clocks by reason, whose ids have moved: 251 to 253 up to driver 580.65, 269 to 271 from 580.82 on, where
    the old ids mean settings of power smoothing (nvidia-ml-py 13.580.65 against 13.580.82). None for a driver not known."""
    if driver is None:
        return ()
    first = 269 if driver >= _RENUMBERED else 251
    return (
        Field(first, "gpu", "sw_thermal_throttle_ns", "ns"),
        Field(first + 1, "gpu", "hw_thermal_throttle_ns", "ns"),
        Field(first + 2, "gpu", "power_brake_throttle_ns", "ns"),
    )
