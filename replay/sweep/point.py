"""One point of a sweep in a process of its own: replay it, and give its figures as one flat row."""

from __future__ import annotations

import json
import os
import signal
import traceback
from functools import lru_cache
from pathlib import Path
from typing import Any

import polars as pl

from hoptrace.errors import HoptraceError
from hoptrace.field_metrics import field_metrics
from hoptrace.metrics import summary
from hoptrace.reader import Trace, open_trace
from hoptrace.replay.policy import Policy
from hoptrace.replay.prepare import prepare
from hoptrace.replay.run import predict
from hoptrace.replay.sweep.grid import Point
from hoptrace.replay.uncertainty import Study, intervals
from hoptrace.replay.workload import parse_rate

__all__ = ["BOUNDS", "FIGURES", "begin", "run_point"]

_LATENCIES = ("ttft", "itl", "tpot", "e2e", "queue")
_STATISTICS = ("mean", "p50", "p95", "p99")

FIGURES: tuple[tuple[str, type], ...] = (
    ("requests", int), ("finished", int), ("failed", int), ("unfinished", int), ("duration_ns", int),
    ("output_tokens_per_s", float), ("requests_per_s", float), ("total_tokens_per_s", float),
    *((f"{m}_{s}_ns", int) for m in _LATENCIES for s in _STATISTICS),
    ("preemptions", int), ("goodput_requests_per_s", float), ("goodput_share", float), ("cached_tokens", int),
    ("recomputed_tokens", int), ("steps", int), ("kv_moved_bytes", int), ("kv_transfers", int),
)  # fmt: skip
"""Columns of a sweep's table beside the axes, with their types. `failed` counts refused requests; null is unknown."""

BOUNDS: tuple[tuple[str, type], ...] = (
    *((f"{m}_{s}_{end}_ns", int) for m in _LATENCIES for s in _STATISTICS for end in ("low", "high")),
    *((f"{name}_per_s_{end}", float) for name in ("output_tokens", "requests") for end in ("low", "high")),
    ("intervals_note", str),
)
"""Columns besides, where intervals are asked for: where nine of ten runs of the point would lie; why there are none."""


def begin() -> None:
    """At the start of a worker: Ctrl-C ends it at once and without a word; the parent says what there is to say."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@lru_cache(maxsize=1)
def _trace(path: str) -> Trace:
    return open_trace(Path(path))


@lru_cache(maxsize=4)
def _study(path: str, options: str, draws: int) -> Study:
    """The draws for all points with the same step cost. ``options``: of ``prepare``, as JSON."""
    trace = _trace(path)
    return Study(prepare(trace, "as-recorded", say=lambda _: None, **_whole(json.loads(options))), draws)


def _whole(options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``prepare``."""
    none = dict.fromkeys(("cost", "platform", "model", "recorded_on", "arrivals", "until"))
    return {**none, "seed": 0, "rate": 1, **options}


def _bounds(path: str, policy: Policy, options: dict[str, Any], draws: int) -> dict[str, Any]:
    """The intervals of a point: BOUNDS."""
    prepared = prepare(_trace(path), policy, say=lambda _: None, **_whole(options))
    cost = json.dumps({k: v for k, v in options.items() if k in ("cost", "platform", "model")}, sort_keys=True)
    got = intervals(prepared, study=_study(path, cost, draws))
    row: dict[str, Any] = {"intervals_note": " ".join(got.notes) or None}
    for metric, statistic in (*((m, s) for m in _LATENCIES for s in _STATISTICS), ("throughput", "output tokens"),
                              ("throughput", "requests")):  # fmt: skip
        i = got.get("what_if", metric, statistic)
        for end, value in () if i is None else (("low", i.low), ("high", i.high)):
            if metric == "throughput":
                row[f"{statistic.replace(' ', '_')}_per_s_{end}"] = value
            else:
                row[f"{metric}_{statistic}_{end}_ns"] = round(value)
    return row


def run_point(path: str, point: Point, slo: dict[str, int] | None, tokens: bool, draws: int = 0) -> dict[str, Any]:
    """The figures of one point: ``status`` ok or failed, ``error``, FIGURES, and with ``draws`` BOUNDS. Nothing that it does
    wrong is raised."""
    try:
        options = dict(point.options)
        rate = options.pop("rate", None)
        if rate is not None:
            options["rate"] = parse_rate(str(rate))
        policy = point.resolved()
        result = predict(_trace(path), policy, check=False, tokens=tokens, **options)
        bounds = _bounds(path, policy, options, draws) if draws else {}
        return {"status": "ok", "error": None, **_figures(result.trace, slo), **bounds}
    except HoptraceError as e:
        return {"status": "failed", "error": str(e)}
    except MemoryError:
        return {"status": "failed", "error": "not enough memory"}
    except Exception as e:
        if os.environ.get("HOPTRACE_DEBUG"):
            traceback.print_exc()
        return {"status": "failed", "error": f"{type(e).__name__}: {e}"}


def _figures(trace: Trace, slo: dict[str, int] | None) -> dict[str, Any]:
    s, f = summary(trace), field_metrics(trace, slo=slo)
    kv = pl.col("object") == "kv"
    row: dict[str, Any] = {
        "requests": s.requests, "finished": s.finished, "failed": s.failed, "unfinished": s.unfinished,
        "duration_ns": s.duration_ns, "output_tokens_per_s": s.output_tokens_per_s, "requests_per_s": s.requests_per_s,
        "total_tokens_per_s": f.total_tokens_per_s, "preemptions": f.preemption.preemptions,
        "cached_tokens": _total(trace.table("stages"), "cached_tokens"),
        "recomputed_tokens": _total(trace.table("stages"), "recomputed_tokens"),
        "steps": trace.table("steps").select(pl.len()).collect().item(),
        "kv_moved_bytes": _total(trace.table("moves").filter(kv), "bytes") or 0,
        "kv_transfers": _total(trace.table("moves").filter(kv), "transfers") or 0,
    }  # fmt: skip
    for metric in _LATENCIES:
        if metric in s:
            row |= {f"{metric}_{x}_ns": getattr(s[metric], f"{x}_ns") for x in _STATISTICS}
    if f.goodput is not None:
        row |= {"goodput_requests_per_s": f.goodput.per_s, "goodput_share": f.goodput.share}
    return row


def _total(table: pl.LazyFrame, column: str) -> int | None:
    """The sum of a column; null where no row tells it."""
    found = table.select(pl.when(pl.col(column).is_not_null().any()).then(pl.col(column).sum())).collect().item()
    return None if found is None else int(found)
