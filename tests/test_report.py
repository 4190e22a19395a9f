"""The report as people and programs read it: snapshots on a small trace, and what it says when there is little to say."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console
from support.memory import MemoryTrace
from support.small import small_trace
from syrupy.assertion import SnapshotAssertion

import hoptrace
from hoptrace.analysis.parts import CLASSES
from hoptrace.analysis.report import report
from hoptrace.analysis.report_text import print_report
from hoptrace.analysis.text import bytes_text, count_text, duration_text, percent
from hoptrace.cli.report import command
from hoptrace.manifest import Manifest, ReplayInfo


def text_of(trace: MemoryTrace, width: int = 110) -> str:
    out = io.StringIO()
    print_report(report(trace), Console(file=out, width=width, color_system=None, highlight=False))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def test_text(snapshot: SnapshotAssertion) -> None:
    assert text_of(small_trace()) == snapshot


def stable(value: Any) -> Any:
    """Four digits of each number: the last ones of a fit are the linear algebra library's."""
    if isinstance(value, dict):
        return {k: stable(v) for k, v in value.items()}
    if isinstance(value, list):
        return [stable(v) for v in value]
    return float(f"{value:.4g}") if isinstance(value, int | float) and not isinstance(value, bool) else value


def test_json(snapshot: SnapshotAssertion) -> None:
    found = report(small_trace()).as_dict()
    assert json.loads(json.dumps(found)) == found
    assert json.dumps(stable(found), indent=1, ensure_ascii=False) == snapshot


def test_requests_left_out_of_itl_are_told() -> None:
    said = "ITL leaves out 1 of 11 finished requests: their tokens, counted chunk by chunk, are not the server's total"
    assert said not in text_of(small_trace(), 400)
    whole = small_trace()
    rows = {t: whole.table(t).collect().to_dicts() for t in ("requests", "tokens", "stages")}
    rows["requests"][0]["output_tokens"] += 1
    trace = MemoryTrace(rows, whole.manifest)
    r = report(trace)
    assert r.as_dict()["metrics"]["itl_left_out"] == 1
    assert said in text_of(trace, 400)


def test_the_same_trace_gives_the_same_report() -> None:
    assert report(small_trace()).as_dict() == report(small_trace()).as_dict()


def test_the_text_bars_are_of_one_length() -> None:
    bars = [line for line in text_of(small_trace()).splitlines() if line.startswith("around p")]
    assert len(bars) == 3 and len({len(b) for b in bars}) == 1


def test_bars_say_how_many_requests_they_hold() -> None:
    bars = [line for line in text_of(small_trace()).splitlines() if line.startswith("around p")]
    held = [report(small_trace()).accounting.compositions[p].requests for p in ("p50", "p95", "p99")]
    assert [int(line.split()[2]) for line in bars] == held == [1, 1, 1]


def test_no_coordination_seen_is_not_none() -> None:
    row = {"request": 1, "arrival_ns": 0, "received_ns": 0, "scheduled_ns": 0, "first_token_ns": 50, "last_token_ns": 100}
    trace = MemoryTrace({"requests": [row | {"finish_ns": 100, "output_tokens": 2, "prompt_tokens": 2}]})
    assert "no coordination is seen in it (client, network in" in report(trace).headline
    assert "0.0%" not in report(trace).headline
    assert "No part of end-to-end time is seen to be coordination" in text_of(trace, 300)


def test_shares_of_the_report_add_up() -> None:
    for c in report(small_trace()).as_dict()["accounting"]["compositions"].values():
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
    text = text_of(trace)
    assert "No request was recorded" in text and "What this trace cannot show" in text
    assert "No finished request was recorded: there is no latency to account for." in text
    assert "Latency" not in text and "CPU 500 ns" in text
    assert report(trace).as_dict()["accounting"]["compositions"] == {}


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
    r = report(replay_of(error))
    assert r.origin_note == (
        "Replayed from run.trace under policy one-slot, seed 3. "
        "Its error under the trace's own policy, p50 (p95): ttft -2.0% (+11.0%)."
    )
    assert "Extrapolated beyond 4 slots." in r.warnings
    assert "error is not known" in report(replay_of(None)).origin_note


def test_a_trace_that_was_not_closed_and_dropped_rows_warns() -> None:
    manifest = Manifest(origin="recorded", rows_dropped={"disk: full": 5}, closed=False)
    found = report(MemoryTrace({}, manifest)).warnings
    assert any("not closed cleanly" in w for w in found) and "5 rows were dropped: disk: full." in found


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hoptrace, "open", lambda _: small_trace())
    plain = CliRunner().invoke(command, ["x"])
    assert plain.exit_code == 0 and "Where the time goes" in plain.stdout
    quiet = CliRunner().invoke(command, ["x", "-q"])
    assert quiet.stdout == report(small_trace()).headline + "\n"
    as_json = CliRunner().invoke(command, ["x", "--json"])
    assert json.loads(as_json.stdout)["schema"] == "hoptrace.report/1"


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
