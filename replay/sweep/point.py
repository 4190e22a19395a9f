"""One point of a sweep in a process of its own: replay it, and give its figures as one flat row."""

from __future__ import annotations

import os
import signal
import traceback
from functools import lru_cache
from pathlib import Path
from typing import Any

from hoptrace.errors import HoptraceError
from hoptrace.field_metrics import field_metrics
from hoptrace.metrics import summary
from hoptrace.reader import Trace, open_trace
from hoptrace.replay.memory_trace import FramesTrace
from hoptrace.replay.run import predict
from hoptrace.replay.sweep.grid import Point
from hoptrace.replay.workload import parse_rate

__all__ = ["FIGURES", "begin", "run_point"]

_LATENCIES = ("ttft", "itl", "tpot", "e2e", "queue")
_STATISTICS = ("mean", "p50", "p95", "p99")

FIGURES: tuple[tuple[str, type], ...] = (
    ("requests", int), ("finished", int), ("failed", int), ("unfinished", int), ("duration_ns", int),
    ("output_tokens_per_s", float), ("requests_per_s", float), ("total_tokens_per_s", float),
    *((f"{m}_{s}_ns", int) for m in _LATENCIES for s in _STATISTICS),
    ("preemptions", int), ("goodput_requests_per_s", float), ("goodput_share", float), ("cached_tokens", int),
    ("recomputed_tokens", int), ("steps", int), ("moved_bytes", int), ("transfers", int),
)  # fmt: skip
"""Columns of a sweep's table beside the axes, with their types. `failed` counts refused requests; null is unknown."""


def begin() -> None:
    """At the start of a worker: Ctrl-C ends it at once and without a word; the parent says what there is to say."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@lru_cache(maxsize=1)
def _trace(path: str) -> Trace:
    return open_trace(Path(path))


def run_point(path: str, point: Point, slo: dict[str, int] | None, tokens: bool) -> dict[str, Any]:
    """The figures of one point: ``status`` ok or failed, ``error``, and FIGURES. Nothing that it does wrong is raised."""
    try:
        options = dict(point.options)
        rate = options.pop("rate", None)
        if rate is not None:
            options["rate"] = parse_rate(str(rate))
        result = predict(_trace(path), point.resolved(), check=False, tokens=tokens, **options)
        return {"status": "ok", "error": None, **_figures(result.trace, slo)}
    except HoptraceError as e:
        return {"status": "failed", "error": str(e)}
    except MemoryError:
        return {"status": "failed", "error": "not enough memory"}
    except Exception as e:
        if os.environ.get("HOPTRACE_DEBUG"):
            traceback.print_exc()
        return {"status": "failed", "error": f"{type(e).__name__}: {e}"}


def _figures(trace: FramesTrace, slo: dict[str, int] | None) -> dict[str, Any]:
    s, f = summary(trace), field_metrics(trace, slo=slo)
    stages, moves = trace.frames.get("stages"), trace.frames.get("moves")

    def total(frame: Any, column: str) -> int | None:
        return None if frame is None or not frame.height or frame[column].is_null().all() else int(frame[column].sum())

    steps = trace.frames.get("steps")
    row: dict[str, Any] = {
        "requests": s.requests, "finished": s.finished, "failed": s.failed, "unfinished": s.unfinished,
        "duration_ns": s.duration_ns, "output_tokens_per_s": s.output_tokens_per_s, "requests_per_s": s.requests_per_s,
        "total_tokens_per_s": f.total_tokens_per_s, "preemptions": f.preemption.preemptions,
        "cached_tokens": total(stages, "cached_tokens"), "recomputed_tokens": total(stages, "recomputed_tokens"),
        "steps": None if steps is None else steps.height,
        "moved_bytes": total(moves, "bytes") or 0, "transfers": total(moves, "transfers") or 0,
    }  # fmt: skip
    for metric in _LATENCIES:
        if metric in s:
            row |= {f"{metric}_{x}_ns": getattr(s[metric], f"{x}_ns") for x in _STATISTICS}
    if f.goodput is not None:
        row |= {"goodput_requests_per_s": f.goodput.per_s, "goodput_share": f.goodput.share}
    return row
