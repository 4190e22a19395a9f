"""The accounting on real captures: exact, nearly nothing unexplained (law 1), and its figures are those of the raw rows.

Literal values were computed by hand from the Parquet files (`tests/data/README.md` says where they are from).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import hoptrace
from hoptrace.analysis.latency.accounting import Accounting, account
from hoptrace.analysis.latency.parts import FULL, PARTS
from hoptrace.metrics import stat, summary
from hoptrace.reader import Trace

VLLM = Path(__file__).parent / "data" / "vllm_traces"
SAMPLES = Path(__file__).parents[1] / "sample_traces"
# Observed steps and residency; steps reconstructed from tokens.
WITH_RESIDENCY = [VLLM / "steady.trace", VLLM / "preempted.trace", *sorted(SAMPLES.glob("llamacpp-*.trace"))]
MS = 1e6


@cache
def opened(path: Path) -> tuple[Trace, Accounting]:
    trace = hoptrace.open(path)
    return trace, account(trace)


def total(a: Accounting, part: str) -> float:
    """ms over all requests."""
    return float(a.parts[f"{part}_ns"].sum() or 0) / MS


@pytest.mark.parametrize("path", WITH_RESIDENCY, ids=lambda p: p.stem)
def test_nothing_is_lost_and_little_unexplained(path: Path) -> None:
    """Law 1: at most 3 % at the median and 10 % at p99; of the time to the first token too."""
    trace, a = opened(path)
    assert a.finished >= 30
    for frame, length in ((a.parts, "e2e_ns"), (a.ttft_parts, "ttft_ns")):
        summed = frame.select(pl.sum_horizontal(pl.col(p.column).fill_null(0) for p in PARTS)).to_series()
        assert (summed == frame[length]).all()
        assert all((frame[p.column].drop_nulls() >= 0).all() for p in PARTS)
        unexplained = frame.select(
            (pl.col("unexplained_ns") + pl.col("queue_unknown_ns").fill_null(0)) / pl.col(length)
        ).to_series()
        assert (unexplained.quantile(0.5) or 0) <= 0.03 and (unexplained.quantile(0.99) or 0) <= 0.10
    # What is said up to the first token is of the requests, and adds up to the time, that TTFT is told of.
    assert stat(a.ttft_parts["ttft_ns"]) == summary(trace)["ttft"]


@pytest.mark.parametrize("path", WITH_RESIDENCY, ids=lambda p: p.stem)
def test_no_part_up_to_the_first_token_is_more_than_the_whole(path: Path) -> None:
    """But for what is on its way to the client while the next step runs: that is delivery, of the first token."""
    _, a = opened(path)
    whole = a.parts.join(a.ttft_parts, on="request", suffix="_first")
    for p in PARTS:
        if p.name != "delivery":
            assert (whole[f"{p.column}_first"].fill_null(0) <= whole[p.column].fill_null(0)).all(), p.name
    decoded = [a.ttft_parts[c].fill_null(0).sum() for c in ("decode_ns", "decode_interference_ns")]
    assert decoded == [0, 0]


@pytest.mark.parametrize("path", WITH_RESIDENCY[:3], ids=lambda p: p.stem)
def test_in_batches_as_at_once(path: Path) -> None:
    trace, a = opened(path)
    b = account(trace, batch=7)
    assert b.parts.equals(a.parts) and b.ttft_parts.equals(a.ttft_parts) and b.notes == a.notes and b.unseen == a.unseen


def test_levels_of_real_captures() -> None:
    _, a = opened(VLLM / "steady.trace")
    assert a.level.name == "observed steps, residency, waits"
    assert len(a.level.missing) == 1 and a.level.missing[0].startswith("Moves of KV")
    _, a = opened(SAMPLES / "llamacpp-four-slots.trace")
    assert a.level.name == "reconstructed steps, waits"
    assert [s.split(":")[0] for s in a.level.missing] == ["Observed steps", "Residency", "Moves of KV"]


@pytest.mark.parametrize(("name", "slots_ms", "kv_ms"), [("steady", 46_563, 0), ("preempted", 11_617, 96_500)])
def test_what_the_server_was_full_of_is_what_its_own_scheduler_says(name: str, slots_ms: float, kv_ms: float) -> None:
    """Against the scheduler's count of running requests and its free KV in the steps that each request waited through."""
    trace, a = opened(VLLM / f"{name}.trace")
    steps = trace.table("steps").sort("start_ns").collect()
    start, running = steps["start_ns"].to_numpy(), steps["running"].to_numpy()
    until = np.append(start[1:], steps["end_ns"][-1])
    free = (steps["kv_capacity_tokens"] - steps["kv_used_tokens"]).to_numpy()
    done = a.parts.select("request")
    waits = (
        trace.table("stages").filter(pl.col("sequence").fill_null(0) == 0).drop_nulls(["enqueued_ns", "scheduled_ns"])
        .collect().join(done, on="request", how="semi")
    )  # fmt: skip
    eight = little = 0
    for begin, end in waits.select("enqueued_ns", "scheduled_ns").rows():
        through = np.clip(np.minimum(until, end) - np.maximum(start, begin), 0, None)
        eight += int(through[running >= 8].sum())
        little += int(through[(running < 8) & (free < 256)].sum())
    assert eight / MS == pytest.approx(slots_ms, rel=1e-3)
    assert total(a, "queue_slots") == pytest.approx(eight / MS, rel=0.025)
    assert little / MS == pytest.approx(kv_ms, rel=0.15, abs=1) and total(a, "queue_kv") >= 0.95 * little / MS
    assert total(a, "queue_full") == total(a, "queue_unknown") == 0
    queued = sum(e - b for b, e in waits.select("enqueued_ns", "scheduled_ns").rows()) / MS
    assert sum(total(a, f"queue_{c}") for c in ("room", *FULL)) == pytest.approx(queued, rel=0.01)


def test_preemption_and_what_it_costs_by_hand() -> None:
    """Request 31 is preempted in step 201 and goes on in step 211, computing 51 tokens from position 192 on; it had got to 242:
    50 of them twice, as vLLM itself counts. Request 39: preempted in 250, goes on in 256 with 28 tokens from 96 on, had got to
    123: 27 twice."""
    trace, a = opened(VLLM / "preempted.trace")
    steps = {s["step"]: s for s in trace.table("steps").collect().iter_rows(named=True)}
    rows = {r["request"]: r for r in a.parts.iter_rows(named=True)}
    told = dict(
        trace.table("stages").filter(pl.col("recomputed_tokens") > 0).select("request", "recomputed_tokens").collect().rows()
    )
    assert told == {31: 50, 39: 27}
    assert (
        {r for r, row in rows.items() if row["preempted_ns"]} == {r for r, row in rows.items() if row["recompute_ns"]} == {31, 39}
    )
    for request, lost, back, tokens in ((31, 201, 211, 51), (39, 250, 256, 28)):
        row = rows[request]
        # From the step in which it lost its place to the one that takes it up again.
        assert row["preempted_ns"] == steps[back]["start_ns"] - steps[lost]["start_ns"]
        assert steps[lost]["preempted"] == 1
        again = steps[back]["end_ns"] - steps[back]["start_ns"]
        # Its share of the step that computes them again, less what the decoders in it added.
        assert 0.75 * again * told[request] / tokens <= row["recompute_ns"] <= again * told[request] / tokens
    assert rows[31]["preempted_ns"] == 813_736_022 and rows[39]["preempted_ns"] == 307_374_733
    assert a.compositions["all"].classes["repeated work"] == pytest.approx(
        (rows[31]["recompute_ns"] + rows[39]["recompute_ns"]) / 49
    )


def test_time_between_steps_by_hand() -> None:
    """Of a request that was alone from its first step to its last: what lies between its steps."""
    trace, a = opened(VLLM / "steady.trace")
    steps = trace.table("steps").sort("step").collect()
    runs = trace.table("residency").group_by("request").agg(pl.col("first_step").min(), pl.col("last_step").max()).collect()
    checked = 0
    for request, first, last in runs.rows():
        row = a.parts.filter(request=request)
        if not row.height:
            continue
        own = steps.filter(pl.col("step").is_between(first, last))
        gaps = int((own["start_ns"][1:] - own["end_ns"][:-1]).sum())
        stay = trace.table("stages").filter((pl.col("request") == request) & (pl.col("sequence") == 0)).collect()
        if stay.height != 1 or stay["scheduled_ns"][0] is None:
            continue
        before = max(0, int(own["start_ns"][0]) - stay["scheduled_ns"][0])
        assert row["host_gap_ns"][0] == gaps + before
        checked += 1
    assert checked >= 50


def test_interference_has_an_error_and_is_less_than_the_mixed_steps() -> None:
    for name in ("steady", "preempted"):
        trace, a = opened(VLLM / f"{name}.trace")
        mixed = trace.table("steps").filter((pl.col("prefill_tokens") > 0) & (pl.col("decode_requests") > 0)).collect()
        felt = ((mixed["end_ns"] - mixed["start_ns"]) * mixed["decode_requests"]).sum()
        share = (a.parts["decode_interference_ns"].sum() or 0) / felt
        # A decode step of these takes 30 to 60 ms, a mixed one 300: most of it is the prompts'.
        assert 0.6 < share < 1
        c = a.compositions["all"]
        assert 0 < c.part_errors["decode_interference"] < 0.1 * (c.parts["decode_interference"] or 0)
        # What decoders add to a step with hundreds of prompt tokens drowns in the steps' spread, and the error says so.
        assert c.part_errors["prefill_interference"] > (c.parts["prefill_interference"] or 0)
