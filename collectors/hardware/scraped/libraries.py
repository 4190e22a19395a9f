"""Transfer libraries and caches: NIXL, LMCache.

NIXL (1.5.1, its Prometheus exporter, a page of a real one): times are microseconds though no suffix says so; `…_last_…` are of
the last operation only. LMCache: sums of its histograms are seconds, not bytes; its names come with `:` or `_`, with or without
`num_` and `_total`, by version.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hoptrace.collectors.hardware.scraped.meaning import Labels, Meaning, label

__all__ = ["NIXL", "library_meaning"]

_agent = label("agent_name", form="nixl:{0}")
_LMCACHE = re.compile(
    r"lmcache[:_](?:num_)?(remote_(?:read|write)_bytes|remote_(?:read|write)_requests|hit_tokens|requested_tokens)(?:_total)?"
)


def _lmcache(labels: Labels) -> str | None:
    return "lmcache"


NIXL: Mapping[str, Meaning] = {
    "agent_tx_bytes_total": Meaning("data_bytes", "bytes", "cumulative", _agent, "tx", whole=True),
    "agent_rx_bytes_total": Meaning("data_bytes", "bytes", "cumulative", _agent, "rx", whole=True),
    "agent_tx_requests_num_total": Meaning("transfers", "transfers", "cumulative", _agent, "tx", whole=True),
    "agent_rx_requests_num_total": Meaning("transfers", "transfers", "cumulative", _agent, "rx", whole=True),
    "agent_memory_registered_total": Meaning("registered_bytes", "bytes", "cumulative", _agent, whole=True),
    "agent_memory_deregistered_total": Meaning("deregistered_bytes", "bytes", "cumulative", _agent, whole=True),
    "agent_xfer_time_total": Meaning("transfer_time_us", "us", "cumulative", _agent, whole=True, doc="microseconds"),
    "agent_xfer_post_time_total": Meaning("post_time_us", "us", "cumulative", _agent, whole=True, doc="what submission costs"),
    "agent_tx_last_bytes": Meaning("last_bytes", "bytes", "gauge", _agent, "tx", whole=True, doc="of the last transfer"),
    "agent_rx_last_bytes": Meaning("last_bytes", "bytes", "gauge", _agent, "rx", whole=True, doc="of the last transfer"),
    "agent_telemetry_events_dropped_total": Meaning("events_dropped", "events", "cumulative", _agent, whole=True),
}


def library_meaning(name: str) -> Meaning | None:
    """The meaning of a series of NIXL or LMCache; null for any other."""
    if (known := NIXL.get(name)) is not None:
        return known
    if (match := _LMCACHE.fullmatch(name)) is None:
        return None
    what = match[1]
    if what.endswith("_bytes"):
        return Meaning("remote_bytes", "bytes", "cumulative", _lmcache, "read" if "read" in what else "write", whole=True)
    unit = "tokens" if what.endswith("tokens") else "requests"
    return Meaning(what, unit, "cumulative", _lmcache, whole=True)
