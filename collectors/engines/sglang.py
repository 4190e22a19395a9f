"""SGLang: its configuration from ``/server_info`` and its model, and its sources."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hoptrace.collectors.base import Collector
from hoptrace.collectors.context import Context
from hoptrace.collectors.engines import names_sglang
from hoptrace.collectors.engines.command_line import Allowed, Flags, of_server
from hoptrace.collectors.engines.identify import first_of
from hoptrace.collectors.engines.metrics_source import MetricsSource
from hoptrace.collectors.engines.model_files import fill_from_model
from hoptrace.collectors.engines.published.forward_pass import ForwardPass
from hoptrace.collectors.engines.published.kv_endpoints import endpoints_of
from hoptrace.collectors.engines.published.kv_events import KvEvents
from hoptrace.collectors.engines.sglang_export import SglangExport
from hoptrace.collectors.engines.sglang_log import SglangLog
from hoptrace.manifest import Server

__all__ = ["FLAGS", "describe", "sources"]

FLAGS: Allowed = {
    "--model-path": "word", "--model=--model-path": "word", "--dtype": "word", "--quantization": "word",
    "--context-length": "int", "--page-size": "int", "--kv-cache-dtype": "word", "--mem-fraction-static": "float",
    "--max-running-requests": "int", "--max-total-tokens": "int", "--max-prefill-tokens": "int", "--chunked-prefill-size": "int",
    "--disable-radix-cache": "flag", "--tp-size": "int", "--tensor-parallel-size=--tp-size": "int", "--tp=--tp-size": "int",
    "--pp-size": "int", "--pipeline-parallel-size=--pp-size": "int", "--dp-size": "int", "--data-parallel-size=--dp-size": "int",
    "--dp=--dp-size": "int", "--ep-size": "int", "--ep=--ep-size": "int", "--enable-dp-attention": "flag",
    "--schedule-policy": "word", "--disable-overlap-schedule": "flag", "--enable-mixed-chunk": "flag",
    "--speculative-algorithm": "word", "--speculative-num-steps": "int", "--speculative-num-draft-tokens": "int",
    "--disaggregation-mode": "word", "--disaggregation-transfer-backend": "word", "--enable-metrics": "flag",
    "--enable-forward-pass-metrics": "flag", "--forward-pass-metrics-ipc-name": "word", "--kv-events-config": "json",
    "--export-metrics-to-file": "flag", "--export-metrics-to-file-dir": "word", "--decode-log-interval": "int",
    "--enable-hierarchical-cache": "flag", "--hicache-ratio": "float", "--stream-interval": "int",
}  # fmt: skip
"""Flags of SGLang that are read from its command line, and fields that are taken from ``/server_info`` (srt/server_args.py of
0.5.23). The rest of it holds keys."""

_FIELDS = {
    "model_path": "model_path", "max_running_requests": "max_sequences", "page_size": "block_size_tokens",
    "kv_cache_dtype": "kv_dtype",
}  # fmt: skip
_MORE = ("max_total_num_tokens", "max_req_input_len", "served_model_name", "load_format", "attention_backend", "status")


async def describe(ctx: Context) -> list[str]:
    """See :class:`hoptrace.collectors.engines.catalog.Engine`."""
    server = ctx.server
    notes: list[str] = []
    info_reply = await first_of(ctx.api, "/server_info", "/get_server_info")
    info = info_reply.json() if info_reply.ok else None
    if isinstance(info, Mapping):
        names = {real.partition("=")[2] or real for real in FLAGS}
        told = {n: info.get(n) for n in (x.lstrip("-").replace("-", "_") for x in names)} | {n: info.get(n) for n in _MORE}
        flags: Flags = {k: v for k, v in told.items() if isinstance(v, str | int | float | bool) and len(str(v)) <= 300}
        _states(server, info, flags)
    else:
        notes.append(f"{server.name}: its settings are not known: {info_reply.why('/server_info')}.")
        flags = (await asyncio.to_thread(of_server, ctx, FLAGS))[0] or {}
    if isinstance(events := _json(info, "kv_events_config") or flags.get("kv_events_config"), Mapping):
        flags["kv_events_config"] = events
    _fill(server, flags)
    notes += await asyncio.to_thread(fill_from_model, ctx, server.model_path)
    if server.kv_dtype in (None, "auto"):
        server.kv_dtype = server.config.get("dtype") if server.config.get("dtype") != "auto" else None
    return notes


def sources(ctx: Context) -> list[Collector]:
    """Steps from forward-pass metrics, requests from the export files, blocks from KV events; the rest are counters."""
    config, options = ctx.server.config, ctx.options
    host = urlsplit(ctx.api.url).hostname or "127.0.0.1"
    ranks = max(1, int(config.get("dp_size") or 1))
    if options.kv_events is not None:
        events = KvEvents(ctx, options.kv_events, options.kv_events_replay, ranks=ranks)
    else:
        told = config.get("kv_events_config")
        events = KvEvents(ctx, endpoints_of(told, host, ranks) if isinstance(told, Mapping) else None)
    told_ipc = config.get("forward_pass_metrics_ipc_name") if config.get("enable_forward_pass_metrics") else None
    folder = config.get("export_metrics_to_file_dir") if config.get("export_metrics_to_file") else None
    off = "is not there: start SGLang with --enable-metrics"
    return [
        MetricsSource(ctx, "sglang-metrics", names_sglang.KNOWN, renamed=names_sglang.RENAMED, off=off),
        ForwardPass(ctx, options.forward_pass or (told_ipc if isinstance(told_ipc, str) else None), ranks=ranks),
        events,
        SglangExport(ctx, Path(folder) if isinstance(folder, str) else None),
        SglangLog(ctx),
    ]


def _json(info: object, name: str) -> Any:
    """A setting that SGLang keeps as a JSON text; only the keys that say where its events go."""
    import json

    value = info.get(name) if isinstance(info, Mapping) else None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, Mapping):
        return None
    return {k: value[k] for k in ("publisher", "endpoint", "replay_endpoint", "topic") if isinstance(value.get(k), str)}


def _states(server: Server, info: Mapping[str, Any], flags: dict[str, Any]) -> None:
    """What the schedulers arrived at, one state per data-parallel rank; it stands over what was asked for."""
    states = (
        [s for s in info.get("internal_states") or () if isinstance(s, Mapping)]
        if isinstance(info.get("internal_states"), list)
        else []
    )
    for name in ("max_running_requests", "max_total_num_tokens", "page_size", "chunked_prefill_size", "max_prefill_tokens"):
        value = next((s[name] for s in states if type(s.get(name)) is int), None)
        if value is not None:
            flags[name] = value
    if len(states) > 1:
        server.config["engines"] = len(states)


def _fill(server: Server, flags: dict[str, Any]) -> None:
    for flag, field in _FIELDS.items():
        if flags.get(flag) is not None:
            setattr(server, field, flags[flag])
    tokens = flags.get("max_total_num_tokens")
    if type(tokens) is int and tokens > 0:
        server.kv_capacity_tokens = tokens
        if server.block_size_tokens:
            server.block_count = tokens // server.block_size_tokens
    if type(context := flags.get("context_length")) is int:
        server.context_tokens = context
    if type(chunk := flags.get("chunked_prefill_size")) is int and chunk > 0:
        server.max_batched_tokens = chunk
    elif type(budget := flags.get("max_prefill_tokens")) is int:
        server.max_batched_tokens = budget
    if isinstance(off := flags.get("disable_radix_cache"), bool):
        server.prefix_caching = not off
    kept = {k: v for k, v in flags.items() if k not in ("model_path", "context_length", "served_model_name")}
    server.config |= {k: v for k, v in kept.items() if v is not None}
