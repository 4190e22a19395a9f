"""node_exporter's series that hoptrace knows from elsewhere: under the same entities and names as its own sources.

Its infiniband bytes are multiplied by four already (prometheus/procfs); its times are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping

from hoptrace.collectors.hardware.memory.vmstat import unit_of
from hoptrace.collectors.hardware.scraped.meaning import Labels, Meaning, label

__all__ = ["NODE", "node_meaning"]

_rdma = label("device", "port", form="rdma:{0}/{1}")
_net, _block, _cpu = label("device", form="net:{0}"), label("device", form="block:{0}"), label("cpu", form="cpu:{0}")


def _pressure(labels: Labels) -> str | None:
    return "pressure"


def _memory(labels: Labels) -> str | None:
    return "memory"


NODE: Mapping[str, Meaning] = {
    "node_infiniband_port_data_received_bytes_total": Meaning("data_bytes", "bytes", "cumulative", _rdma, "rx", whole=True),
    "node_infiniband_port_data_transmitted_bytes_total": Meaning("data_bytes", "bytes", "cumulative", _rdma, "tx", whole=True),
    "node_infiniband_port_packets_received_total": Meaning("packets", "packets", "cumulative", _rdma, "rx", whole=True),
    "node_infiniband_port_packets_transmitted_total": Meaning("packets", "packets", "cumulative", _rdma, "tx", whole=True),
    "node_infiniband_link_downed_total": Meaning("link_downed", "times", "cumulative", _rdma, whole=True),
    "node_infiniband_link_error_recovery_total": Meaning("link_error_recovery", "times", "cumulative", _rdma, whole=True),
    "node_infiniband_port_errors_received_total": Meaning("port_rcv_errors", "errors", "cumulative", _rdma, whole=True),
    "node_infiniband_port_discards_transmitted_total": Meaning("port_xmit_discards", "packets", "cumulative", _rdma, whole=True),
    "node_infiniband_port_transmit_wait_total": Meaning("port_xmit_wait", "ticks", "cumulative", _rdma, whole=True),
    "node_infiniband_rate_bytes_per_second": Meaning("rate_bytes_per_s", "bytes/s", "gauge", _rdma),
    "node_network_receive_bytes_total": Meaning("raw_bytes", "bytes", "cumulative", _net, "rx", whole=True),
    "node_network_transmit_bytes_total": Meaning("raw_bytes", "bytes", "cumulative", _net, "tx", whole=True),
    "node_network_receive_drop_total": Meaning("dropped", "packets", "cumulative", _net, "rx", whole=True),
    "node_network_transmit_drop_total": Meaning("dropped", "packets", "cumulative", _net, "tx", whole=True),
    "node_disk_read_bytes_total": Meaning("data_bytes", "bytes", "cumulative", _block, "read", whole=True),
    "node_disk_written_bytes_total": Meaning("data_bytes", "bytes", "cumulative", _block, "write", whole=True),
    "node_disk_reads_completed_total": Meaning("operations", "operations", "cumulative", _block, "read", whole=True),
    "node_disk_writes_completed_total": Meaning("operations", "operations", "cumulative", _block, "write", whole=True),
    "node_pressure_cpu_waiting_seconds_total": Meaning("cpu_some_seconds", "s", "cumulative", _pressure),
    "node_pressure_memory_waiting_seconds_total": Meaning("memory_some_seconds", "s", "cumulative", _pressure),
    "node_pressure_memory_stalled_seconds_total": Meaning("memory_full_seconds", "s", "cumulative", _pressure),
    "node_pressure_io_waiting_seconds_total": Meaning("io_some_seconds", "s", "cumulative", _pressure),
    "node_pressure_io_stalled_seconds_total": Meaning("io_full_seconds", "s", "cumulative", _pressure),
    "node_schedstat_waiting_seconds_total": Meaning("run_delay_seconds", "s", "cumulative", _cpu),
    "node_schedstat_running_seconds_total": Meaning("on_cpu_seconds", "s", "cumulative", _cpu),
}


def node_meaning(name: str) -> Meaning | None:
    """The meaning of a series of node_exporter; those of vmstat by the kernel's own names."""
    if (known := NODE.get(name)) is not None:
        return known
    if name.startswith("node_vmstat_"):
        own = name.removeprefix("node_vmstat_")
        return Meaning(own, unit_of(own), "cumulative", _memory, whole=True)
    return None
