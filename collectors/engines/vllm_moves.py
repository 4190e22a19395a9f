"""Statistics of vLLM's KV and encoder-cache connectors as moves and waits, by their shape: there is one per connector.

* Lists ``transfer_duration``, ``bytes_transferred`` and mostly ``num_descriptors``, ``post_duration`` (NIXL, Mooncake): one
  transfer each, in the step whose worker found that it was done.
* ``vllm:kv_offload_load_*`` and ``…_store_*`` (offloading): bytes and seconds of the step, in sum.
* A map of such maps (MultiConnector): each by itself.
* Everything else is kept as counters, under its own name: sums where the name is that of a count, a size or a time, else the last
  value as a gauge.

Only the end of a transfer is known, and only to the step: its start is the end less the duration. It may have ended sooner,
since the worker looks once a step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Found", "mechanism_of", "transfers"]

_RDMA = {
    "rc",
    "rc_x",
    "rc_v",
    "rc_mlx5",
    "dc",
    "dc_x",
    "dc_mlx5",
    "ud",
    "ud_x",
    "ud_v",
    "ud_mlx5",
    "ib",
    "rdma",
    "srd",
    "gdr_copy",
}
_MESSAGE = {"tcp"}
_NEUTRAL = {"self"}
_LOAD, _STORE = "vllm:kv_offload_load", "vllm:kv_offload_store"
_SUMMED = re.compile(
    r"(^|_)num_|_(bytes|hits|misses|count|total|failures?|errors|requests|tokens|blocks|seconds|duration|time|size|transferred)$"
)
_COLUMNS = ("transfer_duration", "bytes_transferred", "num_descriptors", "post_duration")


@dataclass(slots=True)
class Found:
    """Rows (without server, step, request, source) and what is left: (name, value)."""

    moves: list[dict[str, Any]] = field(default_factory=list)
    waits: list[dict[str, Any]] = field(default_factory=list)
    sums: list[tuple[str, int | float]] = field(default_factory=list)
    gauges: list[tuple[str, int | float]] = field(default_factory=list)


def mechanism_of(transports: str | None) -> str | None:
    """``mechanism`` of a move from UCX_TLS; null where that leaves open how the bytes go (shared memory or TCP, say)."""
    if not transports or transports.startswith("^"):
        return None
    names = {t.strip().lower() for t in transports.split(",")} - _NEUTRAL
    if names and names <= _RDMA:
        return "rdma"
    return "message" if names and names <= _MESSAGE else None


def transfers(
    stats: Any, end_ns: int, node: str, *, what: str = "kv", connector: str = "", mechanism: str | None = None, name: str = "kv"
) -> Found:
    """What one step's statistics say. ``node`` is this server's, ``what`` moves, ``name`` begins the names of counters."""
    found = Found()
    _any(found, stats, end_ns, node, what, connector, mechanism, name)
    return found


def _any(found: Found, stats: Any, end_ns: int, node: str, what: str, connector: str, mechanism: str | None, name: str) -> None:
    if not isinstance(stats, Mapping):
        return
    rest = dict(stats)
    lists = [rest.get(c) for c in _COLUMNS]
    if isinstance(lists[0], list) and isinstance(lists[1], list) and len(lists[0]) == len(lists[1]):
        _pulled(found, lists, end_ns, node, what, connector or name, mechanism)
        for column in _COLUMNS:
            rest.pop(column, None)
    for prefix, src, dst in ((_LOAD, f"{node}/offload", node), (_STORE, node, f"{node}/offload")):
        size, seconds = _sum(rest.get(f"{prefix}_bytes")), _sum(rest.get(f"{prefix}_time"))
        if size:
            row = {"object": what, "src": src, "dst": dst, "bytes": int(size), "basis": "counted", "end_ns": end_ns}
            row |= {"start_ns": end_ns - round(seconds * 1e9) if seconds else end_ns}
            sizes = rest.get(f"{prefix}_size")
            found.moves.append(row | {"transfers": len(sizes) if isinstance(sizes, list) else None})
            for suffix in ("bytes", "time", "size"):
                rest.pop(f"{prefix}_{suffix}", None)
    for key, value in rest.items():
        if isinstance(value, Mapping):
            inner = value.get("data") if isinstance(value.get("data"), Mapping) else value
            _any(found, inner, end_ns, node, what, str(key), mechanism, f"{name}:{key}")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for one in value:
                _any(found, one, end_ns, node, what, str(key), mechanism, f"{name}:{key}")
        elif (number := _last(value)) is None:
            continue
        elif _SUMMED.search(str(key)):
            found.sums.append((f"{name}:{key}", _sum(value)))
        else:
            found.gauges.append((f"{name}:{key}", number))


def _pulled(found: Found, lists: list[Any], end_ns: int, node: str, what: str, connector: str, mechanism: str | None) -> None:
    seconds, sizes, descriptors, posts = lists
    for i, (duration, size) in enumerate(zip(seconds, sizes, strict=True)):
        length = round(duration * 1e9)
        start = end_ns - length
        count = descriptors[i] if isinstance(descriptors, list) and len(descriptors) == len(seconds) else None
        found.moves.append(
            {"object": what, "src": "remote", "dst": node, "start_ns": start, "end_ns": end_ns, "bytes": int(size),
             "transfers": count, "mechanism": mechanism, "basis": "counted"}
        )  # fmt: skip
        post = posts[i] if isinstance(posts, list) and len(posts) == len(seconds) else None
        posted = start if post is None else min(start + round(post * 1e9), end_ns)
        for kind, a, b in (("serialize", start, posted), ("transfer", posted, end_ns)):
            if b > a:
                found.waits.append({"kind": kind, "on": connector, "start_ns": a, "end_ns": b, "count": 1, "basis": "counted"})


def _last(value: Any) -> int | float | None:
    if isinstance(value, list):
        value = value[-1] if value else None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _sum(value: Any) -> int | float:
    if isinstance(value, list):
        return sum(v for v in value if isinstance(v, int | float) and not isinstance(v, bool))
    return value if isinstance(value, int | float) and not isinstance(value, bool) else 0
