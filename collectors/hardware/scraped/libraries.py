"""Transfer libraries and caches: NIXL, LMCache, Mooncake, NCCL's inspector.

NIXL (1.5.1, its Prometheus exporter, a page of a real one): times are microseconds though no suffix says so; `…_last_…` are of
the last operation only. LMCache: sums of its histograms are times, not bytes; names come with `:` or `_`, with or without `num_`
and `_total`, by version (lmcache/observability.py), as `lmcache_mp_…` from its multi-process server. Mooncake: the engine's own
page (transfer_engine_metrics.cpp) and the master's (master_metric_manager.cpp). NCCL: gauges of the last operations, kept under
their own names with their units.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hoptrace.collectors.engines import names_dynamo, names_llamacpp, names_tgi
from hoptrace.collectors.engines.names import COMMON
from hoptrace.collectors.engines.prometheus import Kind
from hoptrace.collectors.hardware.scraped.meaning import Labels, Meaning, fixed, label, told
from hoptrace.collectors.hardware.sink import Direction

__all__ = ["LIBRARIES", "LMCACHE", "OWN_UNITS", "UNITS", "library_meaning"]

_agent = label("agent_name", form="nixl:{0}")
_mooncake, _master, _segment = fixed("mooncake"), fixed("mooncake:master"), label("segment", form="mooncake:segment/{0}")
_LMCACHE = re.compile(r"lmcache[:_](?:num_)?(\w+?)(?:_total)?")
_READ_WRITE: tuple[tuple[str, Direction], ...] = (("read", "read"), ("write", "write"))


def _lmcache(labels: Labels) -> str | None:
    worker = told(labels, "worker_id")
    return f"lmcache:{worker}" if worker else None if "worker_id" in labels else "lmcache"


def _second_tier(labels: Labels) -> str | None:
    """Each adapter of LMCache's second tier has a name."""
    above, name = _lmcache(labels), told(labels, "l2_name")
    return f"{above}/{name}" if above and name else None


def _nixl(name: str, unit: str, way: Direction | None = None, doc: str = "", *, last: bool = False) -> Meaning:
    return Meaning(name, unit, "gauge" if last else "cumulative", _agent, way, whole=True, doc=doc, of="nixl:AGENT")


def _cache(name: str, unit: str, way: Direction | None = None, *, now: bool = False) -> Meaning:
    return Meaning(name, unit, "gauge" if now else "cumulative", _lmcache, way, whole=True, of="lmcache:WORKER")


def _moved(what: str, unit: str, way: Direction, doc: str = "") -> Meaning:
    return Meaning(what, unit, "cumulative", _mooncake, way, whole=True, of="mooncake", doc=doc)


LIBRARIES: Mapping[str, Meaning] = {
    "agent_tx_bytes_total": _nixl("data_bytes", "bytes", "tx"),
    "agent_rx_bytes_total": _nixl("data_bytes", "bytes", "rx"),
    "agent_tx_requests_num_total": _nixl("transfers", "transfers", "tx"),
    "agent_rx_requests_num_total": _nixl("transfers", "transfers", "rx"),
    "agent_memory_registered_total": _nixl("registered_bytes", "bytes"),
    "agent_memory_deregistered_total": _nixl("deregistered_bytes", "bytes"),
    "agent_xfer_time_total": _nixl("transfer_time_us", "us", doc="microseconds, in spite of its name"),
    "agent_xfer_post_time_total": _nixl("post_time_us", "us", doc="what submission costs; microseconds"),
    "agent_tx_last_bytes": _nixl("last_bytes", "bytes", "tx", "of the last transfer", last=True),
    "agent_rx_last_bytes": _nixl("last_bytes", "bytes", "rx", "of the last transfer", last=True),
    "agent_telemetry_events_dropped_total": _nixl("events_dropped", "events"),
    **{
        f"mooncake_te_{what}_bytes_total": _moved("data_bytes", "bytes", way, "of completed transfers")
        for what, way in _READ_WRITE
    },
    **{
        f"mooncake_te_{what}_requests_total": _moved("transfers", "transfers", way, "completed ones") for what, way in _READ_WRITE
    },
    **{f"mooncake_te_{what}_failures_total": _moved("failed_transfers", "transfers", way) for what, way in _READ_WRITE},
    **{f"mooncake_te_{what}_timeouts_total": _moved("timed_out_transfers", "transfers", way) for what, way in _READ_WRITE},
    "master_allocated_bytes": Meaning("used_bytes", "bytes", "gauge", _master, whole=True, of="mooncake:master"),
    "master_total_capacity_bytes": Meaning("capacity_bytes", "bytes", "gauge", _master, whole=True, of="mooncake:master"),
    "master_key_count": Meaning("keys", "keys", "gauge", _master, whole=True, of="mooncake:master"),
    "segment_allocated_bytes": Meaning("used_bytes", "bytes", "gauge", _segment, whole=True, of="mooncake:segment/NAME"),
    "segment_total_capacity_bytes": Meaning("capacity_bytes", "bytes", "gauge", _segment, whole=True, of="mooncake:segment/NAME"),
    "lmcache_mp_lookup_requested_tokens_total": _cache("requested_tokens", "tokens"),
    "lmcache_mp_lookup_hit_tokens_total": _cache("hit_tokens", "tokens"),
    "lmcache_mp_l1_read_chunks_total": _cache("l1_chunks", "chunks", "read"),
    "lmcache_mp_l1_write_chunks_total": _cache("l1_chunks", "chunks", "write"),
    "lmcache_mp_l1_memory_usage_bytes": _cache("l1_used_bytes", "bytes", now=True),
    "lmcache_mp_l2_usage_bytes": Meaning("l2_used_bytes", "bytes", "gauge", _second_tier, whole=True, of="lmcache:WORKER/L2"),
}
"""By the name on the page; LMCache's by version beside them (:data:`LMCACHE`)."""

LMCACHE: Mapping[str, Meaning] = {
    "remote_read_bytes": _cache("remote_bytes", "bytes", "read"),
    "remote_write_bytes": _cache("remote_bytes", "bytes", "write"),
    "local_disk_read_bytes": _cache("disk_bytes", "bytes", "read"),
    "local_disk_write_bytes": _cache("disk_bytes", "bytes", "write"),
    **{f"{what}_requests": _cache(f"{what}_requests", "requests")
       for what in ("remote_read", "remote_write", "retrieve", "store", "lookup")},
    **{f"{what}_tokens": _cache(f"{what}_tokens", "tokens")
       for what in ("hit", "requested", "stored", "vllm_hit", "prompt", "lookup")},
    "lookup_hits": _cache("lookup_hit_tokens", "tokens"),
    "local_cache_usage": _cache("local_cache_bytes", "bytes", now=True),
    "remote_cache_usage": _cache("remote_cache_bytes", "bytes", now=True),
    "local_storage_usage": _cache("local_storage_bytes", "bytes", now=True),
}  # fmt: skip
"""By the name without `lmcache:` or `lmcache_`, `num_` and `_total`."""

_SECONDS = ("time_to_retrieve", "time_to_store", "time_to_lookup")
_MILLISECONDS = ("remote_time_to_get", "remote_time_to_put", "remote_time_to_get_sync")
OWN_UNITS: Mapping[str, Kind] = {
    **{f"lmcache{sep}{name}_sum": Kind("s", "cumulative") for name in _SECONDS for sep in ":_"},
    **{f"lmcache{sep}{name}_sum": Kind("ms", "cumulative") for name in _MILLISECONDS for sep in ":_"},
    "agent_xfer_time_us_sum": Kind("us", "cumulative"),
    "mooncake_te_read_latency_us_sum": Kind("us", "cumulative"), "mooncake_te_write_latency_us_sum": Kind("us", "cumulative"),
    "nccl_bus_bandwidth_gbs": Kind("GB/s", "gauge"), "nccl_collective_exec_time_microseconds": Kind("us", "gauge"),
    "nccl_p2p_bus_bandwidth_gbs": Kind("GB/s", "gauge"), "nccl_p2p_exec_time_microseconds": Kind("us", "gauge"),
}  # fmt: skip
"""Series that keep their names, with a unit that no TYPE line tells."""

UNITS: Mapping[str, Kind] = {**COMMON, **names_llamacpp.KNOWN, **names_tgi.KNOWN, **names_dynamo.KNOWN, **OWN_UNITS}
"""Those, and what stands on the engines' pages (Dynamo's table has vLLM's, SGLang's and TensorRT-LLM's names in it)."""


def library_meaning(name: str) -> Meaning | None:
    """The meaning of a series of one of these libraries; null for any other."""
    if (known := LIBRARIES.get(name)) is not None:
        return known
    match = _LMCACHE.fullmatch(name) if name.startswith("lmcache") else None
    return LMCACHE.get(match[1]) if match else None
