"""The harness of benchmarks/fidelity: recipes, order, gauges, what a kill leaves, and a whole small cell on a real server."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp import web

import hoptrace

ROOT = Path(__file__).parents[1]
FIDELITY = ROOT / "benchmarks" / "fidelity"
sys.path.append(str(FIDELITY))

from harness.children import end, grant, spawn, tree  # noqa: E402 — after the path to it
from harness.engines import arguments  # noqa: E402
from harness.evaluate import FIGURES  # noqa: E402
from harness.gauges import Gauge, Sample, between, busy_of, verdict  # noqa: E402
from harness.recipe import Bounds, read  # noqa: E402
from harness.rounds import Folder, Run, order  # noqa: E402
from harness.router import application  # noqa: E402
from harness.table import overall, summary  # noqa: E402
from harness.table_text import markdown  # noqa: E402
from harness.work import drawn, write  # noqa: E402

from hoptrace.errors import InputError  # noqa: E402

TINY = """
tier = 2
rounds = 1
warm_up = 2
[bounds]
foreign_at_most = 1.0
steal_at_most = 1.0
probe_apart_at_most = 100.0
attempts = 1
[machine]
server_cpus = [0]
client_cpus = [0]
[workloads.few]
seed = 3
requests = 6
rate_per_s = 6
prompt = {median = 30, sigma = 0.6, least = 8, most = 60}
output = {median = 5, sigma = 0.5, least = 2, most = 8}
[policies.slots-2]
engine = "llamacpp"
flags = {parallel = 2}
[policies.slots-1]
engine = "llamacpp"
flags = {parallel = 1}
[cells.tiny]
use = "develop"
workload = "few"
policies = ["slots-2", "slots-1"]
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.mark.parametrize("path", sorted((FIDELITY / "recipes").glob("*.toml")), ids=lambda p: p.stem)
def test_recipes_read_and_no_reported_cell_shares_work_with_one_to_develop_on(path: Path) -> None:
    found = read(path)
    works: dict[str, set[str]] = {"develop": set(), "report": set()}
    for cell in found.cells.values():
        works[cell.use].add(found.workloads[cell.workload].model_dump_json())
    # Modelled steps have no noise that a model could be tuned to, and a scheduler's rules are the same for all work.
    assert found.tier == 1 or not works["develop"] & works["report"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("tier = 2", "tier = 3", "tier: Input should be 1 or 2"),
        ("rounds = 1", "rounds = 0", "rounds: Input should be greater than or equal to 1"),
        ("attempts = 1", "atempts = 1", "bounds.atempts: Extra inputs are not permitted"),
        ('engine = "llamacpp"\nflags = {parallel = 2}', 'engine = "tgi"', "policies.slots-2.engine: Input should be"),
        ('workload = "few"', 'workload = "many"', "there is no workload 'many'. There are: few."),
        ('["slots-2", "slots-1"]', '["slots-2", "slots-3"]', "there is no policy 'slots-3'. There are: slots-1, slots-2."),
        ('["slots-2", "slots-1"]', '["slots-2", "slots-2"]', "a policy is named twice"),
        ("[cells.tiny]", '[cells."../x"]', "this name cannot be part of a file's"),
        ("rate_per_s = 6\n", "", "requests, rate_per_s, prompt and output are needed, or a trace"),
        ("seed = 3", 'trace = "azure-2023-conv"', "a trace's requests have their own number"),
        ("{parallel = 1}", "{parallel = 1}\ntimes = {step_ms = 3}", "its steps cannot be given times"),
        ("{parallel = 1}", '{parallel = 1}\nlayout = "split"', "llama.cpp hands no KV over"),
        ("{parallel = 1}", '{parallel = 1}\nlayout = "router"\nservers = 8', "it takes 8 servers"),
        ("tier = 2", "tier = ", "is not TOML"),
    ],
)
def test_what_is_wrong_in_a_recipe_is_named(recipe: Path, old: str, new: str, words: str) -> None:
    assert old in TINY
    recipe.write_text(TINY.replace(old, new, 1))
    with pytest.raises(InputError) as e:
        read(recipe)
    assert words in str(e.value) and "tiny.toml" in str(e.value)


def test_policies_run_by_turns() -> None:
    assert [r.name for r in order(("a", "b1", "b2"), 2)] == ["00-a", "00-b1", "00-b2", "01-a", "01-b1", "01-b2"]


def test_flags_become_words() -> None:
    flags: dict[str, Any] = {"max-num-seqs": 2, "enforce-eager": True, "enable-prefix-caching": False, "kv": {"a": 1}, "x": "y"}
    words = ["--max-num-seqs", "2", "--enforce-eager", "--no-enable-prefix-caching", "--kv", '{"a": 1}', "--x", "y"]
    assert arguments(flags) == words


def test_work_is_drawn_alike_for_a_seed_and_holds_what_was_asked(recipe: Path, tmp_path: Path) -> None:
    work = read(recipe).workloads["few"]
    rows = drawn(work)
    assert rows.equals(drawn(work)) and not rows.equals(drawn(work.model_copy(update={"seed": 4})))
    assert rows["prompt_tokens"].is_between(8, 60).all() and rows["output_tokens"].is_between(2, 8).all()
    assert rows["arrival_ns"].is_sorted() and rows["priority"].null_count() == 6
    more = {"requests": 200, "prefixes": {"groups": 2, "tokens": 40, "share": 0.5}, "priorities": [0, 5]}
    many = drawn(type(work).model_validate(work.model_dump() | more))
    shared = many.drop_nulls("prefix_blocks")
    assert 70 <= shared.height <= 130 and set(many["priority"]) == {0, 5}
    # Whole blocks of 16 of the 40 tokens, before a prompt of 8 to 60.
    assert set(shared["prefix_blocks"].list.len()) == {2} and shared["prefix_blocks"].n_unique() == 2
    assert shared["prompt_tokens"].is_between(40, 92).all()
    trace = write(work, tmp_path / "w.trace", tmp_path)
    assert trace.rows("requests") == 6


def test_work_of_a_trace_is_capped_and_sped_up(recipe: Path, tmp_path: Path) -> None:
    text = TINY.replace(
        "requests = 6\nrate_per_s = 6\n", 'trace = "azure-2023-conv"\nlimit = 20\nrate = 2\nmax_prompt_tokens = 90\n'
    )
    recipe.write_text("\n".join(x for x in text.splitlines() if not x.startswith(("prompt =", "output ="))))
    got = write(read(recipe).workloads["few"], tmp_path / "w.trace", tmp_path).table("requests").collect()
    whole = (
        hoptrace.open(ROOT / "sample_traces" / "azure-2023-conv.trace").table("requests").collect().sort("arrival_ns", "request")
    )
    assert got.height == 20 and got["prompt_tokens"].max() == 90
    assert got["arrival_ns"][19] == (whole["arrival_ns"][19] - whole["arrival_ns"][0]) // 2
    assert got["output_tokens"].to_list() == whole["output_tokens"][:20].to_list()


# -- gauges ----------------------------------------------------------------------------------------------------------------

STAT = """cpu  100 0 100 900 0 0 0 0 0 0
cpu0 30 1 20 400 7 2 3 11 0 0
cpu1 50 4 30 300 9 5 6 13 40 2
cpu11 9 9 9 9 9 9 9 9 9 9
intr 1 2 3
"""


def test_busy_and_stolen_time_of_cores() -> None:
    tick = 10**9 // os.sysconf("SC_CLK_TCK")
    # user + nice + system + irq + softirq; guest time stands in user already.
    assert busy_of(STAT, [0]) == (56 * tick, 11 * tick)
    assert busy_of(STAT, [1]) == (95 * tick, 13 * tick)
    assert busy_of(STAT, [0, 1]) == (151 * tick, 24 * tick)


def test_shares_of_others_and_what_they_allow() -> None:
    a = Sample(time_ns=0, busy_ns=5_000, steal_ns=10, servers_ns=0, own_ns=0)
    b = Sample(time_ns=10_000, busy_ns=13_000, steal_ns=510, servers_ns=6_000, own_ns=7_000)
    # Of two cores for 10 µs: busy 8, own 7, so others 1 of 20; stolen 0.5 of 20.
    assert between(a, b, 2) == {"foreign_share": 0.05, "steal_share": 0.025, "server_cpu_s": 0.0}
    gauges = {"foreign_share": 0.05, "steal_share": 0.025, "probe_before_ns": 100, "probe_after_ns": 110, "failed": 0}
    assert verdict(gauges, Bounds()) == []
    assert verdict(gauges | {"foreign_share": 0.11}, Bounds()) == ["others took 11.0% of the servers' cores, 10.0% is allowed"]
    assert verdict(gauges | {"steal_share": 0.2}, Bounds()) == ["the hypervisor kept 20.0% of them, 5.0% is allowed"]
    (slower,) = verdict(gauges | {"probe_after_ns": 120}, Bounds())
    assert slower == "the probe after differs by 20.0% from the one before, 15.0% is allowed"
    assert len(verdict(gauges | {"probe_after_ns": 80}, Bounds())) == 1
    assert verdict(gauges | {"failed": 2}, Bounds()) == ["2 requests failed"]


def test_the_servers_own_time_is_told_from_that_of_others(tmp_path: Path) -> None:
    """A process that burns 0.3 s of CPU, once as the server and once as somebody else."""
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True); time.sleep(60)"
    log = tmp_path / "log"
    cpu = min(os.sched_getaffinity(0))
    found = {}
    for role in ("server", "other"):
        log.unlink(missing_ok=True)
        idle = spawn([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "idle")
        gauge = None
        if role == "other":
            gauge = Gauge([cpu], [idle.pid], client_too=False)
        process = spawn([sys.executable, "-c", burn], log, cpus=[cpu])
        if gauge is None:
            gauge = Gauge([cpu], [process.pid], client_too=False)
        while "done" not in log.read_text():
            time.sleep(0.05)
        found[role] = gauge.read()
        end(process)
        end(idle)
    assert 0.2 <= found["server"]["server_cpu_s"] <= 0.6
    assert found["other"]["server_cpu_s"] <= 0.1 and found["other"]["foreign_share"] > 0


def test_children_end_with_all_that_came_of_them(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        "print('up', flush=True); time.sleep(60)"
    )
    process = spawn([sys.executable, "-c", script], tmp_path / "log")
    while "up" not in (tmp_path / "log").read_text():
        time.sleep(0.05)
    family = tree(process.pid)
    assert len(family) == 2
    end(process)
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family)


# -- what is done, and what a kill leaves ----------------------------------------------------------------------------------


def _recorded(part: Path) -> None:
    part.mkdir()
    (part / "manifest.json").write_text("{}")


def test_a_run_is_done_when_its_gauges_are_written_and_not_before(tmp_path: Path) -> None:
    folder, run = Folder(tmp_path / "cell"), Run(0, "a")
    _recorded(folder.begin(run))
    assert folder.told(run) is None  # killed while it was recorded
    assert not folder.begin(run).exists()
    _recorded(folder.begin(run))
    os.replace(folder.path / "00-a.part" / "run.trace", folder.trace(run))
    assert folder.told(run) is None  # killed between the trace and its gauges
    _recorded(folder.begin(run))
    assert not folder.trace(run).exists()
    folder.keep(run, {"accepted": True})
    assert folder.told(run) == {"accepted": True} and sorted(x.name for x in folder.path.iterdir()) == [
        "00-a.run.json",
        "00-a.trace",
    ]


def test_a_rejected_attempt_is_kept_aside_and_counted(tmp_path: Path) -> None:
    folder, run = Folder(tmp_path / "cell"), Run(2, "a")
    for attempt in (1, 2):
        _recorded(folder.begin(run))
        folder.reject(run, {"attempt": attempt, "accepted": False, "why": "others took 30 %"})
        assert folder.rejected(run) == attempt and folder.told(run) is None
    assert sorted(x.name for x in (folder.path / "rejected").iterdir()) == [
        "02-a-1.run.json", "02-a-1.trace", "02-a-2.run.json", "02-a-2.trace",
    ]  # fmt: skip
    assert folder.rejected(Run(2, "a-b")) == 0


def test_runs_of_another_recipe_are_not_gone_on_with(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "cell")
    folder.same({"a": {"workload": 1, "flags": [1]}})
    folder.same({"a": {"workload": 2, "flags": [1]}})  # nothing was run yet
    _recorded(folder.begin(Run(0, "a")))
    folder.keep(Run(0, "a"), {})
    folder.same({"a": {"workload": 2, "flags": [1]}, "b": {"workload": 2}})
    with pytest.raises(InputError, match="runs of a under another recipe: its flags has changed"):
        folder.same({"a": {"workload": 2, "flags": [2]}})


# -- the router ------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _server(seen: list[Any], name: str) -> web.Application:
    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        seen.append((name, request.headers.get("x-request-id"), body))
        if not body["stream"]:
            return web.json_response({"kv_transfer_params": {"blocks": [7]}})
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        await out.write(f"data: {name}\n\n".encode())
        return out

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name}]})

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/v1/models", models)
    return app


@pytest.mark.parametrize("split", [False, True])
async def test_a_router_takes_turns_or_hands_kv_over(split: bool) -> None:
    seen: list[Any] = []
    body = {"prompt": [1], "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}
    async with (
        serving(_server(seen, "p")) as p, serving(_server(seen, "d")) as d, serving(application([p, d], split=split)) as r,
        aiohttp.ClientSession() as c,
    ):  # fmt: skip
        async with c.get(f"{r}/v1/models") as a:
            assert (await a.json())["data"][0]["id"] == "p"
        said = []
        for i in range(2):
            async with c.post(f"{r}/v1/completions", json=body, headers={"x-request-id": f"r{i}"}) as a:
                said.append(await a.text())
    if not split:
        assert said == ["data: p\n\n", "data: d\n\n"]
        assert seen == [("p", "r0", body), ("d", "r1", body)]
        return
    assert said == ["data: d\n\n"] * 2
    (first, _, asked), (second, name, handed) = seen[:2]
    assert (first, second, name) == ("p", "d", "r0")
    assert (asked["max_tokens"], asked["stream"], "stream_options" in asked) == (1, False, False)
    assert asked["kv_transfer_params"]["do_remote_decode"] is True
    assert handed == body | {"kv_transfer_params": {"blocks": [7]}}


# -- the command -----------------------------------------------------------------------------------------------------------


def _run(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(FIDELITY / "run.py"), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, env=os.environ | (env or {}), timeout=120, check=False)


def test_mistakes_are_told_in_a_sentence(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("fidelity_run", FIDELITY / "run.py")
    assert spec and spec.loader
    command = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(command)
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def told(*arguments: str) -> tuple[int, str]:
        return command.main([str(recipe), "-o", str(tmp_path / "o"), *arguments]), capsys.readouterr().err

    assert told("--only", "big") == (2, "Error: There is no cell 'big' in the recipe.\nHint: There are: tiny.\n")
    recipe.write_text(TINY.replace("parallel = 2", "cache-type-k = 'q7'"))
    code, words = told("--no-table")
    assert code == 4 and "invalid choice: 'q7'" in words and "Hint: Its log is" in words
    recipe.write_text(TINY.replace("llamacpp", "vllm").replace("parallel", "max-num-seqs").replace("cells.tiny", "cells.other"))
    monkeypatch.delenv("HOPTRACE_VLLM_PYTHON", raising=False)
    code, words = told()
    assert code == 4 and "HOPTRACE_VLLM_PYTHON names no Python that has vLLM." in words
    monkeypatch.setenv("HOPTRACE_VLLM_PYTHON", "/nowhere/python")
    code, words = told()
    assert code == 4 and "HOPTRACE_VLLM_PYTHON is /nowhere/python, and that is not there." in words


@pytest.mark.server
@pytest.mark.parametrize(
    ("said", "granted"), [(errno.EINVAL, True), (errno.EROFS, True), (errno.EAGAIN, True), (errno.EPERM, False)]
)
def test_a_task_in_the_root_autogroup_keeps_its_nice_value(monkeypatch: pytest.MonkeyPatch, said: int, granted: bool) -> None:
    # A session that init started without setsid(2) is in the root group: Linux answers EINVAL to every weight there.
    def refused(*_: object) -> int:
        raise OSError(said, os.strerror(said))

    monkeypatch.setattr(Path, "write_text", refused)
    assert grant(0, os.getpriority(os.PRIO_PROCESS, 0)) is granted


def test_a_whole_cell_killed_in_the_middle_and_gone_on_with(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [sys.executable, str(FIDELITY / "run.py"), str(recipe), "-o", str(out), "--no-table"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(words, stderr=log)
    first = out / "tiny" / "00-slots-2.run.json"
    family: list[psutil.Process] = []
    # Killed while the second policy's server is up.
    while not (first.exists() and (out / "servers" / "slots-1" / "0" / "server.log").exists()):
        assert process.poll() is None, (tmp_path / "log").read_text()
        family = tree(process.pid)
        time.sleep(0.1)
    family = list({*family, *tree(process.pid)})
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 130 and "goes on from here" in (tmp_path / "log").read_text()
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family)
    gauges, kept = json.loads(first.read_text()), first.stat().st_mtime_ns
    assert (gauges["policy"], gauges["round"], gauges["attempt"], gauges["accepted"]) == ("slots-2", 0, 1, True)
    assert (gauges["requests"], gauges["failed"]) == (6, 0)
    assert gauges["server_cpu_s"] > 0 and gauges["steps"] > 5 and gauges["probe_before_ns"] > 0
    done = _run(recipe, "-o", out, "--no-table")
    assert done.returncode == 0 and "tiny: 1 of 2 runs are done" in done.stderr, done.stderr
    assert first.stat().st_mtime_ns == kept
    a, b = (hoptrace.open(out / "tiny" / f"00-{p}.trace") for p in ("slots-2", "slots-1"))
    assert (a.manifest.servers[0].max_sequences, b.manifest.servers[0].max_sequences) == (2, 1)
    assert [t.manifest.servers[0].config["parallel"] for t in (a, b)] == [2, 1]  # its own flags, as llama.cpp's
    asked = hoptrace.open(out / "tiny" / "work.trace").table("requests").collect().sort("request")
    for trace in (a, b):
        rows = trace.table("requests").collect().sort("request_id")
        assert rows["request_id"].to_list() == [f"hoptrace-fidelity-{i}" for i in range(6)]
        assert rows["prompt_tokens"].to_list() == asked["prompt_tokens"].to_list()
        assert rows["output_tokens"].to_list() == asked["output_tokens"].to_list()
        assert trace.table("stages").collect()["cached_tokens"].sum() == 0  # slots were cleared


# -- the table -------------------------------------------------------------------------------------------------------------


def _row(i: int, policy: str, errors: dict[str, float], noise: float | None = None, **more: Any) -> dict[str, Any]:
    """One round as `evaluate` gives it; figures that ``errors`` does not name are exact."""
    figures = {
        f"{m} {s}": {
            "error_pct": errors.get(f"{m} {s}", 0.0), "noise_pct": noise, "at_speed_pct": None,
            "next_at_speed_pct": errors.get(f"{m} {s}", 0.0),
            "covered": more.get("covered"), "sign": more.get("sign"),
        }
        for m, s in FIGURES
    }  # fmt: skip
    count = {"observed": 100, "predicted": more.get("cached", 100), "requests": 9, "equal_requests": more.get("equal", 9)}
    terms = {
        "steps": {"equal_share": 0.9, "error_pct": 1.0},
        "cached_tokens": count,
        "preemptions": {"observed": 0, "predicted": 0},
    }
    return {"round": i, "policy": policy, "own_terms": terms, "figures": figures, "speed": 1.1, "speed_of_next": 1.0}


ROWS = [
    _row(0, "a", {"e2e p50": 1.0}, noise=-3.0), _row(1, "a", {"e2e p50": -9.0}, noise=5.0), _row(2, "a", {"e2e p50": 1.5}),
    _row(0, "b", {"e2e p50": -2.0, "e2e p95": 7.0}, covered=True, sign="right"),
    _row(1, "b", {"e2e p50": 2.5, "e2e p95": 6.5}, covered=False, sign="wrong", cached=99),
    {"round": 2, "policy": "b", "why": "void: others took 30.0% of the servers' cores"},
]  # fmt: skip


def test_a_cell_is_the_median_of_its_rounds_and_not_measured_beyond_the_noise() -> None:
    own, other = (summary(p, "a", ROWS, 2, "all") for p in ("a", "b"))
    assert own["figures"]["e2e p50"] == {
        "error_pct": {"median": 1.0, "low": -9.0, "high": 1.5}, "at_speed_pct": {"median": 1.0, "low": -9.0, "high": 1.5},
        "in_sample_pct": {"median": 1.0, "low": -9.0, "high": 1.5}, "noise_pct": 4.0, "target_pct": 2, "verdict": "met",
        "beyond_noise": False,
    }  # fmt: skip
    assert other["figures"]["e2e p50"]["error_pct"] == {"median": 0.25, "low": -2.0, "high": 2.5}
    assert other["figures"]["e2e p95"] | {"at_speed_pct": 0} == {
        "error_pct": {"median": 6.75, "low": 6.5, "high": 7.0}, "at_speed_pct": 0, "noise_pct": 4.0, "target_pct": 6,
        "in_sample_pct": None, "verdict": "missed", "beyond_noise": False,
    }  # fmt: skip
    # A floor of exactly twice the target is still measured (throughput: 2 %), one above it is not.
    assert other["figures"]["throughput output tokens"]["verdict"] == "met"
    assert summary("a", "a", ROWS[1:3], 2, "all")["figures"]["e2e p50"]["verdict"] == "not measured"
    assert summary("a", "a", ROWS[2:3], 2, "all")["figures"]["e2e p50"]["verdict"] == "not measured"  # no neighbour, no floor
    assert other["figures"]["itl p99"]["verdict"] is None
    assert (other["rounds"], other["void"]) == (2, {2: "void: others took 30.0% of the servers' cores"})
    assert (other["cached_exact"], own["cached_exact"]) == (False, True)
    assert other["covered"] == [7, 14] and other["signs"] == {"right": 7, "wrong": 7, "within noise": 0}
    assert summary("b", "a", ROWS, 2, "proxy")["figures"]["e2e p95"]["target_pct"] == 9
    assert summary("b", "a", ROWS, 1, "all")["figures"]["ttft p95"]["target_pct"] == 1


def test_the_own_policy_is_judged_by_the_next_run_and_not_by_the_one_it_was_calibrated_on() -> None:
    row = _row(0, "a", {"e2e p50": 9.0}, noise=0.5)
    row["figures"]["e2e p50"]["error_pct"] = 0.0  # in sample: a step cost of one constant gives that
    found = summary("a", "a", [row], 2, "all")
    assert found["figures"]["e2e p50"]["verdict"] == "missed"
    cell = {"use": "report", "policies": {"a": found}, "gauges": {"foreign_share": None}}
    text = markdown({"cells": {"c": cell}, "overall": {"report": overall({"c": cell}, "report")}})
    assert "| c | a (own) | 1 | +9.0 ± 0.5 ! |" in text and "| c | *(in sample)* | 1 | +0.0 |" in text


def test_the_table_shows_what_was_missed_and_what_was_left_out() -> None:
    gauges = {"foreign_share": {"median": 0.02, "low": 0.01, "high": 0.04}}
    cell = {"use": "report", "policies": {p: summary(p, "a", ROWS, 2, "all") for p in ("a", "b")}, "gauges": gauges}
    cells = {"c": cell, "d": cell | {"use": "develop"}}
    whole = overall(cells, "report")
    assert whole["changed"]["cells"] == ["c b"] and whole["changed"]["covered"] == [7, 14]
    assert whole["changed"]["figures"]["e2e p95"] == {
        "error_pct": 6.75, "cells": 1, "not_measured": 0, "beyond_noise": 0, "met": 0,
    }  # fmt: skip
    text = markdown({"cells": cells, "overall": {"report": whole, "develop": overall(cells, "develop")}})
    assert text.index("## Cells to report") < text.index("## Cells that were developed on")
    assert "| c | b | 2 | +0.2 (-2.0 … +2.5) ± 4.0 | +6.8 (+6.5 … +7.0) ± 4.0 ! | +0.0 ± 4.0 | +0.0 ± 4.0 |" in text
    assert "e2e p95 6.8 % (0 of 1 met)" in text and "Within the 90 % interval: 7 of 14 figures (50%)." in text
    assert "c left out: b, round 2: void: others took 30.0% of the servers' cores." in text
    assert "100, 100; 100, 99" in text


def test_what_noise_hides_is_counted_and_an_error_beyond_it_is_marked() -> None:
    """Twice the target is 6 %: of a floor of 8 % nothing is judged, but 30 % off is no luck of it."""
    rows = [_row(0, "a", {}, noise=8.0), _row(0, "b", {"e2e p50": -30.0, "tpot p50": 10.9}, sign="right", covered=True)]
    b = summary("b", "a", rows, 2, "all")
    found = {n: (f["verdict"], f["beyond_noise"]) for n, f in b["figures"].items() if n in ("e2e p50", "tpot p50")}
    assert found == {"e2e p50": ("not measured", True), "tpot p50": ("not measured", False)}
    cells = {
        "c": {"use": "report", "policies": {"a": summary("a", "a", rows, 2, "all"), "b": b}, "gauges": {"foreign_share": None}}
    }
    whole = overall(cells, "report")
    assert whole["changed"]["figures"]["e2e p50"] == {
        "error_pct": None, "cells": 0, "not_measured": 1, "beyond_noise": 1, "met": 0,
    }  # fmt: skip
    text = markdown({"cells": cells, "overall": {"report": whole}})
    assert "| -30.0 ± 8.0 ?! |" in text and "| +10.9 ± 8.0 ? |" in text
    assert "e2e p50 not measured, 1 beyond target and floor; e2e p95 0.0 % (1 of 1 met); " in text
    # Beside cells that are judged, those that are not are counted too.
    quiet = summary("b", "a", [_row(0, "a", {}, noise=1.0), _row(0, "b", {"e2e p50": 2.0})], 2, "all")
    some = {"c": cells["c"], "d": {**cells["c"], "policies": {"b": quiet}}}
    text = markdown({"cells": some, "overall": {"report": overall(some, "report")}})
    assert "e2e p50 2.0 % (1 of 1 met; 1 not measured, of these 1 beyond target and floor)" in text


def test_unknown_cached_tokens_are_not_exact_and_equal_sums_of_other_requests_neither() -> None:
    def cached(**of: Any) -> Any:
        row = _row(0, "a", {})
        row["own_terms"]["cached_tokens"] |= of
        return summary("a", "a", [row], 2, "all")["cached_exact"]

    assert cached() is True and cached(equal_requests=7) is False and cached(predicted=99) is False
    assert cached(observed=None, predicted=None, requests=0, equal_requests=0) is None
    cell = {
        "use": "report",
        "policies": {"a": summary("a", "a", [_row(0, "a", {})], 2, "all")},
        "gauges": {"foreign_share": None},
    }
    unknown = [_row(0, "a", {})]
    unknown[0]["own_terms"]["cached_tokens"] = {"observed": None, "predicted": None, "requests": 0, "equal_requests": 0}
    cells = {"c": cell, "d": cell | {"policies": {"a": summary("a", "a", unknown, 2, "all")}}}
    whole = overall(cells, "report")
    assert whole["own"]["cached_exact"] == [1, 1]
    text = markdown({"cells": cells, "overall": {"report": whole}})
    assert "Cached tokens exact in 1 of 1 that tell." in text and "| unknown, unknown |" in text


def test_a_sign_counts_beyond_the_noise_of_all_rounds() -> None:
    """Noise of 1 and 5 %: a change of 3 % is none, though the first round's own noise was less; one of 20 % the wrong way is."""
    rows = [_row(0, "a", {}, noise=1.0), _row(1, "a", {}, noise=-5.0), *(_row(i, "b", {}, sign="wrong") for i in (0, 1))]
    for row, ratio in zip(rows[2:], (1.03, 0.8), strict=True):
        for figure in row["figures"].values():
            figure |= {"observed_ratio": ratio, "predicted_ratio": 1.1}
    assert summary("b", "a", rows, 2, "all")["signs"] == {"right": 0, "wrong": 7, "within noise": 7}
    rows[3]["figures"]["e2e p50"]["predicted_ratio"] = 0.9
    assert summary("b", "a", rows, 2, "all")["signs"] == {"right": 1, "wrong": 6, "within noise": 7}
    assert summary("b", "a", rows[2:], 2, "all")["signs"] == {"right": 0, "wrong": 14, "within noise": 0}  # no noise is known


def test_figures_without_an_interval_are_counted_beside_those_within() -> None:
    rows = [_row(0, "a", {}, noise=1.0), _row(0, "b", {}, covered=True), _row(1, "b", {})]
    for row in rows[1:]:
        for figure in row["figures"].values():
            del figure["noise_pct"]
            figure["observed"] = 1.0
    a, b = (summary(p, "a", rows, 2, "all") for p in ("a", "b"))
    assert (b["covered"], b["without_interval"]) == ([7, 7], 7)
    assert a["without_interval"] == 7 and summary("a", "a", [_row(0, "a", {})], 2, "all")["without_interval"] == 0  # no next run
    cells = {"c": {"use": "report", "policies": {"a": a, "b": b}, "gauges": {"foreign_share": None}}}
    text = markdown({"cells": cells, "overall": {"report": overall(cells, "report")}})
    assert "Within the 90 % interval: 7 of 7 figures (100%). 7 more have no interval." in text
