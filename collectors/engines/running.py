"""How many requests a server has running or waiting right now, as far as it tells."""

from __future__ import annotations

from hoptrace.collectors.engines.http import Api
from hoptrace.collectors.engines.prometheus import Reading

__all__ = ["NAMES", "running"]

NAMES = frozenset(
    {
        "vllm:num_requests_running", "vllm:num_requests_waiting", "sglang:num_running_reqs", "sglang:num_queue_reqs",
        "llamacpp:requests_processing", "llamacpp:requests_deferred", "trtllm_num_requests_running",
        "trtllm_num_requests_waiting", "tgi_batch_current_size", "tgi_queue_size",
    }
)  # fmt: skip
"""Gauges of requests in flight, by engine; their sum over all series counts."""


async def running(url: str) -> int | None:
    """Requests that the server at ``url`` runs or holds back: from /metrics, else llama.cpp's /slots; null if neither tells."""
    api = Api(url, None)
    try:
        page = await api.get("/metrics")
        if page.ok:
            values = [s.value for s in Reading({}).page(page.text).samples if s.base in NAMES and s.value is not None]
            if values:
                return max(0, round(sum(values)))
        slots = await api.get("/slots")
        listed = slots.json() if slots.ok else None
        if isinstance(listed, list) and listed and all(isinstance(s, dict) for s in listed):
            return sum(bool(s.get("is_processing")) for s in listed)
        return None
    finally:
        await api.close()
