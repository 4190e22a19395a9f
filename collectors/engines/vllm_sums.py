"""What the plug-in says that has no column of its own: summed over one sampling beat, into `counters`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Sums"]

_PREFIX = ("requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits")
_TOKENS = (
    "generation_tokens", "prompt_tokens_computed", "prompt_tokens_local_cache", "prompt_tokens_external", "prompt_tokens_cached",
    "prompt_tokens", "preemptions_reported",
)  # fmt: skip
_EVICTIONS = ("evictions", "evicted_lifetime_ns", "evicted_idle_ns", "evicted_reuses", "evicted_reuse_gap_ns")


class Sums:
    """Deltas by entity and name, and gauges by their last value. Only what is not zero becomes a row."""

    def __init__(self, server: str) -> None:
        self._entity = f"server:{server}"
        self._sums: dict[tuple[str, str, str], int | float] = {}
        self._gauges: dict[tuple[str, str, str], int | float] = {}
        self._told: dict[tuple[str, str, str], int | float] = {}
        self._last_ns: int | None = None

    def entity(self, engine: int) -> str:
        """The server, or its engine of a rank above 0."""
        return f"{self._entity}/engine:{engine}" if engine else self._entity

    def add(self, engine: int, name: str, value: Any, unit: str, time_ns: int) -> None:
        """Add to a delta; zero, null and what is no number are nothing."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not value or value != value:
            return
        key = (self.entity(engine), f"plugin:{name}", unit)
        self._sums[key] = self._sums.get(key, 0) + value
        self._last_ns = max(self._last_ns or time_ns, time_ns)

    def gauge(self, engine: int, name: str, value: Any, unit: str, time_ns: int) -> None:
        """Set a gauge; a row is written when it has changed."""
        if isinstance(value, int | float) and not isinstance(value, bool) and value == value:
            self._gauges[(self.entity(engine), f"plugin:{name}", unit)] = value
            self._last_ns = max(self._last_ns or time_ns, time_ns)

    def record(self, record: Mapping[str, Any], engine: int, time_ns: int) -> None:
        """The sums of one record of the stat logger (keys: :mod:`hoptrace.collectors.inside.vllm_record`)."""
        for key, by, name in (("p", "ph", "prefix_cache"), ("c", "ch", "connector_prefix_cache")):
            for field, value in zip(_PREFIX, record.get(key) or (), strict=False):
                self.add(engine, f"{name}_{field}", value, "requests" if field.endswith("requests") else "tokens", time_ns)
            for source, value in (record.get(by) or {}).items():
                self.add(engine, f"{name}_hits:{source}", value, "tokens", time_ns)
        for field, value in zip(_TOKENS, record.get("n") or (), strict=False):
            self.add(engine, field, value, "1" if field.startswith("preempt") else "tokens", time_ns)
        for field, value in zip(_EVICTIONS, record.get("ev") or (), strict=False):
            self.add(engine, field, value, "ns" if field.endswith("_ns") else "1", time_ns)
        for stage, value in (record.get("kf") or {}).items():
            self.gauge(engine, f"kv_fetch_requests:{stage}", value, "requests", time_ns)
        if not record.get("kf") and "r" in record:
            prefix = "plugin:kv_fetch_requests:"
            for entity, name, unit in [k for k, v in self._told.items() if v and k[1].startswith(prefix)]:
                if entity == self.entity(engine):
                    self.gauge(engine, name.removeprefix("plugin:"), 0, unit, time_ns)

    def rows(self) -> list[dict[str, Any]]:
        """Rows of `counters` since the last call (``host``, ``source`` and ``incarnation`` are the caller's)."""
        rows = []
        for semantics, values in (("delta", self._sums), ("gauge", self._gauges)):
            for key, value in values.items():
                if semantics == "gauge":
                    if self._told.get(key) == value:
                        continue
                    self._told[key] = value
                entity, name, unit = key
                rows.append(
                    {"time_ns": self._last_ns, "entity": entity, "name": name, "unit": unit, "semantics": semantics,
                     "status": "ok", "value_int": value if isinstance(value, int) else None,
                     "value_float": value if isinstance(value, float) else None}
                )  # fmt: skip
        self._sums.clear()
        self._gauges.clear()
        return rows
