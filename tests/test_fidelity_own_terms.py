"""A prediction in the trace's own terms: equal steps, cached tokens, preemptions, the order of events."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.runs import record
from support.workloads import store

from hoptrace.analysis.fidelity.order import inversions, order
from hoptrace.analysis.fidelity.own_terms import own_terms
from hoptrace.reader import Trace, open_trace

THREE = [(0, 0, 100, 300, 3), (1, 5, 110, 310, 3), (2, 400, 500, 700, 3)]
STEPS = [(0, 100, {0: 8}), (100, 110, {0: 1, 1: 8}), (110, 300, {0: 1, 1: 1}), (300, 310, {1: 1}), (450, 500, {2: 8}),
         (500, 700, {2: 1})]  # fmt: skip
REAL = [Path("tests/data/vllm_traces/steady.trace"), Path("tests/data/vllm_traces/preempted.trace"),
        Path("sample_traces/llamacpp-four-slots.trace"), Path("sample_traces/llamacpp-one-slot.trace")]  # fmt: skip


@pytest.mark.parametrize("path", REAL, ids=lambda p: p.stem)
def test_a_recording_against_itself_is_equal_in_everything(path: Path) -> None:
    trace = open_trace(Path(__file__).parents[1] / path)
    t = own_terms(trace, trace)
    assert t.steps.equal_share == t.steps.alike_share == t.cached_equal_share == 1
    assert t.steps.count.error_pct == t.cached_tokens.error_pct == 0
    assert t.preemptions.observed == t.preemptions.predicted
    for o in (t.first_tokens, t.finishes):
        assert o is not None and o.pairs > 0 and o.swapped == 0 and o.share == 1


def test_equal_steps_are_those_in_which_the_same_requests_compute_as_much(tmp_path: Path) -> None:
    a = record(tmp_path / "a.trace", THREE, STEPS)
    # The second prompt came a step later, so the second and the third step hold others; the fourth is there twice. Times differ.
    other = [(0, 120, {0: 8}), (120, 125, {0: 1}), (130, 180, {0: 1, 1: 8}), (200, 320, {1: 1}), (320, 330, {1: 1}),
             (450, 520, {2: 8}), (520, 800, {2: 1})]  # fmt: skip
    b = record(tmp_path / "b.trace", THREE, other)
    t = own_terms(a, b).steps
    # 0: 8 | 0: 1, 1: 8 | 1: 1 | 2: 8 | 2: 1
    assert (t.count.observed, t.count.predicted, t.equal, t.shown) == (6, 7, 5, 7)
    assert t.equal_share == pytest.approx(5 / 7)
    assert t.count.error_pct == pytest.approx(100 / 6)


def test_steps_of_the_same_size_but_of_others_are_alike_and_not_equal(tmp_path: Path) -> None:
    a = record(tmp_path / "a.trace", THREE[:2], [(0, 100, {0: 8}), (100, 110, {1: 8})])
    b = record(tmp_path / "b.trace", THREE[:2], [(0, 100, {0: 8}), (100, 110, {0: 8})])
    t = own_terms(a, b).steps
    assert (t.equal, t.alike) == (1, 1)  # in b the second is a decoder of eight tokens
    swapped = record(tmp_path / "c.trace", THREE[:2], [(0, 100, {1: 8}), (100, 110, {0: 8})])
    t = own_terms(a, swapped).steps
    assert (t.equal, t.alike, t.equal_share) == (2, 2, 1)


def test_a_request_that_the_other_side_has_not_is_like_nobodys(tmp_path: Path) -> None:
    rows = [(i, 10 * i, 100 + 10 * i, 300 + 10 * i, 3) for i in range(20)]
    steps = [(10 * i, 10 * i + 10, {i: 8}) for i in range(20)]
    a = record(tmp_path / "a.trace", rows, steps)
    moved = [(77 if i == 19 else i, *r) for i, *r in rows]
    b = record(tmp_path / "b.trace", moved, [(s, e, {77 if 19 in m else r: n for r, n in m.items()}) for s, e, m in steps])
    t = own_terms(a, b).steps
    assert (t.equal, t.alike) == (19, 20)


def test_cached_tokens_and_preemptions_are_counted_over_those_that_both_tell(tmp_path: Path) -> None:
    a = record(tmp_path / "a.trace", THREE, STEPS, cached={0: 4, 1: 0}, preempted=2)
    b = record(tmp_path / "b.trace", THREE, STEPS, cached={0: 4, 1: 4, 2: 4}, preempted=3)
    t = own_terms(a, b)
    assert (t.cached_tokens.observed, t.cached_tokens.predicted, t.cached_requests, t.cached_equal) == (4, 8, 2, 1)
    assert (t.preemptions.observed, t.preemptions.predicted, t.preemptions.error_pct) == (2, 3, 50.0)


def test_what_nobody_tells_is_null_and_never_0(tmp_path: Path) -> None:
    a = record(tmp_path / "a.trace", THREE)
    bare = store(tmp_path / "b.trace", {"requests": a.table("requests").collect()})
    b = record(tmp_path / "c.trace", THREE, STEPS, preempted=None)
    for observed, predicted in ((bare, b), (bare, bare)):
        t = own_terms(observed, predicted)
        assert t.steps.equal is None and t.steps.alike is None and t.steps.count.observed is None
        assert t.cached_tokens.observed is None and t.cached_equal_share is None
        assert t.preemptions.observed is None and t.preemptions.error_pct is None


def test_other_requests_have_no_order_and_no_equal_steps(tmp_path: Path) -> None:
    a = record(tmp_path / "a.trace", THREE, STEPS)
    b = record(tmp_path / "b.trace", [(r, *rest, 4) for r, *rest, _ in THREE], STEPS)  # type: ignore[misc]
    t = own_terms(a, b)
    assert t.first_tokens is None and t.finishes is None and t.steps.equal is None and t.steps.alike == 6


def test_a_server_that_is_named_otherwise_computes_the_same_steps(tmp_path: Path) -> None:
    a = record(tmp_path / "a.trace", THREE, STEPS)
    tables = {n: a.table(n).collect() for n in ("requests", "tokens", "steps", "residency")}
    for n in ("steps", "residency"):
        tables[n] = tables[n].with_columns(pl.lit("engine").alias("server"))
    assert own_terms(a, store(tmp_path / "b.trace", tables)).steps.equal == 6


def test_reconstructed_steps_are_said_to_be_so(tmp_path: Path) -> None:
    trace: Trace = record(tmp_path / "a.trace", THREE)
    t = own_terms(trace, trace)
    assert t.steps.origin == "reconstructed" and any("no surer" in n for n in t.notes)


def test_the_order_of_events_counts_pairs_in_flight_together() -> None:
    arrival = np.array([0, 10, 1000])
    # 0 and 1 are in flight together and end the other way round; 2 comes when both have ended.
    o = order(arrival, np.array([100, 200, 1100]), arrival, np.array([250, 200, 1100]))
    assert (o.pairs, o.swapped, o.share) == (1, 1, 0.0)
    # At the same instant there is no order.
    o = order(arrival, np.array([100, 200, 1100]), arrival, np.array([200, 200, 1100]))
    assert (o.pairs, o.swapped, o.share) == (1, 0, 1.0)
    o = order(arrival, np.array([200, 200, 1100]), arrival, np.array([250, 200, 1100]))
    assert (o.pairs, o.swapped) == (1, 0)
    assert order(arrival[:1], arrival[:1], arrival[:1], arrival[:1]).share == 1.0


@given(st.lists(st.integers(0, 12), max_size=40))
def test_inversions_are_counted_as_by_hand(ranks: list[int]) -> None:
    expected = sum(a > b for a, b in combinations(ranks, 2))
    assert inversions(np.array(ranks, dtype=np.int64)) == expected


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=25))
def test_swapped_pairs_are_those_strictly_ordered_both_ways(rows: list[tuple[int, int, int]]) -> None:
    arrival, one, other = (np.array([r[i] for r in rows], dtype=np.int64) for i in range(3))
    o = order(arrival, arrival + one, arrival, arrival + other)
    events = list(zip((arrival + one).tolist(), (arrival + other).tolist(), strict=True))
    swapped = sum((a[0] - b[0]) * (a[1] - b[1]) < 0 for a, b in combinations(events, 2))
    assert o.swapped == swapped and 0 <= o.share <= 1
