"""vLLM: its configuration from its endpoints, command line, plug-in and model, and its sources."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from hoptrace.collectors.base import Collector
from hoptrace.collectors.context import Context
from hoptrace.collectors.engines import names_vllm
from hoptrace.collectors.engines.command_line import Allowed, of_server
from hoptrace.collectors.engines.metrics_source import MetricsSource
from hoptrace.collectors.engines.model_files import fill_from_model
from hoptrace.collectors.engines.prometheus import read
from hoptrace.collectors.engines.published.kv_endpoints import endpoints_of, of_sources
from hoptrace.collectors.engines.published.kv_events import KvEvents
from hoptrace.collectors.engines.vllm_channel import VllmChannel, config_of
from hoptrace.collectors.engines.vllm_log import VllmLog
from hoptrace.manifest import Server

__all__ = ["FLAGS", "describe", "sources"]

FLAGS: Allowed = {
    "--model": "word", "--served-model-name": "list", "--dtype": "word", "--quantization": "word", "-q=--quantization": "word",
    "--max-model-len": "int", "--block-size": "int", "--kv-cache-dtype": "word", "--gpu-memory-utilization": "float",
    "--max-num-seqs": "int", "--max-num-batched-tokens": "int", "--enable-prefix-caching": "flag",
    "--enable-chunked-prefill": "flag",
    "--tensor-parallel-size": "int", "-tp=--tensor-parallel-size": "int", "--pipeline-parallel-size": "int",
    "-pp=--pipeline-parallel-size": "int", "--data-parallel-size": "int", "-dp=--data-parallel-size": "int",
    "--data-parallel-size-local": "int", "-dpl=--data-parallel-size-local": "int", "--enable-expert-parallel": "flag",
    "-ep=--enable-expert-parallel": "flag", "--enforce-eager": "flag", "--scheduling-policy": "word", "--scheduler-cls": "word",
    "--async-scheduling": "flag", "--long-prefill-token-threshold": "int", "--num-gpu-blocks-override": "int",
    "--kv-transfer-config": "json", "--kv-events-config": "json", "--speculative-config": "json", "--stream-interval": "int",
    "--enable-logging-iteration-details": "flag", "--enable-per-request-metrics": "flag", "--api-server-count": "int",
    "--enable-prompt-tokens-details": "flag", "--kv-cache-metrics": "flag", "--otlp-traces-endpoint": "word",
    "--load-format": "word", "--disable-log-stats": "flag", "--config": "word", "--enable-mfu-metrics": "flag",
}  # fmt: skip
"""Flags of vLLM that are read from its command line (vllm/engine/arg_utils.py of 0.32)."""

_FIELDS = {
    "max_num_seqs": "max_sequences", "max_num_batched_tokens": "max_batched_tokens", "max_model_len": "context_tokens",
    "block_size": "block_size_tokens", "enable_prefix_caching": "prefix_caching", "model": "model_path",
}  # fmt: skip
_NOT_KEPT = ("model", "served_model_name", "config", "max_model_len")
_INFO = "vllm:cache_config_info"


async def describe(ctx: Context) -> list[str]:
    """See :class:`hoptrace.collectors.engines.catalog.Engine`. vLLM's defaults depend on the machine: none is assumed."""
    server, api = ctx.server, ctx.api
    notes: list[str] = []
    models, metrics, info, events = await asyncio.gather(
        api.get("/v1/models"), api.get("/metrics"), api.get("/server_info?config_format=json"), api.get("/kv_event_sources")
    )
    listed = models.json() if models.ok else None
    data = listed.get("data") if isinstance(listed, Mapping) else None
    root = data[0].get("root") if isinstance(data, list) and data and isinstance(data[0], Mapping) else None
    if isinstance(root, str):
        server.model_path = root
    if models.denied:
        notes.append(f"{server.name}: the model is not known: {models.why('/v1/models')}.")
    told, subject = await asyncio.to_thread(of_server, ctx, FLAGS)
    flags = told or {}
    if subject and "model" not in flags:
        flags["model"] = subject[0]
    _from_flags(server, flags)
    if "config" in flags:
        notes.append(f"{server.name}: flags in the file that --config names are not read: {flags['config']}.")
    if info.ok:
        _from_info(server, info.json())
    if metrics.ok:
        notes += _from_metrics(server, metrics.text)
    else:
        notes.append(f"{server.name}: block size and KV capacity are not known: {metrics.why('/metrics')}.")
    await asyncio.to_thread(_from_plugin, ctx)
    if server.kv_dtype in (None, "auto") and server.config.get("kv_cache_dtype") not in (None, "auto"):
        server.kv_dtype = server.config["kv_cache_dtype"]
    notes += await asyncio.to_thread(fill_from_model, ctx, server.model_path)
    if server.kv_dtype in (None, "auto"):
        # "auto" is the model's own type.
        server.kv_dtype = server.config.get("dtype") if server.config.get("dtype") != "auto" else None
    if events.ok and isinstance(told_events := events.json(), Mapping):
        server.config["kv_event_sources"] = {
            str(k)[:8]: {n: v[n] for n in ("endpoint", "replay_endpoint", "topic", "publisher") if isinstance(v.get(n), str)}
            for k, v in list(told_events.items())[:1024] if isinstance(v, Mapping)
        }  # fmt: skip
    return notes + _unknown(server, told is not None)


def sources(ctx: Context) -> list[Collector]:
    """The plug-in's channel first: it has what the others have, and from inside."""
    channel = VllmChannel(ctx)
    off = "is not there: vLLM was started with --disable-log-stats, or a gateway stands before it"
    ranks = max(1, int(ctx.server.config.get("data_parallel_size") or 1))
    return [
        channel,
        MetricsSource(ctx, "vllm-metrics", names_vllm.KNOWN, renamed=names_vllm.RENAMED, off=off),
        _kv_events(ctx, ranks),
        VllmLog(ctx, channel),
    ]


def _kv_events(ctx: Context, ranks: int) -> KvEvents:
    options, config = ctx.options, ctx.server.config
    if options.kv_events is not None:
        return KvEvents(ctx, options.kv_events, options.kv_events_replay, ranks=ranks)
    host = urlsplit(ctx.api.url).hostname or "127.0.0.1"
    started = config.get("kv_events_config")
    told = config.get("kv_event_sources")
    if isinstance(told, Mapping) and told:
        return KvEvents(ctx, of_sources(told, host, started.get("endpoint") if isinstance(started, Mapping) else None))
    return KvEvents(ctx, endpoints_of(started, host, ranks) if isinstance(started, Mapping) else None)


def _from_flags(server: Server, flags: dict[str, Any]) -> None:
    for flag, field in _FIELDS.items():
        if flag in flags and (getattr(server, field) is None or flag != "model"):
            setattr(server, field, flags[flag])
    server.config |= {k: v for k, v in flags.items() if k not in _NOT_KEPT}


def _from_info(server: Server, data: Any) -> None:
    """``/server_info`` of a server in development mode: the configuration in whole, of which a few fields are taken."""
    config = data.get("vllm_config") if isinstance(data, Mapping) else None

    def told(part: str, name: str) -> Any:
        section = config.get(part) if isinstance(config, Mapping) else None
        value = section.get(name) if isinstance(section, Mapping) else None
        return value if isinstance(value, str | int | float | bool) else None

    for part, name, field in (
        ("scheduler_config", "max_num_seqs", "max_sequences"),
        ("scheduler_config", "max_num_batched_tokens", "max_batched_tokens"),
        ("model_config", "max_model_len", "context_tokens"),
    ):  # fmt: skip
        value = told(part, name)
        if type(value) is int:
            setattr(server, field, value)
    for part, name in (
        ("model_config", "dtype"), ("model_config", "quantization"), ("parallel_config", "tensor_parallel_size"),
        ("parallel_config", "pipeline_parallel_size"), ("parallel_config", "data_parallel_size"),
        ("parallel_config", "enable_expert_parallel"), ("scheduler_config", "enable_chunked_prefill"),
        ("scheduler_config", "async_scheduling"), ("scheduler_config", "policy"),
        ("scheduler_config", "long_prefill_token_threshold"), ("scheduler_config", "stream_interval"),
        ("observability_config", "enable_logging_iteration_details"), ("speculative_config", "method"),
        ("speculative_config", "num_speculative_tokens"), ("kv_transfer_config", "kv_connector"),
        ("kv_transfer_config", "kv_role"),
    ):  # fmt: skip
        value = told(part, name)
        if value is not None:
            key = f"speculation_{name}" if part == "speculative_config" else "scheduling_policy" if name == "policy" else name
            server.config[key] = value.removeprefix("torch.") if isinstance(value, str) else value


def _from_metrics(server: Server, text: str) -> list[str]:
    """The labels of ``vllm:cache_config_info``: one series per data-parallel engine."""
    series = [s for s in read(text, {}).samples if s.base == _INFO]
    if not series:
        return [f"{server.name}: block size and KV capacity are not known: /metrics has no {_INFO}."]
    labels, engines = series[0].labels, len(series)
    notes = []
    size, blocks, tokens = (_int(labels.get(n)) for n in ("block_size", "num_gpu_blocks", "kv_cache_size_tokens"))
    server.block_size_tokens = size if size is not None else server.block_size_tokens
    if engines > 1:
        # The number is the sum over the engines of one front end (vllm/v1/engine/core_client.py).
        server.config["engines"] = engines
        blocks = blocks // engines if blocks and blocks % engines == 0 else None
        tokens = None
        notes.append(f"{server.name}: block count and KV capacity are of one of its {engines} engines.")
    if blocks:
        # One block is never handed out: vllm/v1/core/block_pool.py, null_block.
        server.block_count = blocks - 1
        if size is not None and tokens in (None, blocks * size):
            server.kv_capacity_tokens = (blocks - 1) * size
    if tokens is not None and server.kv_capacity_tokens is None:
        server.kv_capacity_tokens = tokens  # layers of several kinds share the blocks: only vLLM's own figure is right
    if (caching := labels.get("enable_prefix_caching")) in ("True", "False"):
        server.prefix_caching = caching == "True"
    if (kv := labels.get("cache_dtype")) not in (None, "", "auto"):
        server.kv_dtype = kv
    for name in ("gpu_memory_utilization", "sliding_window", "prefix_caching_hash_algo", "num_cpu_blocks"):
        if (value := labels.get(name)) not in (None, "None", ""):
            server.config[name] = value
    return notes


def _from_plugin(ctx: Context) -> None:
    """What hoptrace's plug-in inside vLLM has written down: it knows the configuration that vLLM arrived at."""
    for name, value in (config_of(ctx) or {}).items():
        if name == "version":
            ctx.server.engine_version = str(value)
        elif name == "iteration_details":
            ctx.server.config["enable_logging_iteration_details"] = value
        elif name in Server.model_fields and name not in ("name", "url", "engine", "config"):
            setattr(ctx.server, name, value)
        else:
            ctx.server.config[name] = value


def _unknown(server: Server, seen: bool) -> list[str]:
    missing = [
        flag for flag, field in (("max-num-seqs", "max_sequences"), ("max-num-batched-tokens", "max_batched_tokens"))
        if getattr(server, field) is None
    ]  # fmt: skip
    if not missing:
        return []
    where = "its command line does not set them" if seen else "its process is not seen here"
    what = " and ".join(missing)
    return [f"{server.name}: {what} not known: {where}, and vLLM's defaults depend on the machine (hoptrace[vllm] tells them)."]


def _int(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 19 else None
