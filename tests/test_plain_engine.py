"""The plain engine of the replay: laws over random works and plans, and another simulator's output."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.plans import plans, works
from support.replay_laws import check_laws, first_difference, said_by
from support.workloads import MS, make

from hoptrace.replay import plain
from hoptrace.replay.plan import EngineSpec, Plan
from hoptrace.stepcost import StepCost, fixed

REFERENCE = Path(__file__).parent / "data" / "reference"


@given(st.data())
@settings(max_examples=250, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_nothing_is_lost_and_no_limit_is_broken(data: st.DataObject) -> None:
    work = data.draw(works())
    plan = data.draw(plans(work.n))
    said = said_by(plain.simulate, work, plan)
    check_laws(said, work, plan)


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_the_same_again(data: st.DataObject) -> None:
    work = data.draw(works())
    plan = data.draw(plans(work.n))
    assert first_difference(said_by(plain.simulate, work, plan), said_by(plain.simulate, work, plan)) is None


def test_equal_to_another_simulator_on_its_reference() -> None:
    """AISimulate's latencies of 200 requests under the same rules; see tests/data/reference/README.md."""
    asked = pl.read_csv(REFERENCE / "r5_200.csv")
    said = pl.read_csv(REFERENCE / "fixed_cost_one_worker.csv")
    work = make(*((round(a * 1e9), p, o) for a, p, o in asked.iter_rows()))
    engine = EngineSpec("one", max_sequences=128, max_batched_tokens=2048, capacity_tokens=7000 * 64, block_size_tokens=64)
    ours = said_by(plain.simulate, work, Plan((engine,), (fixed(any_prefill_ns=50 * MS, any_decode_ns=12 * MS),))).requests
    for mine, theirs in (("first_token_ns", "first_token_ms"), ("last_token_ns", "finish_ms")):
        assert np.abs(ours[mine].to_numpy() / MS - said[theirs].to_numpy()).max() <= 0.001


def test_seed_nought_takes_the_residuals_in_the_order_of_the_recording() -> None:
    cost = StepCost({"step": 1_000_000}, "fitted", residuals={"decode": (0, 100_000, 200_000), "prefill": (500_000, 0)})
    work = make((0, 8, 6), (100_000, 4, 1))
    steps = said_by(plain.simulate, work, Plan((EngineSpec("one"),), (cost,))).steps
    # A prompt, five decode steps (the table begins again behind its end), the other prompt.
    assert (steps["end_ns"] - steps["start_ns"]).to_list() == [1500, 1000, 1100, 1200, 1000, 1100, 1000]
