"""The two engines of the replay, written apart from docs/replay-engine.md, say the same in every row."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.large_cases import large_case
from support.plans import cases
from support.replay_laws import check_laws, first_difference, said_by
from support.workloads import make

from hoptrace.replay import compiled, plain
from hoptrace.replay.plan import EngineSpec, Plan, Routing
from hoptrace.stepcost import fixed

STAGES = {
    "batching": frozenset({"batching"}),
    "routing": frozenset({"batching", "routing"}),
    "split": frozenset({"batching", "routing", "split"}),
    "tiers": frozenset({"batching", "tiers"}),
    "all": frozenset({"batching", "routing", "split", "tiers"}),
}


@pytest.mark.parametrize("stage", STAGES)
@given(data=st.data())
@settings(max_examples=200, suppress_health_check=list(HealthCheck), deadline=None)
def test_every_row_is_equal(stage: str, data: st.DataObject) -> None:
    work, plan = data.draw(cases(STAGES[stage]))
    fast = said_by(compiled.simulate, work, plan)
    difference = first_difference(fast, said_by(plain.simulate, work, plan))
    assert difference is None, difference
    check_laws(fast, work, plan)


@pytest.mark.parametrize("seed", range(8))
def test_every_row_of_larger_work_is_equal(seed: int) -> None:
    work, plan = large_case(seed)
    fast = said_by(compiled.simulate, work, plan)
    difference = first_difference(fast, said_by(plain.simulate, work, plan))
    assert difference is None, difference
    check_laws(fast, work, plan)


@pytest.mark.parametrize("clients", [None, 2])
def test_what_a_horizon_cuts_off_stays_with_its_engine(clients: int | None) -> None:
    """Requests left in the queue of one engine were once read as requests of the next, which ended the process."""
    work = make(*((i * 100, 3 + i % 2, 2 + i) for i in range(40)))
    specs = tuple(EngineSpec(f"e{i}", max_sequences=1, max_batched_tokens=4) for i in range(3))
    plan = Plan(specs, (fixed(step_ns=90),), routing=Routing("random"), horizon_ns=1500, before_ns=7, clients=clients, seed=3)
    fast = said_by(compiled.simulate, work, plan)
    assert first_difference(fast, said_by(plain.simulate, work, plan)) is None
    check_laws(fast, work, plan)
