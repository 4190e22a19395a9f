"""The plug-in in a real vLLM on the CPU, against vLLM's log, metrics and answers. Needs HOPTRACE_VLLM_PYTHON; some minutes."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support import rings, vllm_server

from hoptrace.collectors.base import Finding
from hoptrace.collectors.engines.vllm_channel import SCHEDULER, VllmChannel, config_of
from hoptrace.collectors.engines.vllm_rings import records_of
from hoptrace.collectors.hardware.listener import find_listener
from hoptrace.reader import Trace
from hoptrace.validate import validate

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(vllm_server.python() is None, reason="needs HOPTRACE_VLLM_PYTHON: a Python that has vLLM"),
]

DETAILS = "--enable-logging-iteration-details"
LINE = re.compile(
    r"Iteration\((\d+)\): (\d+) context requests, (\d+) context tokens, (\d+) generation requests, (\d+) generation tokens"
)


def lines_of(log: Path) -> list[tuple[int, ...]]:
    return [tuple(map(int, m)) for m in LINE.findall(log.read_text())]


@dataclass
class Sent:
    """One request as the client knows it."""

    name: str
    prompt: int
    output: int
    sequences: int = 1
    cached: int | None = None


@dataclass
class Story:
    """One capture over two lives of a server: watched scheduler, killed with -9 under load; then the stat logger alone."""

    trace: Trace | None = None
    logs: list[Path] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    dead: list[dict[str, Any]] = field(default_factory=list)
    killed_ns: int = 0
    preemptions: float = 0.0


def load(server: vllm_server.VllmServer, count: int, seed: int, sent: list[Sent]) -> None:
    """``count`` requests, some with a prefix in common, some with several sequences, eight at a time."""
    rnd = random.Random(seed)

    def one(i: int) -> None:
        shared = [7] * 96 if i % 3 == 0 else [rnd.randrange(3, 1000) for _ in range(96)]
        prompt = shared + [rnd.randrange(3, 1000) for _ in range(rnd.randrange(10, 200))]
        tokens, n = rnd.randrange(20, 120), 2 if i % 7 == 0 else 1
        name = f"r{seed}-{i}"
        more = {"n": n, "temperature": 1.0} if n > 1 else {}
        answer = server.complete(prompt, tokens, request_id=name, **more)
        assert answer["usage"]["completion_tokens"] == n * tokens
        details = answer["usage"].get("prompt_tokens_details") or {}
        sent.append(Sent(name, len(prompt), n * tokens, n, details.get("cached_tokens")))

    with ThreadPoolExecutor(10) as pool:
        for future in [pool.submit(one, i) for i in range(count)]:
            future.result()


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("vllm")
    env = {"HOPTRACE_CHANNELS": str(folder / "channels")}
    flags = [
        DETAILS, "--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--enable-prefix-caching", "--max-model-len", "1024",
        "--num-gpu-blocks-override", "41", "--enable-prompt-tokens-details",
    ]  # fmt: skip
    made = Story()
    port = vllm_server.free_port()
    url = f"http://127.0.0.1:{port}"
    server = vllm_server.start(folder, *flags, *SCHEDULER.split(), env=env, port=port, name="one")
    try:
        with rings.capture(folder, find=lambda: find_listener(url)) as capture:
            server.wait()
            made.logs.append(server.log)
            made.findings.append(_probe(capture))
            made.config = config_of(capture.ctx) or {}
            with rings.sampling(capture):
                load(server, 24, 1, made.sent)
                made.preemptions = _metric(server, "vllm:num_preemptions_total")
                channels = sorted((folder / "channels").glob("*.ring"))
                hopeless = threading.Thread(target=_suppressed, args=(server, 40))
                hopeless.start()
                time.sleep(1.5)
                server.kill()
                made.killed_ns = capture.writer.clock.now_ns()
                hopeless.join()
                made.dead = [r for path in channels for r in records_of(path)]
                capture.channel.restarted()
                server = vllm_server.start(folder, *flags, env=env, port=port, name="two").wait()
                made.logs.append(server.log)
                made.findings.append(_probe(capture))
                load(server, 12, 2, made.sent)
                time.sleep(1.5)
        made.trace = capture.trace
        server.kill()
        yield made
    finally:
        server.kill()


def _probe(capture: rings.Capture) -> Finding:
    import asyncio

    return asyncio.run(VllmChannel(capture.ctx).probe())


def _suppressed(server: vllm_server.VllmServer, count: int) -> None:
    with suppress(Exception):
        load(server, count, 3, [])


def _metric(server: vllm_server.VllmServer, name: str) -> float:
    return sum(float(line.rsplit(" ", 1)[1]) for line in server.get("/metrics").splitlines() if line.startswith(name + "{"))


def _steps(story: Story) -> pl.DataFrame:
    assert story.trace is not None
    return story.trace.table("steps").sort("step").collect()


def test_probe_says_what_is_there(story: Story) -> None:
    watched, alone = story.findings
    assert watched == Finding(True)
    assert alone.available and alone.reason is not None and SCHEDULER in alone.reason
    told = {k: story.config[k] for k in ("model", "layers", "heads", "kv_heads", "head_size", "hidden_size", "max_sequences")}
    assert told == {
        "model": "toy", "layers": 1, "heads": 2, "kv_heads": 1, "head_size": 32, "hidden_size": 64, "max_sequences": 8,
    }  # fmt: skip
    assert story.config["max_batched_tokens"] == 128 and story.config["context_tokens"] == 1024
    assert story.config["block_size_tokens"] == 32 and story.config["block_count"] == 40
    assert story.config["kv_capacity_tokens"] == 1280 and story.config["iteration_details"] is True
    assert story.config["prefix_caching"] is True and story.config["kv_dtype"] == "float32"


def test_steps_are_the_logs_lines_one_for_one(story: Story) -> None:
    """What vLLM had logged when it was killed is in the trace, and numbers go on over the restart."""
    first, second = (lines_of(log) for log in story.logs)
    steps = _steps(story)
    composition = ["step", "prefill_requests", "prefill_tokens", "decode_requests", "decode_tokens"]
    rows = steps.select(composition).rows()
    assert [r[0] for r in first] == list(range(len(first))) and len(first) > 300
    before = steps.filter(pl.col("start_ns") < story.killed_ns).height
    # The engine lives a moment longer than its API server: its last steps were never told of.
    assert len(first) <= before <= len(first) + 100
    base = rows[before][0]
    assert base == before
    assert rows[before:] == [(base + n, *rest) for n, *rest in second]
    resumed = [(a, b) for a, b in zip(rows, first, strict=False) if a != b]
    # vLLM counts a request that was preempted and computes its prompt again as a generation request; hoptrace as a chunk.
    for ours, theirs in resumed:
        assert ours[0] == theirs[0] and ours[1] + ours[3] == theirs[1] + theirs[3] and ours[2] + ours[4] == theirs[2] + theirs[4]
        assert ours[1] > theirs[1]
    assert len(resumed) <= story.preemptions * 10
    assert story.trace is not None
    heard = sum("i" in r for r in story.dead)
    assert len(first) <= heard <= len(first) + 1
    assert any(f"{heard} steps are told alike" in note for note in story.trace.manifest.notes), story.trace.manifest.notes


def test_every_step_reported_before_the_kill_is_in_the_channel(story: Story) -> None:
    told = [r["i"][:5] for r in story.dead if "i" in r]
    assert [tuple(t) for t in told][: len(lines_of(story.logs[0]))] == lines_of(story.logs[0])


def test_prompt_tokens_are_computed_or_found(story: Story) -> None:
    assert story.trace is not None
    stages = story.trace.table("stages").filter(pl.col("end_reason") == "done").collect()
    requests = story.trace.table("requests").filter(pl.col("finish_reason").is_not_null()).collect()
    named = {r["request_id"]: r for r in requests.iter_rows(named=True)}
    first = [s for s in story.sent if s.name.startswith("r1")]
    assert len(first) == 24
    for s in story.sent:
        row = named[f"cmpl-{s.name}"]
        assert (row["prompt_tokens"], row["output_tokens"]) == (s.prompt, s.output)
        stays = stages.filter(pl.col("request") == row["request"])
        assert stays.height == s.sequences, s
        if s.sequences == 1 and s.cached is not None:
            assert stays["cached_tokens"][0] == s.cached
        assert row["queued_ns"] <= row["scheduled_ns"] < row["engine_first_token_ns"] <= row["finish_ns"]
        assert row["received_ns"] <= row["queued_ns"]
    # Whole prompts of the first life: chunks + found = prompt + computed again after preemptions
    who = [named[f"cmpl-{s.name}"]["request"] for s in first]
    chunks = story.trace.table("residency").filter((pl.col("phase") == "chunk") & pl.col("request").is_in(who)).collect()
    computed = (chunks["tokens_per_step"] * (chunks["last_step"] - chunks["first_step"] + 1)).sum()
    own = stages.filter(pl.col("request").is_in(who))
    again = computed + own["cached_tokens"].sum() - sum(s.prompt * s.sequences for s in first)
    # A request that runs on after a preemption computes its next token in the same chunk as what it computes again.
    assert 0 <= again - own["recomputed_tokens"].fill_null(0).sum() <= story.preemptions


def test_preemptions_are_seen_when_they_happen(story: Story) -> None:
    assert story.trace is not None and story.preemptions > 0
    requests = story.trace.table("requests").collect()
    until = requests.filter(pl.col("request_id").str.starts_with("cmpl-r1-"))["finish_ns"].max()
    steps = _steps(story).filter(pl.col("end_ns") <= until)
    assert steps["preempted"].sum() == story.preemptions
    events = story.trace.table("events").filter((pl.col("kind") == "preemption") & (pl.col("time_ns") <= until)).collect()
    assert events.height == story.preemptions
    assert story.trace.table("residency").filter(pl.col("phase") == "preempted").collect().height > 0


def test_tokens_of_the_engine_are_the_outputs(story: Story) -> None:
    assert story.trace is not None
    requests = {r["request_id"]: r for r in story.trace.table("requests").collect().iter_rows(named=True)}
    tokens = story.trace.table("tokens").group_by("request").agg(pl.col("count").sum(), pl.col("time_ns").min()).collect()
    counted = {r["request"]: r for r in tokens.iter_rows(named=True)}
    for s in [s for s in story.sent if s.name.startswith("r1")]:
        row = requests[f"cmpl-{s.name}"]
        assert counted[row["request"]]["count"] == s.output
        assert counted[row["request"]]["time_ns"] == row["engine_first_token_ns"] == row["first_token_ns"]


def test_the_trace_keeps_the_laws(story: Story) -> None:
    assert story.trace is not None
    found = [f for f in validate(story.trace) if f.check != "coverage_present"]
    assert [f for f in found if f.level == "error"] == []
    assert story.trace.manifest.rows_dropped == {} and story.trace.manifest.values_dropped == {}


# -- a prefill and a decode server ------------------------------------------------------------------------------------


@dataclass
class Pair:
    trace: Trace
    bytes: float
    seconds: float
    descriptors: float
    count: float
    prompts: list[int]


def _quiet_nixl(folder: Path) -> Path:
    """NIXL's progress thread spins and can't be turned off by vLLM: this sitecustomize turns its default off, here only."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "try:\n    import nixl._api as a\n"
        "    f = a.nixl_agent_config.__init__\n"
        "    def init(self, *args, **kw):\n        kw.setdefault('enable_prog_thread', False)\n        f(self, *args, **kw)\n"
        "    a.nixl_agent_config.__init__ = init\nexcept Exception:\n    pass\n"
    )
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    quiet = _quiet_nixl(folder / "quiet")
    servers = []
    try:
        for role, side in (("kv_producer", "prefill"), ("kv_consumer", "decode")):
            env = {
                "HOPTRACE_CHANNELS": str(folder / "channels"), "PYTHONPATH": str(quiet), "UCX_TLS": "tcp,self",
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(vllm_server.free_port()),
            }  # fmt: skip
            transfer = f'{{"kv_connector":"NixlConnector","kv_role":"{role}","kv_buffer_device":"cpu"}}'
            flags = [DETAILS, "--max-num-seqs", "8", "--kv-transfer-config", transfer, *SCHEDULER.split()]
            # One model folder for both: its path is part of what NIXL compares.
            servers.append(vllm_server.start(folder, *flags, env=env, name=side))
        prefill, decode = (s.wait(400) for s in servers)
        with rings.capture(folder, find=lambda: find_listener(decode.url), server_name="d") as capture:
            prompts = []
            with rings.sampling(capture):
                for i in range(6):
                    prompt = [random.Random(i).randrange(3, 1000) for _ in range(100 + 90 * i)]
                    asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
                    first = prefill.complete(prompt, 1, kv_transfer_params=asked)
                    decode.complete(prompt, 12, kv_transfer_params=first["kv_transfer_params"], request_id=f"p{i}")
                    prompts.append(len(prompt))
                time.sleep(1)
                sums = [
                    _metric(decode, f"vllm:nixl_{n}_sum") for n in ("bytes_transferred", "xfer_time_seconds", "num_descriptors")
                ]
                count = _metric(decode, "vllm:nixl_bytes_transferred_count")
        assert capture.trace is not None
        totals = dict(zip(("bytes", "seconds", "descriptors"), sums, strict=True)) | {"count": count, "prompts": prompts}
        (folder / "decode.json").write_text(json.dumps(totals))
        yield Pair(capture.trace, *sums, count, prompts)
    finally:
        for server in servers:
            server.kill()


def test_moves_are_what_nixl_says_it_moved(pair: Pair) -> None:
    moves = pair.trace.table("moves").collect()
    assert pair.count == 6 and moves.height == 6
    assert moves["bytes"].sum() == pair.bytes and moves["transfers"].sum() == pair.descriptors
    assert (moves["end_ns"] - moves["start_ns"]).sum() / 1e9 == pytest.approx(pair.seconds, abs=1e-6)
    assert set(moves["object"]) == {"kv"} and set(moves["src"]) == {"remote"} and set(moves["dst"]) == {"server:d"}
    assert set(moves["mechanism"]) == {"message"} and set(moves["basis"]) == {"counted"}
    # One transfer at a time: each is its request's.
    requests = pair.trace.table("requests").collect()
    named = {r["request"]: r["request_id"] for r in requests.iter_rows(named=True)}
    assert [named.get(r) for r in moves.sort("start_ns")["request"]] == [f"cmpl-p{i}" for i in range(6)]


def test_waits_add_up_to_the_transfers(pair: Pair) -> None:
    waits = pair.trace.table("waits").collect()
    assert set(waits["kind"]) <= {"serialize", "transfer"}
    assert (waits["end_ns"] - waits["start_ns"]).sum() / 1e9 == pytest.approx(pair.seconds, abs=1e-6)


def test_the_decoder_computes_one_token_of_each_prompt(pair: Pair) -> None:
    stages = pair.trace.table("stages").sort("request").collect()
    assert list(stages["role"]) == ["decode"] * 6 and list(stages["end_reason"]) == ["done"] * 6
    assert stages["cached_peer_tokens"].sum() + stages["cached_device_tokens"].sum() == stages["cached_tokens"].sum()
    assert stages["cached_peer_tokens"].sum() > 0
    chunks = pair.trace.table("residency").filter(pl.col("phase") == "chunk").collect()
    # vLLM finds the whole prompt, and computes its last token again.
    assert chunks["tokens_per_step"].to_list() == [1] * 6 and stages["recomputed_tokens"].to_list() == [1] * 6
    assert stages["cached_tokens"].to_list() == pair.prompts
    assert [f for f in validate(pair.trace) if f.level == "error"] == []
