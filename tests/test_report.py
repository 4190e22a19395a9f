"""The report as people and programs read it: snapshots on a small trace, and what it says when there is little to say."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console
from support.memory import MemoryTrace
from support.small import small_trace
from syrupy.assertion import SnapshotAssertion

import hoptrace
from hoptrace.analysis.latency.parts import CLASSES
from hoptrace.analysis.layers.ceilings import Ceiling
from hoptrace.analysis.report import SECTIONS, Report, quick, quick_lines, report
from hoptrace.analysis.report_text import print_report
from hoptrace.analysis.text import bytes_text, count_text, duration_text, percent
from hoptrace.cli.report import command
from hoptrace.errors import UsageError
from hoptrace.manifest import Manifest, ReplayInfo, Server
from hoptrace.reader import Trace
from hoptrace.samples import sample

DATA = Path(__file__).parent / "data" / "vllm_traces"
REAL = [DATA / "steady.trace", DATA / "preempted.trace", Path(sample("llamacpp-four-slots")), Path(sample("azure-2023-conv"))]


def text_of(trace: Trace, width: int = 110, *sections: str, **options: Any) -> str:
    """The one screen, or sections in full."""
    out = io.StringIO()
    found = report(trace, **options)
    print_report(found, Console(file=out, width=width, color_system=None, highlight=False), sections=sections or None)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


@cache
def small() -> Report:
    """The whole report on the small trace."""
    return report(small_trace())


def test_text(snapshot: SnapshotAssertion) -> None:
    assert text_of(small_trace()) == snapshot


def test_full_text(snapshot: SnapshotAssertion) -> None:
    assert text_of(small_trace(), 110, *SECTIONS) == snapshot


@pytest.mark.parametrize("path", REAL, ids=lambda p: p.stem)
def test_the_screen_of_real_traces(path: Path, snapshot: SnapshotAssertion) -> None:
    text = text_of(hoptrace.open(path))
    assert len(text.splitlines()) <= 45
    assert text == snapshot


def stable(value: Any) -> Any:
    """Four digits of each number: the last ones of a fit are the linear algebra library's."""
    if isinstance(value, dict):
        return {k: stable(v) for k, v in value.items()}
    if isinstance(value, list):
        return [stable(v) for v in value]
    return float(f"{value:.4g}") if isinstance(value, int | float) and not isinstance(value, bool) else value


def test_json(snapshot: SnapshotAssertion) -> None:
    found = report(small_trace(), slo={"ttft": 20_000_000}).as_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert json.dumps(stable(found), indent=1, ensure_ascii=False) == snapshot


def test_requests_left_out_of_itl_are_told() -> None:
    said = "ITL leaves out 1 of 11 finished requests: their tokens, counted chunk by chunk, are not the server's total"
    assert said not in text_of(small_trace(), 400, "unseen")
    whole = small_trace()
    rows = {t: whole.table(t).collect().to_dicts() for t in ("requests", "tokens", "stages")}
    rows["requests"][0]["output_tokens"] += 1
    trace = MemoryTrace(rows, whole.manifest)
    assert report(trace, sections=()).as_dict()["metrics"]["itl_left_out"] == 1
    assert said in text_of(trace, 400, "unseen")


def test_the_same_trace_gives_the_same_report() -> None:
    assert report(small_trace()).as_dict() == small().as_dict()


def test_the_text_bars_are_of_one_length() -> None:
    bars = [line for line in text_of(small_trace()).splitlines() if line.startswith(("mean ", "around p"))]
    assert len(bars) == 3 and len({len(b) for b in bars}) == 1
    assert len([x for x in text_of(small_trace(), 110, "time").splitlines() if x.startswith(("mean ", "around p"))]) == 4


def test_bars_say_how_many_requests_they_hold() -> None:
    bars = [line for line in text_of(small_trace(), 110, "time").splitlines() if line.startswith("around p")]
    held = [small().accounting.compositions[p].requests for p in ("p50", "p95", "p99")]
    assert [int(line.split()[2]) for line in bars] == held == [1, 1, 1]


def test_no_coordination_seen_is_not_none() -> None:
    row = {"request": 1, "arrival_ns": 0, "received_ns": 0, "scheduled_ns": 0, "first_token_ns": 50, "last_token_ns": 100}
    trace = MemoryTrace({"requests": [row | {"finish_ns": 100, "output_tokens": 2, "prompt_tokens": 2}]})
    said = report(trace, sections=()).headline
    assert "no coordination is seen (client, network in" in said and "0.0%" not in said
    assert "No part of end-to-end time is seen to be coordination" in text_of(trace, 300)


def test_shares_of_the_report_add_up() -> None:
    for c in small().as_dict()["accounting"]["compositions"].values():
        assert sum(v or 0 for v in c["class_shares"].values()) == pytest.approx(1, abs=1e-5)
        assert set(c["class_shares"]) == set(CLASSES)
        assert sum(v for v in c["parts_ns"].values() if v is not None) == pytest.approx(c["e2e_ns"], abs=len(c["parts_ns"]))


def test_a_trace_of_counters_only_says_what_it_cannot_show() -> None:
    counters = [
        {
            "time_ns": t,
            "entity": "process:7",
            "name": "on_cpu_ns",
            "semantics": "cumulative",
            "value_int": t // 2,
            "width_bits": 64,
        }
        for t in (0, 1000)
    ]
    trace = MemoryTrace({"counters": counters})
    text = text_of(trace, 200, *SECTIONS)
    assert "No request was recorded" in text and "What this trace cannot show" in text
    assert "No finished request was recorded: there is no latency to account for." in text
    assert "TTFT" not in text and "CPU 500 ns" in text and "this trace cannot show" in text_of(trace)
    assert report(trace, sections=()).as_dict()["accounting"]["compositions"] == {}


def test_a_workload_without_times_is_told_as_one() -> None:
    rows = {"requests": [{"request": i, "arrival_ns": i, "prompt_tokens": 5, "output_tokens": 5} for i in range(3)]}
    text = text_of(MemoryTrace(rows, Manifest(origin="imported", imported_from=[{"source": "public.csv"}], closed=True)))
    assert "None of its 3 requests is known to have finished" in text and "Imported from public.csv." in text


def replay_of(error: dict[str, Any] | None) -> MemoryTrace:
    info = ReplayInfo(
        parent="run.trace",
        policy={"name": "one-slot"},
        cost_model={},
        seed=3,
        error=error,
        warnings=["Extrapolated beyond 4 slots."],
    )
    return MemoryTrace({}, Manifest(origin="replayed", replay=info, closed=True))


def test_a_replay_says_its_error_and_its_warnings() -> None:
    error = {"ttft": {"mean": 0.01, "p50": -0.02, "p95": 0.11}, "paired": True, "throughput": {"requests": 0.0}}
    r = report(replay_of(error), sections=())
    assert r.origin_note == (
        "Replayed from run.trace under policy one-slot, seed 3. "
        "Its error under the trace's own policy, p50 (p95): ttft -2.0% (+11.0%)."
    )
    assert "Extrapolated beyond 4 slots." in r.warnings
    assert "error is not known" in report(replay_of(None), sections=()).origin_note


def test_a_trace_that_was_not_closed_and_dropped_rows_warns() -> None:
    manifest = Manifest(origin="recorded", rows_dropped={"disk: full": 5}, closed=False)
    found = report(MemoryTrace({}, manifest), sections=()).warnings
    assert any("not closed cleanly" in w for w in found) and "5 rows were dropped: disk: full." in found


def run(*words: str) -> Any:
    return CliRunner().invoke(command, list(words))


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hoptrace, "open", lambda _: small_trace())
    plain = run("x")
    assert plain.exit_code == 0 and "11 finished requests" in plain.stdout and "Stranded memory" not in plain.stdout
    quiet = run("x", "-q")
    assert quiet.stdout.splitlines() == quick_lines(small().headline, small().metrics)
    assert quick(small_trace()) == (small().headline, small().metrics)
    assert json.loads(run("x", "--json").stdout)["schema"] == "hoptrace.report/2"
    full = run("x", "--full").stdout
    assert [t for t in SECTIONS.values() if t not in full] == []
    some = run("x", "--section", "time,moves", "--section", "unseen").stdout
    assert "Where the time goes" in some and "What moved" in some and "Bottleneck layers" not in some
    assert "Goodput under ttft=20ms: 5 of 13 requests" in run("x", "--slo", "ttft=20ms").stdout
    assert set(json.loads(run("x", "--json", "--section", "layers").stdout)) >= {"layers", "metrics"}
    assert "stranding" not in json.loads(run("x", "--json", "--section", "layers").stdout)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--full", "--section", "time"), "exclude each other"), (("-q", "--json"), "headline alone"), (("--section", "tim"),
        "no section 'tim'"), (("--section", ","), "names no section"), (("--slo", "ttft"), "is no limit"), (("--platform",
        "nonesuch"), "no platform"),
    ],
)  # fmt: skip
def test_wrong_use_is_said(words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hoptrace, "open", lambda _: small_trace())
    error = run("x", *words).exception
    assert isinstance(error, UsageError) and said in str(error)


def test_a_headline_needs_no_section() -> None:
    r = report(small_trace(), sections=())
    assert (r.field, r.hidden, r.layers, r.stranding, r.reversibility) == (None,) * 5
    assert r.as_dict()["headline"] == small().headline


def test_coordination_carrying_and_work_come_first() -> None:
    said, shares = small().headline, small().accounting.shares["all"]
    assert said.startswith(f"Of the 11 finished requests' time {percent(shares['coordination'])} is coordination, ")
    assert f"{percent(shares['work'])} work (arithmetic and own memory)" in said
    assert "(counted)" in said and "(derived)" in said


@pytest.mark.parametrize(
    ("known", "said"),
    [
        (("requests", "stages", "tokens", "steps", "residency"), "work (arithmetic and own memory)"),
        (("requests", "stages", "tokens"), "work (arithmetic, own memory, and host time that is not told apart)"),
        (("requests", "stages"), "work (prefill and decode, host time and interference in them)"),
    ],
)
def test_what_counts_as_work_is_said_as_far_as_it_is_known(known: tuple[str, ...], said: str) -> None:
    """AIPerf's export knows tokens alone: "100 % arithmetic and own memory" would be a claim that nothing supports."""
    trace = small_trace()
    rows = {t: trace.table(t).collect().to_dicts() for t in known}
    for row in rows["requests"] + rows["stages"]:
        row.pop("engine_first_token_ns", None)
    assert said in report(MemoryTrace(rows, trace.manifest), sections=()).headline


def test_a_platform_and_ceilings_reach_the_layers() -> None:
    rates = {"name": "toy", "flops_per_s": 1e12, "memory_bytes_per_s": 1e11}
    ceiling = Ceiling("host", "with host cost zero", e2e=2.6)
    r = report(hoptrace.open(DATA / "preempted.trace"), sections=["layers"], platform=rates, ceilings=[ceiling])
    assert r.layers is not None and r.layers.ceilings == (ceiling,) and r.layers.rooflines
    assert r.field is None


def test_what_stands_in_a_trace_is_no_markup() -> None:
    name = "[/bold]x[red]"
    trace = small_trace()
    rows = {t: trace.table(t).collect().to_dicts() for t in ("requests", "tokens", "stages", "moves", "steps", "residency")}
    for table in ("stages", "steps", "residency", "moves"):
        for row in rows[table]:
            row["server"] = name
    for row in rows["moves"]:
        row["src" if row["object"] == "tokens" else "dst"] = f"server:{name}"
    servers = [Server(name=name, engine=name, model=name, max_sequences=2)]
    text = text_of(MemoryTrace(rows, Manifest(origin="recorded", servers=servers, notes=[name], closed=True)), 400, *SECTIONS)
    assert f"server:{name} → client" in text


@pytest.mark.parametrize("path", REAL, ids=lambda p: p.stem)
def test_figures_told_twice_are_one(path: Path) -> None:
    """Sections that touch the same thing say the same of it."""
    d = report(hoptrace.open(path)).as_dict()
    assert d["coordination"]["share"].get("all") == d["accounting"]["compositions"].get("all", {}).get("class_shares", {}).get(
        "coordination"
    )
    assert d["ledger"]["output_tokens"] == d["coordination"]["output_tokens"]
    if d["layers"]["groups"]:
        assert d["layers"]["groups"]["all"]["e2e_ns"] == d["accounting"]["compositions"]["all"]["e2e_ns"]
        assert d["metrics"]["e2e"]["mean_ns"] == d["accounting"]["compositions"]["all"]["e2e_ns"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (None, "–"), (0, "0"), (999, "999 ns"), (1500, "1.50 µs"), (12_345_678, "12.3 ms"), (7_510_000_000, "7.51 s"),
        (-2_000_000, "-2.00 ms"), (7.2e11, "12 min"), (7.2e13, "20 h"),
    ],
)  # fmt: skip
def test_durations(given: float | None, text: str) -> None:
    assert duration_text(given) == text


def test_sizes_shares_and_counts() -> None:
    assert [bytes_text(x) for x in (None, 0, 45.5, 325, 1024, 143 << 20, 5e15)] == [
        "–", "0 B", "45.5 B", "325 B", "1.00 KiB", "143 MiB", "4,547 TiB"
    ]  # fmt: skip
    assert [percent(x) for x in (None, 0, 0.0004, 0.012, 0.0996, 0.5)] == ["–", "0.0%", "<0.1%", "1.2%", "10%", "50%"]
    assert [count_text(x) for x in (None, 3, 1.04, 25.37, 12345.6)] == ["–", "3", "1.04", "25.4", "12,346"]
