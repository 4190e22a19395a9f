"""`hoptrace fidelity` as a user meets it: the sample traces, the screen, JSON, the gate, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support.command import Ran, run
from support.runs import MS, record
from support.workloads import server, store
from syrupy.assertion import SnapshotAssertion

from hoptrace.analysis.fidelity.rules import gate, parse
from hoptrace.analysis.fidelity.sources import ALL, Truth
from hoptrace.analysis.fidelity.study import Case, study
from hoptrace.cli.fidelity_run import measure
from hoptrace.cli.fidelity_view import show, show_short
from hoptrace.reader import open_trace
from hoptrace.replay.run import replay
from hoptrace.stepcost import fixed

ROOT = Path(__file__).parents[1]
FOUR = ROOT / "sample_traces" / "llamacpp-four-slots.trace"
ONE = ROOT / "sample_traces" / "llamacpp-one-slot.trace"


# The sample traces: one machine, one slot instead of four


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, Ran]:
    kept = tmp_path_factory.mktemp("f") / "study.json"
    ran = run("fidelity", FOUR, ONE, "--truth", "all", "--json", "-o", kept, "--fail-on", "wrong_signs>0")
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout), kept, ran


def test_one_slot_is_predicted_from_a_recording_of_four(sample: tuple[dict[str, Any], Path, Ran]) -> None:
    found, kept, _ = sample
    own, case = found["cases"]
    assert (found["format"], own["trace"], own["own"], case["trace"]) == ("fidelity/1", FOUR.stem, True, ONE.stem)
    assert case["settings"] == [{"name": "max_sequences", "a": "4", "b": "1"}]
    assert case["paired"] and case["requests"] == {"observed": 48, "predicted": 48}
    # One slot leaves nothing to get wrong but time: every step holds what it held.
    terms = case["own_terms"]
    assert terms["steps"]["equal_share"] == 1 and terms["finishes"]["share"] == 1
    assert terms["cached_tokens"]["equal_share"] == 1
    assert case["signs"]["wrong"] == [] and case["signs"]["right"] >= 10
    e2e = next(f for f in case["figures"] if (f["metric"], f["statistic"]) == ("e2e", "mean"))
    assert e2e["ratio"]["observed"] == pytest.approx(0.63465, abs=1e-5)  # 570.1 ÷ 898.3 ms
    assert e2e["ratio"]["low_pct"] < e2e["ratio"]["error_pct"] < e2e["ratio"]["high_pct"]
    assert found["noise"] is None and found["rules"] == [
        {"rule": "wrong_signs>0", "trace": ONE.stem, "value": 0.0, "failed": False, "passed": True}
    ]
    assert json.loads(kept.read_text()) == found


def test_with_every_truth_put_in_next_to_nothing_is_left_of_the_error(sample: tuple[dict[str, Any], Path, Ran]) -> None:
    for case in sample[0]["cases"]:
        by = {s["truth"]: s for s in case["sources"]}
        assert list(by) == [None, "arrival", "step_time", "batching", "cache", "all"]
        assert by["all"]["of"] == ["arrival", "step_time", "batching", "cache"]
        for metric in ("ttft", "e2e"):
            assert abs(by["all"]["error_pct"][metric]["mean"]) < 1, case["trace"]
    # With the recorded batches and arrivals one slot has the error of its step times left; with those it has none.
    by = {s["truth"]: s["error_pct"]["e2e"]["mean"] for s in sample[0]["cases"][1]["sources"]}
    assert abs(by["step_time"]) < 1 and by["cache"] == by[None]
    assert any("token times tell" in n for n in sample[0]["cases"][0]["notes"])


def test_the_file_is_not_replaced_unasked(sample: tuple[dict[str, Any], Path, Ran]) -> None:
    ran = run("fidelity", FOUR, "-o", sample[1])
    assert ran.returncode == 2 and "is already there" in ran.stderr and ran.stdout == ""


def test_a_gate_that_fails_exits_with_1_and_names_the_policy() -> None:
    ran = run("fidelity", FOUR, "--truth", "none", "-q", "--fail-on", "e2e_mean>0.001%", "--fail-on", "own.e2e_mean>90%")
    assert ran.returncode == 1, ran.stderr
    first, failed, passed = ran.stdout.splitlines()
    assert first.startswith("llamacpp-four-slots, error of its own policy: E2E p50 ")
    assert failed.startswith("FAILED  e2e_mean>0.001%: ") and failed.endswith(" % in llamacpp-four-slots")
    assert passed.startswith("ok      own.e2e_mean>90%: ")


# A recording whose step cost is known


def known(folder: Path, name: str, slots: int, step_ms: int = 9) -> Path:
    """What a server of so many slots does whose step lasts 9 ms, 0.5 for each prompt token, 3 for each decoder."""
    rows = [
        {"request": i, "request_id": f"r{i}", "arrival_ns": i * 60 * MS, "arrival_of": "received", "received_ns": i * 60 * MS,
         "prompt_tokens": 10 + 7 * i % 23, "output_tokens": 5 + i % 7, "source": "t"}
        for i in range(40)
    ]  # fmt: skip
    log = store(folder / f"{name}.log.trace", {"requests": pl.DataFrame(rows)}, server(max_sequences=slots))
    cost = fixed(step_ns=step_ms * MS, prefill_token_ns=500_000, decode_request_ns=3 * MS)
    return replay(log, "as-recorded", cost=cost, out=folder / f"{name}.trace").path


def test_a_policy_is_predicted_exactly_where_the_step_cost_is_known(tmp_path: Path) -> None:
    a, b = (open_trace(known(tmp_path, n, slots)) for n, slots in (("a", 4), ("b", 1)))
    result = measure(a, [b], truths=())
    for case in result.cases:
        for f in case.figures:
            if f.raw.observed:
                assert abs(f.error_pct or 0) < 0.01 and abs(f.raw.error_pct or 0) < 0.01, (case.trace, f.metric, f.statistic)
        assert case.own_terms.steps.equal_share == 1
        assert case.speed == pytest.approx(1, abs=1e-4)
    assert result.cases[1].signs["wrong"] == [] and result.cases[1].signs["right"] > 10


def test_a_machine_that_was_slower_in_b_is_seen_and_taken_out(tmp_path: Path) -> None:
    a = open_trace(known(tmp_path, "a", 4))
    b = open_trace(known(tmp_path, "b", 4))
    slow = tmp_path / "slow.trace"
    # Twice as slow in each step: also the coefficients that grow with the batch.
    log = open_trace(tmp_path / "b.log.trace")
    cost = fixed(step_ns=18 * MS, prefill_token_ns=1_000_000, decode_request_ns=6 * MS)
    replay(log, "as-recorded", cost=cost, out=slow)
    case = measure(a, [open_trace(slow)], [b], truths=()).cases[1]
    assert case.speed == pytest.approx(2, abs=0.001)
    for metric in ("ttft", "tpot", "e2e"):
        f = case.figure(metric, "mean")
        assert f.raw.error_pct is not None and f.raw.error_pct < -40 and f.at_speed_pct == pytest.approx(0, abs=0.1)
        assert f.floor is not None and f.floor.largest_pct == 0


def test_b_of_other_work_is_refused_and_else_predicted_over_its_own_requests(tmp_path: Path) -> None:
    a, b = known(tmp_path, "a", 4), known(tmp_path, "b", 2)
    short = open_trace(b)
    tables = {n: short.table(n).collect() for n in ("requests", "stages", "tokens", "steps", "residency")}
    tables |= {n: tables[n].filter(pl.col("request") < 30) for n in ("requests", "stages", "tokens", "residency")}
    less = store(tmp_path / "less.trace", tables, server(max_sequences=2))
    ran = run("fidelity", a, less.path, "--truth", "none")
    assert ran.returncode == 3 and "40 against 30 finished requests" in ran.stderr and "--anyway" in ran.stderr
    case = measure(open_trace(a), [less], truths=(), anyway=True).cases[1]
    assert case.compared.requests == (30, 30) and case.compared.paired
    assert any("The requests of less itself were replayed" in n for n in case.notes)


# What is refused, in one sentence


def test_wrong_use(tmp_path: Path) -> None:
    for args, words in (
        ((FOUR, FOUR), "is given twice"),
        ((FOUR, "--repeat", FOUR), "is given twice"),
        ((FOUR, "--truth", "step_times"), "There is no truth 'step_times'"),
        ((FOUR, "--fail-on", "e2e_p50"), "cannot be read"),
        ((FOUR, "--truth", "none", "--fail-on", "wrong_signs>0"), "there is none"),
        ((FOUR, "-o", tmp_path), "is no ordinary file"),
    ):  # fmt: skip
        ran = run("fidelity", *args)
        assert ran.returncode == 2 and words in ran.stderr, (args, ran.stderr)
        assert "Traceback" not in ran.stderr
    assert run("fidelity").returncode == 2


def test_bad_input(tmp_path: Path) -> None:
    empty = store(tmp_path / "empty.trace", {})
    rows = [(i, 100 * i, 100 * i + 50, 100 * i + 90, 3) for i in range(6)]
    lengths = record(tmp_path / "bare.trace", rows).table("requests").select("request", "arrival_ns", "prompt_tokens", "source")
    log = store(tmp_path / "log.trace", {"requests": lengths.collect()})
    for args, words in (
        ((tmp_path / "none.trace",), "There is no trace at"),
        ((empty.path,), "empty holds no observed latencies"),
        ((FOUR, log.path), "log holds no observed latencies"),
        ((FOUR, "--repeat", ONE), "is no repeat of llamacpp-four-slots"),
        ((FOUR, ROOT / "tests/data/vllm_traces/steady.trace"), "another engine: llama.cpp against vllm"),
    ):  # fmt: skip
        ran = run("fidelity", *args, "--truth", "none")
        assert ran.returncode == 3 and words in ran.stderr, (args, ran.stderr)
        assert "Traceback" not in ran.stderr and "fault of hoptrace" not in ran.stderr, ran.stderr


def with_context(of: Path, to: Path, tokens: int) -> Path:
    """A copy whose manifest tells another context."""
    shutil.copytree(of, to)
    manifest = json.loads((to / "manifest.json").read_text())
    manifest["servers"][0]["context_tokens"] = tokens
    (to / "manifest.json").write_text(json.dumps(manifest))
    return to


def test_requests_that_a_prediction_refuses_are_told(tmp_path: Path) -> None:
    short = with_context(ONE, tmp_path / "short.trace", 60)
    ran = run("fidelity", FOUR, short, "--truth", "none", "-o", tmp_path / "f.json")
    case = json.loads((tmp_path / "f.json").read_text())["cases"][1]
    there = case["requests"]["predicted"]
    assert 0 < there < 48 and f"over 48 requests, {there} in the prediction" in " ".join(ran.stdout.split()), ran.stderr
    assert any(n.startswith(f"In the prediction {48 - there} requests are refused; the first: ") for n in case["notes"])
    none = with_context(FOUR, tmp_path / "none.trace", 2)
    ran = run("fidelity", none, "--truth", "none")
    assert ran.returncode == 3 and "Nothing of none is predicted: 48 requests are refused" in ran.stderr


def test_without_steps_nothing_is_fitted_and_that_is_said(tmp_path: Path) -> None:
    rows = [(i, 100 * i, 100 * i + 50, 100 * i + 90, 3) for i in range(6)]
    full = record(tmp_path / "full.trace", rows).table("requests").collect()
    timed = store(tmp_path / "timed.trace", {"requests": full}, server())
    ran = run("fidelity", timed.path, "--truth", "all")
    said = ran.stdout.replace("\n", " ")
    assert ran.returncode == 0, ran.stderr
    assert "The step cost is not fitted to timed (roofline)" in said
    assert "The recorded step time is not told: it has no steps." in said
    assert re.search(r"steps +unknown +\d", said)


def test_a_killed_capture_is_studied_as_far_as_it_goes(tmp_path: Path) -> None:
    killed = tmp_path / "[red]killed\x1b[31m.trace"  # names are text, and never commands to the terminal
    shutil.copytree(FOUR, killed)
    manifest = json.loads((killed / "manifest.json").read_text())
    (killed / "manifest.json").write_text(json.dumps({**manifest, "closed": False}))
    ran = run("fidelity", killed, "--truth", "none")
    assert ran.returncode == 0 and "was not closed cleanly" in ran.stdout.replace("\n", " ")
    assert "[red]killed" in ran.stdout and "\x1b" not in ran.stdout


# The screen


def screen(tmp_path: Path, capsys: pytest.CaptureFixture[str], short: bool) -> str:
    rows = [(i, 200 * i, 200 * i + 100 + i, 200 * i + 350 + 2 * i, 3) for i in range(24)]
    steps = [(200 * i, 200 * i + 100, {i: 8}) for i in range(24)]

    def at(name: str, percent: int, slots: int = 4) -> Any:
        part = [(n, a, a + (f - a) * percent // 100, a + (e - a) * percent // 100, out) for n, a, f, e, out in rows]
        longer = [(s, s + (e - s) * percent // 100, m) for s, e, m in steps]
        return record(tmp_path / f"{name}.trace", part, longer, on=server(max_sequences=slots), cached={0: 4, 1: 0})

    base, off, one = at("four", 100), at("replayed", 103), at("one", 60, 1)
    truths = (
        Truth(None, off),
        Truth("arrival", off, None, ("arrival",)),
        Truth("step_time", base, None, ("step_time",)),
        Truth("batching", None, "it has no steps.", ("batching",)),
        Truth(ALL, base, None, ("arrival", "step_time")),
    )
    result = study(
        Case(base, off, truths=truths),
        [Case(one, at("predicted", 66), at_speed=one)],
        [at("again", 101)],
        cost=fixed(step_ns=100 * MS),
        notes=["What all of it rests on."],
    )
    (show_short if short else show)(result, gate([parse("e2e_p50>3%"), parse("wrong_signs>0")], result))
    return capsys.readouterr().out


@pytest.mark.parametrize("short", [False, True])
def test_the_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion, short: bool) -> None:
    shown = screen(tmp_path, capsys, short)
    # The sentences of -q and of the gate are for a log: one line each, however long.
    assert short or all(len(line) <= 80 for line in shown.splitlines())
    assert shown == snapshot
