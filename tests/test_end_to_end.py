"""The main job through the command line, against a real llama.cpp server, as a user would do it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import hoptrace
from hoptrace.demo_server import DemoServer, free_port
from hoptrace.samples import sample

pytestmark = pytest.mark.server


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[DemoServer]:
    with DemoServer(model, slots=4, log=tmp_path / "server.log") as s:
        yield s


def _run(*args: object, code: int = 0, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hoptrace", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env={**os.environ, **(env or {})})
    assert done.returncode == code, f"{args}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done


def test_attach_drive_replay_report_diff_export(server: DemoServer, tmp_path: Path) -> None:
    run, port = tmp_path / "run.trace", free_port()
    attach = subprocess.Popen(
        [sys.executable, "-m", "hoptrace", "attach", server.url, "--proxy", f":{port}", "-o", str(run)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 30
        while not run.joinpath("manifest.json").exists() and attach.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        sent = _run(
            "drive", sample("azure-2023-conv"), "--against", f"http://127.0.0.1:{port}", "--limit", 10,
            "--rate", "4x", "--prompt-scale", 0.05, "--output-scale", 0.1, "--json",
        )  # fmt: skip
        assert json.loads(sent.stdout)["failed"] == 0
    finally:
        attach.send_signal(signal.SIGINT)
        words = attach.communicate(timeout=30)
    assert attach.returncode == 0, words
    trace = hoptrace.open(run)
    assert trace.manifest.closed
    requests = trace.table("requests").collect()
    assert requests.height == 10
    for column in ("intended_ns", "sent_ns", "received_ns", "scheduled_ns", "first_token_ns", "finish_ns", "prompt_tokens"):
        assert requests[column].null_count() == 0, column
    assert trace.table("tokens").collect()["count"].sum() == requests["output_tokens"].sum()
    assert trace.rows("steps") > 0 and trace.rows("residency") > 0
    assert trace.rows("counters") > 0
    _run("validate", run)

    report = json.loads(_run("report", run, "--json").stdout)
    shares = report["accounting"]["compositions"]["all"]["class_shares"]
    assert abs(sum(v for v in shares.values() if v is not None) - 1) < 1e-4
    again, one = tmp_path / "again.trace", tmp_path / "one.trace"
    own = json.loads(_run("replay", run, "-o", again, "--json").stdout)
    assert own["own_policy"]["paired"] and own["own_policy"]["requests"] == {"observed": 10, "predicted": 10}
    _run("replay", run, "--policy", "one-slot", "-o", one)
    _run("validate", one)
    assert hoptrace.open(one).manifest.replay is not None
    _run("diff", run, one, "--json")
    _run("export", run, "-o", tmp_path / "run.pftrace")
    assert (tmp_path / "run.pftrace").stat().st_size > 1000
    assert "10" in _run("sql", run, "SELECT count(*) AS n FROM requests", "--json").stdout


def test_capture_survives_a_kill(server: DemoServer, tmp_path: Path) -> None:
    run, port = tmp_path / "run.trace", free_port()
    attach = subprocess.Popen(
        [sys.executable, "-m", "hoptrace", "attach", server.url, "--proxy", f":{port}", "-q", "-o", str(run)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 30
        while not run.joinpath("manifest.json").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        _run(
            "drive", sample("azure-2023-conv"), "--against", f"http://127.0.0.1:{port}", "--limit", 4,
            "--rate", "20x", "--prompt-scale", 0.02, "--output-scale", 0.1, "-q",
        )  # fmt: skip
        time.sleep(1.1)  # what is older than a second must be there
    finally:
        attach.kill()
        attach.wait()
    trace = hoptrace.open(run)
    assert not trace.manifest.closed
    assert trace.table("requests").collect()["finish_ns"].null_count() == 0
    assert trace.rows("requests") == 4
    report = json.loads(_run("report", run, "--json").stdout)
    assert report["metrics"]["finished"] == 4
    _run("compact", run)
    assert hoptrace.open(run).rows("requests") == 4


def test_demo(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    done = json.loads(_run("demo", "--json", "--requests", 12, "--span", 8, "-o", out).stdout)
    assert set(done["traces"]) == {"workload", "four-slots", "four-slots-replayed", "one-slot-predicted", "one-slot"}
    for path in done["traces"].values():
        assert hoptrace.open(path).rows("requests") == 12
    assert hoptrace.open(done["traces"]["one-slot"]).manifest.servers[0].max_sequences == 1
    for name in ("four-slots", "one-slot"):
        assert hoptrace.open(done["traces"][name]).manifest.servers[0].config["cache_ram_mib"] == 0
    assert not [w for w in done["warnings"] if "--cache-ram" in w]
    figures = {(d["metric"], d["statistic"]): d for d in done["one_slot"]["figures"]}
    for metric in ("ttft", "itl", "tpot", "e2e", "queue"):
        for statistic in ("mean", "p50", "p95", "p99"):
            d = figures[metric, statistic]
            assert d["observed"] is not None and d["predicted"] is not None
    assert done["own_policy"]["paired"]


def test_demo_without_the_model_shows_the_samples(tmp_path: Path) -> None:
    env = {"HOPTRACE_CACHE": str(tmp_path / "cache"), "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0"}
    env |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    done = _run("demo", "--no-app", "-o", tmp_path / "demo", env=env)
    assert "can't be had here" in done.stderr
    assert "Largest parts" in done.stdout
    assert not (tmp_path / "demo").exists()
