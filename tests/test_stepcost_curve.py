"""A curve of decoders: found where there is one, not where a line says it all, and the fit's errors add up to nothing."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from hoptrace.replay.planning.parts import without_prompts
from hoptrace.stepcost import StepCost, fit, fixed
from hoptrace.stepcost_kernel import step_ns
from hoptrace.stepcost_pack import pack
from hoptrace.stepcost_robust import robust

CURVE_MS = {1: 22.0, 2: 27.0, 3: 21.0, 4: 20.5, 5: 21.0, 6: 22.0}


def steps(seed: int, *, share: float, noise: float = 0.05) -> pl.DataFrame:
    """600 steps: runs of decoders, prompts now and then, some beside decoders."""
    rng = np.random.default_rng(seed)
    rows, at = [], 0
    for _ in range(120):
        n = int(rng.integers(1, 7))
        for _ in range(4):
            rows.append((0, n))
        rows.append((int(rng.integers(8, 400)), n if rng.random() < 0.6 else 0))
    out = []
    for tokens, n in rows:
        alone = CURVE_MS.get(n, 0.0)
        ms = alone if not tokens else 20 + 0.6 * tokens + share * alone
        took = int(ms * 1e6 * rng.lognormal(0, noise))
        out.append({
            "start_ns": at, "end_ns": at + took, "prefill_requests": int(tokens > 0), "prefill_tokens": tokens,
            "prefill_context_tokens": 0, "decode_requests": n, "decode_context_tokens": 100 * n,
        })  # fmt: skip
        at += took
    return pl.DataFrame(out)


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_a_curve_comes_back(share: float) -> None:
    got = fit(steps(3, share=share))
    assert len(got.pieces) == 1 and got.pieces[0].inner == "decode_batch"
    for n, ms in CURVE_MS.items():
        assert got.cost_ns(decode_requests=n, decode_context_tokens=100 * n) == pytest.approx(ms * 1e6, rel=0.05)
    mixed = got.cost_ns(prefill_tokens=200, decode_requests=3, decode_context_tokens=300)
    assert mixed == pytest.approx((20 + 0.6 * 200 + share * 21) * 1e6, rel=0.05)
    assert got.pieces[0].factors[2] / 1e6 == pytest.approx(share, abs=0.15)


def test_beyond_what_was_seen_a_curve_goes_on_in_the_lines_slope_and_the_domain_knows() -> None:
    got = fit(steps(3, share=0.1))
    at = [got.cost_ns(decode_requests=n) for n in (6, 12, 24, 100)]
    assert at == sorted(at) and at[1] < 2 * at[0]
    assert got.domain["decode_requests"][1] == 6


def test_where_a_line_says_it_all_there_is_no_curve() -> None:
    line = fixed(step_ns=8e6, prefill_token_ns=1e5, decode_request_ns=5e5)
    for seed in range(3):
        frame = steps(seed, share=0.5)
        took = (line.cost_ns_array(frame) * np.random.default_rng(seed).lognormal(0, 0.05, frame.height)).astype(np.int64)
        assert fit(frame.with_columns((pl.col("start_ns") + pl.Series(took)).alias("end_ns"))).pieces == ()


def test_two_numbers_of_decoders_make_no_curve() -> None:
    frame = steps(1, share=0.1).with_columns(pl.col("decode_requests").clip(0, 2))
    assert fit(frame).pieces == ()


def test_neither_short_nor_long_steps_are_off_as_a_whole() -> None:
    """Prompts cost 20 ms and 0.6 ms a token, but those beyond 300 tokens a tenth less: no line fits. The errors of the steps that
    are kept still add up to nothing, in ms and as shares of the cost."""
    tokens = np.tile(np.arange(10.0, 400.0, 10.0), 5)
    y = (20 + 0.6 * tokens) * np.where(tokens > 300, 0.9, 1.0) * 1e6
    x = np.column_stack([np.ones(len(tokens)), tokens])
    beta, keep = robust(x, y)
    p = x @ beta
    assert keep.mean() > 0.85 and abs(y / p - 1).max() > 0.02
    assert p[keep].sum() == pytest.approx(y[keep].sum(), rel=1e-9)
    assert float((y / p)[keep].mean()) == pytest.approx(1, abs=1e-4)


def test_the_kernel_and_the_dictionary_have_the_curve_too() -> None:
    got = fit(steps(3, share=0.1))
    again = StepCost.from_dict(got.to_dict())
    assert again == got
    packed, starts = pack([got])
    for pt, n in ((0, 1), (0, 4), (0, 50), (100, 3), (100, 0)):
        took = step_ns(packed, int(starts[0]), -1, int(pt > 0), pt, 0, n, 100 * n, 0)
        assert took == got.cost_ns(prefill_tokens=pt, decode_requests=n, decode_context_tokens=100 * n)


def test_prompts_free_of_charge_leave_decoders_what_they_take_alone() -> None:
    got = fit(steps(3, share=0.1))
    free = without_prompts(got)
    alone = got.cost_ns(decode_requests=3, decode_context_tokens=300)
    assert free.cost_ns(prefill_tokens=500, decode_requests=3, decode_context_tokens=300) == alone
