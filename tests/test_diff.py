"""Comparing two traces: equal work, what is chance and what is not, the gate and its rules."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from support.memory import MemoryTrace
from support.small import small_trace

import hoptrace
from hoptrace.analysis.compare.bootstrap import (
    FEW_BEYOND,
    STATS,
    WINDOWS,
    Sample,
    chosen,
    composition_intervals,
    interval,
    ranks,
    ratio_intervals,
)
from hoptrace.analysis.compare.diff import Change, Diff, diff
from hoptrace.analysis.compare.diff_pairs import finished
from hoptrace.analysis.compare.diff_work import work_of
from hoptrace.analysis.compare.rules import Rule, check, parse
from hoptrace.analysis.latency.composition import compositions
from hoptrace.analysis.latency.parts import PARTS
from hoptrace.cli.diff import command
from hoptrace.errors import InputError, UsageError

A, B = small_trace(name="a"), small_trace(slower_ms=3, name="b")


@cache
def ab() -> Diff:
    return diff(A, B)


@cache
def aa() -> Diff:
    return diff(A, A)


def test_a_trace_against_itself_changes_nothing() -> None:
    d = aa()
    assert d.paired and not d.unequal
    assert {c.verdict for c in d.changes.values()} <= {"same", "unknown"}
    assert all(c.low == c.high == 0 for c in d.metrics if c.low is not None)


def test_a_slower_server_is_worse_beyond_noise() -> None:
    d = ab()
    ttft = d.changes["ttft.mean"]
    assert ttft.verdict == "worse" and ttft.low is not None and ttft.low > 0
    assert ttft.a is not None and ttft.b is not None and ttft.change == ttft.b - ttft.a > 0
    assert d.changes["decode.mean"].verdict == "worse"
    assert d.changes["proxy.mean"].verdict == "same"
    # Rates have no interval: whether such a change is more than chance is not known.
    assert d.changes["output_tokens_per_s"].verdict == d.changes["requests_per_s"].verdict == "changed"
    assert d.changes["bytes_per_token.counted"].change == 0
    # The parts' changes add up to that of e2e, up to the rounding of each mean.
    total = sum(c.change or 0 for c in d.parts)
    assert total == pytest.approx(d.changes["e2e.mean"].change, abs=len(d.parts))
    back = diff(B, A)
    assert back.changes["ttft.mean"].verdict == "better"


def test_requests_that_one_side_does_not_know_are_in_neither_figure() -> None:
    """Like with like: of four requests A knows the first token of two."""
    rows = [
        {"request": i, "arrival_ns": 0, "first_token_ns": (10, 20, 300, 400)[i], "last_token_ns": 500, "finish_ns": 500,
         "prompt_tokens": 7, "output_tokens": 5}
        for i in range(4)
    ]  # fmt: skip
    whole = MemoryTrace({"requests": rows})
    some = MemoryTrace(
        {"requests": [{**r, "first_token_ns": r["first_token_ns"] if i < 2 else None} for i, r in enumerate(rows)]}
    )
    d = diff(some, whole)
    assert d.paired and (d.changes["ttft.mean"].a, d.changes["ttft.mean"].b) == (15, 15)
    assert any(n.startswith("ttft, ") and "over the 2 of 4 requests" in n for n in d.notes)


def test_the_same_comparison_twice() -> None:
    assert ab().as_dict() == diff(A, B).as_dict()


def short(n: int, output: int = 5, prompt: int = 7) -> MemoryTrace:
    rows = [
        {"request": i, "arrival_ns": i, "finish_ns": i + 10, "prompt_tokens": prompt, "output_tokens": output} for i in range(n)
    ]
    return MemoryTrace({"requests": rows}, name=f"n{n}")


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (
            short(4),
            "3 against 4 finished requests; 21 against 28 prompt tokens; 15 against 20 output tokens",
        ),
        (short(3, output=6), "15 against 18 output tokens"),
        (short(3, prompt=8), "21 against 24 prompt tokens"),
    ],
)
def test_unequal_work_is_refused(other: MemoryTrace, why: str) -> None:
    with pytest.raises(InputError, match="did not do the same work") as e:
        diff(short(3), other)
    assert why in e.value.message and "--anyway" in (e.value.hint or "")
    d = diff(short(3), other, anyway=True)
    assert "; ".join(d.unequal) == why and {r.code for r in d.reasons} <= {"finished_requests", "prompt_tokens", "output_tokens"}


def test_a_failed_request_is_less_work() -> None:
    rows = [{"request": i, "arrival_ns": i, "finish_ns": i + 10, "prompt_tokens": 7, "output_tokens": 5} for i in range(3)]
    rows[2]["error"] = "It broke."  # type: ignore[assignment]
    broken = MemoryTrace({"requests": rows})
    assert work_of(broken, finished(broken)).finished == 2
    with pytest.raises(InputError, match="3 against 2 finished requests"):
        diff(short(3), broken)


def test_what_one_side_cannot_show_is_unknown_not_zero() -> None:
    bare = MemoryTrace({n: f.to_dicts() for n, f in A._frames.items() if n not in ("steps", "residency", "tokens")})
    d = diff(A, bare)
    host = d.changes["host_gap.mean"]
    assert host.a is not None and host.b is None and host.change is None and host.verdict == "unknown"
    [outcome] = check([parse("host_gap.mean>5%")], d)
    assert outcome.failed is None


# -- chance -----------------------------------------------------------------------------------------------------------


def sample(values: list[float]) -> Sample:
    return Sample(np.array(values, dtype=np.float64), np.arange(len(values)), len(values))


def test_pairs_cancel_what_requests_have_in_common() -> None:
    rng = np.random.default_rng(1)
    base = rng.lognormal(3, 1, 60)
    a, b = sample(base.tolist()), sample((base + 1).tolist())
    low, high = interval(a, b, paired=True)["mean"]
    assert low == pytest.approx(1) and high == pytest.approx(1)
    low, high = interval(a, b, paired=False)["mean"]
    assert low < 0 < high


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(7)
    covered = 0
    for _ in range(40):
        a, b = sample(rng.normal(10, 2, 40).tolist()), sample(rng.normal(11, 2, 40).tolist())
        low, high = interval(a, b, paired=False)["mean"]
        covered += low <= 1 <= high
    assert 34 <= covered <= 40


def test_tokens_of_a_request_are_drawn_together() -> None:
    """Ten requests of a hundred equal tokens know ten values, not a thousand."""
    values, owner = np.repeat(np.arange(10.0), 100), np.repeat(np.arange(10), 100)
    few = interval(Sample(values, owner, 10), Sample(values, owner, 10), paired=False)["mean"]
    many = interval(sample(values.tolist()), sample(values.tolist()), paired=False)["mean"]
    assert few[1] - few[0] > 5 * (many[1] - many[0])


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30))
@settings(max_examples=25)
def test_a_sample_against_itself_holds_zero(values: list[float]) -> None:
    for low, high in interval(sample(values), sample(values), paired=False).values():
        assert low <= 0 <= high


@pytest.mark.parametrize("paired", [True, False])
def test_means_of_several_columns_are_judged_as_one_by_one(paired: bool) -> None:
    rng = np.random.default_rng(3)
    a, b = rng.normal(5, 1, (30, 3)), rng.normal(6, 1, (30, 3))
    low, high = composition_intervals(a, b, paired=paired)["mean"]
    for column in range(3):
        alone = interval(sample(a[:, column].tolist()), sample(b[:, column].tolist()), paired=paired)["mean"]
        assert (low[column], high[column]) == pytest.approx(alone)


@given(st.lists(st.integers(1, 10**9), min_size=2, max_size=60), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_windows_are_those_of_the_compositions(lengths: list[int], rng: object) -> None:
    """What the intervals are of is what the accounting shows: the same requests around the same percentile."""
    columns = {p.column: [0] * len(lengths) for p in PARTS} | {"decode_ns": [n // 3 for n in lengths]}
    columns["prefill_ns"] = [n - n // 3 for n in lengths]
    frame = pl.DataFrame({"request": range(len(lengths)), "e2e_ns": lengths, **columns})
    shown = compositions(frame)
    ordered = sorted(lengths)
    for stat, window in WINDOWS.items():
        first, last = ranks(len(lengths), window)
        inside = [n for n in ordered if ordered[first] <= n <= ordered[last]]
        c = shown["all" if stat == "mean" else stat]
        assert c.requests == len(inside)
        assert c.e2e_ns == pytest.approx(sum(inside) / len(inside))


def test_compositions_are_drawn_with_their_ranks() -> None:
    """The same rows on both sides, the second a constant slower: paired, the change is that constant at every percentile."""
    rng = np.random.default_rng(5)
    rows = rng.lognormal(10, 1, (50, 2))
    slower = rows + np.array([1000.0, 500.0])
    for stat in STATS:
        low, high = composition_intervals(rows, slower, paired=True)[stat]
        assert low[:2] == pytest.approx([1000, 500]) and high[:2] == pytest.approx([1000, 500])


def test_of_a_ratio_sums_are_drawn_not_quotients() -> None:
    """Σ x ÷ Σ n with one heavy request: 100 of 110 tokens carry 1, the others 0."""
    n, x = np.array([100.0, 5, 5]), np.array([100.0, 0, 0])
    [(low, high)] = ratio_intervals(np.column_stack([n, x]), np.column_stack([n, x]), paired=False)
    assert low < -0.9 and high > 0.9  # without the heavy one, the ratio is 0
    assert ratio_intervals(np.column_stack([n, x]), np.column_stack([n, x]), paired=True) == [(0.0, 0.0)]
    assert ratio_intervals(np.zeros((3, 2)), np.zeros((3, 2)), paired=False) == []


def test_of_many_requests_some_are_drawn_and_the_interval_is_as_wide() -> None:
    """Of 4,000 values 1,000 are drawn from: on the average the interval is that of all of them."""
    widths: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(8):
        rng = np.random.default_rng(seed)
        a, b = rng.exponential(10, 4000), rng.exponential(11, 4000)
        for few in (True, False):
            at = chosen(4000, 1000) if few else slice(None)
            samples = [Sample(v[at], np.arange(len(v[at])), len(v[at]), 4000) for v in (a, b)]
            low, high = interval(*samples, paired=False)["mean"]
            widths[few].append(high - low)
    assert np.mean(widths[True]) == pytest.approx(np.mean(widths[False]), rel=0.1)
    assert chosen(1000, 1000) is None
    at = chosen(10**6)
    assert at is not None and len(at) == 20_000 == len(set(at.tolist())) and np.array_equal(at, chosen(10**6))


def test_one_request_tells_no_interval() -> None:
    assert interval(sample([1.0]), sample([2.0, 3.0]), paired=False) == {}
    assert interval(sample([]), sample([]), paired=True) == {}


# -- rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("ttft.p95>10%", Rule("ttft.p95>10%", "ttft.p95", True, 0.1, True, "%")),
        ("ttft_p95>+5%", Rule("ttft_p95>+5%", "ttft_p95", True, 0.05, True, "%")),
        (" e2e.mean > 50 ms ", Rule("e2e.mean > 50 ms", "e2e.mean", True, 5e7, False, "ms")),
        ("output_tokens_per_s<-5%", Rule("output_tokens_per_s<-5%", "output_tokens_per_s", False, -0.05, True, "%")),
        ("itl.p50>0.5us", Rule("itl.p50>0.5us", "itl.p50", True, 500.0, False, "us")),
        ("coordination_share>+2pp", Rule("coordination_share>+2pp", "coordination_share", True, 0.02, False, "pp")),
        (
            "bytes_per_token.counted>1KiB",
            Rule("bytes_per_token.counted>1KiB", "bytes_per_token.counted", True, 1024, False, "KiB"),
        ),
        (
            "bytes_per_token[node client counted]>10%",
            Rule("bytes_per_token[node client counted]>10%", "bytes_per_token[node client counted]", True, 0.1, True, "%"),
        ),
    ],
)
def test_rules_are_read(text: str, rule: Rule) -> None:
    assert parse(text) == rule


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ttft.p95",
        "ttft.p95>>10%",
        "ttft.p95>ten",
        "ttft p95>10%",
        "ttft.p95=10%",
        "TTFT>1%",
        "ttft.p95>+-1%",
        ">10%",
        "ttft.p95>10 parsec",
    ],
)
def test_rules_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        parse(text)


def test_rules_are_judged() -> None:
    d = ab()
    relative = d.changes["ttft.mean"].relative
    assert relative is not None

    def failed(text: str, beyond_noise: bool = False) -> bool | None:
        return check([parse(text)], d, beyond_noise=beyond_noise)[0].failed

    assert failed(f"ttft.mean>{relative * 100 - 1:.3f}%") and not failed(f"ttft.mean>{relative * 100 + 1:.3f}%")
    assert failed("ttft.mean>1ms") and not failed("ttft.mean>10s")
    assert failed("output_tokens_per_s<-1%") and not failed("output_tokens_per_s>0%")
    with pytest.raises(UsageError, match=r"Did you mean 'ttft\.p95'"):
        check([parse("ttf.p95>10%")], d)


def test_from_nothing_to_something_is_more_than_any_percentage() -> None:
    change = Change("x.mean", "ns", 0, 5)
    assert change.relative is None and change.verdict == "changed"
    d = replace(aa(), sections={"parts": [change]})
    assert check([parse("x.mean>1000%")], d)[0].failed and not check([parse("x.mean<-10%")], d)[0].failed


@pytest.mark.parametrize(
    ("text", "said"),
    [("x.share>2", "2pp"), ("x.mean>5", "5ms"), ("x.bytes<-1", "-1MiB")],
)
def test_a_number_without_unit_limits_no_figure_that_has_one(text: str, said: str) -> None:
    # A share never rises by 2 (200 points): such a gate would always be green.
    changes = [Change("x.share", "share", 0.1, 0.9), Change("x.mean", "ns", 1e6, 9e6), Change("x.bytes", "bytes", 9, 1)]
    d = replace(aa(), sections={"parts": changes})
    with pytest.raises(UsageError, match=f"{said}\\.$"):
        check([parse(text)], d)


def test_any_rise_at_all_needs_no_unit() -> None:
    d = replace(aa(), sections={"parts": [Change("x.mean", "ns", 1e6, 1e6 + 1), Change("x.count", "1", 3, 9)]})
    assert [o.failed for o in check([parse("x.mean>0"), parse("x.mean<0"), parse("x.count>5")], d)] == [True, False, True]


def test_noise_fails_no_rule_if_asked() -> None:
    d = replace(aa(), sections={"metrics": [Change("noisy.mean", "ns", 100, 150, -20, 120)]})
    assert check([parse("noisy.mean>10%")], d)[0].failed
    assert check([parse("noisy.mean>10%")], d, beyond_noise=True)[0].failed is False


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"a": A, "b": B, "short": short(3)}
    monkeypatch.setattr(hoptrace, "open", known.__getitem__)


def run(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(command, list(args))
    if isinstance(done.exception, InputError | UsageError):
        return done.exception.exit_code, str(done.exception)
    return done.exit_code, done.stdout


@pytest.mark.usefixtures("traces")
def test_the_command_and_its_exit_codes() -> None:
    code, text = run("a", "b")
    assert code == 0 and "TTFT p95" in text and "worse" in text and "the same requests on both sides" in text
    code, text = run("a", "b", "--fail-on", "ttft.p95>1%", "--fail-on", "e2e.mean>1000%", "-q")
    lines = text.splitlines()
    assert code == 1 and lines[-2].startswith("FAILED") and lines[-1].startswith("ok")
    assert "access path" in text and "meaning" in text and "TTFT p50" not in text
    assert run("a", "b", "--fail-on", "e2e.mean>1000%")[0] == 0
    assert run("a", "b", "--fail-on", "e2e.mean=3")[0] == 2
    assert run("a", "b", "--fail-on", "nothing.mean>3%")[0] == 2
    assert run("a", "short")[0] == 3
    code, text = run("a", "b", "--json", "--fail-on", "ttft.p95>1%")
    found = json.loads(text)
    assert code == 1 and found["schema"] == "hoptrace.diff/2" and found["rules"][0]["failed"] is True
    code, text = run("a", "short", "--anyway")
    assert code == 0 and "The work is not the same" in text


def test_intervals_of_extreme_percentiles_of_few_requests_hold_what_they_say() -> None:
    """Two samples of one distribution: a 95 % interval of p99 leaves 0 out in some 5 % of cases. Of 25 requests the plain
    bootstrap does in some 15 %."""
    rng = np.random.default_rng(11)
    n, cases, missed, plain = 25, 60, 0, 0
    for _ in range(cases):
        a, b = (rng.lognormal(0, 0.8, n) for _ in range(2))
        low, high = interval(Sample(a, np.arange(n), n), Sample(b, np.arange(n), n), paired=False)["p99"]
        change = np.quantile(b, 0.99) - np.quantile(a, 0.99)
        missed += not low <= 0 <= high
        plain += not change - (change - low) / FEW_BEYOND <= 0 <= change + (high - change) / FEW_BEYOND
    assert missed <= 3 and plain >= 5


def test_intervals_are_widened_only_where_no_request_is_left_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(12)
    a, b = (rng.lognormal(0, 0.8, 100) for _ in range(2))

    def found(n: int) -> dict[str, tuple[float, float]]:
        return interval(Sample(a[:n], np.arange(n), n), Sample(b[:n], np.arange(n), n), paired=True)

    wide = {n: found(n) for n in (19, 20, 99, 100)}
    monkeypatch.setattr("hoptrace.analysis.compare.bootstrap.FEW_BEYOND", 1.0)
    widened = {n: {s for s in STATS if wide[n][s] != pytest.approx(found(n)[s])} for n in wide}
    assert widened == {19: {"p95", "p99"}, 20: {"p99"}, 99: {"p99"}, 100: set()}
