"""Truths put into a replay: with all of them it is the recording, and each does what its name says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.workloads import MS, server

from hoptrace.comparison import compare
from hoptrace.errors import InputError, UsageError
from hoptrace.manifest import Manifest
from hoptrace.reader import Trace, open_trace
from hoptrace.replay.against import against
from hoptrace.replay.memory_trace import FramesTrace
from hoptrace.replay.overheads import Overheads
from hoptrace.replay.played import played
from hoptrace.replay.run import predict
from hoptrace.replay.truths import TRUTHS, lacking, replayed_with
from hoptrace.replay.truths.arrival import ready_ns
from hoptrace.replay.truths.recorded import Recorded
from hoptrace.schema import TABLES
from hoptrace.stepcost import fixed

HERE = Path(__file__).parent
COST = fixed(step_ns=5 * MS, prefill_token_ns=90_000, decode_request_ns=700_000, decode_context_token_ns=900)
OTHER = fixed(step_ns=11 * MS, prefill_token_ns=30_000, decode_request_ns=100_000, decode_context_token_ns=100)
ALL = frozenset(TRUTHS)
CAPTURES = ("steady", "preempted")


def capture(name: str) -> Trace:
    return open_trace(HERE / "data" / "vllm_traces" / f"{name}.trace")


def in_memory(rows: list[dict[str, Any]], **of_server: Any) -> Trace:
    """A request log, in memory."""
    empty = pl.from_arrow(TABLES["requests"].arrow.empty_table())
    assert isinstance(empty, pl.DataFrame)
    given = pl.DataFrame(rows, infer_schema_length=None)
    frame = given.select(
        pl.col(c).cast(t) if c in given.columns else pl.lit(None, dtype=t).alias(c) for c, t in empty.schema.items()
    )  # fmt: skip
    return FramesTrace({"requests": frame}, Manifest(origin="imported", servers=[server(**of_server)]), "log")


@st.composite
def logs(draw: st.DrawFn) -> Trace:
    """Up to a dozen requests on a small server: some begin alike, some have to wait, some are driven out."""
    at, rows = 10**18, []
    for i in range(draw(st.integers(1, 12))):
        at += draw(st.integers(0, 60)) * MS
        prompt = draw(st.integers(1, 40))
        kind = draw(st.integers(0, 2))
        rows.append({
            "request": i, "request_id": f"r{i}", "arrival_ns": at, "arrival_of": "received", "received_ns": at,
            "prompt_tokens": prompt, "output_tokens": draw(st.integers(1, 12)),
            "prefix_blocks": [100 * kind + k for k in range(prompt // 4)], "hash_space": "h", "block_size": 4,
            "block_unit": "tokens", "priority": draw(st.integers(0, 2)), "source": "t",
        })  # fmt: skip
    return in_memory(
        rows, max_sequences=draw(st.integers(1, 4)), max_batched_tokens=draw(st.sampled_from([4, 16, 64])),
        kv_capacity_tokens=draw(st.sampled_from([56, 80, 400])), block_size_tokens=4, prefix_caching=draw(st.booleans()),
        config={"scheduling_order": draw(st.sampled_from(["fcfs", "priority"]))},
    )  # fmt: skip


def rows(trace: Trace, name: str) -> list[dict[str, Any]]:
    frame = trace.table(name).collect()
    return frame.select(sorted(frame.columns)).sort(frame.columns[:3]).to_dicts() if frame.height else []


def same(one: Trace, other: Trace, *, but: tuple[str, ...] = ()) -> None:
    for name in ("requests", "stages", "steps", "residency", "tokens"):
        if name not in but:
            assert rows(one, name) == rows(other, name), name


@settings(max_examples=15, deadline=None)
@given(logs())
def test_with_all_truths_a_replay_is_the_recording(log: Trace) -> None:
    """Whatever the step cost says: nothing is left to be predicted but the way out, which a replay has constant."""
    seen = predict(log, "as-recorded", cost=COST, check=False).trace
    prepared = against(seen, seen, work="b", cost=OTHER)
    assert set(lacking(prepared, seen).values()) == {None}
    same(replayed_with(prepared, seen, ALL), seen)
    # The scheduler decides as it did, once it is asked at the same instants with the same requests before it.
    same(replayed_with(prepared, seen, {"arrival", "step_time", "cache"}), seen)
    same(replayed_with(prepared, seen, {"arrival", "step_time"}), seen)


@settings(max_examples=8, deadline=None)
@given(logs())
def test_recorded_batches_at_the_recorded_cost_are_the_recording(log: Trace) -> None:
    seen = predict(log, "as-recorded", cost=COST, check=False).trace
    prepared = against(seen, seen, work="b", cost=COST)
    for truths in ({"batching"}, {"batching", "arrival"}, {"batching", "cache"}):
        same(replayed_with(prepared, seen, truths), seen)


@settings(max_examples=8, deadline=None)
@given(logs())
def test_recorded_batches_at_another_cost_take_that_cost(log: Trace) -> None:
    seen = predict(log, "as-recorded", cost=COST, check=False).trace
    got = replayed_with(against(seen, seen, work="b", cost=OTHER), seen, {"batching"})
    assert rows(got, "residency") == rows(seen, "residency")
    steps = got.table("steps").collect().sort("step")
    priced = OTHER.cost_ns_array(steps)
    assert (steps["end_ns"] - steps["start_ns"]).to_list() == [max(1, int(x)) for x in priced]
    assert (steps["start_ns"].shift(-1) >= steps["end_ns"]).drop_nulls().all()
    # Nobody is in a step before it has come.
    first = got.table("residency").filter(pl.col("phase").is_in(["chunk", "decode"])).group_by("request").agg(
        pl.col("first_step").min()
    ).collect()  # fmt: skip
    came = first.join(steps.select(pl.col("step").alias("first_step"), "start_ns"), on="first_step").join(
        got.table("requests").select("request", "received_ns").collect(), on="request"
    )  # fmt: skip
    assert came.height == got.table("requests").collect().height and (came["start_ns"] >= came["received_ns"]).all()


@pytest.mark.parametrize("name", CAPTURES)
def test_with_all_truths_a_capture_is_left_with_the_way_out(name: str) -> None:
    """Real vLLM: steps and who was in them are the recorded ones, exactly; so is every step's end that yields a token. From there
    to the client a replay has one length for all, the recording one for each: latencies differ by that scatter alone."""
    seen = capture(name)
    prepared = against(seen, seen, work="b")
    got = replayed_with(prepared, seen, ALL)
    of = ["step", "start_ns", "end_ns", "prefill_tokens", "decode_requests", "decode_context_tokens", "kv_used_tokens"]
    assert rows_of(got, "steps", of) == rows_of(seen, "steps", of)
    of = ["request", "sequence", "first_step", "last_step", "phase", "tokens_per_step"]
    assert rows_of(got, "residency", of) == rows_of(seen, "residency", of)
    of = ["request", "arrival_ns", "sent_ns", "received_ns", "queued_ns"]
    mine = got.table("requests").select("request").collect()
    assert rows_of(got, "requests", of) == rows_of(seen, "requests", of, mine)
    steps = seen.table("steps").select(pl.col("step").alias("last_step"), "end_ns")
    works = seen.table("residency").filter(pl.col("phase").is_in(["chunk", "decode"]))
    last = works.group_by("request").agg(pl.col("last_step").max()).join(steps, on="last_step").collect()
    assert rows_of(got, "stages", ["request", "end_ns"]) == last.join(mine, on="request", how="semi").select(
        "request", "end_ns"
    ).sort("request").rows()  # fmt: skip
    left = compare(seen, got)
    assert left.paired and left.get("queue", "p95").error_pct == pytest.approx(0, abs=0.1)
    for metric, most in (("ttft", 3), ("e2e", 1)):
        for statistic in ("mean", "p50", "p95"):
            assert left.get(metric, statistic).error_pct == pytest.approx(0, abs=most), (metric, statistic)


def rows_of(trace: Trace, name: str, columns: list[str], mine: pl.DataFrame | None = None) -> list[tuple[Any, ...]]:
    frame = trace.table(name).collect()
    frame = frame if mine is None else frame.join(mine, on="request", how="semi")
    return frame.select(columns).sort(columns).rows()


def composition(trace: Trace, plain: set[int]) -> dict[int, set[tuple[int, int, int]]]:
    """By start of the step: (request, tokens, context); steps with others than the ``plain`` requests left out."""
    at = dict(trace.table("steps").select("step", "start_ns").collect().iter_rows())
    found: dict[int, set[tuple[int, int, int]]] = {s: set() for s in at.values()}
    strange = set()
    runs = trace.table("residency").filter(pl.col("phase").is_in(["chunk", "decode"]))
    columns = ("request", "first_step", "last_step", "tokens_per_step", "context_at_start")
    for request, first, last, tokens, context in runs.select(columns).collect().iter_rows():
        for step in range(first, last + 1):
            found[at[step]].add((request, tokens, context + tokens * (step - first)))
            if request not in plain:
                strange.add(at[step])
    return {s: who for s, who in found.items() if s not in strange}


@pytest.mark.parametrize("name", CAPTURES)
def test_vllms_scheduler_decides_as_ours(name: str) -> None:
    """Asked at the instants at which vLLM's was asked, with the requests that it had and what its cache held, the replay's
    scheduler puts the same requests with as many tokens into each step. (Requests of several sequences, and such as were aborted,
    are not in a replay: steps with them are left out.)"""
    seen = capture(name)
    prepared = against(seen, seen, work="b")
    got = replayed_with(prepared, seen, {"arrival", "step_time", "cache"})
    several = set(seen.table("residency").filter(pl.col("sequence") > 0).collect()["request"].to_list())
    plain = set(prepared.asked_work.request.tolist()) - several
    real, ours = composition(seen, plain), composition(got, plain)
    both = set(real) & set(ours)
    assert len(both) > 0.6 * len(real) and len(both) > 220
    assert [(s, real[s], ours[s]) for s in both if real[s] != ours[s]] == []


def test_each_truth_is_taken_from_the_recording_and_the_rest_is_not() -> None:
    seen = capture("preempted")
    prepared = against(seen, seen, work="b", cost=OTHER)
    real = set(seen.table("steps").select("start_ns", "end_ns").collect().rows())

    def with_(*truths: str) -> Trace:
        return replayed_with(prepared, seen, frozenset(truths))

    def shared(trace: Trace) -> float:
        mine = trace.table("steps").select("start_ns", "end_ns").collect().rows()
        return sum(x in real for x in mine) / len(mine)

    def cached(trace: Trace) -> dict[int, int]:
        stays = trace.table("stages").filter(pl.col("sequence") == 0).select("request", "cached_tokens").drop_nulls()
        return dict(stays.collect().iter_rows())

    nothing, told = with_(), cached(seen)
    assert rows(nothing, "requests") == rows(played(prepared), "requests") and nothing.has("waits")
    assert shared(nothing) < 0.01 and shared(with_("arrival")) < 0.01 and shared(with_("step_time")) > 0.9
    assert not with_("arrival").has("waits")
    queued = dict(seen.table("requests").select("request", "queued_ns").collect().iter_rows())
    for truths, is_recorded in ((("arrival",), True), (("step_time",), False)):
        mine = with_(*truths).table("requests").select("request", "queued_ns").collect().rows()
        assert all(queued[r] == q for r, q in mine) == is_recorded
    assert {r: n for r, n in cached(with_("cache")).items() if told.get(r) != n} == {}
    # Of a server without a cache nothing is found, but with the truth as much as was recorded.
    off = Trace(seen.path, seen.manifest.model_copy(deep=True))
    off.manifest.servers[0].prefix_caching = False
    without = against(seen, off, work="b", cost=OTHER)
    assert set(cached(replayed_with(without, off)).values()) == {0}
    found = cached(replayed_with(without, off, {"cache"}))
    assert found == {r: told[r] for r in found} and sum(found.values()) > 1000


@pytest.mark.parametrize("last", ["arrival", "sent", "received", "engine"])
def test_the_rest_of_the_way_in_follows_the_last_stamp_and_no_part_of_it_comes_twice(last: str) -> None:
    """7 ms until it is sent, 2 until it is received, 3 to the engine's queue, 1 until it can begin: 13 whoever saw how much of
    it, also where no step shows the request."""
    stamps = {"sent_ns": 7, "received_ns": 9, "queued_ns": 12}
    seen = list(stamps)[: ("arrival", "sent", "received", "engine").index(last)]
    log = in_memory([
        {"request": i, "arrival_ns": 1000 * i * MS, "arrival_of": "intended", "intended_ns": 1000 * i * MS, "prompt_tokens": 4,
         "output_tokens": 2, "source": "t"} | {name: (1000 * i + stamps[name]) * MS for name in seen}
        for i in range(3)
    ])  # fmt: skip
    p = against(log, log, cost=COST)
    ready = ready_ns(Recorded(log, p.planned.plan), p.asked_work, Overheads(7 * MS, 2 * MS, 3 * MS, 1 * MS))
    assert ready.tolist() == [(1000 * i + 13) * MS for i in range(3)]


def test_a_run_repeats() -> None:
    seen = capture("steady")
    prepared = against(seen, seen, work="b")
    for truths in (frozenset(TRUTHS[:2]), frozenset(TRUTHS[2:])):
        same(replayed_with(prepared, seen, truths), replayed_with(prepared, seen, truths))


def test_what_a_recording_does_not_tell_is_said(tmp_path: Path) -> None:
    llama = open_trace(HERE.parent / "sample_traces" / "llamacpp-one-slot.trace")
    prepared = against(llama, llama, work="b")
    found = lacking(prepared, llama)
    assert found["arrival"] is None and found["cache"] is None
    assert found["step_time"] == "its steps were reconstructed from token times: they are inferred, not recorded."
    assert set(lacking(prepared, llama, inferred=True).values()) == {None}
    with pytest.raises(InputError, match=r"The truth of batching cannot be had from .* they are inferred, not recorded"):
        replayed_with(prepared, llama, {"batching"})
    inferred = replayed_with(prepared, llama, ALL, inferred=True)
    assert abs(compare(llama, inferred).get("e2e", "p50").error_pct or 0) < 1
    bare = in_memory([{"request": 0, "arrival_ns": 5, "prompt_tokens": 3, "output_tokens": 2, "source": "t"}])
    found = lacking(against(bare, bare, work="b", cost=COST), bare)
    assert found["step_time"] == "it has no steps." and found["arrival"] is None
    assert found["cache"] == "it does not tell what 1 of 1 requests found in the cache."


def test_wrong_use_is_refused() -> None:
    steady, preempted = (capture(n) for n in CAPTURES)
    with pytest.raises(UsageError, match="There is no truth 'luck'"):
        replayed_with(against(steady, steady, work="b"), steady, {"luck"})
    with pytest.raises(UsageError, match=r"not about the requests of .*preempted"):
        replayed_with(against(steady, preempted), preempted, {"arrival"})
    got = replayed_with(against(steady, preempted, work="b"), preempted, {"arrival", "step_time"})
    assert compare(preempted, got).paired
