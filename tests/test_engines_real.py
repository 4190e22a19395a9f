"""Real servers, described and followed: llama.cpp, and vLLM on the CPU (skipped without HOPTRACE_VLLM_PYTHON)."""

from __future__ import annotations

import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support import vllm_server

import hoptrace
from hoptrace.collectors.attached import attached
from hoptrace.collectors.context import Options
from hoptrace.collectors.engines.vllm_log import FLAG, step_of
from hoptrace.demo_server import DemoServer
from hoptrace.validate import validate


def rows(out: Path, table: str) -> list[dict[str, Any]]:
    return hoptrace.open(out).table(table).collect().to_dicts()


def grown(out: Path, name: str) -> float:
    """How far a counter grew in a trace, over all its series."""
    found = hoptrace.open(out).table("counters").filter(pl.col("name").str.split("{").list.first() == name).collect()
    value = pl.coalesce(pl.col("value_int").cast(pl.Float64), "value_float")
    return float(found.group_by("name").agg((value.max() - value.min()).alias("grown"))["grown"].sum())


@pytest.mark.server
def test_a_real_llamacpp(model: Path, tmp_path: Path) -> None:
    """Its log, followed, says of each request what its metrics say of all."""
    out = tmp_path / "t.trace"
    with DemoServer(model, slots=2, log=tmp_path / "log") as server:
        with attached(server.url, out) as session:
            findings = session.findings
            for n in (6, 9):
                body = f'{{"prompt": "Once upon a time", "n_predict": {n}, "ignore_eos": true}}'.encode()
                with urllib.request.urlopen(urllib.request.Request(server.url + "/completion", body)) as answer:
                    answer.read()
            time.sleep(0.5)
        pid = server.pid
    assert findings["llamacpp-log"].available and findings["llamacpp-slots"].available
    (told,) = hoptrace.open(out).manifest.servers
    assert (told.engine, told.max_sequences, told.context_tokens) == ("llama.cpp", 2, 2048)
    assert told.config["kv_unified"] is False and told.kv_capacity_tokens == 4096, "as the beginning of its log says"
    assert (told.layers, told.heads, told.kv_heads, told.head_size) == (30, 9, 3, 64)
    logged = {r["name"]: r for r in rows(out, "counters") if r["source"] == "llamacpp-log"}
    decoded = [r["value_int"] for r in rows(out, "counters") if r["name"] == "log:decode_tokens"]
    assert sorted(decoded) == [6, 9] and sum(decoded) == grown(out, "llamacpp:tokens_predicted_total")
    assert all(0 <= r["uncertainty_ns"] <= 10**9 for r in logged.values())
    assert {r["entity"] for r in rows(out, "counters") if r["entity"].startswith("process:")} == {f"process:{pid}"}
    assert not [f for f in validate(hoptrace.open(out)) if f.level == "error"]


@pytest.mark.vllm
@pytest.mark.skipif(vllm_server.python() is None, reason="needs HOPTRACE_VLLM_PYTHON: a Python that has vLLM")
def test_a_real_vllm(tmp_path: Path) -> None:
    """Without the plug-in: configuration, processes, metrics, KV events, each step from the log, a restart with other flags."""
    out, port = tmp_path / "t.trace", vllm_server.free_port()
    events = '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:0"}'
    flags = ("--max-num-seqs", "8", "--max-num-batched-tokens", "512", "--kv-events-config", events, FLAG)
    env = {"HOPTRACE_VLLM": "0"}
    options = Options(log=tmp_path / "vllm.log")

    def load(server: Any, prompts: int) -> None:
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(server.complete, list(range(10 + i, 110 + i)), 20) for i in range(prompts)]
            assert all(len(a.result()["choices"][0]["token_ids"]) == 20 for a in asked)

    first = vllm_server.start(tmp_path, *flags, env=env, port=port).wait()
    try:
        with attached(first.url, out, options=options) as session:
            findings = dict(session.findings)
            load(first, 8)
            time.sleep(2.0)
            first.kill()
            second = vllm_server.start(tmp_path, "--max-num-seqs", "4", FLAG, env=env, port=port)
            try:
                second.wait()
                load(second, 3)
                time.sleep(3.0)
            finally:
                second.kill()
    finally:
        first.kill()
    trace = hoptrace.open(out)
    (told,) = trace.manifest.servers
    assert (told.engine, told.engine_version, told.model) == ("vllm", "0.32.0", "toy")
    assert (told.max_sequences, told.max_batched_tokens, told.context_tokens, told.block_size_tokens) == (8, 512, 2048, 32)
    assert told.kv_capacity_tokens == told.block_count * 32  # type: ignore[operator]
    assert (told.layers, told.heads, told.kv_heads, told.head_size, told.kv_dtype) == (1, 2, 1, 32, "float32")
    assert told.config["processes"] == {"api": 1, "engine": 1, "worker": 1}
    assert {n for n, f in findings.items() if f.available} >= {"vllm-metrics", "vllm-log", "kv-events", "process"}
    assert not findings["vllm-plugin"].available
    # Every step of both lives, numbered on. The log of the second life begins the file anew.
    steps = sorted(rows(out, "steps"), key=lambda r: r["step"])
    assert {s["source"] for s in steps} == {"vllm-log"} and {s["server"] for s in steps} == {"vllm"}
    assert [s["step"] for s in steps] == list(range(len(steps)))
    assert all(a["end_ns"] <= b["start_ns"] for a, b in pairwise(steps))
    ended = 8 * 20 + 3 * 20
    assert sum(s["decode_tokens"] for s in steps) + sum(1 for _ in range(8 + 3)) == ended, "each prompt's last chunk emits one"
    last = [s for line in (tmp_path / "vllm.log").read_text().splitlines() if (s := step_of(line))]
    assert [s["end_ns"] - s["start_ns"] for s in steps[-len(last) :]] == [s[2] for s in last]
    # The server's own totals.
    assert grown(out, "vllm:generation_tokens_total") >= 8 * 20
    incarnations = {r["incarnation"] for r in rows(out, "counters") if r["source"] == "vllm-metrics"}
    assert incarnations == {"vllm#1", "vllm#2"}
    kinds = [e["kind"] for e in rows(out, "events") if e["source"] == "session"]
    assert kinds.count("restart") == 1 and kinds.count("configuration change") == 1
    change = next(e["detail"] for e in rows(out, "events") if e["kind"] == "configuration change")
    assert "max_sequences: 8 -> 4" in change
    roles = [e["detail"] for e in rows(out, "events") if e["kind"] == "process"]
    assert sum("engine (VLLM::EngineCore)" in r for r in roles) == 2 and sum("worker (VLLM::Worker)" in r for r in roles) == 2
    seen = {r["entity"] for r in rows(out, "counters") if r["name"] == "cpu_user_ns"}
    assert len(seen) == 8, "four processes, twice"
    assert not [f for f in validate(hoptrace.open(out)) if f.level == "error"], validate(hoptrace.open(out))


@pytest.mark.vllm
@pytest.mark.skipif(vllm_server.python() is None, reason="needs HOPTRACE_VLLM_PYTHON: a Python that has vLLM")
def test_steps_of_the_log_are_those_of_the_plug_in(tmp_path: Path) -> None:
    """The same steps seen twice: from inside, with their own times, and from the log, looked at ten times a second."""
    channels, inside, outside = tmp_path / "channels", tmp_path / "inside.trace", tmp_path / "outside.trace"
    server = vllm_server.start(tmp_path, FLAG, "--max-num-seqs", "8", env={"HOPTRACE_CHANNELS": str(channels)}).wait()
    try:
        server.complete(list(range(40)), 4)
        log = Options(channels=tmp_path / "none", log=server.log)
        with (
            attached(server.url, inside, options=Options(channels=channels)) as a,
            attached(server.url, outside, options=log, pid=None),
            ThreadPoolExecutor(6) as pool,
        ):
            assert a.findings["vllm-plugin"].available, a.findings
            time.sleep(0.5)
            list(pool.map(lambda i: server.complete(list(range(i, i + 60)), 30 + i), range(18)))
            time.sleep(2.0)
    finally:
        server.kill()
    truth = sorted((r for r in rows(inside, "steps") if r["source"] == "vllm-plugin"), key=lambda r: r["step"])
    logged = sorted(rows(outside, "steps"), key=lambda r: r["step"])
    assert {r["source"] for r in rows(inside, "steps")} == {"vllm-plugin"}, "the log is only read for its summaries then"
    assert len(truth) == len(logged) > 100
    names = ("prefill_requests", "prefill_tokens", "decode_requests", "decode_tokens")
    assert [[r[n] for n in names] for r in logged] == [[r[n] for n in names] for r in truth]
    off = sorted(abs(b["end_ns"] - a["end_ns"]) / 1e6 for a, b in zip(truth, logged, strict=True))
    lengths = [
        abs((b["end_ns"] - b["start_ns"]) - (a["end_ns"] - a["start_ns"])) / 1e6 for a, b in zip(truth, logged, strict=True)
    ]
    print(f"ends of {len(off)} steps from the log: off by {off[len(off) // 2]:.1f} ms p50, {off[len(off) * 95 // 100]:.1f} p95")
    assert max(lengths) < 0.01, "lengths are printed to a hundredth of a millisecond"
    assert off[-1] < 1000, "a beat, and what a busy machine adds"
