"""DCGM's fields as dcgm-exporter prints them, by their numbers, under old names and new ones.

A name or a TYPE line says nothing sure here: PROF_PCIE_TX_BYTES is bytes a second, and DEV_NVLINK_BANDWIDTH_TOTAL is a rate of
both directions that is exported as a counter. Numbers and units: dcgm_fields.h; old and new names: the table of deprecated
aliases in DCGM's dcgm_fields.py (a field keeps its number when it is renamed; one in another unit has a number of its own). What
is computed where: DcgmCacheManager. Directions are the GPU's: sent is what goes to the host or a peer.

Left out, under their own names: times at reduced clocks 240 to 247 (microseconds by the header, nanoseconds by what NVML gives);
DEV_GPU_UTIL_RATIO (per cent where it is field 203, 0 to 1 where it is field 1613, and the page tells no number); and the counts
of NVLink 5 (1200 to 1219) where no label tells the link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from hoptrace.collectors.hardware.scraped.meaning import Labels, Meaning, pci_address, told
from hoptrace.collectors.hardware.sink import Direction, Semantics

__all__ = ["DCGM", "FIELDS"]

_Entity = Callable[[Labels], str | None]
_Field = tuple[tuple[str, ...], Meaning]


def _uuid(labels: Labels) -> str | None:
    return told(labels, "UUID") or told(labels, "uuid")


def _gpu(labels: Labels) -> str | None:
    uuid, part = _uuid(labels), told(labels, "GPU_I_ID")
    if not labels.get("GPU_I_ID"):
        return f"gpu:{uuid}" if uuid else None
    return f"gpu:{uuid}/mig:{part}" if uuid and part else None


def _pcie(labels: Labels) -> str | None:
    address = pci_address(labels.get("pci_bus_id"))
    return f"pcie:{address}" if address and not labels.get("GPU_I_ID") else None


def _c2c(labels: Labels) -> str | None:
    uuid = _uuid(labels)
    return f"c2c:{uuid}" if uuid and not labels.get("GPU_I_ID") else None


def _link(which: str | None) -> _Entity:
    """``which``: the link, ``all``, or null for what the label says."""

    def entity(labels: Labels) -> str | None:
        uuid, link = _uuid(labels), which or (told(labels, "nvlink") or "").removeprefix("L")
        return f"nvlink:{uuid}/{link}" if uuid and link and not labels.get("GPU_I_ID") else None

    return entity


_MIB, _MHZ = 1 << 20, 1e-6
_RATE = "over the exporter's interval, which the page does not tell"
_WINDOW_NS = 20_000_000
_FORMS: dict[_Entity, str] = {_gpu: "gpu:UUID", _pcie: "pcie:BDF", _c2c: "c2c:UUID"}


def _m(
    name: str, unit: str, entity: _Entity = _gpu, way: Direction | None = None, scale: int | float = 1, *,
    semantics: Semantics = "gauge", whole: bool = True, doc: str = "", window_ns: int | None = None, of: str | None = None,
) -> Meaning:  # fmt: skip
    return Meaning(name, unit, semantics, entity, way, scale, whole, doc, of or _FORMS[entity], window_ns)


def _count(name: str, unit: str, entity: _Entity = _gpu, way: Direction | None = None) -> Meaning:
    return _m(name, unit, entity, way, semantics="cumulative")


def _ratio(name: str) -> Meaning:
    return _m(name, "ratio", semantics="rate", whole=False, doc=f"0 to 1, {_RATE}")


def _share(name: str) -> Meaning:
    """Per cent, as the ratio that NVML's own source writes."""
    return _m(name, "ratio", scale=0.01, semantics="rate", whole=False, doc=f"per cent on the page; {_RATE}")


def _rate(name: str, entity: _Entity, way: Direction | None, of: str | None = None) -> Meaning:
    doc = f"a rate, whatever its name and type say, {_RATE}"
    return _m(name, "bytes/s", entity, way, semantics="rate", whole=False, doc=doc, of=of)


def _throughput(entity: _Entity, way: Direction | None, of: str) -> Meaning:
    """DcgmCacheManager: the difference of NVML's KiB, by seconds, by 1,000."""
    both = "" if way else " of both directions together"
    doc = f"a rate{both}, though exported as a counter: KiB a second ÷ 1,000; payload; the first is 0"
    return _m("data_bytes_per_s", "bytes/s", entity, way, 1_024_000, semantics="rate", whole=False, doc=doc, of=of)


_ALL, _TOLD = _link("all"), _link(None)
_LINKS, _ONE_LINK = "nvlink:UUID/all", "nvlink:UUID/N"
_SPEED = "20 ms of NVML, in KB/s: bursts between two of them are in none"


def _ratios() -> Iterator[tuple[int, _Field]]:
    told = (
        (1001, "GR_ENGINE_ACTIVE", "GR_ENGINE_UTIL_RATIO", "graphics_active_ratio"),
        (1002, "SM_ACTIVE", "SM_UTIL_RATIO", "sm_active_ratio"),
        (1003, "SM_OCCUPANCY", "SM_OCCUPANCY_RATIO", "sm_occupancy_ratio"),
        (1004, "PIPE_TENSOR_ACTIVE", "TENSOR_UTIL_RATIO", "tensor_active_ratio"),
        (1005, "DRAM_ACTIVE", "DRAM_UTIL_RATIO", "memory_active_ratio"),
        (1006, "PIPE_FP64_ACTIVE", "FP64_UTIL_RATIO", "fp64_active_ratio"),
        (1007, "PIPE_FP32_ACTIVE", "FP32_UTIL_RATIO", "fp32_active_ratio"),
        (1008, "PIPE_FP16_ACTIVE", "FP16_UTIL_RATIO", "fp16_active_ratio"),
        (1013, "PIPE_TENSOR_IMMA_ACTIVE", "IMMA_UTIL_RATIO", "imma_active_ratio"),
        (1014, "PIPE_TENSOR_HMMA_ACTIVE", "HMMA_UTIL_RATIO", "hmma_active_ratio"),
        (1015, "PIPE_TENSOR_DFMA_ACTIVE", "DFMA_UTIL_RATIO", "dfma_active_ratio"),
        (1016, "PIPE_INT_ACTIVE", "INT_UTIL_RATIO", "int_active_ratio"),
    )
    for number, old, new, name in told:
        yield number, ((f"PROF_{old}", f"PROF_{new}"), _ratio(name))


def _cycles() -> Iterator[tuple[int, _Field]]:
    whats = ("SM_CYCLES_ELAPSED", "SM_CYCLES_ACTIVE", "MMA_CYCLES_ACTIVE", "DMMA_CYCLES_ACTIVE", "HMMA_CYCLES_ACTIVE",
             "IMMA_CYCLES_ACTIVE", "DFMA_CYCLES_ACTIVE", None, None, "INT_CYCLES_ACTIVE", "FP64_CYCLES_ACTIVE",
             "FP32_CYCLES_ACTIVE", "FP16_CYCLES_ACTIVE")  # fmt: skip
    for number, what in enumerate(whats, 1084):
        if what is not None:
            unit, _, state = what.lower().partition("_cycles_")
            yield number, ((f"PROF_{what}_TOTAL",), _count(f"{unit}_{state}_cycles", "cycles"))


def _per_link() -> Iterator[tuple[int, _Field]]:
    both = (440, 441, 442, 443, 444, 445, 475, 476, 477, 478, 479, 480, 446, 447, 448, 494, 495, 496)
    for n in range(18):
        link = _link(str(n))
        for number, old, new, way in (
            (both[n], f"BANDWIDTH_L{n}", f"THROUGHPUT_L{n}", None),
            (825 + n, f"TX_BANDWIDTH_L{n}", f"TX_THROUGHPUT_L{n}", "tx"),
            (879 + n, f"RX_BANDWIDTH_L{n}", f"RX_THROUGHPUT_L{n}", "rx"),
        ):
            meaning = _throughput(link, way, f"nvlink:UUID/{n}")  # type: ignore[arg-type]
            yield number, ((f"DEV_NVLINK_{old}", f"DEV_NVLINK_{new}"), meaning)
        yield 1040 + 2 * n, ((f"PROF_NVLINK_L{n}_TX_BYTES",), _rate("raw_bytes_per_s", link, "tx", f"nvlink:UUID/{n}"))
        yield 1041 + 2 * n, ((f"PROF_NVLINK_L{n}_RX_BYTES",), _rate("raw_bytes_per_s", link, "rx", f"nvlink:UUID/{n}"))


def _link_errors(name: str) -> Meaning:
    return _m(name, "errors", _ALL, semantics="cumulative", of=_LINKS)


def _link_bytes(way: Direction) -> Meaning:
    return _m("nvlink5_bytes", "bytes", _TOLD, way, semantics="cumulative", of=_ONE_LINK)


# number: (names, meaning). The first name is the one that exporters up to 4.8 print.
FIELDS: Mapping[int, _Field] = {
    **dict(_ratios()),
    1009: (("PROF_PCIE_TX_BYTES",), _rate("raw_bytes_per_s", _pcie, "tx")),
    1010: (("PROF_PCIE_RX_BYTES",), _rate("raw_bytes_per_s", _pcie, "rx")),
    1011: (("PROF_NVLINK_TX_BYTES",), _rate("raw_bytes_per_s", _ALL, "tx", _LINKS)),
    1012: (("PROF_NVLINK_RX_BYTES",), _rate("raw_bytes_per_s", _ALL, "rx", _LINKS)),
    1532: (("PROF_NVLINK_TX_BYTES_PER_LINK",), _rate("raw_bytes_per_s", _TOLD, "tx", _ONE_LINK)),
    1533: (("PROF_NVLINK_RX_BYTES_PER_LINK",), _rate("raw_bytes_per_s", _TOLD, "rx", _ONE_LINK)),
    1076: (("PROF_C2C_TX_ALL_BYTES",), _rate("raw_bytes_per_s", _c2c, "tx")),
    1077: (("PROF_C2C_TX_DATA_BYTES",), _rate("data_bytes_per_s", _c2c, "tx")),
    1078: (("PROF_C2C_RX_ALL_BYTES",), _rate("raw_bytes_per_s", _c2c, "rx")),
    1079: (("PROF_C2C_RX_DATA_BYTES",), _rate("data_bytes_per_s", _c2c, "rx")),
    1080: (("PROF_HOSTMEM_CACHE_HIT",), _share("host_memory_cache_hit_ratio")),
    1081: (("PROF_HOSTMEM_CACHE_MISS",), _share("host_memory_cache_miss_ratio")),
    1082: (("PROF_PEERMEM_CACHE_HIT",), _share("peer_memory_cache_hit_ratio")),
    1083: (("PROF_PEERMEM_CACHE_MISS",), _share("peer_memory_cache_miss_ratio")),
    1091: (("PROF_PCIE_TX_BYTES_TOTAL",), _count("raw_bytes", "bytes", _pcie, "tx")),
    1092: (("PROF_PCIE_RX_BYTES_TOTAL",), _count("raw_bytes", "bytes", _pcie, "rx")),
    **dict(_cycles()),
    200: (("DEV_PCIE_TX_THROUGHPUT",), _m(
        "window_bytes_per_s", "bytes/s", _pcie, "tx", 1000, semantics="rate", doc=_SPEED, window_ns=_WINDOW_NS)),
    201: (("DEV_PCIE_RX_THROUGHPUT",), _m(
        "window_bytes_per_s", "bytes/s", _pcie, "rx", 1000, semantics="rate", doc=_SPEED, window_ns=_WINDOW_NS)),
    449: (("DEV_NVLINK_BANDWIDTH_TOTAL", "DEV_NVLINK_THROUGHPUT_TOTAL"), _throughput(_ALL, None, _LINKS)),
    843: (("DEV_NVLINK_TX_BANDWIDTH_TOTAL", "DEV_NVLINK_TX_THROUGHPUT_TOTAL"), _throughput(_ALL, "tx", _LINKS)),
    897: (("DEV_NVLINK_RX_BANDWIDTH_TOTAL", "DEV_NVLINK_RX_THROUGHPUT_TOTAL"), _throughput(_ALL, "rx", _LINKS)),
    1529: (("DEV_NVLINK_THROUGHPUT_PER_LINK",), _throughput(_TOLD, None, _ONE_LINK)),
    1530: (("DEV_NVLINK_TX_THROUGHPUT_PER_LINK",), _throughput(_TOLD, "tx", _ONE_LINK)),
    1531: (("DEV_NVLINK_RX_THROUGHPUT_PER_LINK",), _throughput(_TOLD, "rx", _ONE_LINK)),
    **dict(_per_link()),
    1201: (("DEV_NVLINK_COUNT_TX_BYTES", "DEV_NVLINK_TX_BYTES_TOTAL"), _link_bytes("tx")),
    1203: (("DEV_NVLINK_COUNT_RX_BYTES", "DEV_NVLINK_RX_BYTES_TOTAL"), _link_bytes("rx")),
    409: (("DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", "DEV_NVLINK_CRC_FLIT_ERROR_TOTAL"), _link_errors("crc_flit_errors")),
    419: (("DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL", "DEV_NVLINK_CRC_DATA_ERROR_TOTAL"), _link_errors("crc_data_errors")),
    429: (("DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", "DEV_NVLINK_REPLAY_ERROR_TOTAL"), _link_errors("replay_errors")),
    439: (("DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL", "DEV_NVLINK_RECOVERY_ERROR_TOTAL"), _link_errors("recovery_errors")),
    202: (("DEV_PCIE_REPLAY_COUNTER", "DEV_PCIE_REPLAY_TOTAL"), _count("replays", "events", _pcie)),
    1501: (("DEV_PCIE_COUNT_CORRECTABLE_ERRORS", "DEV_PCIE_CORRECTABLE_ERROR_TOTAL"),
           _count("correctable_errors", "errors", _pcie)),
    235: (("DEV_PCIE_MAX_LINK_GEN",), _m("most_link_generation", "1", _pcie)),
    236: (("DEV_PCIE_MAX_LINK_WIDTH",), _m("most_link_width_lanes", "lanes", _pcie)),
    237: (("DEV_PCIE_LINK_GEN",), _m("link_generation", "1", _pcie)),
    238: (("DEV_PCIE_LINK_WIDTH",), _m("link_width_lanes", "lanes", _pcie)),
    100: (("DEV_SM_CLOCK",), _m("sm_clock_mhz", "MHz")),
    101: (("DEV_MEM_CLOCK",), _m("memory_clock_mhz", "MHz")),
    1603: (("DEV_SM_CLOCK_HERTZ",), _m("sm_clock_mhz", "MHz", scale=_MHZ, whole=False)),
    1604: (("DEV_MEMORY_CLOCK_HERTZ",), _m("memory_clock_mhz", "MHz", scale=_MHZ, whole=False)),
    112: (("DEV_CLOCK_THROTTLE_REASONS", "DEV_CLOCKS_EVENT_REASONS"), _m("throttle_reasons", "bits")),
    1420: (("DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP_NS",), _count("power_throttle_ns", "ns")),
    1421: (("DEV_CLOCKS_EVENT_REASON_SYNC_BOOST_NS", "DEV_CLOCKS_EVENT_REASON_SYNC_BOOST_COUNT_NS"),
           _count("sync_boost_throttle_ns", "ns")),
    1422: (("DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN_NS",), _count("sw_thermal_throttle_ns", "ns")),
    1423: (("DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN_NS",), _count("hw_thermal_throttle_ns", "ns")),
    1424: (("DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN_NS",), _count("power_brake_throttle_ns", "ns")),
    140: (("DEV_MEMORY_TEMP", "DEV_MEMORY_TEMP_CELSIUS"), _m("memory_temperature_c", "°C", whole=False)),
    150: (("DEV_GPU_TEMP", "DEV_GPU_TEMP_CELSIUS"), _m("temperature_c", "°C", whole=False)),
    155: (("DEV_POWER_USAGE", "DEV_BOARD_POWER_WATTS"), _m("power_w", "W", whole=False)),
    157: (("DEV_POWER_USAGE_INSTANT", "DEV_BOARD_POWER_RAW_WATTS"), _m("instant_power_w", "W", whole=False)),
    156: (("DEV_TOTAL_ENERGY_CONSUMPTION",), _count("energy_mj", "mJ")),
    1611: (("DEV_GPU_ENERGY_JOULES_TOTAL",), _m("energy_mj", "mJ", scale=1000, semantics="cumulative")),
    203: (("DEV_GPU_UTIL",), _m("kernel_active_percent", "%", whole=False, doc="some kernel ran: no measure of load")),
    204: (("DEV_MEM_COPY_UTIL",), _m("memory_busy_percent", "%", whole=False)),
    206: (("DEV_ENC_UTIL",), _m("encoder_busy_percent", "%", whole=False)),
    207: (("DEV_DEC_UTIL",), _m("decoder_busy_percent", "%", whole=False)),
    230: (("DEV_XID_ERRORS", "DEV_XID_ERROR"), _m("last_xid", "1", doc="the last code, no count")),
    92: (("DEV_BAR1_USED",), _m("bar1_used_bytes", "bytes", scale=_MIB)),
    1601: (("DEV_BAR1_USED_BYTES",), _m("bar1_used_bytes", "bytes")),
    250: (("DEV_FB_TOTAL",), _m("memory_total_bytes", "bytes", scale=_MIB)),
    251: (("DEV_FB_FREE",), _m("memory_free_bytes", "bytes", scale=_MIB)),
    252: (("DEV_FB_USED",), _m("memory_used_bytes", "bytes", scale=_MIB)),
    253: (("DEV_FB_RESERVED",), _m("memory_reserved_bytes", "bytes", scale=_MIB)),
    254: (("DEV_FB_USED_PERCENT", "DEV_FB_USED_RATIO"), _m(
        "memory_used_ratio", "ratio", whole=False, doc="0 to 1 under both names: used ÷ (total − reserved)")),
    310: (("DEV_ECC_SBE_VOL_TOTAL",), _count("ecc_corrected_errors", "errors")),
    311: (("DEV_ECC_DBE_VOL_TOTAL",), _count("ecc_uncorrected_errors", "errors")),
    312: (("DEV_ECC_SBE_AGG_TOTAL",), _count("ecc_corrected_errors_ever", "errors")),
    313: (("DEV_ECC_DBE_AGG_TOTAL",), _count("ecc_uncorrected_errors_ever", "errors")),
    393: (("DEV_UNCORRECTABLE_REMAPPED_ROWS", "DEV_ROW_REMAP_UNCORRECTABLE_TOTAL"), _m("remapped_rows_uncorrected", "rows")),
    394: (("DEV_CORRECTABLE_REMAPPED_ROWS", "DEV_ROW_REMAP_CORRECTABLE_TOTAL"), _m("remapped_rows_corrected", "rows")),
    395: (("DEV_ROW_REMAP_FAILURE", "DEV_ROW_REMAP_FAILED"), _m("remapping_failed", "state")),
}  # fmt: skip
"""By the number of the field (dcgm_fields.h)."""

DCGM: Mapping[str, Meaning] = {f"DCGM_FI_{name}": meaning for names, meaning in FIELDS.values() for name in names}
"""By the name on the page."""
