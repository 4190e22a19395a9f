"""vLLM's stat-logger plug-in: entry point ``hoptrace`` of the group ``vllm.stat_logger_plugins``. Loaded in API-server processes.

Importing this needs vLLM; if its interface has changed so that the import fails, vLLM says so and goes on without the plug-in.
"""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

from hoptrace.collectors.inside.channel import Channel
from hoptrace.collectors.inside.vllm_config import config_of_vllm
from hoptrace.collectors.inside.vllm_record import record_of
from hoptrace.collectors.inside.vllm_times import install, take

__all__ = ["StatLogger"]

_Base: Any = import_module("vllm.v1.metrics.loggers").StatLoggerBase

# One channel for all engines of this process: records say which engine they are of.
_shared: list[Channel | None] = []


class StatLogger(_Base):  # type: ignore[misc]
    """Writes what each message of an engine says into the channel. No method of it raises, and none waits."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        try:
            if not _shared:
                _shared.append(_open(vllm_config))
            self._channel = _shared[0]
        except Exception:
            self._channel = None
        self._engine = engine_index

    def record(
        self, scheduler_stats: Any = None, iteration_stats: Any = None, mm_cache_stats: Any = None, engine_idx: int = 0, **_: Any
    ) -> None:
        channel = self._channel
        if channel is None:
            return
        try:
            if channel.on:
                record = record_of(scheduler_stats, iteration_stats, engine_idx, take(iteration_stats))
                if record is not None:
                    channel.send(record, time.monotonic_ns())
        except Exception as e:
            channel.fault(e)

    def log_engine_initialized(self) -> None:
        return None

    def log(self, *_: Any, **__: Any) -> None:
        return None

    def record_sleep_state(self, *_: Any, **__: Any) -> None:
        return None


def _open(vllm_config: Any) -> Channel | None:
    exact = False
    try:
        exact = install(import_module("vllm.v1.metrics.stats").IterationStats)
    except Exception:
        exact = False
    return Channel.open("api", {"engine": "vllm", "exact_times": exact, "config": config_of_vllm(vllm_config)})
