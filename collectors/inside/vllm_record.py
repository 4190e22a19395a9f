"""What vLLM hands to a stat logger, as one plain record. By attribute only: the classes are not a stable interface.

Keys (left out where zero or missing), so that a record of an idle field costs nothing:

====  ================================================================================================
k     "s"
t     CLOCK_MONOTONIC in ns when the engine's message had reached the API server (see ``_received``)
e     engine (data-parallel rank)
i     iteration: index, context requests, context tokens, generation requests, generation tokens,
      elapsed ns, encoder inputs, encoder tokens, dummy (0 or 1)
r w d running, waiting, deferred requests
u     share of the KV blocks in use
p c   prefix cache, connector's prefix cache: requests, queries, hits, preempted requests, their queries, their hits
ph ch hits by source of either
ev    evictions: number, summed lifetime ns, summed idle ns, reuses, summed reuse gaps ns
sd    speculation: drafts, proposed tokens, accepted tokens
kv ec statistics of the KV connector, of the encoder-cache connector, as they are
kf    requests that wait for remote KV, by stage
n     generated tokens, then prompt tokens: computed, found locally, from elsewhere, found in all, total; preemptions
f     finished requests: id, reason, end-to-end ns, prompt tokens, generated tokens, max tokens, cached tokens, preemptions,
      queued ns, prefill ns, inference ns, then the engine's own times where reachable: queued, scheduled, first token, last token
====  ================================================================================================
"""

from __future__ import annotations

import time
from typing import Any

__all__ = ["record_of"]

_ITERATION = (
    "iteration_index", "num_ctx_requests", "num_ctx_tokens", "num_generation_requests", "num_generation_tokens",
)  # fmt: skip
_PREFIX = ("requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits")
_MOST_VALUES = 4096


def ns(seconds: Any) -> int | None:
    """Seconds as whole ns; null for what is no number."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds != seconds:
        return None
    return round(seconds * 1e9)


def record_of(
    scheduler: Any, iteration: Any, engine: int, times: dict[int, list[int | None]] | None = None
) -> dict[str, Any] | None:
    """The record of one message of the engine; null if it says nothing. ``times``: see :mod:`vllm_times`, by position."""
    record: dict[str, Any] = {"k": "s", "t": _received(iteration)}
    if engine:
        record["e"] = engine
    if scheduler is not None:
        _scheduler(record, scheduler)
    if iteration is not None:
        _iteration(record, iteration, times or {})
    return record if len(record) > (3 if engine else 2) else None


def _received(iteration: Any) -> int:
    """Now; or when the API server began with the message, if it tells (wall clock, so only if that is a little ago)."""
    now, wall = time.monotonic_ns(), time.time()
    began = getattr(iteration, "iteration_timestamp", None)
    if isinstance(began, float) and 0 <= wall - began < 60:
        return now - round((wall - began) * 1e9)
    return now


def _scheduler(record: dict[str, Any], s: Any) -> None:
    details = getattr(s, "iteration_details", None)
    if details is not None:
        record["i"] = [getattr(details, name, None) for name in _ITERATION] + [
            ns((getattr(details, "elapsed_ms", None) or 0) / 1000),
            getattr(details, "num_encoder_inputs", 0),
            getattr(details, "num_encoder_output_tokens", 0),
            int(bool(getattr(details, "is_dummy", False))),
        ]
    record["r"] = getattr(s, "num_running_reqs", None)
    record["w"] = getattr(s, "num_waiting_reqs", None)
    if deferred := getattr(s, "num_skipped_waiting_reqs", 0):
        record["d"] = deferred
    usage = getattr(s, "kv_cache_usage", None)
    if usage is not None:
        record["u"] = float(usage)
    for key, by, name in (("p", "ph", "prefix_cache_stats"), ("c", "ch", "connector_prefix_cache_stats")):
        stats = getattr(s, name, None)
        if stats is None:
            continue
        values = [getattr(stats, field, 0) for field in _PREFIX]
        if any(values):
            record[key] = values
        sources = getattr(stats, "hits_by_source", None)
        if sources:
            record[by] = {str(getattr(k, "value", k)): v for k, v in sources.items()}
    if events := getattr(s, "kv_cache_eviction_events", None):
        gaps = [g for e in events for g in getattr(e, "reuse_gaps_seconds", ())]
        record["ev"] = [
            len(events), ns(sum(e.lifetime_seconds for e in events)), ns(sum(e.idle_seconds for e in events)), len(gaps),
            ns(sum(gaps)),
        ]  # fmt: skip
    if (spec := getattr(s, "spec_decoding_stats", None)) is not None:
        record["sd"] = [getattr(spec, f, None) for f in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")]
    for key, name in (("kv", "kv_connector_stats"), ("ec", "ec_connector_stats")):
        if stats := getattr(s, name, None):
            # Both may be an object with the values in `data` (a nested connector's) or plain already.
            record[key] = plain(stats)
    if (fetch := getattr(s, "num_kv_fetch_reqs_by_stage", None)) and any(fetch.values()):
        record["kf"] = dict(fetch)


def _iteration(record: dict[str, Any], it: Any, times: dict[int, list[int | None]]) -> None:
    prompt = getattr(it, "prompt_token_stats", None)
    fields = ("computed", "local_cache_hit", "external_kv_transfer", "cached_tokens", "total")
    counts = [getattr(it, "num_generation_tokens", 0), *(getattr(prompt, f, 0) for f in fields)]
    counts.append(getattr(it, "num_preempted_reqs", 0))
    if any(counts):
        record["n"] = counts
    finished = getattr(it, "finished_requests", None)
    if finished:
        record["f"] = [_finished(f) + times.get(i, []) for i, f in enumerate(finished)]


def _finished(f: Any) -> list[Any]:
    return [
        getattr(f, "request_id", None), str(getattr(f, "finish_reason", "")), ns(getattr(f, "e2e_latency", None)),
        getattr(f, "num_prompt_tokens", None), getattr(f, "num_generation_tokens", None), getattr(f, "max_tokens_param", None),
        getattr(f, "num_cached_tokens", None), getattr(f, "num_preemptions", None), ns(getattr(f, "queued_time", None)),
        ns(getattr(f, "prefill_time", None)), ns(getattr(f, "inference_time", None)),
    ]  # fmt: skip


def plain(value: Any, depth: int = 0) -> Any:
    """Statistics of any shape as plain values, bounded; what can't be said is left out."""
    if value is None or isinstance(value, bool | int | float | str):
        return value[:256] if isinstance(value, str) else value
    if depth > 4:
        return None
    if isinstance(value, dict):
        return {str(getattr(k, "value", k))[:128]: plain(v, depth + 1) for k, v in list(value.items())[:256]}
    if isinstance(value, list | tuple | set):
        return [plain(v, depth + 1) for v in list(value)[:_MOST_VALUES]]
    if hasattr(value, "data"):
        return plain(value.data, depth + 1)
    item = getattr(value, "item", None)  # a NumPy number
    return plain(item(), depth + 1) if callable(item) and getattr(value, "size", 0) == 1 else None
