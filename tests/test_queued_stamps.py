"""An engine that looks for requests between steps stamps them then: so does its replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

import hoptrace
from hoptrace.manifest import Manifest, Server
from hoptrace.reader import Trace
from hoptrace.replay.parent import parent_of
from hoptrace.replay.run import predict
from hoptrace.stepcost import StepCost
from hoptrace.writer import TraceWriter

_MS = 1_000_000


def _trace(path: Path, late_ms: list[float], stamped: str) -> Trace:
    """Requests on one server with steps of 10 ms from 0 to 200 ms; each comes ``late_ms`` after the start of one, and is stamped
    at its end, or where it came."""
    steps = [
        {
            "server": "s", "dp_rank": 0, "pp_rank": 0, "step": k, "start_ns": 10 * k * _MS + 1000, "end_ns": 10 * (k + 1) * _MS,
            "prefill_requests": 0, "prefill_tokens": 0, "prefill_context_tokens": 0, "decode_requests": 1, "decode_tokens": 1,
            "decode_context_tokens": 10, "origin": "observed", "source": "t",
        }
        for k in range(20)
    ]  # fmt: skip
    requests: list[dict[str, Any]] = []
    stages: list[dict[str, Any]] = []
    for i, late in enumerate(late_ms):
        came = round((10 * (2 * i + 1) + late) * _MS)
        queued = 10 * (2 * i + 2) * _MS + 500 if stamped == "between" else came + 100
        requests.append(
            {
                "request": i, "arrival_ns": came, "received_ns": came, "arrival_of": "received", "queued_ns": queued,
                "scheduled_ns": queued + 500, "first_token_ns": queued + 11 * _MS, "last_token_ns": queued + 11 * _MS,
                "finish_ns": queued + 11 * _MS, "prompt_tokens": 5, "output_tokens": 1, "source": "t",
            }
        )  # fmt: skip
        stages.append({"request": i, "attempt": 0, "stage": 0, "server": "s", "dp_rank": 0, "enqueued_ns": queued, "source": "t"})
    manifest = Manifest(origin="recorded", servers=[Server(name="s", engine="vllm", max_sequences=8, max_batched_tokens=64)])
    with TraceWriter(path, manifest, background=False) as w:
        w.append_arrow("steps", pl.DataFrame(steps).to_arrow())
        w.append_arrow("requests", pl.DataFrame(requests).to_arrow())
        w.append_arrow("stages", pl.DataFrame(stages).to_arrow())
    return hoptrace.open(path)


@pytest.mark.parametrize(("stamped", "between"), [("between", True), ("at once", False)])
def test_who_stamps_is_told_from_the_stamps(tmp_path: Path, stamped: str, between: bool) -> None:
    assert parent_of(_trace(tmp_path / "t.trace", [1.0, 2, 3, 4, 5, 6, 7, 8], stamped)).between is between


def test_few_requests_say_nothing(tmp_path: Path) -> None:
    assert parent_of(_trace(tmp_path / "t.trace", [1.0, 2, 3], "between")).between is False


@pytest.mark.parametrize("stamped", ["between", "at once"])
def test_a_replay_stamps_as_the_recording_did(tmp_path: Path, stamped: str) -> None:
    """Steps of 10 ms, one place: between steps nobody is queued before the step in which he comes has ended."""
    trace = _trace(tmp_path / "t.trace", [1.0, 2, 3, 4, 5, 6, 7, 8], stamped)
    made = predict(trace, "as-recorded", cost=StepCost({"step": 60 * _MS * 1000}, "fixed"), check=False).trace
    steps = made.table("steps").collect().sort("start_ns")
    inside = 0
    for queued in made.table("requests").collect()["queued_ns"]:
        inside += steps.filter((pl.col("start_ns") < queued) & (pl.col("end_ns") > queued)).height
    assert (inside == 0) is (stamped == "between")
