"""The two engines of the replay, written apart from docs/replay-engine.md, say the same in every row."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.large_cases import large_case
from support.plans import cases
from support.replay_laws import check_laws, first_difference, said_by

from hoptrace.replay import compiled, plain

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
