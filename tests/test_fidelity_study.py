"""The fidelity study on recordings of which everything is known: errors, ratios, noise floor, signs, intervals, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.runs import MS, Request, record
from support.workloads import server, store

from hoptrace.analysis.compare.bootstrap import Sample, ratios
from hoptrace.analysis.fidelity.rules import gate, parse
from hoptrace.analysis.fidelity.sources import Truth
from hoptrace.analysis.fidelity.speed import machine_speed
from hoptrace.analysis.fidelity.study import Case, Study, study
from hoptrace.analysis.fidelity.text import headline, noise_text, outcome_text, settings_text, signs_text, speed_text
from hoptrace.errors import InputError, UsageError
from hoptrace.reader import Trace
from hoptrace.stepcost import fixed

ROWS: list[Request] = [(i, 1000 * i, 1000 * i + 100 + i, 1000 * i + 400 + 2 * i, 3) for i in range(20)]
STEPS = [(1000 * i, 1000 * i + 100, {i: 8}) for i in range(20)]


def slower(rows: list[Request], first: int, rest: int) -> list[Request]:
    """TTFT and the time after it times so much, in %."""
    return [
        (n, a, a + (f - a) * first // 100, a + (f - a) * first // 100 + (e - f) * rest // 100, out) for n, a, f, e, out in rows
    ]


def test_a_recording_that_is_its_own_prediction_has_no_error(tmp_path: Path) -> None:
    a = record(tmp_path / "a.trace", ROWS, STEPS)
    result = study(Case(a, a), [Case(a, a)])
    for case in result.cases:
        for f in case.figures:
            assert f.raw.error_pct == 0 and f.error_pct == 0, f.metric
            assert f.interval_pct == ((None, None) if f.metric == "throughput" else (0, 0))
        assert case.own_terms.steps.equal_share == 1
    assert result.cases[1].signs == {"right": 0, "wrong": [], "within_noise": 20}


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(10, 900), st.integers(0, 900), st.integers(1, 6)), min_size=2, max_size=9))
def test_all_times_a_tenth_longer_are_ten_percent_off_in_every_latency(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("s")
    rows = [(i, 50 * i, 50 * i + first, 50 * i + first + rest, out) for i, (first, rest, out) in enumerate(shapes)]
    a, b = record(folder / "a.trace", rows), record(folder / "b.trace", rows, factor=(11, 10))
    case = study(Case(a, b)).cases[0]
    for f in case.figures:
        if f.raw.observed and f.raw.error_pct is not None:
            expected = 10 if f.metric != "throughput" else -100 / 11
            assert f.error_pct == pytest.approx(expected, abs=2e-4), (f.metric, f.statistic)
            if f.metric != "throughput" and f.bounds is not None:
                assert f.interval_pct == (pytest.approx(10, abs=2e-3), pytest.approx(10, abs=2e-3))
    assert case.own_terms.finishes is not None and case.own_terms.finishes.swapped == 0


def four(tmp_path: Path, b: int = 50, b_replay: int = 60) -> tuple[Case, Case]:
    """A, predicted 10 % too slow; B, so many % of A, predicted as so many % of A."""
    a = record(tmp_path / "a.trace", ROWS, STEPS)
    a_replay = record(tmp_path / "ar.trace", slower(ROWS, 110, 110), STEPS)
    other = record(tmp_path / "b.trace", slower(ROWS, b, b), STEPS, on=server(max_sequences=1))
    other_replay = record(tmp_path / "br.trace", slower(ROWS, b_replay, b_replay), STEPS)
    return Case(a, a_replay), Case(other, other_replay)


def both(tmp_path: Path, b: int, b_replay: int) -> Study:
    own, other = four(tmp_path, b, b_replay)
    return study(own, [other])


def test_the_headline_of_a_changed_policy_is_the_ratio_in_which_a_common_error_cancels(tmp_path: Path) -> None:
    result = both(tmp_path, 50, 55)
    own, case = result.cases
    f = case.figure("e2e", "p50")
    assert f.ratio is not None
    # Both replays are a tenth too slow: B alone is 10 % off, B ÷ A is right. (Times are cut to whole ms.)
    assert own.figure("e2e", "p50").error_pct == pytest.approx(10, abs=0.3)
    assert f.raw.error_pct == pytest.approx(10, abs=0.6)
    assert f.ratio.observed == pytest.approx(0.5, abs=0.005) and f.ratio.predicted == pytest.approx(0.5, abs=0.005)
    assert f.error_pct == pytest.approx(0, abs=0.6)
    assert case.settings[0].as_dict() == {"name": "max_sequences", "a": "4", "b": "1"}
    assert settings_text(case) == "max_sequences 4 → 1" and own.settings == ()


def test_literal_ratio_and_its_error(tmp_path: Path) -> None:
    """Two requests each: A 400 and 400 ms, replayed 440; B 200 and 200, replayed 264: 0.6 instead of 0.5."""

    def runs(name: str, e2e: int) -> Trace:
        return record(tmp_path / f"{name}.trace", [(i, 1000 * i, 1000 * i + 100, 1000 * i + e2e, 3) for i in range(2)])

    case = study(Case(runs("a", 400), runs("ar", 440)), [Case(runs("b", 200), runs("br", 264))]).cases[1]
    f = case.figure("e2e", "mean")
    assert f.ratio is not None and f.as_dict()["ratio"] == {
        "observed": 0.5, "predicted": 0.6, "error_pct": 20.0, "low_pct": 20.0, "high_pct": 20.0,
    }  # fmt: skip
    assert f.raw.error_pct == pytest.approx(32.0) and f.error_pct == pytest.approx(20.0)
    t = case.figure("throughput", "requests")
    assert t.ratio is not None and t.ratio.observed == pytest.approx(1400 / 1200) and t.interval_pct == (None, None)


def test_signs_are_judged_beyond_the_noise_between_runs(tmp_path: Path) -> None:
    own, other = four(tmp_path, 90, 130)
    # Without repeats: every request is faster in B, the replay says slower.
    case = study(own, [other]).cases[1]
    assert case.figure("e2e", "p50").sign == "wrong" and "e2e p50" in case.signs["wrong"]
    assert signs_text(case).startswith(f"signs right for 0 of {len(case.signs['wrong'])} changes (wrong: ttft mean, ")
    # With a repeat that is 12 % off, a tenth less is within the noise.
    again = record(tmp_path / "a2.trace", slower(ROWS, 112, 112), STEPS)
    result = study(own, [other], [again])
    f = result.cases[1].figure("e2e", "p50")
    assert f.sign == "within noise" and f.floor is not None and f.floor.median_pct == pytest.approx(12, abs=0.3)
    # With one that is 2 % off it is not.
    near = record(tmp_path / "a3.trace", slower(ROWS, 102, 102), STEPS)
    assert study(own, [other], [near]).cases[1].figure("e2e", "p50").sign == "wrong"
    right = both(tmp_path / "r", 50, 60).cases[1]
    assert right.signs == {"right": 16, "wrong": [], "within_noise": 4}  # queue is the same ten milliseconds everywhere


def test_the_noise_floor_is_between_neighbouring_runs(tmp_path: Path) -> None:
    a = record(tmp_path / "a.trace", ROWS, STEPS)
    runs = [record(tmp_path / f"a{p}.trace", slower(ROWS, p, p), STEPS) for p in (110, 99, 100)]
    result = study(Case(a, a), repeats=runs, cost=fixed(step_ns=100 * MS))
    assert result.noise is not None
    floor = result.noise.get("e2e", "mean")
    assert floor is not None
    # 100 → 110 → 99 → 100: 10 %, 10 %, 1 %.
    assert floor.median_pct == pytest.approx(10, abs=0.3) and floor.largest_pct == pytest.approx(10, abs=0.3)
    assert result.noise.runs == ("a", "a110", "a99", "a100") and result.noise.speeds == (1, 1, 1, 1)
    assert noise_text(result).startswith("Noise (a run of A against the one before): E2E p50 ")
    assert study(Case(a, a)).noise is None
    assert noise_text(study(Case(a, a))) == "Noise between runs is unknown: give another run of A with --repeat."


def test_the_speed_of_the_machine_is_that_of_equal_steps(tmp_path: Path) -> None:
    a = record(tmp_path / "a.trace", ROWS, STEPS)
    b = record(tmp_path / "b.trace", ROWS, [(s, s + 120, m) for s, _, m in STEPS])
    for cost in (fixed(step_ns=100 * MS), fixed(step_ns=50 * MS)):  # what the cost is wrong by in both cancels
        assert machine_speed(a, b, cost) == pytest.approx(1.2)
    assert machine_speed(a, b, None) is None
    bare = record(tmp_path / "c.trace", [(0, 0, 100, 100, 1)])
    assert machine_speed(a, store(tmp_path / "d.trace", {"requests": bare.table("requests").collect()}), fixed(step_ns=1)) is None
    case = study(Case(a, a), [Case(b, a, at_speed=b)], cost=fixed(step_ns=100 * MS)).cases[1]
    assert case.speed == pytest.approx(1.2) and case.figure("e2e", "p50").at_speed_pct == 0
    assert str(speed_text(case)).startswith("Equal steps took 20.0 % longer than in A")


def test_what_is_left_with_each_truth(tmp_path: Path) -> None:
    a = record(tmp_path / "a.trace", ROWS, STEPS)
    off = record(tmp_path / "r.trace", slower(ROWS, 110, 110), STEPS)
    truths = (Truth(None, off), Truth("arrival", off, None, ("arrival",)), Truth("cache", None, "it does not tell.", ("cache",)),
              Truth("all", a, None, ("arrival", "step_time")))  # fmt: skip
    got = study(Case(a, off, truths=truths)).cases[0].sources
    assert [s.truth for s in got] == [None, "arrival", "cache", "all"]
    assert got[0].error_pct["e2e", "p50"] == pytest.approx(10, abs=0.3)
    assert got[2].error_pct["e2e", "p50"] is None and got[2].as_dict()["why_not"] == "it does not tell."
    assert got[3].error_pct["e2e", "p50"] == 0 and got[3].as_dict()["of"] == ["arrival", "step_time"]


def test_steps_beyond_what_the_cost_was_measured_on_are_told(tmp_path: Path) -> None:
    a = record(tmp_path / "a.trace", ROWS, STEPS)
    seen = replace(fixed(step_ns=100 * MS, prefill_token_ns=1), domain={"prefill_tokens": (1, 7)})
    case = study(Case(a, a), cost=seen).cases[0]
    assert case.beyond == 1.0
    assert case.domain[0] == "prefill_tokens of 8 was asked for, 1 to 7 was seen: extrapolated in 20 of 20 steps."
    assert study(Case(a, a), cost=replace(seen, domain={"prefill_tokens": (1, 9)})).cases[0].as_dict()["domain"] == {
        "share": 0.0, "beyond": [], "remedy": None,
    }  # fmt: skip


# Refusals


def test_other_work_another_engine_or_model_is_refused_and_said(tmp_path: Path) -> None:
    a = record(tmp_path / "a.trace", ROWS, STEPS)
    for name, b, words in (
        ("less", record(tmp_path / "less.trace", ROWS[:19], STEPS[:19]), "20 against 19 finished requests"),
        ("engine", record(tmp_path / "engine.trace", ROWS, STEPS, on=server(engine="llama.cpp")), "another engine: vllm against"),
        ("model", record(tmp_path / "model.trace", ROWS, STEPS, on=server(layers=3)), "another model: layers 2 against 3"),
    ):
        with pytest.raises(InputError, match=f"{name} is no run of the work of a under another policy: .*{words}"):
            study(Case(a, a), [Case(b, b)])
        got = study(Case(a, a), [Case(b, b)], anyway=True).cases[1]
        assert any(words in n for n in got.notes), name


def test_traces_without_latencies_are_refused_on_either_side(tmp_path: Path) -> None:
    a = record(tmp_path / "a.trace", ROWS, STEPS)
    gone = a.table("requests").collect().with_columns(pl.lit(None, dtype=pl.Int64).alias("first_token_ns"))
    log = store(tmp_path / "log.trace", {"requests": gone})
    empty = store(tmp_path / "empty.trace", {})
    for bad in (log, empty):
        for own, others in ((Case(bad, a), []), (Case(a, a), [Case(bad, a)])):
            with pytest.raises(InputError, match=f"{bad.name} holds no observed latencies"):
                study(own, others, anyway=True)


def test_a_repeat_has_to_be_one(tmp_path: Path) -> None:
    a = record(tmp_path / "a.trace", ROWS, STEPS)
    other = record(tmp_path / "o.trace", ROWS, STEPS, on=server(max_sequences=1))
    with pytest.raises(InputError, match=r"o is no repeat of a: max_sequences 4 against 1\."):
        study(Case(a, a), repeats=[other])
    assert study(Case(a, a), repeats=[other], anyway=True).notes == ("o is no exact repeat of a: max_sequences 4 against 1.",)
    with pytest.raises(InputError, match="repeat of itself"):
        study(Case(a, a), repeats=[a], anyway=True)


def test_a_recording_that_is_a_replay_or_was_killed_is_called_so(tmp_path: Path) -> None:
    a = record(tmp_path / "a.trace", ROWS, STEPS, origin="imported")
    a.manifest.closed = False
    notes = study(Case(a, a)).cases[0].notes
    assert any("was not measured here" in n for n in notes) and any("not closed cleanly" in n for n in notes)


# The gate


def test_rules_speak_of_errors_without_their_sign(tmp_path: Path) -> None:
    result = both(tmp_path, 50, 66)
    for text, failed in (
        ("e2e_p50>9%", [True, True]), ("e2e_p50>11%", [False, True]), ("own.e2e_p50>11%", [False]),
        ("changed.e2e.p50>25%", [False]), ("raw_e2e_p50>25%", [False, True]), ("at_speed_e2e_p50>1%", [None]),
        ("equal_steps<99%", [False, False]), ("steps>0%", [False, False]), ("wrong_signs>0", [False]),
        ("finish_order<100%", [False, False]), ("output_tokens_per_s>50%", [False, False]), ("preemptions>0%", [False, False]),
        ("cached_tokens>0%", [None, None]), ("equal_cached_tokens<100%", [None, None]), ("alike_steps<100%", [False, False]),
        ("first_token_order<100%", [False, False]),
    ):  # fmt: skip
        got = gate([parse(text)], result)
        assert [o.failed for o in got] == failed, text
        assert [o.passed for o in got] == [f is False for f in failed]
    assert outcome_text(gate([parse("own.e2e_p50>9%")], result)[0]).startswith("FAILED  own.e2e_p50>9%: 9.")
    assert outcome_text(gate([parse("wrong_signs>0")], result)[0]) == "ok      wrong_signs>0: 0 in b"
    assert outcome_text(gate([parse("own.cached_tokens>0%")], result)[0]) == "UNKNOWN own.cached_tokens>0%: unknown in a"


def test_a_rule_at_speed_speaks_of_the_policies_that_have_such_an_error(tmp_path: Path) -> None:
    a = record(tmp_path / "a.trace", ROWS, STEPS)
    result = study(Case(a, a), [Case(a, a, at_speed=a)])
    assert [o.passed for o in gate([parse("at_speed_e2e_p50>1%")], result)] == [True]
    with pytest.raises(UsageError, match="there is none"):
        gate([parse("at_speed_e2e_p50>1%")], study(Case(a, a)))


def test_rules_that_mean_nothing_are_refused_with_a_right_one(tmp_path: Path) -> None:
    for text, words in (
        ("e2e_p50", "cannot be read"), ("e2e_meen>3%", "Did you mean 'e2e_mean'"), ("e2e_p50>3ms", "is in %"),
        ("e2e_p50>3", "is in %"),
        ("wrong_signs>0%", "is a plain number"), ("other.e2e_p50>3%", "no figure of a fidelity study"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=words):
            parse(text)
    a = record(tmp_path / "a.trace", ROWS, STEPS)
    with pytest.raises(UsageError, match="there is none"):
        gate([parse("wrong_signs>0")], study(Case(a, a)))


def test_a_policy_in_a_line(tmp_path: Path) -> None:
    own, other = both(tmp_path, 50, 66).cases
    assert headline(own).startswith("a, error of its own policy: E2E p50 +9.")
    assert headline(other).startswith("b, error of its B ÷ A: E2E p50 +19.9 % (") and headline(other).endswith("within noise.")


# Intervals of ratios


def sample(values: list[float], of: int | None = None) -> Sample:
    return Sample(np.array(values), np.arange(len(values)), len(values), of)


def test_ratios_of_the_same_requests_are_drawn_together() -> None:
    x = np.random.default_rng(1).lognormal(0, 1, 60)
    both = ratios([(sample(list(x * 1.1)), 0)], [(sample(list(x)), 0)])
    for value, bounds in both.values():
        assert value == pytest.approx(1.1) and bounds == (pytest.approx(1.1), pytest.approx(1.1))
    apart = ratios([(sample(list(x * 1.1)), 0)], [(sample(list(x)), 1)])
    value, bounds = apart["mean"]
    assert value == pytest.approx(1.1) and bounds is not None and bounds[0] < 0.9 and bounds[1] > 1.3
    # A product: (2 × 3) ÷ (1 × 1).
    double = ratios([(sample(list(2 * x)), 0), (sample(list(3 * x)), 0)], [(sample(list(x)), 0), (sample(list(x)), 0)])
    assert double["p50"][0] == pytest.approx(6.0)


def test_ratios_say_nothing_where_there_is_nothing_to_say() -> None:
    assert ratios([(sample([]), 0)], [(sample([]), 0)]) == {}
    one = ratios([(sample([2.0]), 0)], [(sample([1.0]), 0)])
    assert one["mean"] == (pytest.approx(2.0), None)  # one request has no interval
    assert "p50" not in ratios([(sample([1.0, 2.0, 3.0]), 0)], [(sample([0.0, 0.0, 9.0]), 0)])
    with pytest.raises(ValueError, match="same requests"):
        ratios([(sample([1.0]), 0)], [(sample([1.0, 2.0]), 0)])


def test_the_interval_of_a_mean_ratio_holds_the_truth_about_as_often_as_it_says() -> None:
    """Sixty requests whose predictions are off by 20 % each way, 5 % too long in the mean: 95 of 100 intervals hold 1.05."""
    rng = np.random.default_rng(7)
    held = 0
    for _ in range(100):
        x = rng.lognormal(0, 0.5, 60)
        y = x * 1.05 * rng.lognormal(-0.02, 0.2, 60)
        bounds = ratios([(sample(list(y)), 0)], [(sample(list(x)), 0)])["mean"][1]
        assert bounds is not None
        held += bounds[0] <= 1.05 <= bounds[1]
    assert 86 <= held <= 99
