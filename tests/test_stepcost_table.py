"""Looked-up step costs and residuals: kernel and numpy agree to the last bit, lines are lines, draws give the recording back."""

from __future__ import annotations

import dataclasses

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoptrace.errors import InputError
from hoptrace.replay.draws import draw_plain
from hoptrace.stepcost import RESIDUALS, StepCost, fixed
from hoptrace.stepcost_domain import Domain
from hoptrace.stepcost_kernel import IN_ORDER, RUN, step_ns
from hoptrace.stepcost_pack import pack
from hoptrace.stepcost_residuals import residuals
from hoptrace.stepcost_table import DECODE, EVER, MILLION, PROMPT, STALL, TIMES, VARIABLES, Composition, Grid, Piece, grid

COLUMNS = ("prefill_requests", "prefill_tokens", "prefill_context_tokens", "decode_requests", "decode_context_tokens")


def frame(*rows: tuple[int, ...]) -> pl.DataFrame:
    return pl.DataFrame([dict(zip(COLUMNS, r, strict=True)) for r in rows])


def ascending(most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 1 << 20), min_size=1, max_size=most, unique=True).map(sorted)


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    outer = draw(ascending(4))
    rows = []
    for _ in outer:
        inner = draw(ascending(5))
        rows.append(tuple((x, draw(st.integers(0, 10**13))) for x in inner))
    return Grid(tuple(outer), tuple(rows))


pieces = st.builds(
    Piece,
    grids(),
    st.sampled_from(VARIABLES),
    st.sampled_from(VARIABLES),
    st.tuples(*[st.integers(0, 3 * MILLION)] * 3),
    st.sampled_from(TIMES),
    st.integers(0, 1),
)
compositions = st.tuples(
    st.integers(0, 4), st.integers(0, 5000), st.integers(0, 50_000), st.integers(0, 300), st.integers(0, 1_000_000)
).map(lambda c: (max(c[0], 1) if c[1] else 0, c[1], c[2] if c[1] else 0, c[3], c[4] if c[3] else 0))
COEFFICIENTS = st.dictionaries(st.sampled_from(["step", "prefill_tokens", "decode_requests"]), st.integers(0, 10**7))


@settings(max_examples=150, deadline=None)
@given(st.lists(pieces, max_size=3), COEFFICIENTS, COEFFICIENTS, compositions)
def test_the_kernel_looks_up_what_numpy_does(
    p: list[Piece], first: dict[str, int], second: dict[str, int], c: tuple[int, ...]
) -> None:
    other = fixed(step_ns=3e6)
    cost = StepCost(first, "table", compute_ps=second, pieces=tuple(p))
    costs, starts = pack([other, cost, other])
    for at, one in zip(starts, (other, cost, other), strict=True):
        got = step_ns(costs, int(at), -1, *c, 0)
        if c[1] or c[3]:  # the engines start no empty step
            assert got == max(1, int(one.cost_ns_array(frame(c))[0]))
    assert step_ns.py_func(costs, int(starts[1]), -1, *c, 0) == step_ns(costs, int(starts[1]), -1, *c, 0)
    assert StepCost.from_dict(cost.to_dict()) == cost


def at(g: Grid, outer: int, inner: int) -> int:
    return int(g.at(np.array([outer]), np.array([inner]))[0])


def test_a_grid_is_linear_between_its_points_and_beyond_them() -> None:
    g = grid({(1, 100): 1000, (1, 200): 3000, (3, 100): 2000, (3, 300): 2000})
    assert at(g, 1, 100) == 1000 and at(g, 1, 150) == 2000 and at(g, 1, 175) == 2500
    assert at(g, 1, 250) == 4000 and at(g, 1, 60) == 200  # in the line of the last two
    assert at(g, 1, 40) == 0  # never negative
    assert at(g, 2, 150) == 2000 and at(g, 2, 200) == 2500  # half of each row
    assert at(g, 5, 100) == 3000 and at(g, 0, 100) == 500
    one = Grid((7,), (((5, 42),),))
    assert at(one, 0, 0) == at(one, 9, 9) == 42
    assert at(grid({(0, 0): 0, (0, 3): 10}), 0, 1) == 3  # rounded down


@given(grids(), st.integers(0, 1 << 21), st.integers(0, 1 << 21))
def test_points_are_met_exactly(g: Grid, outer: int, inner: int) -> None:
    for o, row in zip(g.outer, g.rows, strict=True):
        for x, ps in row:
            assert at(g, o, x) == ps
    assert at(g, outer, inner) >= 0


@pytest.mark.parametrize(
    "outer, rows",
    [((), ()), ((0, 0), (((1, 1),), ((1, 1),))), ((0,), ((),)), ((0,), (((2, 1), (1, 1)),)), ((0,), (((1, -1),),)),
     ((-1,), (((1, 1),),)), ((0,), (((1, 10**16),),)), ((0,), (((1 << 41, 1),),))],
)  # fmt: skip
def test_what_is_no_grid_is_refused(outer: tuple[int, ...], rows: tuple[tuple[tuple[int, int], ...], ...]) -> None:
    with pytest.raises(InputError):
        Grid(outer, rows)


def test_variables_by_hand() -> None:
    c = Composition(*(np.array([v], dtype=np.int64) for v in (2, 300, 1001, 4, 4003, 4)))
    want = {
        "none": 0, "tokens": 308, "prefill_tokens": 300, "prefill_context_tokens": 1001, "decode_batch": 8, "decode_context": 500,
        "decoder_context": 1000, "prompt_tokens": 150, "prompt_context": 500, "prompt_tokens_rms": 212, "sequences": 6,
    }  # fmt: skip
    assert {name: int(c.variable(name)[0]) for name in VARIABLES} == want
    g = Grid((0,), (((0, 0), (1 << 20, 1000 << 20)),))  # 1 ns for each
    for name, value in want.items():
        costs, _ = pack([StepCost({}, "table", pieces=(Piece(g, name),))])
        assert step_ns(costs, 0, -1, 2, 300, 1001, 4, 4003, 4) == max(1, value)


def test_a_piece_counts_in_its_steps_so_often() -> None:
    g = Grid((0,), (((0, 10**9),),))  # 1 ms

    def ms(p: Piece, *c: int) -> float:
        costs, _ = pack([StepCost({}, "table", pieces=(p,))])
        return float(step_ns(costs, 0, -1, *c, 0)) / 1e6

    prompt, decode, both = (3, 10, 0, 0, 0), (0, 0, 0, 5, 50), (3, 10, 0, 5, 50)
    assert [ms(Piece(g, "none", factors=f), *prompt) for f in (EVER, PROMPT, DECODE)] == [1, 1, 1e-6]
    assert [ms(Piece(g, "none", factors=f), *decode) for f in (EVER, PROMPT, DECODE)] == [1, 1e-6, 1]
    assert ms(Piece(g, "none", factors=(MILLION, 0, 1_100_000)), *both) == 1.1
    assert ms(Piece(g, "none", times="prefill_requests"), *both) == 3
    assert ms(Piece(g, "none", times="decode_requests"), *both) == 5
    # The larger of two sides, each with its pieces.
    sides = StepCost({"step": 10**9}, "roofline", pieces=(Piece(g, "none", side=1), Piece(g, "none", side=1)))
    assert step_ns(pack([sides])[0], 0, -1, *both, 0) == 2_000_000 and sides.kind == 1


# Residuals


def recording(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    prefill = rng.random(n) < 0.3
    decode = ~prefill | (rng.random(n) < 0.5)
    predicted = np.where(prefill, rng.integers(10**7, 10**8, n), rng.integers(10**6, 10**7, n))
    usual = rng.random(n) > 0.02
    took = np.where(usual, predicted * np.exp(0.3 * rng.standard_normal(n)), predicted + 5 * 10**7).astype(np.int64)
    return took, predicted, prefill, decode, usual


@pytest.mark.parametrize("n", [300, 5000])
def test_drawing_evenly_from_the_residuals_spends_the_recorded_time(n: int) -> None:
    took, predicted, prefill, decode, usual = recording(n)
    tables = residuals(took, predicted, prefill, decode, usual)
    kinds = {"decode": decode & ~prefill, "prefill": prefill & ~decode, "mixed": prefill & decode}
    assert set(tables) == set(RESIDUALS)
    for kind, rows in kinds.items():
        t = np.array(tables[kind])
        assert len(t) == rows.sum() or len(t) == 2048
        stall = t >= STALL
        expected = (
            predicted[rows].sum() * (1 + np.where(stall, 0, t).mean() / 1e6) + rows.sum() * np.where(stall, t - STALL, 0).mean()
        )
        assert expected / took[rows].sum() == pytest.approx(1, abs=0.005)


def test_a_stall_is_as_long_whatever_the_step_holds() -> None:
    cost = dataclasses.replace(fixed(any_decode_ns=1e6, decode_request_ns=1e5), residuals={"decode": (STALL + 7_000_000,)})
    costs, _ = pack([cost])
    assert step_ns(costs, 0, 5, 0, 0, 0, 10, 0, 0) == 2_000_000 + 7_000_000
    assert step_ns(costs, 0, 5, 0, 0, 0, 1, 0, 0) == 1_100_000 + 7_000_000
    assert step_ns(costs, 0, -1, 0, 0, 0, 1, 0, 0) == 1_100_000
    assert step_ns(costs, 0, 5, 1, 8, 0, 1, 0, 0) == 1_100_000  # mixed steps have none here


def test_the_draw_takes_sixteen_neighbours_in_a_row_and_every_residual_about_as_often() -> None:
    table = tuple(range(0, 100_000, 100))
    cost = dataclasses.replace(fixed(any_decode_ns=1e9), residuals={"decode": table})
    costs, _ = pack([fixed(step_ns=1), cost])
    at_ = len(pack([fixed(step_ns=1)])[0])
    seen = []
    for step in range(16_000):
        h = draw_plain(11, 5, 0, step // RUN)
        d = h - h % RUN + step % RUN
        took = step_ns(costs, at_, d, 0, 0, 0, 1, 0, 0)
        assert took == step_ns.py_func(costs, at_, d, 0, 0, 0, 1, 0, 0)
        seen.append((took - 10**9) // 100_000)
    runs = np.array(seen).reshape(-1, RUN)
    assert set(np.diff(runs, axis=1).ravel() % len(table)) == {1}
    counts = np.bincount(np.array(seen), minlength=len(table))
    assert counts.mean() == 16 and counts.max() < 100 and np.unique(runs[:, 0]).size > 500
    assert np.mean(seen) == pytest.approx(np.mean(range(1000)), rel=0.1)


def test_small_draws_are_places_in_the_recording() -> None:
    cost = dataclasses.replace(fixed(any_decode_ns=1e9), residuals={"decode": (10, 20, 30)})
    costs, _ = pack([cost])
    took = [step_ns(costs, 0, d, 0, 0, 0, 1, 0, 0) - 10**9 for d in (0, 1, 2, 3, 1009, IN_ORDER - 1)]
    assert took == [10_000, 20_000, 30_000, 10_000, 20_000, [10, 20, 30][(IN_ORDER - 1) % 3] * 1000]


def test_rare_kinds_have_no_residuals_of_their_own() -> None:
    took, predicted, prefill, decode, usual = recording(400)
    some = prefill & ~decode
    few = np.flatnonzero(some)[5:]
    keep = np.ones(len(took), dtype=bool)
    keep[few] = False
    tables = residuals(*(v[keep] for v in (took, predicted, prefill, decode, usual)))
    assert tables["prefill"] == tables["mixed"] != tables["decode"]
    only_decode = decode & ~prefill
    tables = residuals(*(v[only_decode] for v in (took, predicted, prefill, decode, usual)))
    assert tables["prefill"] == tables["mixed"] == () and tables["decode"]
    exact = residuals(predicted, predicted, prefill, decode, np.ones(len(took), dtype=bool))
    assert exact == {}  # nothing to draw


@pytest.mark.parametrize("bad", [{"idle": (1,)}, {"decode": (-1_000_001,)}, {"mixed": (2 * STALL,)}])
def test_residuals_that_cannot_be_are_refused(bad: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(InputError, match="residuals"):
        dataclasses.replace(fixed(step_ns=1), residuals=bad)


# Extrapolation


def test_steps_beyond_what_was_seen_are_counted_with_their_time() -> None:
    piece = Piece(grid({(1, 100): 10**9, (8, 100): 2 * 10**9}), "decode_context", "decode_batch", DECODE, seen=(100, 100, 1, 8))
    cost = StepCost({"prefill_tokens": 10}, "table", pieces=(dataclasses.replace(piece, name="decode step"),),
                    domain={"prefill_tokens": (1, 512), "decode_requests": (0, 8)})  # fmt: skip
    domain = Domain(cost)
    assert domain.sentences() == []
    ms = 10**6
    steps = frame((0, 0, 0, 8, 800), (0, 0, 0, 9, 900), (1, 512, 0, 0, 0), (1, 513, 0, 0, 0)).with_columns(
        start_ns=pl.Series([0, 1, 2, 4]) * ms, end_ns=pl.Series([1, 2, 4, 8]) * ms
    )
    for part in (steps[:1], steps[1:1], steps[1:]):
        domain.add(part)
    assert domain.sentences() == [
        "prefill_tokens of 512 to 513 was asked for, 1 to 512 was seen: extrapolated in 1 of 4 steps.",
        "decode_requests of 8 to 9 was asked for, 0 to 8 was seen: extrapolated in 1 of 4 steps.",
        "decode step: decode_batch of 8 to 9 was asked for, 1 to 8 was seen: extrapolated in 1 of 4 steps.",
        "62 % of the replay's step time rests on extrapolated step costs.",
    ]  # 1 ms + 4 ms of 8
