"""node_exporter's series that hoptrace knows from elsewhere: under the same entities, names and units as its own sources.

Its infiniband bytes are multiplied by four already (prometheus/procfs) and hold headers too (PortXmitData). Its times, seconds,
become what the kernel counts in (ns, of disks ms). Of vmstat only what the kernel's own source keeps, and pgpgin, pgpgout:
KiB. Devices that are built of others, and paths of a multipath disk, keep their names: their bytes would count twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from hoptrace.collectors.hardware.memory.vmstat import unit_of, wanted
from hoptrace.collectors.hardware.scraped.meaning import Labels, Meaning, fixed, label, pci_address, told
from hoptrace.collectors.hardware.sink import Direction

__all__ = ["CPU_TIMES", "NODE", "node_meaning"]

_NO_DISK = re.compile(r"(loop|ram|zram|dm-|md|sr|fd|nbd|drbd|bcache)\d+(p\d+)?|nvme\d+c\d+n\d+|.*\dp\d+|(s|h|v|xv)d[a-z]+\d+")
_NS, _MS = 1_000_000_000, 1000
_IN_OUT: tuple[tuple[Direction, str], ...] = (("rx", "received"), ("tx", "transmitted"))
_RX_TX: tuple[tuple[Direction, str], ...] = (("rx", "receive"), ("tx", "transmit"))

_rdma, _net, _cpu = label("device", "port", form="rdma:{0}/{1}"), label("device", form="net:{0}"), label("cpu", form="cpu:{0}")
_node, _machine, _memory, _pressure = label("node", form="node:{0}"), fixed("cpu"), fixed("memory"), fixed("pressure")


def _block(labels: Labels) -> str | None:
    device = told(labels, "device")
    return f"block:{device}" if device and not _NO_DISK.fullmatch(device) else None


def _pci(labels: Labels) -> str | None:
    where = [labels.get(k, "") for k in ("segment", "bus", "device", "function")]
    address = pci_address("{}:{}:{}.{}".format(*where))
    return f"pcie:{address}" if address else None


_FORMS: Mapping[Callable[[Labels], str | None], str] = {
    _rdma: "rdma:DEV/PORT", _net: "net:IF", _cpu: "cpu:N", _node: "node:N", _machine: "cpu", _memory: "memory",
    _pressure: "pressure", _block: "block:DEV", _pci: "pcie:BDF",
}  # fmt: skip


def _count(
    name: str, unit: str, entity: Callable[[Labels], str | None], way: Direction | None = None, *,
    scale: int = 1, end: int | None = None, doc: str = "",
) -> Meaning:  # fmt: skip
    told_end = f"stops at {end:,}" if end else doc
    return Meaning(name, unit, "cumulative", entity, way, scale, whole=True, of=_FORMS[entity], end=end, doc=told_end)


def _gauge(name: str, unit: str, entity: Callable[[Labels], str | None], *, scale: float = 1, whole: bool = True) -> Meaning:
    return Meaning(name, unit, "gauge", entity, scale=scale, whole=whole, of=_FORMS[entity])


def _rdma_rows() -> Iterator[tuple[str, Meaning]]:
    for way, does in _IN_OUT:
        doc = "multiplied by 4 already; headers are in them"
        yield f"node_infiniband_port_data_{does}_bytes_total", _count("raw_bytes", "bytes", _rdma, way, doc=doc)
        for kind in ("port_", "unicast_", "multicast_"):
            ours = f"{kind}packets" if kind != "port_" else "packets"
            yield f"node_infiniband_{kind}packets_{does}_total", _count(ours, "packets", _rdma, way)
    ends: tuple[tuple[str, str, str, Direction | None, int], ...] = (
        ("link_downed", "link_downed", "times", None, 0xFF), ("link_error_recovery", "link_error_recovery", "times", None, 0xFF),
        ("port_errors_received", "port_rcv_errors", "packets", "rx", 0xFFFF),
        ("port_discards_transmitted", "port_xmit_discards", "packets", "tx", 0xFFFF),
        ("port_transmit_wait", "port_xmit_wait", "ticks", None, 0xFFFFFFFF),
    )  # fmt: skip
    for name, ours, unit, direction, end in ends:
        yield f"node_infiniband_{name}_total", _count(ours, unit, _rdma, direction, end=end)
    yield "node_infiniband_rate_bytes_per_second", _gauge("rate_bytes_per_s", "bytes/s", _rdma, whole=False)


def _network_rows() -> Iterator[tuple[str, Meaning]]:
    for way, does in _RX_TX:
        for name, ours, unit in (
            ("bytes", "raw_bytes", "bytes"), ("packets", "packets", "packets"), ("errs", "errors", "packets"),
            ("drop", "dropped", "packets"),
        ):  # fmt: skip
            yield f"node_network_{does}_{name}_total", _count(ours, unit, _net, way)


def _disk_rows() -> Iterator[tuple[str, Meaning]]:
    rows: tuple[tuple[str, str, str, Direction | None], ...] = (
        ("read_bytes", "data_bytes", "bytes", "read"), ("written_bytes", "data_bytes", "bytes", "write"),
        ("reads_completed", "ops", "operations", "read"), ("writes_completed", "ops", "operations", "write"),
        ("discards_completed", "discard_ops", "operations", None), ("flush_requests", "flush_ops", "operations", None),
        ("read_time_seconds", "wait_ms", "ms", "read"), ("write_time_seconds", "wait_ms", "ms", "write"),
        ("io_time_seconds", "busy_ms", "ms", None), ("io_time_weighted_seconds", "queue_ms", "ms", None),
        ("flush_requests_time_seconds", "flush_ms", "ms", None),
    )  # fmt: skip
    for name, ours, unit, way in rows:
        yield f"node_disk_{name}_total", _count(ours, unit, _block, way, scale=_MS if unit == "ms" else 1)
    yield "node_disk_io_now", _gauge("in_flight_ops", "operations", _block)


def _machine_rows() -> Iterator[tuple[str, Meaning]]:
    for name, ours in (
        ("cpu_waiting", "cpu_some"), ("memory_waiting", "memory_some"), ("memory_stalled", "memory_full"),
        ("io_waiting", "io_some"), ("io_stalled", "io_full"), ("irq_stalled", "irq_full"),
    ):  # fmt: skip
        yield f"node_pressure_{name}_seconds_total", _count(f"{ours}_ns", "ns", _pressure, scale=_NS)
    for name, ours in (("waiting", "run_delay_ns"), ("running", "on_cpu_ns")):
        yield f"node_schedstat_{name}_seconds_total", _count(ours, "ns", _cpu, scale=_NS)
    yield "node_schedstat_timeslices_total", _count("timeslices", "times", _cpu)
    yield "node_context_switches_total", _count("context_switches", "switches", _machine)
    yield "node_forks_total", _count("forks", "threads", _machine)
    yield "node_intr_total", _count("interrupts_and_timers", "interrupts", _machine)
    for name, ours in (("procs_running", "running_threads"), ("procs_blocked", "blocked_threads")):
        yield f"node_{name}", _gauge(ours, "threads", _machine)
    for which, prefix in (("current", ""), ("max", "most_")):
        yield f"node_pcidevice_{which}_link_width", _gauge(f"{prefix}link_width_lanes", "lanes", _pci)
        speed = _gauge(f"{prefix}link_speed_gt_per_s", "GT/s", _pci, scale=1e-9, whole=False)
        yield f"node_pcidevice_{which}_link_transfers_per_second", speed


_SIZES = {
    "MemTotal": "total_bytes", "MemFree": "free_bytes", "MemUsed": "used_bytes", "MemAvailable": "available_bytes",
    "AnonPages": "anonymous_bytes", "Shmem": "shared_bytes", "Mlocked": "locked_bytes", "FilePages": "cached_bytes",
    "Cached": "cached_bytes", "SwapTotal": "swap_total_bytes", "SwapFree": "swap_free_bytes",
}  # fmt: skip

_NODES_ONLY, _MACHINES_ONLY = ("MemUsed", "FilePages"), ("MemAvailable", "Cached", "SwapTotal", "SwapFree")


def _memory_rows() -> Iterator[tuple[str, Meaning]]:
    for name, ours in _SIZES.items():
        if name not in _NODES_ONLY:
            yield f"node_memory_{name}_bytes", _gauge(ours, "bytes", _memory)
        if name not in _MACHINES_ONLY:
            yield f"node_memory_numa_{name}", _gauge(ours, "bytes", _node)
    for name in ("numa_hit", "numa_miss", "numa_foreign", "interleave_hit", "local_node", "other_node"):
        yield f"node_memory_numa_{name}_total", _count(name, "pages", _node)
    for name in ("pgpgin", "pgpgout"):
        doc = "KiB on the page, in spite of its name"
        yield f"node_vmstat_{name}", _count(f"{name}_bytes", "bytes", _memory, scale=1024, doc=doc)
    yield "node_vmstat_pgfault", _count("pgfault", "faults", _memory)


NODE: Mapping[str, Meaning] = {
    name: meaning for rows in (_rdma_rows, _network_rows, _disk_rows, _machine_rows, _memory_rows) for name, meaning in rows()
}
"""By the name on the page."""

CPU_TIMES: Mapping[str, Meaning] = {
    mode: _count(f"{mode}_ns", "ns", _cpu, scale=_NS)
    for mode in ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
}
"""node_cpu_seconds_total, by its label `mode`."""


def node_meaning(name: str, labels: Labels | None = None) -> Meaning | None:
    """The meaning of a series of node_exporter; those of vmstat by the kernel's own names, CPU times by their mode."""
    if (known := NODE.get(name)) is not None:
        return known
    if name.startswith("node_vmstat_"):
        own = name.removeprefix("node_vmstat_")
        return _count(own, unit_of(own), _memory) if wanted(own) else None
    if name == "node_cpu_seconds_total" and labels is not None:
        return CPU_TIMES.get(labels.get("mode", ""))
    return None
