"""TPOT of a request with several sequences: each of them has a first token of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support.memory import MemoryTrace

import hoptrace
from hoptrace.field_metrics_sql import goodput_sql
from hoptrace.metrics import METRICS, request_metrics, stat, summary
from hoptrace.reader import Trace

MS = 1_000_000
VLLM = Path(__file__).parent / "data" / "vllm_traces"


def two(tokens: dict[int, list[int]], output: int, stages: int = 0) -> Trace:
    """A request whose sequences have tokens at these ms; ``stages``: how many of them have a stay."""
    row: dict[str, Any] = {
        "request": 0, "arrival_ns": 0, "first_token_ns": 20 * MS, "last_token_ns": 90 * MS, "finish_ns": 95 * MS,
        "output_tokens": output,
    }  # fmt: skip
    seen = [
        {"request": 0, "sequence": s, "index": i, "time_ns": t * MS, "count": 1, "vantage": "proxy"}
        for s, times in tokens.items()
        for i, t in enumerate(times)
    ]
    return MemoryTrace(
        {"requests": [row], "tokens": seen, "stages": [{"request": 0, "stage": 0, "sequence": s} for s in range(stages)]}
    )


@pytest.mark.parametrize(
    ("tokens", "output", "stages", "want"),
    [
        ({0: [20, 40, 60, 80], 1: [30, 50, 70, 90]}, 8, 0, 20 * MS),  # a token each 20 ms, twice
        ({0: [20, 30], 1: [30, 50, 70, 90]}, 6, 2, 17_500_000),  # (10 + 60) ÷ (6 − 2)
        ({0: [20], 1: [90]}, 2, 2, None),  # nothing after the first ones
        ({0: [20, 40, 60, 80]}, 8, 2, None),  # the tokens of the second were not seen
        ({0: [20, 55, 90]}, 3, 1, 35 * MS),  # one: as ever
    ],
)
def test_by_hand(tokens: dict[int, list[int]], output: int, stages: int, want: int | None) -> None:
    trace = two(tokens, output, stages)
    assert request_metrics(trace)["tpot_ns"].to_list() == [want]
    assert trace.sql(METRICS["tpot"].sql).row(0, named=True) == summary(trace)["tpot"].as_dict()
    met = trace.sql(goodput_sql({"tpot": 19 * MS}))["met"].item()
    assert met == int(want is not None and want <= 19 * MS)


def test_on_a_real_capture() -> None:
    """vLLM with n = 2: of three requests somebody outside saw the tokens of both; TPOT lies where their ITL does, not at half."""
    trace = hoptrace.open(VLLM / "preempted.trace")
    assert trace.several().rows() == [(2, 2), (3, 2), (4, 3), (5, 2), (6, 4), (10, 2)]
    tpot = dict(request_metrics(trace).filter(pl.col("request").is_in([2, 5, 10])).select("request", "tpot_ns").rows())
    tokens = trace.table("tokens").collect()
    for request, found in tpot.items():
        own = tokens.filter(pl.col("request") == request)
        spans = own.group_by("sequence").agg(pl.col("time_ns").max() - pl.col("time_ns").min())["time_ns"].sum()
        assert found == round(spans / (int(own["count"].sum()) - 2))
    assert trace.sql(METRICS["tpot"].sql).row(0, named=True) == summary(trace)["tpot"].as_dict()
    assert stat(request_metrics(trace)["tpot_ns"]).n == 43
