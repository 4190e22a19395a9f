"""`hoptrace replay` and `hoptrace policies` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from support.command import run
from support.workloads import MS, server, store

from hoptrace.reader import open_trace
from hoptrace.replay.run import replay
from hoptrace.stepcost import fixed


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace with steps and observed latencies."""
    folder = tmp_path_factory.mktemp("c")
    rows = [
        {"request": i, "arrival_ns": i * 100 * MS, "arrival_of": "received", "received_ns": i * 100 * MS, "prompt_tokens": 10 + i,
         "output_tokens": 5 + i % 7, "source": "t"}
        for i in range(40)
    ]  # fmt: skip
    log = store(folder / "log.trace", {"requests": pl.DataFrame(rows)}, server())
    cost = fixed(step_ns=9 * MS, prefill_token_ns=500_000, decode_request_ns=3 * MS)
    return replay(log, "as-recorded", cost=cost, out=folder / "capture.trace").path


def test_what_if_with_the_error_beside_it(capture: Path, tmp_path: Path) -> None:
    out = tmp_path / "one.trace"
    p = run("replay", capture, "--policy", "one-slot", "-o", out)
    assert p.returncode == 0, p.stderr
    for words in (
        "one-slot",
        "max_sequences = 1",
        "own policy",
        "what-if",
        "ttft p99",
        "tokens/s",
        "where so many further runs of the same requests would lie",
        "40 draws of: step cost: ",
        f"Written: {out}",
    ):
        assert words in p.stdout
    table = [line for line in p.stdout.splitlines() if line.startswith(("ttft ", "e2e ", "tokens/s", " "))][-10:]
    assert len(table) == 10 and all(len(line) <= 80 for line in table)
    # A machine without any scatter: another run is the same again.
    assert table[0].split() == ["observed", "own", "error", "90", "%", "what-if", "90", "%", "change", "90", "%"]
    assert table[1] == "ttft mean   27.7 ms 27.7 ms    0% 0…0   134 ms 134–134    +384% +384…+384"
    t = open_trace(out)
    assert t.manifest.replay is not None and t.manifest.replay.error is not None
    assert t.manifest.replay.intervals["draws"] == 40  # type: ignore[attr-defined]
    assert t.manifest.servers[0].max_sequences == 1


def test_json_is_all_there_is_on_stdout(capture: Path, tmp_path: Path) -> None:
    p = run("replay", capture, "--set", "batching.max_sequences=2", "--rate", "1.5x", "-o", tmp_path / "a.trace", "--json",
            "--intervals", "9")  # fmt: skip
    assert p.returncode == 0, p.stderr
    d = json.loads(p.stdout)
    assert d["policy"]["batching"]["max_sequences"] == 2
    assert d["own_policy"]["paired"] is True
    assert {f["metric"] for f in d["against_observed"]["figures"]} == {"ttft", "itl", "tpot", "e2e", "queue", "throughput"}
    within = d["intervals"]
    assert (within["draws"], within["level"]) == (9, 0.9) and d["coverage"]["verdict"] == "partly"  # longer prompts in a step
    sides = {(f["side"], f["metric"], f["statistic"]): f for f in within["figures"]}
    for side, figures in (("own", d["own_policy"]), ("what_if", d["against_observed"])):
        for f in figures["figures"]:
            i = sides[side, f["metric"], f["statistic"]]
            assert i["low"] <= f["predicted"] + 1 and f["predicted"] - 1 <= i["high"], (side, f)
    for f in d["change"]["figures"]:
        if f["observed"]:
            assert sides["change", f["metric"], f["statistic"]]["low"] <= f["predicted"] / f["observed"] * 1.000001
    assert open_trace(tmp_path / "a.trace").manifest.replay.arrivals == "recorded, 1.5 times as fast"  # type: ignore[union-attr]


def test_a_trace_without_latencies_gives_plain_figures(capture: Path, tmp_path: Path) -> None:
    p = run("replay", capture.parent / "log.trace", "--cost", "fixed:50,12", "-o", tmp_path / "a.trace")
    assert p.returncode == 0, p.stderr
    assert "the error of this replay is unknown" in p.stdout
    q = run("replay", capture.parent / "log.trace", "--cost", "fixed:50,12", "-o", tmp_path / "b.trace", "-q")
    assert (q.returncode, q.stdout) == (0, "")


def test_the_screen_says_on_what_an_answer_rests(capture: Path, tmp_path: Path) -> None:
    p = run(
        "replay",
        capture.parent / "log.trace",
        "--policy",
        "pd-1-1",
        "--cost",
        "fixed:50,12",
        "--until",
        "3s",
        "-o",
        tmp_path / "a",
    )
    assert p.returncode == 0, p.stderr
    for words in (
        "split: prefill = 1, decode = 1, start = pull, link = roce",
        "servers: 2 (1 for prefill, 1 for decode)",
        "step cost: fixed",
        "arrivals: recorded (no request says which one it waited for)",
        "KV handed over: ",
        " unfinished, ",
        " not arrived",
    ):
        assert words in p.stdout, words
    assert "split.prefill_server" not in p.stdout  # nothing of its own


def test_a_closed_loop_and_its_json(capture: Path, tmp_path: Path) -> None:
    p = run("replay", capture, "--arrivals", "closed:3", "--no-tokens", "--intervals", "0", "-o", tmp_path / "a.trace", "--json")
    assert p.returncode == 0, p.stderr
    d = json.loads(p.stdout)
    assert d["arrivals"]["label"] == "closed loop of 3 clients" and d["arrivals"]["clients"] == 3
    assert d["requests"] == {"done": 40, "refused": 0, "unfinished": 0, "not_arrived": 0}
    assert not open_trace(tmp_path / "a.trace").has("tokens")
    # Replayed again, its own arrivals are its clients'.
    q = run("replay", tmp_path / "a.trace", "--cost", "fixed:9,3", "-o", tmp_path / "b.trace")
    assert q.returncode == 0, q.stderr
    assert "arrivals: sessions (37 requests come from 3 client slots, each of which waits for its answer)" in q.stdout
    assert "Error under its own policy with these arrivals (with the recorded ones): ttft mean" in q.stdout
    assert not [line for line in q.stdout.splitlines() if line.startswith("note") and q.stdout.count(line) > 1]


def test_without_intervals_there_are_none(tmp_path: Path) -> None:
    seen = Path(__file__).parent / "data" / "vllm_traces" / "preempted.trace"
    p = run("replay", seen, "--seed", "3", "--intervals", "0", "--set", "batching.max_sequences=2", "-o", tmp_path / "a.trace")
    assert p.returncode == 0, p.stderr
    assert " error " in p.stdout and " change" in p.stdout and "throughput output" in p.stdout
    assert "draws of" not in p.stdout and "90 %" not in p.stdout
    info = open_trace(tmp_path / "a.trace").manifest.replay
    assert info is not None and info.seed == 3 and "intervals" not in (info.model_extra or {})


def test_a_cost_that_is_not_fitted_has_no_interval_and_says_so(capture: Path, tmp_path: Path) -> None:
    p = run("replay", capture, "--cost", "fixed:50,12", "-o", tmp_path / "a.trace")
    assert p.returncode == 0, p.stderr
    assert "No intervals: how far a fixed step cost is off the machine's is not known." in p.stdout and "…" not in p.stdout


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("--policy", "onslot"), 2, "Did you mean 'one-slot'?"),
        (("--policy", "nowhere.toml"), 2, "no policy file nowhere.toml"),
        (("--set", "batching.max_sequnces=1"), 3, "Did you mean max_sequences?"),
        (("--set", "batching.max_sequences=99999999999999"), 3, "Allowed: a whole number from 1 to 65536"),
        (("--set", "batching.max_batched_tokens=9223372036854775808"), 3, "is not possible"),
        (("--set", "batching.max_sequences=" + "9" * 5000), 3, "is not possible"),
        (("--policy", "/"), 2, "/ is a folder, not a policy file."),
        (("--rate", "1e-99999999x"), 2, "is not a rate"),
        (("--set", "nonsense"), 2, "is not a setting"),
        (("--cost", "guess"), 2, "no cost model 'guess'"),
        (("--cost", "fixed:1"), 2, "not a fixed cost"),
        (("--cost", "roofline", "--platform", "h101"), 2, "no platform 'h101'"),
        (("--platform", "l40s"), 3, "does not say what machine it was recorded on"),
        (("--arrivals", "closed:0"), 2, "is no way to arrive"),
        (("--arrivals", "sessions"), 2, "says which one it waited for"),
        (("--arrivals", "closed:4", "--rate", "2x"), 2, "A closed loop has no rate"),
        (("--until", "soon"), 2, "is not a time"),
        (("--rate", "0"), 2, "is not a rate"),
    ],
)
def test_wrong_use_is_one_sentence_with_a_remedy(
    capture: Path, tmp_path: Path, args: tuple[str, ...], code: int, words: str
) -> None:
    p = run("replay", capture, *args, "-o", tmp_path / "x.trace")
    assert p.returncode == code
    assert words in p.stderr
    assert "Traceback" not in p.stderr and p.stdout == ""
    assert len(p.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "x.trace").exists()


def test_a_policy_file_with_a_misspelt_key_names_its_line(capture: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('name = "mine"\n\n[batching]\nmax_sequnces = 1\n')
    p = run("replay", capture, "--policy", mine, "-o", tmp_path / "x.trace")
    assert p.returncode == 3
    assert f"{mine}, line 4: max_sequnces is not a key of [batching]. Did you mean max_sequences?" in p.stderr


def test_nothing_is_overwritten_and_a_missing_trace_is_named(capture: Path, tmp_path: Path) -> None:
    p = run("replay", capture, "-o", capture)
    assert p.returncode == 2 and "already there" in p.stderr
    q = run("replay", tmp_path / "none.trace", "-o", tmp_path / "x.trace")
    assert q.returncode == 3 and "There is no trace at" in q.stderr


def test_policies_lists_and_shows(tmp_path: Path) -> None:
    listed = run("policies")
    assert listed.returncode == 0 and "vllm-default" in listed.stdout
    shown = run("policies", "--show", "one-slot")
    assert shown.stdout == (
        'name = "one-slot"\ndescription = "One request at a time, the others wait: no batching at all."\n\n'
        "[batching]\nmax_sequences = 1\n"
    )
    again = tmp_path / "again.toml"
    again.write_text(shown.stdout)
    assert run("policies", "--show", again).stdout == shown.stdout
    assert json.loads(run("policies", "--json").stdout)[0]["name"] == "as-recorded"
    assert "max_batched_tokens" in run("policies", "--fields").stdout


def test_with_a_horizon_the_table_is_of_what_was_written(capture: Path, tmp_path: Path) -> None:
    p = run("replay", capture, "--until", "1s", "--intervals", "0", "-o", tmp_path / "a.trace")
    assert p.returncode == 0, p.stderr
    assert " not arrived" in p.stdout
    assert "what-if" in p.stdout  # of 40 requests the own policy's run has all, and the trace that was written has not


def test_what_is_assumed_is_said_once(capture: Path, tmp_path: Path) -> None:
    p = run("replay", capture.parent / "log.trace", "-o", tmp_path / "a.trace")
    assert p.returncode == 0, p.stderr
    said = [line.split("assumed: ", 1)[1] for line in p.stdout.splitlines() if line.startswith("  assumed: ")]
    assert any("No platform was named" in x for x in said)
    for x in said:
        assert p.stdout.count(x) == 1, x


def test_one_client(capture: Path, tmp_path: Path) -> None:
    p = run("replay", capture.parent / "log.trace", "--cost", "fixed:5,2", "--arrivals", "closed:1", "-o", tmp_path / "a.trace")
    assert "arrivals: closed loop of 1 client (" in p.stdout


def test_a_manifest_lists_its_tables_in_one_order(capture: Path) -> None:
    names = list(json.loads((capture / "manifest.json").read_text())["tables"])
    assert names == sorted(names)
