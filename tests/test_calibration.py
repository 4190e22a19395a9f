"""Calibration: one cost out of several captures, what it covers, and the verdict on a what-if."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import hoptrace
from hoptrace.cli.calibrate import command
from hoptrace.cli.calibrate_view import coefficients, curves, show
from hoptrace.errors import InputError, UsageError
from hoptrace.manifest import Server
from hoptrace.replay.calibration.cost_file import cost_file, write_cost_file
from hoptrace.replay.calibration.coverage import Coverage, coverage, coverage_of
from hoptrace.replay.calibration.fitting import Calibrated, Capture, calibrate, fitted
from hoptrace.replay.calibration.held import held, usable
from hoptrace.replay.calibration.speeds import Speed, speeds
from hoptrace.replay.overheads import Overheads
from hoptrace.replay.run import predict
from hoptrace.samples import sample
from hoptrace.stepcost import StepCost, fixed
from hoptrace.stepcost_domain import BESIDE, Domain
from hoptrace.stepcost_table import Grid, Piece

DATA = Path(__file__).parent / "data"
MACHINE = fixed(step_ns=4e6, prefill_token_ns=2e5, decode_request_ns=1e6, decode_context_token_ns=1e3)
COMPOSITION = ["prefill_requests", "prefill_tokens", "prefill_context_tokens", "decode_requests", "decode_context_tokens"]
SERVER = Server(name="s", engine="vllm", model="m", max_sequences=8, max_batched_tokens=512, context_tokens=2048)


def steps(
    n: int = 300, *, factor: float = 1.0, seed: int = 0, noise: float = 0.05, kinds: str = "dpm", cost: StepCost = MACHINE
) -> pl.DataFrame:
    """``n`` steps of decoders (d), prompts (p) and both (m) that take ``factor`` times what ``cost`` says, give or take."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(n):
        kind = kinds[int(rng.integers(len(kinds)))]
        d = int(rng.integers(1, 9)) if kind in "dm" else 0
        p = int(rng.integers(8, 500)) if kind in "pm" else 0
        rows.append((int(p > 0), p, 0, d, d * int(rng.integers(50, 900))))
    frame = pl.DataFrame(rows, schema=COMPOSITION, orient="row")
    took = np.rint(cost.cost_ns_array(frame) * factor * np.exp(noise * rng.standard_normal(n))).astype(np.int64)
    start = np.concatenate([[0], np.cumsum(took)[:-1]])
    return frame.with_columns(pl.Series("start_ns", start), pl.Series("end_ns", start + took))


def capture(name: str, frame: pl.DataFrame, server: Server = SERVER, outside: Overheads | None = None) -> Capture:
    return Capture(name, "2026-01-01", server, None, frame, "observed", None, outside or Overheads(), 200)


# Several captures


@pytest.mark.parametrize("factor", [0.8, 1.1, 1.3, 2.0])
def test_a_planted_speed_comes_out_within_two_percent(factor: float) -> None:
    one, other = speeds([steps(seed=1), steps(seed=2, factor=factor)])
    assert other.factor / one.factor == pytest.approx(factor, rel=0.02)
    assert one.told and other.told and one.error is not None and one.error < 0.02


def test_speeds_are_told_from_captures_that_hold_other_steps_too() -> None:
    """An ordinary capture and a wide one: most of their steps are unlike, and the factor is right all the same."""
    ordinary, wide = steps(600, seed=3, kinds="dm"), steps(300, seed=4, kinds="dp", factor=1.25)
    one, other = speeds([ordinary, wide])
    assert other.factor / one.factor == pytest.approx(1.25, rel=0.02)


def test_the_mean_speed_of_captures_is_one_by_step_time() -> None:
    frames = [steps(seed=5), steps(100, seed=6, factor=1.5), steps(50, seed=7, factor=0.7)]
    total = [int((f["end_ns"] - f["start_ns"]).sum()) for f in frames]
    at_mean = [t / s.factor for t, s in zip(total, speeds(frames), strict=True)]
    assert sum(at_mean) == pytest.approx(sum(total), rel=1e-9)


def test_stalls_do_not_move_a_speed() -> None:
    slow = steps(seed=8, factor=1.2)
    took = (slow["end_ns"] - slow["start_ns"]).to_numpy().copy()
    took[::40] *= 20
    one, other = speeds([steps(seed=9), slow.with_columns(end_ns=slow["start_ns"] + pl.Series(took))])
    assert other.factor / one.factor == pytest.approx(1.2, rel=0.02)


def test_captures_with_nothing_alike_are_not_compared() -> None:
    """Decoders alone against prompts alone, each with a constant of its own: a slower machine and dearer prompts look alike."""
    cost = fixed(any_prefill_ns=9e6, any_decode_ns=3e6, prefill_token_ns=2e5, decode_request_ns=1e6)
    found = speeds([steps(seed=1, kinds="d", cost=cost), steps(seed=2, kinds="p", cost=cost, factor=1.4)])
    assert [(s.factor, s.error, s.told) for s in found] == [(1.0, None, False)] * 2
    made = fitted([capture("a", steps(seed=1, kinds="d", cost=cost)), capture("b", steps(seed=2, kinds="p", cost=cost))])
    assert made.notes[0].startswith("How fast the machine was in a, b cannot be told from the other captures")


def test_one_capture_is_its_own_speed() -> None:
    assert speeds([steps()])[0].factor == 1.0 and speeds([]) == []


@settings(max_examples=20)
@given(st.floats(0.7, 1.5), st.floats(0.7, 1.5), st.integers(0, 50))
def test_the_order_of_captures_does_not_matter(a: float, b: float, seed: int) -> None:
    frames = [steps(60, seed=seed), steps(60, seed=seed + 1, factor=a), steps(60, seed=seed + 2, factor=b)]
    forth, back = speeds(frames), speeds(frames[::-1])[::-1]
    assert [s.factor for s in forth] == pytest.approx([s.factor for s in back], rel=1e-3)


def test_the_joint_cost_is_that_of_the_mean_speed() -> None:
    made = fitted([capture("a", steps(seed=1)), capture("b", steps(seed=2, factor=1.3))])
    total = sum(int((c.steps["end_ns"] - c.steps["start_ns"]).sum()) for c in made.captures)
    priced = sum(int(made.cost.cost_ns_array(c.steps).sum()) for c in made.captures)
    weights = [s.factor for s in made.speeds]
    by_speed = sum(f * int(made.cost.cost_ns_array(c.steps).sum()) for f, c in zip(weights, made.captures, strict=True))
    assert by_speed == pytest.approx(total, rel=0.01)
    # Pooled as they are, they would scatter by their speeds' distance; with those taken out, by their own noise only.
    assert made.cost.error["sd"] < 0.07
    assert priced == pytest.approx(total, rel=0.05)


def test_times_outside_steps_weigh_by_what_is_behind_them() -> None:
    a = Overheads(received_to_enqueued_ns=1000, n=(0, 0, 30, 0, 0, 0, 0))
    b = Overheads(received_to_enqueued_ns=2000, step_to_token_ns=7, n=(0, 0, 10, 0, 0, 5, 0))
    made = fitted([capture("a", steps(seed=1), outside=a), capture("b", steps(seed=2), outside=b)])
    assert made.outside.received_to_enqueued_ns == 1250 and made.outside.n[2] == 40
    assert made.outside.step_to_token_ns == 7 and made.outside.n[0] == 0


def test_captures_of_unlike_servers_are_refused_by_name() -> None:
    other = capture("b", steps(), SERVER.model_copy(update={"model": "n"}))
    with pytest.raises(InputError, match="a was recorded from model m, b from n"):
        fitted([capture("a", steps()), other])


def test_too_few_steps_are_refused_with_a_remedy() -> None:
    with pytest.raises(InputError, match=r"at least 20 steps.*--probe"):
        fitted([capture("a", steps(5))])
    with pytest.raises(InputError, match=r"at least 20 steps"):
        fitted([capture("a", steps(5)), capture("b", steps(5).clear())])


# What was held, and what that covers


def test_what_steps_held_by_hand() -> None:
    rows = [(0, 0, 0, 2, 300), (0, 0, 0, 4, 4000), (1, 64, 0, 0, 0), (1, 100, 200, 3, 90), (2, 30, 80, 0, 0)]
    frame = pl.DataFrame(rows, schema=COMPOSITION, orient="row").with_columns(
        start_ns=pl.int_range(5) * 10, end_ns=pl.int_range(5) * 10 + 5
    )
    got = held(usable(frame))
    assert got.kinds == {"decode": 2, "prefill": 2, "mixed": 1}
    assert got.decoders is not None and got.decoders.as_dict() == {"steps": 3, "least": 2, "p50": 3, "p95": 3, "most": 4}
    assert got.context_each is not None and (got.context_each.least, got.context_each.most) == (30, 1000)
    assert got.context_before is not None and (got.context_before.least, got.context_before.most) == (40, 200)
    assert (got.beside_decoders, got.beside_prompt_tokens) == (3, 100)
    rows_ = {r["setting"]: r for r in got.covers(SERVER)}
    assert (rows_["max_sequences"]["measured"], rows_["max_sequences"]["covered"]) == (4, False)
    assert rows_["max_sequences"]["sentence"] == "sequences at once: up to 4 of the server's 8; beyond is extrapolated"
    assert rows_["beside"]["covered"] is True
    assert [r["covered"] for r in got.covers(Server(name="s"))][:3] == [None] * 3


def test_nothing_beside_is_said() -> None:
    got = held(steps(kinds="dp"))
    assert got.covers(SERVER)[-1]["covered"] is False
    assert "none was measured" in got.covers(SERVER)[-1]["sentence"]


# The verdict on a what-if


def _asked(*rows: tuple[int, int, int, int, int], ns: int = 100) -> pl.DataFrame:
    frame = pl.DataFrame(list(rows), schema=COMPOSITION, orient="row")
    return frame.with_columns(start_ns=pl.lit(0), end_ns=pl.lit(ns))


def _domain(cost: StepCost, *frames: pl.DataFrame) -> Domain:
    domain = Domain(cost)
    for f in frames:
        domain.add(f)
    return domain


SEEN = replace(
    MACHINE, origin="fitted", domain={"decode_requests": (0, 8), "prefill_tokens": (0, 512), "decode_context_tokens": (0, 4000)},
    error={"by_kind": {"decode": {}, "prefill": {}, "mixed": {}}},
)  # fmt: skip


def test_a_what_if_within_what_was_seen_is_covered() -> None:
    got = coverage([_domain(SEEN, _asked((0, 0, 0, 8, 4000), (1, 512, 0, 0, 0)))], SERVER)
    assert (got.verdict, got.share, got.beyond, got.remedy) == ("covered", 0.0, (), None)
    assert got.sentence() == "Covered: every step lies within what the step cost was measured on."


def test_a_what_if_beyond_says_how_much_rests_on_what_and_what_would_help() -> None:
    got = coverage([_domain(SEEN, _asked(*[(0, 0, 0, 8, 100)] * 3, (0, 0, 0, 12, 100)))], SERVER)
    assert (got.verdict, got.share) == ("partly", 0.25)
    assert got.sentence() == (
        "Partly covered: 25 % of the step time rests on extrapolated step costs "
        "(decoders in a step: up to 12 asked for, 8 measured)."
    )
    assert got.remedy == (
        "Start the server with more sequences at once (--max-num-seqs, --parallel), at least 12; then hoptrace calibrate --probe "
        "URL would measure decoders in a step up to 12."
    )
    wider = coverage([_domain(SEEN, _asked(*[(0, 0, 0, 8, 100)] * 3, (0, 0, 0, 12, 100)))], Server(name="s", max_sequences=16))
    assert wider.remedy == "hoptrace calibrate --probe URL would measure decoders in a step up to 12."


def test_mostly_beyond_is_not_covered_and_the_dearest_comes_first() -> None:
    rows = _asked((0, 0, 0, 9, 100), (0, 0, 0, 9, 9000), (0, 0, 0, 2, 9000))
    got = coverage([_domain(SEEN, rows, _asked((1, 600, 0, 0, 0), ns=1000))], SERVER)
    assert got.verdict == "not covered" and got.share == 1.0
    assert [b.name for b in got.beyond] == ["prefill_tokens", "decode_context_tokens", "decode_requests"]
    assert json.loads(json.dumps(got.as_dict()))["beyond"][0] == {
        "quantity": "prefill_tokens", "label": "prompt tokens in a step", "asked": [600, 600], "measured": [0, 512], "steps": 1,
        "step_ns": 1000,
    }  # fmt: skip


def test_prompts_beside_decoders_that_were_never_seen_together_are_beyond() -> None:
    apart = replace(SEEN, error={"by_kind": {"decode": {}, "prefill": {}}})
    got = coverage([_domain(apart, _asked((1, 64, 0, 4, 100), (0, 0, 0, 4, 100)))], SERVER)
    assert [b.name for b in got.beyond] == [BESIDE] and got.share == 0.5
    assert "prompts beside decoders, never seen together" in got.sentence()
    assert _domain(apart, _asked((1, 64, 0, 4, 100))).sentences()[0] == (
        "Steps of prompts beside decoders were asked for, none was seen: extrapolated in 1 of 1 steps."
    )


def test_a_cost_that_was_not_measured_has_no_verdict() -> None:
    got = coverage([_domain(MACHINE, _asked((0, 0, 0, 8, 4000)))], SERVER)
    assert got == Coverage("unknown", None, 0) and got.sentence().startswith("Coverage unknown")
    assert coverage([], None).verdict == "unknown"


@given(st.lists(st.tuples(st.just(0), st.just(0), st.just(0), st.integers(1, 16), st.integers(1, 8000)), min_size=1, max_size=8))
def test_the_share_is_between_nothing_and_all_and_is_nothing_only_within(rows: list[tuple[int, int, int, int, int]]) -> None:
    got = coverage([_domain(SEEN, _asked(*rows))], SERVER)
    outside = sum(d > 8 or c > 4000 for *_, d, c in rows)
    assert got.share == outside / len(rows)
    assert (got.verdict == "covered") == (got.share <= 0.01)
    assert (got.remedy is None) == (got.verdict == "covered")


# On real captures, and on the screen


def test_real_captures_of_one_server_are_fitted_as_one() -> None:
    """Two runs of the same llama.cpp, one slot and four: one cost, priced nearly as either alone."""
    both = calibrate([hoptrace.open(sample(n)) for n in ("llamacpp-four-slots", "llamacpp-one-slot")])
    assert all(s.told and 0.8 < s.factor < 1.25 for s in both.speeds)
    assert both.held.decoders is not None and both.held.decoders.most == 4
    for c in both.captures:
        alone = fitted([c])
        assert both.cost.error["by_kind"]["decode"]["p50"] < alone.cost.error["by_kind"]["decode"]["p50"] + 0.05


def test_a_replay_gives_its_domains_to_the_verdict() -> None:
    """What the sentences of a replay say is what the verdict says: four slots, fitted to one."""
    trace = hoptrace.open(sample("llamacpp-one-slot"))
    got = predict(trace, "four-slots", check=False)
    said = [w for w in got.trace.manifest.replay.warnings if "rests on extrapolated" in w]  # type: ignore[union-attr]
    verdict = coverage_of(got.cost, got.trace.table("steps").collect(), trace.manifest.servers[0])
    assert verdict == got.coverage
    assert got.trace.manifest.replay.coverage == verdict.as_dict()  # type: ignore[union-attr]
    assert verdict.share is not None and said[0].startswith(f"{100 * verdict.share:.0f} % of the replay's step time")
    assert BESIDE in [b.name for b in verdict.beyond]  # one slot never holds a prompt beside a decoder


def test_a_cost_file_of_a_trace_replays_it_as_the_trace_itself_does(tmp_path: Path) -> None:
    """To the row: the speed is 1 exactly, stalls and all, and the times outside steps are the trace's."""
    trace = hoptrace.open(sample("llamacpp-four-slots"))
    out = tmp_path / "cost.json"
    write_cost_file(out, cost_file(calibrate([trace])))
    kept, own = (predict(trace, "one-slot", cost=c, check=False).trace for c in (f"file:{out}", "fitted"))
    for table in ("requests", "steps", "tokens"):
        assert kept.table(table).collect().equals(own.table(table).collect())


def test_what_bends_is_shown_by_its_points() -> None:
    piece = Piece(Grid((0,), (((1, 26_000_000_000), (2, 27_700_000_000), (8, 40_000_000_000)),)), "decode_batch", name="decoders")
    cost = StepCost({"any_prefill": 10**9}, "fitted", pieces=(piece,), covariance_ps2=((0.0,) * 9,) * 9)
    assert curves(cost) == ["decoders alone: 1 take 26.0 ms, 2 take 27.7 ms"]  # the last point is where its line goes on
    assert coefficients(cost)[0]["text"] == "1.00 ms" and coefficients(cost)[0]["ps_error"] is None


def test_coefficients_are_shown_in_units_that_people_read() -> None:
    cost = StepCost(
        {"step": 3_680_000_000, "prefill_tokens": 722_000_000, "decode_context_tokens": 1_500, "prefill_attention": 2_000_000},
        "fitted", covariance_ps2=tuple(tuple(1e16 * (i == j) for j in range(9)) for i in range(9)),
    )  # fmt: skip
    rows = {r["feature"]: (r["text"], r["per"]) for r in coefficients(cost)}
    assert rows["step"] == ("3.68 ± 0.10 ms", "a step")
    assert rows["prefill_tokens"] == ("722 ± 100 µs", "a prompt token computed")
    assert rows["decode_context_tokens"] == ("1.50 ± 100000.00 µs", "1,000 tokens of the decoders' context")
    assert rows["prefill_attention"] == ("2.00 ± 100.00 µs", "1,000 pairs of positions in a prompt's attention")


def test_the_screen(snapshot: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a calibration made by hand: what people see does not hang on the fit here."""
    monkeypatch.setenv("COLUMNS", "110")
    cost = replace(
        SEEN, covariance_ps2=tuple(tuple(1e16 * (i == j) for j in range(9)) for i in range(9)),
        error={"p50": 0.05, "by_kind": {"decode": {"p50": 0.041, "p95": 0.12, "bias": -0.004},
                                        "mixed": {"p50": 0.03, "p95": 0.2, "bias": 0.0}}},
        notes=("Did not lessen the cross-validated error: batched; left out.",),
    )  # fmt: skip
    outside = Overheads(received_to_enqueued_ns=1_234_567, n=(0, 0, 30, 0, 0, 0, 0))
    frame = steps(80, noise=0.0)
    made = Calibrated(
        (capture("monday", frame), capture("tuesday", frame)), cost, outside, (Speed(0.9, 0.01), Speed(told=False)),
        ((1.0, 0.9, 1.1, 1.0), ()), held(frame), ("A note.",),
    )  # fmt: skip
    show(made, Path("cost.json"))
    assert capsys.readouterr().out == snapshot


def test_json_and_file_and_replay(tmp_path: Path) -> None:
    out = tmp_path / "cost.json"
    got = CliRunner().invoke(command, [str(sample("llamacpp-four-slots")), "-o", str(out), "--json"], catch_exceptions=False)
    d = json.loads(got.output)
    assert d["format"] == "hoptrace-cost/1" and d["file"] == str(out) and d["server"]["engine"] == "llama.cpp"
    assert d["captures"][0]["trace"] == "llamacpp-four-slots" and d["captures"][0]["speed"] == 1.0
    assert {r["setting"] for r in d["covers"]} == {"max_sequences", "max_batched_tokens", "context_tokens", "beside"}
    assert json.loads(out.read_text())["cost"]["coefficients_ps"] == d["cost"]["coefficients_ps"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nothing to calibrate on"),
        (["T", "--cost", "c.json"], "--cost names the cost file of a probe"),
        (["T", "--yes"], "--yes belongs to --probe"),
        (["--probe", "http://127.0.0.1:1"], "Where shall the probe's trace go"),
        (["--probe", "http://127.0.0.1:1", "-o", "p.trace", "--server", "x"], "--server belongs to traces"),
        (["T", "--server", "nobody"], "has no server 'nobody'"),
        (["T", "T"], "is given twice"),
    ],
)
def test_wrong_use(arguments: list[str], said: str) -> None:
    trace = str(sample("llamacpp-four-slots"))
    with pytest.raises(UsageError, match=said):
        CliRunner().invoke(command, [trace if a == "T" else a for a in arguments], catch_exceptions=False)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    there = tmp_path / "cost.json"
    there.write_text("mine")
    with pytest.raises(UsageError, match="already there"):
        CliRunner().invoke(command, [str(sample("llamacpp-four-slots")), "-o", str(there)], catch_exceptions=False)
    assert there.read_text() == "mine"
