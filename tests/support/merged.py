"""Several traces as one: what a capture of all servers of a deployment would hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl
from support.memory import MemoryTrace

from hoptrace.manifest import Manifest
from hoptrace.reader import Trace
from hoptrace.schema import TABLES

__all__ = ["merged"]

_TIMES = (
    "start_ns", "end_ns", "time_ns", "from_ns", "to_ns", "intended_ns", "sent_ns", "received_ns", "queued_ns", "scheduled_ns",
    "engine_first_token_ns", "first_token_ns", "first_visible_ns", "last_token_ns", "finish_ns", "arrival_ns", "enqueued_ns",
)  # fmt: skip


def merged(parts: Sequence[tuple[Trace, str, int]], **manifest: Any) -> MemoryTrace:
    """``parts``: (trace with one server, the server's new name, ns to add to its times). Requests are numbered anew."""
    rows: dict[str, list[dict[str, Any]]] = {}
    servers = []
    first = 0
    for trace, name, shift in parts:
        servers.append(trace.manifest.servers[0].model_copy(update={"name": name}))
        highest = first
        for table in TABLES:
            if table in ("tokens", "counters"):
                continue
            frame = trace.table(table).collect()
            if frame.is_empty():
                continue
            changes = [(pl.col(c) + shift).alias(c) for c in _TIMES if c in frame.columns]
            if "server" in frame.columns:
                changes.append(pl.lit(name).alias("server"))
            changes += [(pl.col(c) + first).alias(c) for c in ("request", "parent_request") if c in frame.columns]
            frame = frame.with_columns(changes)
            if "request" in frame.columns and (top := frame["request"].max()) is not None:
                highest = max(highest, int(top) + 1)  # type: ignore[call-overload]
            rows.setdefault(table, []).extend(frame.to_dicts())
        first = highest
    return MemoryTrace(rows, Manifest(origin="recorded", servers=servers, closed=True, **manifest))
