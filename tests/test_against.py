"""One recorded run predicted from another: whose cost, whose policy, whose requests, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from test_own_servers import COST, MS, captured

from hoptrace.comparison import compare
from hoptrace.errors import InputError
from hoptrace.manifest import Manifest
from hoptrace.reader import Trace, open_trace
from hoptrace.replay.against import against
from hoptrace.replay.memory_trace import FramesTrace
from hoptrace.replay.played import played
from hoptrace.replay.run import predict
from hoptrace.stepcost import fixed

HERE = Path(__file__).parent
BATCHES = {
    "two places": "[batching]\nmax_sequences = 2\n",
    "chunks": "[batching]\nmax_batched_tokens = 16\n",
    "little space": '[kv]\ncapacity_tokens = 320\n[prefix_cache]\nenabled = true\nkind = "pool"\n',
    "three servers": "[servers]\ncount = 3\n",
    "shortest first": '[batching]\norder = "shortest"\nmax_sequences = 1\n',
}


def on(seen: Trace, **of_server: Any) -> Trace:
    """The same rows under a manifest that says something else of the server."""
    assert isinstance(seen, FramesTrace)
    config = of_server.pop("config", {})
    changed = [s.model_copy(update=of_server | {"config": s.config | config}) for s in seen.manifest.servers]
    return FramesTrace(seen.frames, Manifest(origin="recorded", servers=changed), "other")


@pytest.fixture(scope="module")
def a() -> Trace:
    return captured("[servers]\ncount = 1\n")


@pytest.mark.parametrize("name", list(BATCHES))
def test_a_run_is_predicted_from_another_with_its_own_cost(a: Trace, name: str) -> None:
    """B's policy is read from B's manifest alone; with the true cost the prediction is B's run to the nanosecond."""
    b = captured(BATCHES[name])
    assert b.manifest.replay is None
    for work in ("a", "b") if name == "chunks" else ("b",):
        got = compare(b, played(against(a, b, work=work, cost=COST)))  # type: ignore[arg-type]
        assert got.paired and got.requests == (60, 60)
        assert all(e == 0 for m in got.errors().values() for e in m.values()), (work, got.errors())
    # It was another run than A's: the prediction is no copy.
    assert name == "little space" or compare(a, b).get("e2e", "mean").error != 0


def test_cost_and_times_are_a_s_policy_is_b_s_work_is_either_s(a: Trace) -> None:
    b = captured(BATCHES["two places"])
    assert isinstance(b, FramesTrace)
    # B's machine was half as fast, and its requests come a second later: neither is taken from B.
    slow = b.frames["steps"].with_columns(pl.col("end_ns") + 5 * MS)
    late = b.frames["requests"].with_columns(pl.col("arrival_ns", "received_ns") + 1000 * MS)
    other = FramesTrace(b.frames | {"steps": slow, "requests": late}, b.manifest, "b")
    mine, its = against(a, other), against(a, other, work="b")
    assert mine.planned.plan.engines[0].max_sequences == 2 and mine.own.plan.engines[0].max_sequences == 4
    assert mine.planned.plan.costs == its.planned.plan.costs == mine.own.plan.costs
    assert mine.planned.overheads == mine.own.overheads
    assert np.array_equal(its.asked_work.arrival_ns, mine.asked_work.arrival_ns + 1000 * MS)
    assert np.array_equal(mine.asked_work.arrival_ns, mine.own_work.arrival_ns)
    assert its.asked_parent is not None and its.asked_parent.trace is other and mine.asked_parent is None


def test_a_run_against_itself_is_its_own_policy(a: Trace) -> None:
    p = against(a, a)
    assert played(p).frames["requests"].equals(played(p, own=True).frames["requests"])
    whole = predict(a, "as-recorded")
    assert isinstance(whole.trace, FramesTrace)
    for name in ("requests", "steps", "tokens"):
        assert played(p).frames[name].equals(whole.trace.frames[name]), name


def test_a_real_run_is_predicted_from_another() -> None:
    """llama.cpp with one slot, from its run with four: within 15 % of each request's time, in the median."""
    folder = HERE.parent / "sample_traces"
    one, four = (open_trace(folder / f"llamacpp-{n}.trace") for n in ("one-slot", "four-slots"))
    got = compare(one, played(against(four, one)))
    assert got.paired and abs(got.get("e2e", "p50").error_pct or 0) < 15
    # Four slots at that load queue for far less: what would be copied from A is far off.
    assert abs(compare(one, four).get("e2e", "p50").error_pct or 0) > 30


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"layers": 3}, "The two traces ran another model: .* layers is 2 and 3"),
        ({"parameters": None, "layers": None, "model": "m"}, "The two traces ran another model: unknown and m"),
        ({"engine": "sglang"}, "The two traces ran another engine: vllm and sglang"),
        ({"config": {"tensor_parallel_size": 2}}, "tensor_parallel_size = 2, toy with 1: a step cost measured on one"),
        ({"config": {"dtype": "bfloat16"}}, None),
        ({"config": {"long_prefill_token_threshold": 64}}, "long_prefill_token_threshold = 64, which a replay does not"),
        ({"config": {"cache_reuse": 256}}, "toy ran with cache_reuse = 256, which a replay does not model"),
        ({"config": {"speculation": "ngram", "speculative_tokens": 3}}, r"the speculator ngram \(3 tokens\), toy with none"),
        ({"config": {"spec_draft_n_max": 8}}, "toy ran with the speculator of a draft model"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_from_a_is_refused_by_its_key(a: Trace, changed: dict[str, Any], said: str | None) -> None:
    b = on(a, **changed)
    if said is None:  # A does not tell its own
        assert against(a, b).planned.notes == against(a, a).planned.notes
        return
    with pytest.raises(InputError, match=said):
        against(a, b)


def test_a_cost_that_knows_ranks_takes_them(a: Trace) -> None:
    two = on(a, config={"tensor_parallel_size": 2})
    p = against(a, two, cost="roofline")
    mine, its = (x.plan.costs[0].cost_ns(prefill_tokens=64) for x in (p.own, p.planned))
    assert its != mine


def test_what_is_not_carried_over_is_said(a: Trace) -> None:
    typed = against(a, on(a, kv_dtype="fp8")).planned
    assert any(n.startswith("KV is fp8 on toy and f16 on toy: room and bytes are taken over;") for n in typed.notes)
    assert typed.servers[0].kv_dtype == "fp8"
    later = against(a, on(a, config={"async_scheduling": True})).planned
    assert any(n.startswith("async_scheduling differs") for n in later.notes)
    three = captured(BATCHES["three servers"])
    hosted = on(three, host="vm")
    assert any("3 servers of other ran on one host" in n for n in against(a, hosted, cost=COST).planned.notes)


def test_a_cost_in_hand_is_used(a: Trace) -> None:
    twice = fixed(step_ns=10 * MS, prefill_token_ns=180_000, decode_request_ns=1_400_000, decode_context_token_ns=1800)
    p = against(a, a, cost=twice)
    assert p.planned.plan.costs == (twice,)
