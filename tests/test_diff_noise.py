"""Noise between runs of one policy: from repeats, used for the verdict and for the gate."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from support.arms import Times, arm
from support.memory import MemoryTrace

import hoptrace
from hoptrace.analysis.compare.diff import Diff, diff
from hoptrace.analysis.compare.diff_change import Change
from hoptrace.analysis.compare.diff_noise import limit
from hoptrace.analysis.compare.rules import check, parse
from hoptrace.cli.diff import command
from hoptrace.errors import InputError, UsageError
from hoptrace.manifest import Server


def run(seed: int, scale: float, *, slots: int = 1, n: int = 12) -> MemoryTrace:
    """A run whose times are ``scale`` times those of the first."""
    server = Server(name="s", engine="toy", model="toy", max_sequences=slots)
    return arm(n, lambda i: Times(prefill=scale * (100 + i), gaps=[scale * 10] * 4), name=f"run{seed}", server=server)


# Field case A80: repeats of one and the same policy spread by 18 % (published: 15 to 22 %).
A, A2, A3 = run(0, 1.0), run(1, 1.18), run(2, 1.05)
B = run(3, 1.12)


@cache
def without() -> Diff:
    """B against A, and no repeats."""
    return diff(A, B)


def test_one_repeat_by_hand() -> None:
    """100 and 110: s² = 50; B at 120 scatters relatively as much: s² × (120 ÷ 105)² = 65.31; t(80 %, 1) = 3.0777."""
    assert limit([100, 110], [120]) == pytest.approx(3.0777 * (50 + 65.306) ** 0.5, rel=1e-4)


def test_two_repeats_by_hand() -> None:
    """100, 105, 110: s² = 25; B at 50, below, is taken to scatter as much; t(95 %, 2) = 4.3027."""
    assert limit([100, 105, 110], [50]) == pytest.approx(4.3027 * 50**0.5, rel=1e-4)


def test_both_repeated_by_hand() -> None:
    """s² 50 and 2 of two runs each: Welch's freedom (50 + 2)² ÷ (50² ÷ 1 + 2² ÷ 1) = 1.0799; t(95 %, 1.0799) = 10.687."""
    freedom = 52**2 / (50**2 + 2**2)
    assert freedom == pytest.approx(1.0799, abs=1e-4)
    found = limit([100, 110], [50, 52])
    assert found == pytest.approx(10.687 * 52**0.5, rel=1e-3)
    # Two runs that do not scatter at all leave the others' freedom.
    assert limit([100, 105, 110], [50, 50]) == pytest.approx(4.3027 * 25**0.5, rel=1e-4)


def test_runs_that_agree_leave_no_noise_and_one_run_tells_none() -> None:
    assert limit([5, 5], [7]) == 0 and limit([5], [7]) is None and limit([0, 0, 0], [0, 0]) == 0


@given(st.lists(st.floats(1, 1e9), min_size=2, max_size=6), st.floats(1, 1e9), st.floats(1e-3, 1e3))
def test_units_do_not_matter(a: list[float], b: float, unit: float) -> None:
    found = limit(a, [b])
    assert found is not None
    assert limit([v * unit for v in a], [b * unit]) == pytest.approx(found * unit, rel=1e-6, abs=1e-9 * unit * max(a))


def test_chance_exceeds_the_limit_as_seldom_as_it_says() -> None:
    """Of runs drawn alike, about 5 % differ by more than the limit from three runs, 20 % with that from two."""
    import numpy as np

    rng = np.random.default_rng(4)
    for k, sure in ((3, 0.05), (2, 0.20)):
        over = 0
        for _ in range(2000):
            runs = rng.normal(1000, 30, k + 1)
            found = limit(runs[:k].tolist(), [runs[k]])
            assert found is not None
            over += abs(runs[k] - runs[0]) > found
        # The first of the repeats is the run that is compared; it stands within their spread, so a bit less often.
        assert over / 2000 < sure * 1.25


def test_a_change_must_exceed_both() -> None:
    beyond = {"low": 10.0, "high": 30.0}
    assert Change("x.mean", "ns", 100, 120, **beyond).verdict == "worse"
    assert Change("x.mean", "ns", 100, 120, **beyond, noise=25.0, repeats=True).verdict == "within noise"
    assert Change("x.mean", "ns", 100, 120, **beyond, noise=15.0, repeats=True).verdict == "worse"
    assert Change("x.mean", "ns", 100, 120, low=-5, high=45, noise=1.0, repeats=True).verdict == "within noise"
    # Repeats that do not tell the figure leave its noise unknown, whatever the interval over requests.
    assert Change("x.mean", "ns", 100, 120, **beyond, repeats=True).verdict == "changed"
    # A figure without an interval is judged by the repeats alone.
    assert Change("rate", "1", 100, 120, lower_is_better=False, noise=15.0, repeats=True).verdict == "better"


def test_a_change_within_the_spread_of_repeats_is_noise() -> None:
    assert without().changes["e2e.mean"].verdict == "worse"  # the interval over requests alone takes it for one
    d = diff(A, B, repeats_of_a=[A2, A3])
    c = d.changes["e2e.mean"]
    assert c.verdict == "within noise" and c.noise is not None and c.noise > (c.change or 0) > 0
    assert d.changes["output_tokens_per_s"].verdict in ("within noise", "changed")
    assert d.noise is not None and d.noise.sure == 0.95
    spread = d.noise.spread("e2e.mean")
    # 1, 1.18, 1.05 × the same times, but for 1 ms of delivery: their range ÷ mean is 0.167.
    assert spread[0] == pytest.approx(0.18 / (3.23 / 3), rel=0.01) and spread[1] is None
    assert any("3 runs of A" in n and "e2e.mean spreads 16.6%" in n for n in d.notes)
    far = diff(A, run(4, 3.0), repeats_of_a=[A2, A3])
    assert far.changes["e2e.mean"].verdict == "worse"


def test_one_repeat_says_how_little_it_tells() -> None:
    d = diff(A, B, repeats_of_a=[A2])
    assert d.noise is not None and d.noise.sure == 0.8 and any("One repeat tells little" in n for n in d.notes)
    both = diff(A, B, repeats_of_a=[A2], repeats_of_b=[run(5, 1.3)])
    assert both.noise is not None and both.noise.sure == 0.95 and both.as_dict()["noise"]["b"] == ["run3", "run5"]


@pytest.mark.parametrize(
    ("repeat", "why"),
    [
        (run(6, 1.0, n=11), "12 against 11 finished requests"),
        (run(7, 1.0, slots=2), "max_sequences 1 against 2"),
    ],
)
def test_a_repeat_of_other_work_or_settings_is_refused(repeat: MemoryTrace, why: str) -> None:
    with pytest.raises(InputError, match="is no repeat of run0") as e:
        diff(A, B, repeats_of_a=[repeat])
    assert why in e.value.message


def test_a_repeat_of_other_settings_is_taken_if_asked_and_said() -> None:
    assert any("no exact repeat" in n for n in diff(A, B, repeats_of_a=[run(7, 1.0, slots=2)], anyway=True).notes)


def test_a_run_is_no_repeat_of_itself() -> None:
    with pytest.raises(InputError, match="repeat of itself"):
        diff(A, B, repeats_of_a=[A])


def test_one_run_given_twice_is_not_two(tmp_path: Path) -> None:
    # Two equal runs would say that runs of this policy do not differ at all.
    same = tmp_path / "link"
    same.symlink_to(tmp_path / "b2")
    for option in ("--noise", "--noise-b"):
        done = CliRunner().invoke(command, ["a", "b", option, str(tmp_path / "b2"), option, str(same)])
        assert isinstance(done.exception, UsageError) and "twice" in str(done.exception)


def test_the_gate_with_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"a": A, "a2": A2, "a3": A3, "b": B}
    monkeypatch.setattr(hoptrace, "open", known.__getitem__)
    rule = ["--fail-on", "e2e_mean>+5%", "--beyond-noise"]
    runner = CliRunner()
    assert runner.invoke(command, ["a", "b", *rule, "-q"]).exit_code == 1
    done = runner.invoke(command, ["a", "b", *rule, "--noise", "a2", "--noise", "a3"])
    assert done.exit_code == 0 and "± runs" in done.stdout and "within noise" in done.stdout
    found = json.loads(runner.invoke(command, ["a", "b", "--noise", "a2", "--noise", "a3", "--json"]).stdout)
    assert found["noise"] == {"a": ["run0", "run1", "run2"], "b": ["run3"], "confidence": 0.95}
    e2e = next(c for c in found["metrics"] if c["name"] == "e2e.mean")
    assert e2e["noise"] > 0 and e2e["run_spread"] == [pytest.approx(0.166, abs=0.002), None] and e2e["verdict"] == "within noise"


def test_a_figure_that_neither_trace_has_does_not_pass() -> None:
    d = without()
    [o] = check([parse("operations_per_token.poll.counted>5%")], d)
    assert o.failed is None and not o.passed and o.change is None and o.as_dict()["passed"] is False
