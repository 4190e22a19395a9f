"""NVIDIA Dynamo: its frontend (which routes to workers that have addresses of their own) or one of its workers, and its metrics.

A frontend tells of each model what its workers' deployment card says; a worker's page has its engine's metrics beside Dynamo's.
"""

from __future__ import annotations

from hoptrace.collectors.base import Collector
from hoptrace.collectors.context import Context
from hoptrace.collectors.engines import names_dynamo
from hoptrace.collectors.engines.metrics_source import MetricsSource
from hoptrace.collectors.engines.prometheus import Sample, read
from hoptrace.collectors.engines.published.forward_pass import ForwardPass

__all__ = ["describe", "sources"]

_F, _C = "dynamo_frontend_", "dynamo_component_"
_CARD = {
    f"{_F}model_context_length": "context_tokens",
    f"{_F}model_kv_cache_block_size": "block_size_tokens",
    f"{_F}model_total_kv_blocks": "block_count",
    f"{_F}model_max_num_seqs": "max_sequences",
    f"{_F}model_max_num_batched_tokens": "max_batched_tokens",
    f"{_C}total_blocks": "block_count",
}


async def describe(ctx: Context) -> list[str]:
    """See :class:`hoptrace.collectors.engines.catalog.Engine`."""
    server = ctx.server
    reply = await ctx.api.get("/metrics")
    if not reply.ok:
        return [f"{server.name}: its settings are not known: {reply.why('/metrics')}."]
    samples = read(reply.text, names_dynamo.KNOWN).samples
    frontend = any(s.name.startswith(_F) for s in samples)
    server.config["part"] = "frontend" if frontend else "worker"
    notes = []
    for name, field in _CARD.items():
        told = [s for s in samples if s.base == name and s.value is not None and s.value > 0 and _of_model(s, server.model)]
        values = {int(s.value or 0) for s in told}
        if len(values) == 1:
            setattr(server, field, values.pop())
        elif values:
            notes.append(f"{server.name}: {field} is not one number: its workers or models differ ({sorted(values)[:5]}).")
    if server.block_count and server.block_size_tokens:
        server.kv_capacity_tokens = server.block_count * server.block_size_tokens
        notes.append(f"{server.name}: KV capacity is that of one worker.")
    engines = sorted({e for s in samples for e in ("vllm", "sglang", "trtllm") if s.name.startswith((f"{e}:", f"{e}_"))})
    if engines:
        server.config["worker_engines"] = engines
    if frontend:
        notes.append(
            f"{server.name}: this is a frontend: steps and KV are its workers'. Attach to their system ports too "
            "(DYN_SYSTEM_PORT), each as a URL."
        )
    return notes


def sources(ctx: Context) -> list[Collector]:
    """The page; of a worker also its forward-pass metrics, where the address is given."""
    off = "is not there: a worker serves it on its system port (DYN_SYSTEM_ENABLED=true, DYN_SYSTEM_PORT)"
    found: list[Collector] = [
        MetricsSource(ctx, "dynamo-metrics", names_dynamo.KNOWN, renamed=names_dynamo.RENAMED, off=off),
    ]
    if ctx.options.forward_pass is not None or ctx.server.config.get("part") == "worker":
        found.append(ForwardPass(ctx, ctx.options.forward_pass))
    return found


def _of_model(s: Sample, model: str | None) -> bool:
    """A frontend may serve several models: the one that was told first counts."""
    named = s.labels.get("model") or s.labels.get("model_name")
    return named is None or model is None or named.lower() == model.lower()
