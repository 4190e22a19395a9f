"""Routers before several servers: what they are, their own metrics, and where their workers are."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from hoptrace.collectors.base import Collector
from hoptrace.collectors.context import Context
from hoptrace.collectors.engines import names_sglang, names_vllm
from hoptrace.collectors.engines.identify import GATEWAYS
from hoptrace.collectors.engines.metrics_source import MetricsSource

__all__ = ["describe", "sources"]

_LISTED = 32


async def describe(ctx: Context) -> list[str]:
    """Names the router and, where it tells, its workers' addresses."""
    server = ctx.server
    what = GATEWAYS.get(server.engine or "", "a router")
    workers = await _workers(ctx)
    if workers:
        server.config["workers"] = workers
        where = " ".join(workers[:4]) + (" …" if len(workers) > 4 else "")
        return [
            f"{server.name}: this is {what}: its settings, steps and KV are its workers'. Attach to them too: hoptrace attach "
            f"{ctx.api.url} {where} …"
        ]
    return [f"{server.name}: this is {what}: settings, steps and KV are its workers'. Attach to their URLs too."]


def sources(ctx: Context) -> list[Collector]:
    """The router's own page."""
    known = {**names_vllm.KNOWN, **names_sglang.KNOWN}
    off = "is not there: SGLang's and vLLM's routers serve it on the port of --prometheus-port"
    return [MetricsSource(ctx, "router-metrics", known, off=off)]


async def _workers(ctx: Context) -> list[str]:
    reply = await ctx.api.get("/workers")
    data = reply.json() if reply.ok else None
    listed = data.get("workers") if isinstance(data, Mapping) else None
    found = []
    for worker in listed if isinstance(listed, list) else ():
        url = worker.get("url") if isinstance(worker, Mapping) else worker
        if isinstance(url, str) and urlsplit(url).scheme in ("http", "https") and len(url) <= 200:
            parts = urlsplit(url)
            found.append(f"{parts.scheme}://{parts.netloc.rsplit('@', 1)[-1]}")
    return found[:_LISTED]
