"""The way to the engine, told from ways of which only bounds are known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoptrace.replay.way_in import mean_way_ns

_NONE = np.empty(0, dtype=np.int64)
_MS = 1_000_000


def _ns(*values: float) -> np.ndarray:
    return np.array([round(v * _MS) for v in values], dtype=np.int64)


def test_known_ways_give_their_mean() -> None:
    assert mean_way_ns(_ns(1, 2, 6), _NONE, _NONE) == 3 * _MS


def test_nobody_tells() -> None:
    assert mean_way_ns(_NONE, _NONE, _NONE) is None


def test_bounds_that_exclude_each_other_say_nothing() -> None:
    assert mean_way_ns(_NONE, _ns(5), _ns(2)) is None
    assert mean_way_ns(_ns(4), _ns(5), _ns(2)) == 4 * _MS


def test_bounds_that_meet_in_one_place_give_it() -> None:
    found = mean_way_ns(_NONE, _ns(0, 0, 2.9, 2.9), _ns(3.1, 3.1, 20, 20))
    assert found is not None and 2.9 * _MS <= found <= 3.2 * _MS


def test_wide_bounds_follow_what_the_others_know() -> None:
    """A third between 0 and 50 ms is as the known ones, 2 and 4 ms, are."""
    found = mean_way_ns(_ns(2, 4), _ns(0), _ns(50))
    assert found == pytest.approx(3 * _MS, rel=0.03)


@given(
    seed=st.integers(0, 1000),
    step_ms=st.sampled_from([5.0, 20.0, 80.0]),
    middle_ms=st.sampled_from([0.8, 3.0, 12.0]),
    spread=st.sampled_from([0.05, 0.3, 0.6]),
)
@settings(max_examples=40, deadline=None)
def test_the_mean_is_found_from_bounds_alone(seed: int, step_ms: float, middle_ms: float, spread: float) -> None:
    """Requests at any time, an engine that looks every step: nothing but bounds a step apart, and the mean comes out."""
    rng = np.random.default_rng(seed)
    n = 1500
    way = rng.lognormal(np.log(middle_ms * _MS), spread, n)
    came = rng.uniform(0, 1e13, n)
    step = step_ms * _MS
    taken = np.ceil((came + way) / step) * step
    found = mean_way_ns(_NONE, (taken - step - came).astype(np.int64), (taken - came).astype(np.int64))
    # What the bounds cannot tell: a share of √(n) requests' chances in a step.
    doubt = 4 * step / np.sqrt(12 * n)
    assert found == pytest.approx(way.mean(), rel=0.05, abs=doubt)
