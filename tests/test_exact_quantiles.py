"""Order statistics in bounded memory are those of a sort, whatever was guessed, kept or cut short."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hoptrace.exact_quantiles import Zones, brackets, order_statistics, type7

INT = st.one_of(
    st.integers(-5, 5),
    st.integers(0, 10**9),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.sampled_from([-(1 << 63), (1 << 63) - 1]),
)
PAIRS = st.lists(st.tuples(INT, st.integers(1, 4)), min_size=1, max_size=60)


class Data:
    """Batches that can be scanned again and again; ``passes`` counts how often they were."""

    def __init__(self, pairs: list[tuple[int, int]], batch: int) -> None:
        self.batches = [pairs[i : i + batch] for i in range(0, len(pairs), batch)]
        self.passes = 0

    def __call__(self, work: Callable[..., Zones]) -> Iterator[Zones]:
        self.passes += 1
        for b in self.batches:
            yield work(np.array([v for v, _ in b], dtype=np.int64), np.array([w for _, w in b], dtype=np.int64))


@settings(max_examples=300, deadline=None)
@given(PAIRS, st.integers(1, 20), st.lists(INT, max_size=6), st.integers(0, 20), st.integers(4, 5000))
@example([(-(1 << 63), 1), ((1 << 63) - 1, 1)], 1, [], 0, 4)
def test_the_values_at_the_ranks_are_those_of_a_sort(
    pairs: list[tuple[int, int]], batch: int, guess: list[int], held: int, cells: int
) -> None:
    guess = sorted(guess)[: len(guess) // 2 * 2]
    whole = sorted(v for v, w in pairs for _ in range(w))
    wanted = sorted({0, len(whole) // 2, len(whole) - 1, len(whole) * 9 // 10})
    n, found = order_statistics(
        Data(pairs, batch), lambda n: wanted, np.array(guess, dtype=np.int64) if guess else None, held=held, cells=cells
    )
    assert n == len(whole)
    assert found == [whole[r] for r in wanted]


def test_a_good_guess_needs_one_pass_and_a_bad_one_a_few() -> None:
    rng = np.random.default_rng(0)
    pairs = [(int(v), 1) for v in rng.lognormal(16, 0.4, 50_000)]
    whole = sorted(v for v, _ in pairs)
    samples = [(np.array([v for v, _ in pairs[i : i + 500]]), np.ones(500, dtype=np.int64)) for i in range(0, 50_000, 5000)]
    ranks = [r for q in (0.5, 0.95, 0.99) for r in type7(len(pairs), q)[:2]]
    for edges, passes in ((brackets(samples, (0.5, 0.95, 0.99)), 1), (np.array([1, 2, 3, 4]), 4)):
        data = Data(pairs, 7000)
        assert order_statistics(data, lambda n: ranks, edges, held=5000)[1] == [whole[r] for r in ranks]
        assert data.passes <= passes


def test_many_equal_values_are_counted_not_stored() -> None:
    data = Data([(7, 1)] * 1000 + [(9, 1)] * 10, 100)
    assert order_statistics(data, lambda n: [500], np.array([7, 8]), held=1) == (1010, [7])
    assert data.passes == 1


def test_no_values_have_no_ranks() -> None:
    assert order_statistics(Data([], 1), lambda n: [] if n == 0 else [0]) == (0, [])


@pytest.mark.parametrize("n", [1, 2, 3, 10, 101])
@pytest.mark.parametrize("q", [0.0, 0.5, 0.95, 0.99, 1.0])
def test_type_7_is_numpys_default(n: int, q: float) -> None:
    values = np.arange(n) ** 2
    low, high, share = type7(n, q)
    assert values[low] + (values[high] - values[low]) * share == pytest.approx(np.quantile(values, q))
