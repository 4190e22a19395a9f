"""Ceilings: each cost taken away from a replay whose answer can be computed by hand, published Amdahl figures, real captures."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text
from support.memory import MemoryTrace

import hoptrace
from hoptrace.analysis.layers.ceilings import TERMS, Ceiling, factor_text
from hoptrace.analysis.report_text import Short
from hoptrace.errors import UsageError
from hoptrace.manifest import Manifest, Server
from hoptrace.replay.ceilings import QUESTIONS, ceilings
from hoptrace.replay.costs.hostfree import host_free
from hoptrace.stepcost import features_array, fit, fixed

DATA = Path(__file__).parent / "data" / "vllm_traces"
MS = 1_000_000
CPU = {"name": "cpu", "flops_per_s": 200e9, "memory_bytes_per_s": 40e9}
SERVER = Server(
    name="s", engine="vllm", max_sequences=64, max_batched_tokens=163, kv_capacity_tokens=200_000, block_size_tokens=16,
    prefix_caching=False, context_tokens=8192, config={"chunked_prefill": False},
)  # fmt: skip


def loaded(
    *,
    schedule_ms: float | None = None,
    device_ms: float | None = None,
    gap_ms: float = 0,
    decode_ms: float = 10,
    prefill_ms: float = 30,
    requests: int = 64,
    tokens: int = 40,
    server: Server = SERVER,
    front_ms: float = 0,
    config: dict[str, Any] | None = None,
) -> MemoryTrace:
    """All requests come at once and run together: one step per prompt of 100 tokens, then each step one token of every request.

    ``schedule_ms``: host time in every step; ``gap_ms`` between steps; ``front_ms`` before the engine and again at the end.
    """
    server = server.model_copy(update={"config": {**server.config, **(config or {})}})
    rows: list[dict[str, Any]] = []
    at = 1000 * MS
    begin = at
    ends: dict[int, list[int]] = {r: [] for r in range(requests)}
    runs = []
    host = {} if schedule_ms is None else {"schedule_ns": round(schedule_ms * MS)}
    if device_ms is not None:
        host["device_ns"] = round(device_ms * MS)

    def step(took_ms: float, **what: Any) -> int:
        nonlocal at
        start, end = at, at + round(took_ms * MS)
        rows.append({"server": "s", "dp_rank": 0, "pp_rank": 0, "step": len(rows), "start_ns": start, "end_ns": end,
                     "origin": "observed", **host, **what})  # fmt: skip
        at = end + round(gap_ms * MS)
        return end

    for r in range(requests):
        # Prompts first, each in a step of its own with the decoders before it.
        n = r
        ends[r].append(step(prefill_ms, prefill_requests=1, prefill_tokens=100, prefill_context_tokens=0, decode_requests=n,
                            decode_tokens=n, decode_context_tokens=sum(100 + len(ends[q]) for q in range(n))))  # fmt: skip
        runs.append(
            {"request": r, "first_step": r, "last_step": r, "phase": "chunk", "tokens_per_step": 100, "context_at_start": 0}
        )
        for q in range(n):
            ends[q].append(rows[-1]["end_ns"])
    while len(ends[requests - 1]) < tokens:
        live = [r for r in range(requests) if len(ends[r]) < tokens]
        end = step(decode_ms, prefill_requests=0, prefill_tokens=0, prefill_context_tokens=0, decode_requests=len(live),
                   decode_tokens=len(live), decode_context_tokens=sum(100 + len(ends[r]) for r in live))  # fmt: skip
        for r in live:
            ends[r].append(end)
    asked, stages = [], []
    front = round(front_ms * MS)
    for r in range(requests):
        seen = [e + front for e in ends[r][:tokens]]
        runs.append({"request": r, "first_step": r + 1, "last_step": r + tokens - 1, "phase": "decode", "tokens_per_step": 1,
                     "context_at_start": 100})  # fmt: skip
        asked.append({"request": r, "arrival_ns": begin - front, "arrival_of": "received", "received_ns": begin - front,
                      "queued_ns": begin, "first_token_ns": seen[0], "last_token_ns": seen[-1], "finish_ns": seen[-1],
                      "prompt_tokens": 100, "output_tokens": tokens})  # fmt: skip
        stages.append({"request": r, "stage": 0, "attempt": 0, "sequence": 0, "server": "s", "dp_rank": 0, "role": "both",
                       "enqueued_ns": begin, "scheduled_ns": rows[r]["start_ns"], "end_ns": ends[r][tokens - 1],
                       "end_reason": "done"})  # fmt: skip
    residency = [{"sequence": 0, "server": "s", "dp_rank": 0, **run} for run in runs]
    tables = {"requests": asked, "stages": stages, "steps": rows, "residency": residency}
    return MemoryTrace(tables, Manifest(origin="recorded", servers=[server], closed=True))


def by_name(trace: Any, **kw: Any) -> dict[str, Ceiling]:
    return {d["name"]: Ceiling.from_dict(d) for d in ceilings(trace, **kw)}


def test_amdahl_with_the_host_taken_away_gives_2_6() -> None:
    """P17, vLLM 0.5.3: 33 % HTTP server, 29 % scheduling, 38 % GPU; its makers' own answer was 2.7 × by 0.6.0."""
    # Steps of 6.7 with 2.9 of scheduling in them, and 3.3 between them that the HTTP server's threads take: 38 % of it is GPU.
    t = loaded(schedule_ms=2.9, gap_ms=3.3, decode_ms=6.7, prefill_ms=6.7)
    c = by_name(t)["host"]
    assert c.throughput == pytest.approx(1 / 0.38, rel=0.02)
    assert c.e2e == pytest.approx(1 / 0.38, rel=0.02)
    assert c.tpot == pytest.approx(1 / 0.38, rel=0.02)
    assert "2.6 ×" in c.sentence
    assert "43.3 % of the steps' time" in c.taken_away and "3,300,000 ns between steps" in c.taken_away
    assert c.error is not None and abs(c.error["e2e"]) < 0.02
    # The same where the device's time tells it.
    d = by_name(loaded(device_ms=3.8, gap_ms=3.3, decode_ms=6.7, prefill_ms=6.7))["host"]
    assert d.throughput == pytest.approx(1 / 0.38, rel=0.02)


def test_without_recorded_host_time_only_the_gap_goes() -> None:
    c = by_name(loaded(gap_ms=10, decode_ms=10, prefill_ms=10))["host"]
    assert c.throughput == pytest.approx(2, rel=0.02)
    assert any("do not tell their host time" in w for w in c.warnings)


def test_reconstructed_steps_tell_no_host_time() -> None:
    t = loaded()
    steps = [r | {"origin": "reconstructed"} for r in t.table("steps").collect().to_dicts()]
    tables = {n: t.table(n).collect().to_dicts() for n in ("requests", "stages", "residency")}
    c = by_name(MemoryTrace({**tables, "steps": steps}, t.manifest))["host"]
    assert c.left_out is not None and c.throughput is None and c.best is None
    assert "tells no host time" in c.sentence


def test_under_asynchronous_scheduling_host_time_is_hidden() -> None:
    c = by_name(loaded(schedule_ms=5, gap_ms=1, config={"async_scheduling": True}))["host"]
    assert c.throughput is not None and c.throughput < 1.2
    assert any("asynchronous" in w for w in c.warnings)
    told = by_name(loaded(device_ms=5, gap_ms=0, config={"async_scheduling": True}))["host"]
    assert told.e2e is not None and told.e2e > 1.5


def test_the_way_in_and_out() -> None:
    t = loaded(front_ms=500)
    c = by_name(t)["front"]
    # 500 ms before the engine and 500 ms from the step's end until the token is seen.
    own, free = c.figures["own_policy"]["e2e_mean_ns"], c.figures["what_if"]["e2e_mean_ns"]
    assert own - free == pytest.approx(1000 * MS, abs=2)
    assert c.e2e == pytest.approx(own / free)
    assert c.tpot == pytest.approx(1)
    assert by_name(loaded())["front"].e2e == pytest.approx(1)


def test_no_limits() -> None:
    narrow = SERVER.model_copy(update={"max_sequences": 4})
    t = loaded(requests=16, decode_ms=10)
    m = MemoryTrace({n: t.table(n).collect().to_dicts() for n in ("requests", "stages", "residency", "steps")},
                    Manifest(origin="recorded", servers=[narrow], closed=True))  # fmt: skip
    c = by_name(m)["unlimited"]
    assert c.ttft is not None and c.ttft > 2
    assert "places 4" in c.taken_away
    # Nothing was in the way: nothing is gained.
    wide = by_name(loaded(requests=1))["unlimited"]
    assert wide.e2e == pytest.approx(1)


def test_every_prompt_cached() -> None:
    c = by_name(loaded(prefill_ms=30, decode_ms=10, requests=8))["cached"]
    assert c.ttft is not None and c.ttft > 1.5
    assert c.warnings[0] == "An upper bound: no cache holds every prompt."


def test_roofline_needs_a_platform_and_sizes() -> None:
    t = loaded()
    assert "--platform" in (by_name(t)["roofline"].left_out or "")
    assert "parameters" in (by_name(t, platform=CPU)["roofline"].left_out or "")
    with pytest.raises(UsageError, match="no platform"):
        ceilings(t, platform="no-such-thing")


def test_a_roofline_that_the_steps_beat_says_so() -> None:
    size = {"parameters": 8_000_000_000, "weight_bytes": 16_000_000_000, "layers": 32, "heads": 32, "kv_heads": 8}
    t = loaded(server=SERVER.model_copy(update={**size, "head_size": 128, "kv_dtype": "f16"}), requests=4, prefill_ms=10)
    c = by_name(t, platform=CPU)["roofline"]  # 16 GB at 40 GB/s take 400 ms, the steps took 10
    assert c.e2e is not None and c.e2e < 0.1
    assert "faster than this roofline" in c.warnings[0]
    good = by_name(t, platform={"name": "x", "flops_per_s": 1e15, "memory_bytes_per_s": 4e12})["roofline"]  # 4 ms
    assert good.tpot is not None and good.tpot == pytest.approx(10 / 4.0, rel=0.05)


def test_what_cannot_be_asked_says_why() -> None:
    t = MemoryTrace({"requests": [{"request": 0, "arrival_ns": 5, "prompt_tokens": 3, "output_tokens": 2}]})
    found = ceilings(t)
    assert [d["name"] for d in found] == ["host", "front", "unlimited", "cached", "roofline"]
    assert all(d["left_out"] for d in found)
    empty = MemoryTrace({}, Manifest(origin="recorded", servers=[SERVER], closed=True))
    assert all("it has no requests" in d["left_out"] for d in ceilings(empty))


def test_transfers_come_up_where_there_are_any() -> None:
    t = loaded(requests=16)
    assert "transfers" not in by_name(t)
    tables: dict[str, Any] = {n: t.table(n).collect().to_dicts() for n in ("requests", "stages", "residency", "steps")}
    tables["waits"] = [{"request": 0, "kind": "transfer", "start_ns": 1000 * MS, "end_ns": 1001 * MS}]
    assert by_name(MemoryTrace(tables, t.manifest))["transfers"].left_out is not None


@pytest.mark.parametrize("name", ["steady", "preempted"])
def test_real_captures(name: str) -> None:
    t = hoptrace.open(DATA / f"{name}.trace")
    first = ceilings(t, platform=CPU)
    assert ceilings(t, platform=CPU) == first  # law 4
    json.dumps(first, allow_nan=False)
    assert [d["name"] for d in first] == [q for q in QUESTIONS if q != "transfers"]
    c = {d["name"]: Ceiling.from_dict(d) for d in first}
    host = c["host"]
    raw = t.table("steps").collect()
    share = (raw["schedule_ns"] + raw["update_ns"]).sum() / (raw["end_ns"] - raw["start_ns"]).sum()
    assert f"{100 * share:.3g} % of the steps' time" in host.taken_away
    # Some 1 % of host time and as much between steps: more than nothing, and no more than Amdahl and queueing allow.
    assert host.e2e is not None and 1 <= host.e2e < 1.2
    assert c["cached"].ttft is not None and c["cached"].ttft > 1
    assert c["interference"].left_out is not None
    for x in c.values():
        assert Ceiling.from_dict(x.as_dict()).sentence


def test_a_replay_of_a_replay_is_exact() -> None:
    from hoptrace.replay.run import predict

    again = predict(hoptrace.open(DATA / "steady.trace"), "as-recorded").trace
    c = by_name(again)
    assert c["front"].error is not None
    assert c["front"].error == pytest.approx({"e2e": 0, "ttft": 0, "tpot": 0}, abs=1e-8)


# What is left of a step cost


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 16), st.integers(0, 4000)), min_size=30, max_size=60),
    st.floats(0, 0.9),
    st.integers(0, 5 * MS),
)
@settings(max_examples=40, deadline=None)
def test_no_step_becomes_dearer_without_its_host(steps: list[tuple[int, int, int]], share: float, constant: int) -> None:
    base = fixed(step_ns=7e6, prefill_token_ns=1e5, decode_request_ns=3e5, decode_context_token_ns=100)
    rows, at = [], 0
    for i, (prompt, decoders, context) in enumerate(steps):
        if not prompt and not decoders:
            prompt = 1
        took = base.cost_ns(prefill_tokens=prompt, decode_requests=decoders, decode_context_tokens=context if decoders else 0)
        rows.append({"step": i, "start_ns": at, "end_ns": at + took, "schedule_ns": min(took, constant + round(share * took)),
                     "launch_ns": None, "update_ns": None, "device_ns": None, "prefill_requests": int(prompt > 0),
                     "prefill_tokens": prompt, "prefill_context_tokens": 0, "decode_requests": decoders,
                     "decode_context_tokens": context if decoders else 0})  # fmt: skip
        at += took
    types = dict.fromkeys(("launch_ns", "update_ns", "device_ns"), pl.Int64)
    frame = pl.DataFrame(rows, schema_overrides=types)
    found = host_free(base, frame, asynchronous=False)
    assert found.cost is not None and found.share is not None
    x = features_array(frame)
    with_host, without = base._cost(x), found.cost._cost(x)
    assert (without <= with_host).all() and (without >= 0).all()
    took = float((frame["end_ns"] - frame["start_ns"]).sum())
    assert float(without.sum()) == pytest.approx(took * (1 - found.share), rel=0.01, abs=1e5)


def test_host_time_of_the_decode_steps_is_taken_from_them() -> None:
    rows, at = [], 0
    for i in range(200):
        prompt = 200 if i % 10 == 0 else 0
        took = (3 + (50 if prompt else 9)) * MS  # 3 of it the host's, in every step
        rows.append({"step": i, "start_ns": at, "end_ns": at + took, "schedule_ns": 3 * MS, "launch_ns": None,
                     "update_ns": None, "device_ns": None, "prefill_requests": int(prompt > 0),
                     "prefill_tokens": prompt, "prefill_context_tokens": 0, "decode_requests": 0 if prompt else 4,
                     "decode_context_tokens": 0 if prompt else 400})  # fmt: skip
        at += took
    frame = pl.DataFrame(rows, schema_overrides=dict.fromkeys(("launch_ns", "update_ns", "device_ns"), pl.Int64))
    found = host_free(fit(frame), frame, asynchronous=False).cost
    assert found is not None
    assert found.cost_ns(decode_requests=4, decode_context_tokens=400) == pytest.approx(9 * MS, rel=0.02)
    assert found.cost_ns(prefill_tokens=200) == pytest.approx(50 * MS, rel=0.02)


def test_words() -> None:
    assert [factor_text(f) for f in (None, 1.0, 1.994, 2.63, 99.6, 1234.0)] == [
        "–",
        "1.00 ×",
        "1.99 ×",
        "2.6 ×",
        "100 ×",
        "1,234 ×",
    ]
    c = Ceiling("host", "with host cost zero", throughput=2.63, e2e=2.5)
    assert c.sentence == "with host cost zero: end to end 2.5 ×, throughput 2.6 ×"
    assert c.best == 2.63
    assert np.isfinite(c.as_dict()["throughput"])
    assert TERMS[0].name == "ceiling"


def test_transfers_of_a_split_can_be_taken_away() -> None:
    """Four prompts of 100 tokens one after another, 1 ms a step; 1,000 bytes a token at 10^8 bytes/s take 1 ms each."""
    from hoptrace.reconstruct import Steps
    from hoptrace.replay.ceilings import runs as ceiling_runs
    from hoptrace.replay.overheads import Overheads
    from hoptrace.replay.policy import parse_policy
    from hoptrace.replay.policy.own import Own
    from hoptrace.replay.workload import Workload

    none = np.zeros(0, dtype=np.int64)
    n = 4
    work = Workload(
        np.arange(n), np.arange(n) * 20 * MS, np.full(n, 100), np.full(n, 3), np.zeros(n + 1, dtype=np.int64), none, none, none
    )
    policy = parse_policy(
        '[split]\nprefill = 1\ndecode = 1\nlink = "x"\n[links.x]\ngbytes_per_s = 0.1\n[kv]\nbytes_per_token = 1000'
    )
    own = Own(policy, Server(name="s", max_sequences=8, max_batched_tokens=512, kv_capacity_tokens=10_000, prefix_caching=False))
    empty = pl.DataFrame()
    base = ceiling_runs.Base(work, own, fixed(step_ns=MS), Overheads(), Steps(empty, empty, "none"))
    slow = ceiling_runs.play(base)
    fast = ceiling_runs.play(base, parse_policy('[ceilings]\nlinks = "infinite"'))
    before, after, both, added = ceiling_runs.compared(slow, fast)
    assert (both, added) == (n, 0)
    # Prompt 1 ms, transfer 1 ms, two more tokens 2 ms.
    assert before["e2e_mean_ns"] == 4 * MS and after["e2e_mean_ns"] == 3 * MS
    assert before["ttft_mean_ns"] == after["ttft_mean_ns"] == MS


def test_a_replay_of_a_split_asks_for_its_transfers() -> None:
    from hoptrace.replay.policy import parse_policy
    from hoptrace.replay.run import predict

    policy = parse_policy(
        'name = "pd"\n[split]\nprefill = 1\ndecode = 1\nlink = "x"\n[links.x]\ngbytes_per_s = 0.001\nlatency_us = 1000\n'
        "[kv]\nbytes_per_token = 1000\n"
    )
    split = predict(hoptrace.open(DATA / "steady.trace"), policy, check=False).trace
    c = by_name(split)
    assert c["transfers"].left_out is None and c["transfers"].taken_away == "the time of every transfer of KV"
    assert c["transfers"].e2e is not None and c["transfers"].e2e > 1.01
    # Law 3: what the split's replay says is what its rows say.
    assert c["transfers"].error == pytest.approx({"e2e": 0, "ttft": 0, "tpot": 0}, abs=1e-8)


def test_the_ceilings_line_is_on_the_screen_beside_a_headline_of_two_lines() -> None:
    """Both wrap at 80 columns: what was asked for by --ceilings may not be left out."""
    out = Console(width=80, file=io.StringIO())
    out.print(Short("layers", [Text("layer " * 20), Text("End to end at most, " + "factor 1.00 x, " * 8)]))
    assert "End to end at most" in out.file.getvalue()  # type: ignore[attr-defined]
