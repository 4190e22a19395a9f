"""DCGM's fields as dcgm-exporter prints them, by their numbers, under old names and new ones.

A name or a TYPE line says nothing sure here: PROF_PCIE_TX_BYTES is bytes a second, and DEV_NVLINK_BANDWIDTH_TOTAL is a rate of
both directions that is exported as a counter. Numbers and units: dcgm_fields.h; what is computed where: DcgmCacheManager.
Directions are the GPU's: sent is what goes to the host or a peer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hoptrace.collectors.hardware.scraped.meaning import Labels, Meaning, pci_address
from hoptrace.collectors.hardware.sink import Direction

__all__ = ["DCGM", "FIELDS"]


def _gpu(labels: Labels) -> str | None:
    uuid = labels.get("UUID") or labels.get("uuid")
    part = labels.get("GPU_I_ID")
    return f"gpu:{uuid}/mig:{part}" if uuid and part else f"gpu:{uuid}" if uuid else None


def _pcie(labels: Labels) -> str | None:
    address = pci_address(labels.get("pci_bus_id"))
    return f"pcie:{address}" if address and not labels.get("GPU_I_ID") else None


def _of_links(kind: str) -> Callable[[Labels], str | None]:
    def entity(labels: Labels) -> str | None:
        uuid = labels.get("UUID") or labels.get("uuid")
        if not uuid or labels.get("GPU_I_ID"):
            return None
        return f"{kind}:{uuid}/all" if kind == "nvlink" else f"{kind}:{uuid}"

    return entity


_nvlink, _c2c = _of_links("nvlink"), _of_links("c2c")
_MIB = 1 << 20
_RATE = "over the exporter's interval, which the page does not tell"


def _ratio(name: str) -> Meaning:
    return Meaning(name, "ratio", "gauge", _gpu, doc=f"0 to 1, {_RATE}")


def _rate(name: str, entity: Callable[[Labels], str | None], way: Direction) -> Meaning:
    return Meaning(name, "bytes/s", "rate", entity, way, doc=f"a rate, whatever its name and type say, {_RATE}")


# number: (names, meaning). The first name is the one that exporters up to 4.8 print.
FIELDS: Mapping[int, tuple[tuple[str, ...], Meaning]] = {
    1001: (("PROF_GR_ENGINE_ACTIVE", "PROF_GR_ENGINE_UTIL_RATIO"), _ratio("graphics_active_ratio")),
    1002: (("PROF_SM_ACTIVE", "PROF_SM_UTIL_RATIO"), _ratio("sm_active_ratio")),
    1003: (("PROF_SM_OCCUPANCY", "PROF_SM_OCCUPANCY_RATIO"), _ratio("sm_occupancy_ratio")),
    1004: (("PROF_PIPE_TENSOR_ACTIVE", "PROF_TENSOR_UTIL_RATIO"), _ratio("tensor_active_ratio")),
    1005: (("PROF_DRAM_ACTIVE", "PROF_DRAM_UTIL_RATIO"), _ratio("memory_active_ratio")),
    1009: (("PROF_PCIE_TX_BYTES",), _rate("raw_bytes_per_s", _pcie, "tx")),
    1010: (("PROF_PCIE_RX_BYTES",), _rate("raw_bytes_per_s", _pcie, "rx")),
    1011: (("PROF_NVLINK_TX_BYTES",), _rate("raw_bytes_per_s", _nvlink, "tx")),
    1012: (("PROF_NVLINK_RX_BYTES",), _rate("raw_bytes_per_s", _nvlink, "rx")),
    1076: (("PROF_C2C_TX_ALL_BYTES",), _rate("raw_bytes_per_s", _c2c, "tx")),
    1077: (("PROF_C2C_TX_DATA_BYTES",), _rate("data_bytes_per_s", _c2c, "tx")),
    1078: (("PROF_C2C_RX_ALL_BYTES",), _rate("raw_bytes_per_s", _c2c, "rx")),
    1079: (("PROF_C2C_RX_DATA_BYTES",), _rate("data_bytes_per_s", _c2c, "rx")),
    1091: (("PROF_PCIE_TX_BYTES_TOTAL",), Meaning("raw_bytes", "bytes", "cumulative", _pcie, "tx", whole=True)),
    1092: (("PROF_PCIE_RX_BYTES_TOTAL",), Meaning("raw_bytes", "bytes", "cumulative", _pcie, "rx", whole=True)),
    200: (("DEV_PCIE_TX_THROUGHPUT",), Meaning("raw_bytes_per_s", "bytes/s", "rate", _pcie, "tx", 1000, doc="over 20 ms; KB/s")),
    201: (("DEV_PCIE_RX_THROUGHPUT",), Meaning("raw_bytes_per_s", "bytes/s", "rate", _pcie, "rx", 1000, doc="over 20 ms; KB/s")),
    449: (("DEV_NVLINK_BANDWIDTH_TOTAL", "DEV_NVLINK_THROUGHPUT_TOTAL"), Meaning(
        "data_bytes_per_s", "bytes/s", "rate", _nvlink, None, 1_024_000,
        doc="a rate of both directions together, though exported as a counter: KiB a second ÷ 1,000; payload")),
    202: (("DEV_PCIE_REPLAY_COUNTER", "DEV_PCIE_REPLAY_TOTAL"), Meaning("replays", "times", "cumulative", _pcie, whole=True)),
    235: (("DEV_PCIE_MAX_LINK_GEN",), Meaning("most_generation", "1", "gauge", _pcie, whole=True)),
    236: (("DEV_PCIE_MAX_LINK_WIDTH",), Meaning("most_width", "lanes", "gauge", _pcie, whole=True)),
    237: (("DEV_PCIE_LINK_GEN",), Meaning("generation", "1", "gauge", _pcie, whole=True)),
    238: (("DEV_PCIE_LINK_WIDTH",), Meaning("width", "lanes", "gauge", _pcie, whole=True)),
    100: (("DEV_SM_CLOCK",), Meaning("sm_clock_mhz", "MHz", "gauge", _gpu)),
    101: (("DEV_MEM_CLOCK",), Meaning("memory_clock_mhz", "MHz", "gauge", _gpu)),
    112: (("DEV_CLOCK_THROTTLE_REASONS", "DEV_CLOCKS_EVENT_REASONS"), Meaning(
        "throttle_reasons", "bits", "gauge", _gpu, whole=True)),
    140: (("DEV_MEMORY_TEMP",), Meaning("memory_temperature_c", "°C", "gauge", _gpu)),
    150: (("DEV_GPU_TEMP",), Meaning("temperature_c", "°C", "gauge", _gpu)),
    155: (("DEV_POWER_USAGE",), Meaning("power_w", "W", "gauge", _gpu)),
    156: (("DEV_TOTAL_ENERGY_CONSUMPTION",), Meaning("energy_mj", "mJ", "cumulative", _gpu, whole=True)),
    203: (("DEV_GPU_UTIL",), Meaning("kernel_running_percent", "%", "gauge", _gpu, doc="some kernel ran: no measure of load")),
    204: (("DEV_MEM_COPY_UTIL",), Meaning("memory_busy_percent", "%", "gauge", _gpu)),
    230: (("DEV_XID_ERRORS",), Meaning("last_xid", "1", "gauge", _gpu, whole=True, doc="the last code, no count")),
    251: (("DEV_FB_FREE",), Meaning("memory_free_bytes", "bytes", "gauge", _gpu, None, _MIB, True)),
    252: (("DEV_FB_USED",), Meaning("memory_used_bytes", "bytes", "gauge", _gpu, None, _MIB, True)),
    253: (("DEV_FB_RESERVED",), Meaning("memory_reserved_bytes", "bytes", "gauge", _gpu, None, _MIB, True)),
    310: (("DEV_ECC_SBE_VOL_TOTAL",), Meaning("ecc_single_bit_errors", "errors", "cumulative", _gpu, whole=True)),
    311: (("DEV_ECC_DBE_VOL_TOTAL",), Meaning("ecc_double_bit_errors", "errors", "cumulative", _gpu, whole=True)),
    393: (("DEV_UNCORRECTABLE_REMAPPED_ROWS",), Meaning("remapped_rows_uncorrectable", "rows", "cumulative", _gpu, whole=True)),
    394: (("DEV_CORRECTABLE_REMAPPED_ROWS",), Meaning("remapped_rows_correctable", "rows", "cumulative", _gpu, whole=True)),
}  # fmt: skip
"""By the number of the field (dcgm_fields.h)."""

DCGM: Mapping[str, Meaning] = {f"DCGM_FI_{name}": meaning for names, meaning in FIELDS.values() for name in names}
