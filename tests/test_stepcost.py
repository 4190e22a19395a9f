"""Step cost: planted coefficients come back, integers stay bit-equal, monotone and non-negative; the fit says how wrong it is."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoptrace.errors import InputError
from hoptrace.manifest import Manifest, ReplayInfo, Server
from hoptrace.stepcost import FEATURES, StepCost, features_array, fit, fixed, interference, known_cost, outside, roofline
from hoptrace.stepcost_kernel import attention, cost_ns, cost_ps

LLAMA = Server.model_validate(
    {
        "name": "s", "parameters": 8_030_000_000, "weight_bytes": 16_060_000_000, "layers": 32, "heads": 32, "kv_heads": 8,
        "head_size": 128, "kv_dtype": "bf16",
    }
)  # fmt: skip
H100 = {"flops_per_s": 0.6e15, "memory_bytes_per_s": 3e12}
COLUMNS = ("prefill_requests", "prefill_tokens", "prefill_context_tokens", "decode_requests", "decode_context_tokens")


def steps(n: int = 600, seed: int = 0) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    prefill = np.where(rng.random(n) < 0.25, rng.integers(5, 400, n), 0)
    decode = np.where(prefill == 0, rng.integers(1, 9, n), rng.integers(0, 9, n))
    return pl.DataFrame(
        {
            "prefill_requests": (prefill > 0).astype(np.int64),
            "prefill_tokens": prefill,
            "prefill_context_tokens": np.where(prefill > 0, rng.integers(0, 500, n), 0),
            "decode_requests": decode,
            "decode_context_tokens": decode * rng.integers(20, 800, n),
        }
    )


def timed(frame: pl.DataFrame, cost: StepCost, noise: float = 0.0, seed: int = 1) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    ns = (cost.cost_ns_array(frame) * np.exp(noise * rng.standard_normal(frame.height) - noise**2 / 2)).astype(np.int64)
    start = np.concatenate(([0], np.cumsum(ns)[:-1]))
    return frame.with_columns(start_ns=pl.Series(start), end_ns=pl.Series(start + ns))


PLANTED = fixed(step_ns=4e6, any_prefill_ns=30e6, prefill_token_ns=6e6, decode_request_ns=9e6, decode_context_token_ns=8e3)


def test_the_fit_is_exact_without_noise() -> None:
    got = fit(timed(steps(), PLANTED))
    assert set(got.coefficients_ps) == set(PLANTED.coefficients_ps)
    for name, ps in PLANTED.coefficients_ps.items():
        assert got.coefficients_ps[name] == pytest.approx(ps, rel=1e-4), name
    assert got.error["p99"] < 1e-3 and got.error["left_out"] == 0


@pytest.mark.parametrize("seed", range(5))
def test_planted_coefficients_come_back_within_the_stated_error(seed: int) -> None:
    got = fit(timed(steps(1500, seed), PLANTED, noise=0.1, seed=seed))
    assert got.covariance_ps2 is not None
    for name in ("step", "prefill_tokens", "decode_requests", "decode_context_tokens"):
        i = FEATURES.index(name)
        error = got.covariance_ps2[i][i] ** 0.5
        # Within 4 standard errors (five seeds and four coefficients), or within 5 % where the error is smaller still.
        assert abs(got.coefficients_ps[name] - PLANTED.coefficients_ps[name]) < max(
            4 * error, 0.05 * PLANTED.coefficients_ps[name]
        )
        assert 0 < error < 0.5 * PLANTED.coefficients_ps[name]
    assert got.error["p50"] == pytest.approx(0.0674 * 1.0, abs=0.015)  # median |x| of 10 % log-normal noise
    assert abs(got.error["bias"]) < 0.02


def test_stalls_are_left_out_said_and_do_not_bend_the_rest() -> None:
    frame = timed(steps(), PLANTED, noise=0.05)
    stalled = np.arange(frame.height) % 25 == 3
    frame = frame.with_columns(
        end_ns=pl.Series(np.where(stalled, frame["end_ns"].to_numpy() + 2_000_000_000, frame["end_ns"].to_numpy()))
    )
    got = fit(frame)
    assert got.coefficients_ps["decode_requests"] == pytest.approx(9e9, rel=0.05)
    assert got.coefficients_ps["prefill_tokens"] == pytest.approx(6e9, rel=0.05)
    assert got.error["left_out"] >= 20 and any("outliers" in n for n in got.notes)
    assert got.error["left_out_time"] > 0.2


def test_the_fit_is_right_in_the_mean_under_skewed_noise() -> None:
    frame = steps(2000)
    exact = PLANTED.cost_ns_array(frame)
    rng = np.random.default_rng(5)
    ns = (exact * (1 + rng.exponential(0.2, len(exact)))).astype(np.int64)
    got = fit(frame.with_columns(start_ns=pl.lit(0), end_ns=pl.Series(ns)))
    assert got.cost_ns_array(frame).sum() / ns.sum() == pytest.approx(1, abs=0.02)


def test_one_token_alone_is_cheaper_than_a_batch() -> None:
    # What llama.cpp on one core does: 14 ms alone, then about 16 + 8 per decoder.
    frame = steps(900).with_columns(prefill_tokens=0, prefill_requests=0, prefill_context_tokens=0)
    frame = frame.filter(pl.col("decode_requests") > 0)
    got = fit(timed(frame, fixed(step_ns=6e6, decode_request_ns=8e6, batched_ns=10e6), noise=0.1))
    assert got.cost_ns(decode_requests=1, decode_context_tokens=100) == pytest.approx(14e6, rel=0.04)
    assert got.cost_ns(decode_requests=4, decode_context_tokens=400) == pytest.approx(48e6, rel=0.04)


def test_what_the_data_cannot_tell_is_dropped_and_said() -> None:
    alone = steps().with_columns(prefill_tokens=0, prefill_requests=0, prefill_context_tokens=0, decode_requests=1)
    got = fit(timed(alone, PLANTED))
    assert "any_decode" in got.notes[0] and "decode_requests" in got.notes[0]
    assert got.cost_ns(decode_requests=1, decode_context_tokens=100) == pytest.approx(
        PLANTED.cost_ns(decode_requests=1, decode_context_tokens=100), rel=1e-3
    )
    warnings = outside(got.domain, {"decode_requests": (1, 4), "decode_context_tokens": 100})
    assert warnings == ["decode_requests of 1 to 4 was asked for, 1 to 1 was seen: extrapolated."]


def test_a_few_tokens_of_context_are_no_ground_for_a_price() -> None:
    frame = steps().with_columns(
        prefill_context_tokens=pl.when(pl.col("prefill_tokens") > 0).then(pl.col("prefill_tokens") % 3).otherwise(0)
    )
    got = fit(timed(frame, PLANTED, noise=0.2))
    assert "prefill_context_tokens" not in got.coefficients_ps
    assert got.cost_ns(prefill_tokens=100, prefill_context_tokens=1000) == got.cost_ns(prefill_tokens=100)


def test_too_few_steps_are_refused() -> None:
    frame = timed(steps(19), PLANTED)
    with pytest.raises(InputError, match="at least 20 steps"):
        fit(frame)
    known = timed(steps(40), PLANTED).with_columns(
        prefill_tokens=pl.when(pl.int_range(pl.len()) < 25).then(None).otherwise("prefill_tokens")
    )
    with pytest.raises(InputError, match="the trace has 15"):
        fit(known)


def test_equal_input_gives_the_equal_cost() -> None:
    frame = timed(steps(300), PLANTED, noise=0.2)
    assert fit(frame) == fit(frame.reverse())


composition = st.tuples(
    st.integers(0, 4), st.integers(0, 5000), st.integers(0, 50_000), st.integers(0, 300), st.integers(0, 1_000_000)
).map(lambda c: (max(c[0], 1) if c[1] else 0, c[1], c[2] if c[1] else 0, c[3], c[4] if c[3] else 0))
coefficients = st.dictionaries(st.sampled_from(FEATURES), st.integers(0, 10**7), max_size=9)


@settings(max_examples=200)
@given(coefficients, coefficients, composition)
def test_numpy_and_numba_agree_to_the_last_bit(first: dict[str, int], second: dict[str, int], c: tuple[int, ...]) -> None:
    cost = StepCost(first, "fixed", compute_ps=second)
    row = pl.DataFrame([dict(zip(COLUMNS, c, strict=True))])
    whole = int(cost.cost_ns_array(row)[0])
    assert cost_ns(cost.as_vector(), cost.kind, *c) == whole
    features = features_array(row)[0]
    assert (cost_ps(cost.as_vector(), cost.kind, features) + 500) // 1000 == whole
    assert attention(*c[:3]) == features[FEATURES.index("prefill_attention")]
    assert cost.cost_ns(
        prefill_requests=c[0], prefill_tokens=c[1], prefill_context_tokens=c[2], decode_requests=c[3], decode_context_tokens=c[4]
    ) == whole  # fmt: skip
    assert whole >= 0 and StepCost.from_dict(cost.to_dict()) == cost


@given(coefficients, composition, st.sampled_from([1, 2, 3, 4]), st.integers(1, 100))
def test_more_work_never_costs_less(c: dict[str, int], work: tuple[int, ...], column: int, more: int) -> None:
    cost = StepCost(c, "fixed")
    larger = list(work)
    larger[column] += more
    if larger[1] and not larger[0]:
        larger[0] = 1
    before, after = (int(cost.cost_ns_array(pl.DataFrame([dict(zip(COLUMNS, w, strict=True))]))[0]) for w in (work, larger))
    assert after >= before


def test_fixed_costs() -> None:
    cost = fixed(any_prefill_ns=50e6, any_decode_ns=12e6)
    assert cost.cost_ns(prefill_tokens=1) == 50_000_000
    assert cost.cost_ns(decode_requests=7, decode_context_tokens=900) == 12_000_000
    assert cost.cost_ns(prefill_tokens=300, decode_requests=2) == 62_000_000
    assert cost.cost_ns() == 0


def test_roofline_of_a_known_model() -> None:
    cost = roofline(LLAMA, H100)
    # One decoder: bound by the weights, 16.06 GB at 3 TB/s; 131072 bytes of KV per token, read for 1000 and written for one.
    assert cost.cost_ns(decode_requests=1, decode_context_tokens=1000) == pytest.approx(
        (16.06e9 + 1001 * 131_072) / 3e3, rel=1e-6
    )
    # A long prompt: bound by arithmetic, 2 × 8.03e9 per token and 4 × 32 × 4096 per pair.
    assert cost.cost_ns(prefill_tokens=4096) == pytest.approx((2 * 8.03e9 * 4096 + 4 * 32 * 4096 * 4096**2 / 2) / 0.6e6, rel=1e-5)


def test_roofline_says_what_is_missing() -> None:
    with pytest.raises(InputError, match="parameters, kv_dtype, flops_per_s"):
        roofline(LLAMA.model_copy(update={"parameters": None, "kv_dtype": None}), {"memory_bytes_per_s": 1e12})


def test_interference_is_the_other_phases_part() -> None:
    cost = fixed(step_ns=2e6, any_prefill_ns=30e6, prefill_token_ns=6e6, decode_request_ns=9e6)
    frame = pl.DataFrame(
        {
            "start_ns": [0, 0, 0, 0], "end_ns": [10**9, 10**9, 10**9, 50_000_000], "prefill_requests": [1, 1, 0, 1],
            "prefill_tokens": [10, 10, 0, 10], "prefill_context_tokens": [0, 0, 0, 0], "decode_requests": [3, 0, 3, 3],
            "decode_context_tokens": [300, 0, 300, 300],
        }
    )  # fmt: skip
    got = interference(cost, frame)
    assert got["on_decode_ns"].to_list() == [90_000_000, 0, 0, 50_000_000]
    assert got["on_prefill_ns"].to_list() == [27_000_000, 0, 0, 27_000_000]
    assert got["on_decode_se_ns"].null_count() == 4


def test_interference_takes_the_batch_away_too() -> None:
    cost = fixed(decode_request_ns=9e6, batched_ns=10e6, prefill_token_ns=1e6)
    frame = pl.DataFrame([dict(zip(COLUMNS, (1, 10, 0, 1, 50), strict=True)) | {"start_ns": 0, "end_ns": 10**9}])
    assert interference(cost, frame)["on_decode_ns"].item() == 20_000_000


def test_the_interference_has_the_fits_standard_error() -> None:
    cost = fit(timed(steps(), PLANTED, noise=0.2))
    frame = timed(steps(50, seed=9), PLANTED)
    got = interference(cost, frame)
    mixed = (frame["prefill_tokens"] > 0) & (frame["decode_requests"] > 0)
    assert (got.filter(mixed)["on_decode_se_ns"] > 0).all() and (got.filter(~mixed)["on_decode_se_ns"] == 0).all()
    assert (got["on_decode_ns"] <= frame["end_ns"] - frame["start_ns"]).all()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"origin": "fixed", "coefficients_ps": {"steps": 1}}, "no feature 'steps'"),
        ({"origin": "fixed", "coefficients_ps": {"step": -1}}, "0 or more"),
        ({"origin": "fixed", "coefficients_ps": {"step": 1.5}}, "whole picoseconds"),
        ({"origin": "fixed"}, "cannot be read"),
    ],
)
def test_a_wrong_cost_is_refused(bad: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        StepCost.from_dict(bad)


def test_the_cost_of_a_replay_is_read_from_its_manifest() -> None:
    cost = fit(timed(steps(), PLANTED, noise=0.1))

    def manifest(**model: object) -> Manifest:
        info = ReplayInfo(parent="a", policy={"name": "p"}, cost_model=dict(model))
        return Manifest.model_validate_json(Manifest(origin="replayed", replay=info).model_dump_json())

    assert known_cost(manifest(kind="fitted", step=cost.to_dict())) == cost
    assert known_cost(manifest(kind="fixed")) is None
    assert known_cost(Manifest(origin="recorded")) is None
    with pytest.raises(InputError):
        known_cost(manifest(step="cheap"))
