"""Text Generation Inference: its configuration from ``/info`` and its model, and its sources."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from hoptrace.collectors.base import Collector
from hoptrace.collectors.context import Context
from hoptrace.collectors.engines import names_tgi
from hoptrace.collectors.engines.metrics_source import MetricsSource
from hoptrace.collectors.engines.model_files import fill_from_model

__all__ = ["describe", "sources"]

# router/src/lib.rs, struct Info of TGI 3; earlier versions say more (model_dtype, waiting_served_ratio …).
_KEPT = (
    "max_concurrent_requests", "max_best_of", "max_stop_sequences", "max_input_tokens", "max_input_length",
    "max_client_batch_size", "waiting_served_ratio", "max_batch_total_tokens", "max_waiting_tokens", "max_batch_size",
    "validation_workers", "model_dtype", "model_device_type",
)  # fmt: skip


async def describe(ctx: Context) -> list[str]:
    """See :class:`hoptrace.collectors.engines.catalog.Engine`."""
    server = ctx.server
    notes: list[str] = []
    reply = await ctx.api.get("/info")
    info = reply.json() if reply.ok else None
    if not isinstance(info, Mapping):
        return [f"{server.name}: its settings are not known: {reply.why('/info')}."]
    if isinstance(name := info.get("model_id"), str):
        server.model = name.rstrip("/").rsplit("/", 1)[-1] if name.startswith("/") else name[:300]
        server.model_path = name[:300]
    if isinstance(version := info.get("version"), str):
        server.engine_version = version[:100]
    for field, names in (
        ("context_tokens", ("max_total_tokens",)),
        ("max_sequences", ("max_batch_size",)),
        ("max_batched_tokens", ("max_batch_prefill_tokens",)),
    ):
        value = next((info[n] for n in names if type(info.get(n)) is int), None)
        if value is not None:
            setattr(server, field, value)
    server.config |= {k: info[k] for k in _KEPT if isinstance(info.get(k), int | float | str) and len(str(info[k])) <= 100}
    dtype = info.get("model_dtype")
    if isinstance(dtype, str):
        server.config["dtype"] = dtype.removeprefix("torch.")
    if server.max_sequences is None:
        notes.append(f"{server.name}: sequences are not limited by number: TGI's limit is tokens (max_batch_total_tokens).")
    # What fits in the KV cache at once, as TGI's own warm-up found or as it was told.
    total = info.get("max_batch_total_tokens")
    if type(total) is int and total > 0:
        server.kv_capacity_tokens = total
    else:
        notes.append(f"{server.name}: KV capacity is not known: /info of this version does not tell max_batch_total_tokens.")
    return notes + await asyncio.to_thread(fill_from_model, ctx, server.model_path)


def sources(ctx: Context) -> list[Collector]:
    """Counters: TGI shows neither steps nor requests from inside."""
    off = "is not there: TGI serves it on the port of --prometheus-port too"
    return [MetricsSource(ctx, "tgi-metrics", names_tgi.KNOWN, off=off)]
