"""TensorRT-LLM (``trtllm-serve``): its configuration from command line, Prometheus page and model, and its sources."""

from __future__ import annotations

import asyncio

from hoptrace.collectors.base import Collector
from hoptrace.collectors.context import Context
from hoptrace.collectors.engines import names_trtllm
from hoptrace.collectors.engines.command_line import Allowed, of_server
from hoptrace.collectors.engines.metrics_source import MetricsSource
from hoptrace.collectors.engines.model_files import fill_from_model
from hoptrace.collectors.engines.prometheus import read
from hoptrace.collectors.engines.trtllm_requests import TrtllmRequests
from hoptrace.collectors.engines.trtllm_steps import TrtllmSteps

__all__ = ["FLAGS", "PAGE", "describe", "sources"]

PAGE = "/prometheus/metrics"
"""In the Prometheus format (``return_perf_metrics: true``); ``/metrics`` is JSON, told once."""

FLAGS: Allowed = {
    "--backend": "word", "--max_batch_size": "int", "--max_num_tokens": "int", "--max_seq_len": "int", "--max_beam_width": "int",
    "--tp_size": "int", "--pp_size": "int", "--ep_size": "int", "--cluster_size": "int", "--gpus_per_node": "int",
    "--kv_cache_free_gpu_memory_fraction": "float", "--extra_llm_api_options": "word", "--config=--extra_llm_api_options": "word",
    "--num_postprocess_workers": "int", "--server_role": "word", "--tokenizer": "word", "--host": "word",
}  # fmt: skip
"""Flags of trtllm-serve that are read from its command line (tensorrt_llm/commands/serve.py)."""

_GAUGES = {
    "trtllm_kv_cache_max_blocks": "block_count", "trtllm_kv_cache_tokens_per_block": "block_size_tokens",
    "trtllm_max_num_active_requests": "max_sequences",
}  # fmt: skip
_INFO = (
    "trtllm_model_config_info",
    "trtllm_parallel_config_info",
    "trtllm_speculative_config_info",
    "trtllm_kv_cache_config_info",
)
_NOT_KEPT = frozenset(("engine_type", "model_name", "extra_llm_api_options", "host", "tokenizer"))


async def describe(ctx: Context) -> list[str]:
    """See :class:`hoptrace.collectors.engines.catalog.Engine`. ``/metrics`` is not asked: it forgets what it has told."""
    server = ctx.server
    notes: list[str] = []
    told, subject = await asyncio.to_thread(of_server, ctx, FLAGS)
    flags = told or {}
    for flag, field in (
        ("max_batch_size", "max_sequences"),
        ("max_num_tokens", "max_batched_tokens"),
        ("max_seq_len", "context_tokens"),
    ):
        if flag in flags:
            setattr(server, field, flags[flag])
    if subject:
        server.model_path = subject[0]
    if "extra_llm_api_options" in flags:
        notes.append(f"{server.name}: settings in {flags['extra_llm_api_options']} (--extra_llm_api_options) are not read.")
    server.config |= {k: v for k, v in flags.items() if k not in _NOT_KEPT}
    page = await ctx.api.get(PAGE)
    if page.ok:
        for s in read(page.text, names_trtllm.KNOWN).samples:
            if s.base in _GAUGES and s.value is not None and s.value > 0:
                setattr(server, _GAUGES[s.base], int(s.value))
            elif s.base in _INFO:
                server.config |= {
                    k: v[:200] for k, v in s.labels.items() if k not in _NOT_KEPT and v not in ("", "None", "unknown")
                }
    if server.block_count and server.block_size_tokens:
        server.kv_capacity_tokens = server.block_count * server.block_size_tokens
    else:
        notes.append(
            f"{server.name}: KV capacity is not known yet: it comes with the first steps (kv_capacity_tokens), or from {PAGE} "
            "(return_perf_metrics: true)."
        )
    name = server.model_path or server.model
    return notes + await asyncio.to_thread(fill_from_model, ctx, name)


def sources(ctx: Context) -> list[Collector]:
    """Steps, requests, counters."""
    off = "is not there: start trtllm-serve with --extra_llm_api_options FILE, in it `return_perf_metrics: true`"
    return [
        TrtllmSteps(ctx),
        TrtllmRequests(ctx),
        MetricsSource(ctx, "trtllm-metrics", names_trtllm.KNOWN, off=off, path=PAGE),
    ]
