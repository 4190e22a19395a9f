"""What the demo sends: a slice of the public request log, its lengths and its pace scaled to the speed of this machine."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

import hoptrace
from hoptrace.errors import EnvironmentProblem
from hoptrace.manifest import Manifest
from hoptrace.writer import TraceWriter

__all__ = ["Speed", "measure", "write_workload"]

SLICE = "azure-2023-conv"
REQUESTS = 48
SPAN_S = 32.0
# Work that arrives ÷ work that one slot can do. High enough that one slot queues; low enough that a tenth more time per step,
# which a virtual machine takes without asking, does not double the queue.
LOAD = 0.55
_PROMPT_LIMITS = (8, 1500)
_OUTPUT_LIMITS = (6, 256)


@dataclass(frozen=True, slots=True)
class Speed:
    """What one request alone gets from the server."""

    prefill_ns_per_token: int
    decode_ns_per_token: int


def measure(url: str) -> Speed:
    """Measure a llama.cpp server with three short requests, the first of which only warms it up.

    Raises:
        EnvironmentProblem: it does not answer as llama.cpp does.
    """
    best: list[tuple[float, float]] = []
    for n in range(3):
        words = " ".join(f"{n}{i}" for i in range(40))
        timings = _complete(url, words, 24).get("timings", {})
        try:
            best.append((timings["prompt_ms"] / timings["prompt_n"], timings["predicted_ms"] / (timings["predicted_n"] - 1)))
        except (KeyError, ZeroDivisionError, TypeError):
            raise EnvironmentProblem(f"The server at {url} tells no timings, so its speed is unknown.") from None
    prefill, decode = (min(b[i] for b in best[1:]) for i in (0, 1))
    return Speed(max(1, round(prefill * 1e6)), max(1, round(decode * 1e6)))


def _complete(url: str, prompt: str, tokens: int) -> dict[str, Any]:
    body = json.dumps({"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}).encode()
    request = urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return dict(json.load(answer))
    except (OSError, ValueError) as e:
        raise EnvironmentProblem(f"The server at {url} did not answer a test request: {e}.") from None


def write_workload(source: Path, out: Path, speed: Speed, *, requests: int = REQUESTS, span_s: float = SPAN_S) -> None:
    """Write the first ``requests`` of ``source``, scaled, as the trace ``out``.

    One factor scales the prompts, one the outputs, so that each fills half of ``LOAD`` of one slot's time; a third scales all
    gaps, so that the slice lasts ``span_s``. They stand in the manifest.
    """
    trace = hoptrace.open(source)
    rows = trace.table("requests").sort("arrival_ns").head(requests).collect()
    first = rows["arrival_ns"][0]
    pace = max(1, rows["arrival_ns"][-1] - first) / (span_s * 1e9)
    half_ns = LOAD * span_s * 1e9 / 2
    prompts = min(1.0, half_ns / (float(rows["prompt_tokens"].sum()) * speed.prefill_ns_per_token))
    outputs = min(1.0, half_ns / (float(rows["output_tokens"].sum()) * speed.decode_ns_per_token))
    arrival = (first + (pl.col("arrival_ns") - first) / pace).round().cast(pl.Int64)
    scaled = rows.with_columns(
        arrival.alias("arrival_ns"),
        arrival.alias("received_ns"),
        _scaled("prompt_tokens", prompts, _PROMPT_LIMITS),
        _scaled("output_tokens", outputs, _OUTPUT_LIMITS),
    ).with_columns(pl.col("output_tokens").alias("max_tokens"))
    manifest = Manifest(
        origin="imported",
        title=f"first {rows.height} requests of {trace.name}, scaled to this machine",
        imported_from=trace.manifest.imported_from,
        notes=[
            *trace.manifest.notes,
            f"To suit this machine, prompts are scaled by {prompts:.4f} (kept within {_PROMPT_LIMITS} tokens), outputs by "
            f"{outputs:.4f} (within {_OUTPUT_LIMITS}), and gaps between arrivals divided by {pace:.4f}.",
        ],
    )
    with TraceWriter(out, manifest, background=False) as writer:
        writer.append_arrow("requests", scaled.to_arrow())
        writer.append_arrow("coverage", trace.table("coverage").collect().to_arrow())


def _scaled(column: str, factor: float, limits: tuple[int, int]) -> pl.Expr:
    return (pl.col(column) * factor).round().cast(pl.Int64).clip(*limits)
