"""Non-negative least squares against scipy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls as reference

from hoptrace.nnls import nnls


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 7), st.integers(0, 20), st.booleans())
def test_as_close_as_scipys(seed: int, n: int, more: int, wild: bool) -> None:
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(n + more, n)) * (10.0 ** rng.integers(-3, 4, n) if wild else 1.0)
    b = rng.normal(size=n + more)
    x, (y, far) = nnls(a, b), reference(a, b)
    assert (x >= 0).all()
    assert float(np.linalg.norm(a @ x - b)) == pytest.approx(far, rel=1e-9, abs=1e-12)
    assert a @ x == pytest.approx(a @ y, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize(
    ("a", "b", "x"),
    [
        ([[1.0, 0.0], [0.0, 1.0]], [3.0, 4.0], [3.0, 4.0]),
        ([[1.0, 0.0], [0.0, 1.0]], [3.0, -4.0], [3.0, 0.0]),
        ([[1.0, 0.0], [0.0, 1.0]], [-3.0, -4.0], [0.0, 0.0]),
        ([[1.0, 1.0], [0.0, 1.0]], [1.0, 3.0], [0.0, 2.0]),  # unconstrained: −2, 3
        ([[2.0], [0.0]], [5.0, 1.0], [2.5]),
    ],
)
def test_by_hand(a: list[list[float]], b: list[float], x: list[float]) -> None:
    assert nnls(np.array(a), np.array(b)) == pytest.approx(x)


def test_columns_that_are_the_same_share_and_nothing_breaks() -> None:
    a = np.array([[1.0, 1.0], [2.0, 2.0]])
    assert a @ nnls(a, np.array([1.0, 2.0])) == pytest.approx([1.0, 2.0])
    assert nnls(np.zeros((3, 2)), np.ones(3)) == pytest.approx([0.0, 0.0])
