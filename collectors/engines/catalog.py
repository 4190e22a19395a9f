"""The engines that hoptrace knows, each a module with two functions. A new engine is a new file and a line here."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Protocol

from hoptrace.collectors.base import Collector
from hoptrace.collectors.context import Context
from hoptrace.collectors.engines import dynamo, gateway, llamacpp, sglang, tgi, trtllm, vllm
from hoptrace.collectors.engines.identify import GATEWAYS
from hoptrace.collectors.engines.metrics_source import MetricsSource
from hoptrace.collectors.hardware.tree import tree_of

__all__ = ["ENGINES", "GIVES", "Engine", "describe", "sources"]


class Engine(Protocol):
    """What a module of an engine offers."""

    async def describe(self, ctx: Context) -> list[str]:
        """Fill ``ctx.server`` with the server's configuration as far as it can be read; gives notes on the rest.

        Called at the start, and again when the server is back after a restart. Asks and reads, records nothing.
        """

    def sources(self, ctx: Context) -> list[Collector]:
        """The engine's collectors, available or not: each one's probe says."""


ENGINES: dict[str, Engine] = {
    "llama.cpp": llamacpp,
    "vllm": vllm,
    "sglang": sglang,
    "tensorrt-llm": trtllm,
    "dynamo": dynamo,
    "tgi": tgi,
    **dict.fromkeys(GATEWAYS, gateway),
}

GIVES = {
    "sniff": "requests, each token's time, totals, prefix hashes, from copies of the packets: no client is changed",
    "proxy": "requests, each token's time, totals, prefix hashes: clients are pointed at hoptrace's port",
    "otlp": "each request's times inside the engine, from its spans",
    "process": "CPU time, run-queue delay and memory of the server's processes and threads, and of the machine",
    "vllm-plugin": "every step from inside vLLM (composition, length, KV, preemptions) and each request's times and cache hits",
    "vllm-metrics": "vLLM's totals, gauges and histograms",
    "vllm-log": "each step's composition and length from the log, and its ten-second summaries",
    "kv-events": "each KV block stored, evicted and cleared, by tier",
    "forward-pass": "each forward pass: composition, length, queue",
    "sglang-metrics": "SGLang's totals, gauges and histograms",
    "sglang-export": "each finished request: times, tokens, cache hits by tier",
    "sglang-log": "batch sizes and queue from SGLang's log",
    "llamacpp-metrics": "llama.cpp's totals and gauges",
    "llamacpp-slots": "what each slot does, many times a second",
    "llamacpp-log": "prompt and decode time of each request, by slot",
    "trtllm-steps": "each iteration: composition, length, KV, queue",
    "trtllm-requests": "each finished request's times inside the engine, and KV transfers",
    "trtllm-metrics": "TensorRT-LLM's totals, gauges and histograms",
    "dynamo-metrics": "Dynamo's totals, gauges and histograms, and its workers' load",
    "tgi-metrics": "TGI's totals, gauges and histograms",
    "router-metrics": "the router's totals, gauges and histograms",
    "metrics": "what the server tells at /metrics, read as its TYPE lines say",
}
"""One line per source: what it records."""


async def describe(ctx: Context) -> list[str]:
    """As the engine's module does; of an engine that is not known, only that."""
    server = ctx.server
    notes = []
    if isinstance(front := server.config.get("front"), str):
        notes.append(
            f"{server.name}: {front} stands before the server at {ctx.api.url}: the process that listens is its, and times seen "
            "there include it. Give the server's own URL where you can, or --pid."
        )
    if ctx.find is not None and (roles := await asyncio.to_thread(_roles, ctx)):
        server.config["processes"] = roles
    engine = ENGINES.get(server.engine or "")
    if engine is None and server.config.get("denied"):
        return [*notes, f"{server.name}: it wants an API key: name the variable that holds it with --key-env."]
    if engine is None:
        known = ", ".join(sorted(n for n in ENGINES if n not in GATEWAYS))
        return [*notes, f"{server.name}: of no engine that hoptrace knows ({known}): its settings and steps are not read."]
    return [*notes, *await engine.describe(ctx)]


def _roles(ctx: Context) -> dict[str, int]:
    """How many processes of the server there are, by role; their numbers change with every start, and stand in `events`."""
    pid = ctx.find().pid if ctx.find is not None else None
    found = Counter(p.role for p in tree_of(pid)) if pid is not None else {}
    return {role: n for role, n in sorted(found.items()) if role in ("api", "engine", "worker")}


def sources(ctx: Context) -> list[Collector]:
    """As the engine's module does; of an engine that is not known, its ``/metrics`` if it has any."""
    engine = ENGINES.get(ctx.server.engine or "")
    return engine.sources(ctx) if engine is not None else [MetricsSource(ctx, "metrics", {})]
