"""Bottleneck layers: the design's rule on traces whose answer is known, published traps, real captures, and the laws."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console, Group
from support.engine_steps import LLAMA70, MS, engine_trace
from support.memory import MemoryTrace

import hoptrace
from hoptrace.analysis.latency.accounting import account
from hoptrace.analysis.latency.parts import PARTS
from hoptrace.analysis.layers.ceilings import Ceiling
from hoptrace.analysis.layers.layer_of import LAYER_OF_PART, LAYERS, layer_of
from hoptrace.analysis.layers.layers import TERMS, Layers, layers
from hoptrace.analysis.layers.layers_requests import divide
from hoptrace.analysis.layers.layers_text import blocks
from hoptrace.manifest import Manifest
from hoptrace.platform import load_platform

DATA = Path(__file__).parent / "data" / "vllm_traces"
A100, H100, B200 = (load_platform(n) for n in ("a100-sxm-80gb", "h100-sxm-80gb", "b200-sxm"))
CPU = {"name": "cpu", "flops_per_s": 200e9, "memory_bytes_per_s": 40e9}
COLUMNS = [f"{k}_ns" for k in LAYERS]


def prompt(took_ns: int, **more: Any) -> dict[str, Any]:
    return {"took_ns": took_ns, "prefill_requests": 1, "prefill_tokens": 512, "prefill_context_tokens": 0, "decode_requests": 0,
            "decode_tokens": 0, "decode_context_tokens": 0, **more}  # fmt: skip


def token(took_ns: int, context: int = 512, **more: Any) -> dict[str, Any]:
    return {"took_ns": took_ns, "prefill_requests": 0, "prefill_tokens": 0, "prefill_context_tokens": 0, "decode_requests": 1,
            "decode_tokens": 1, "decode_context_tokens": context, **more}  # fmt: skip


def total(x: Layers) -> dict[str, int | None]:
    row = x.per_request.select(pl.col(c).sum() if x.per_request[c].null_count() == 0 else pl.lit(None).alias(c) for c in COLUMNS)
    return {k.removesuffix("_ns"): v for k, v in row.row(0, named=True).items()}


def exact(x: Layers) -> None:
    """What holds of all layers, whatever the trace."""
    f = x.per_request
    assert (f.select(pl.sum_horizontal(pl.col(c).fill_null(0) for c in COLUMNS)).to_series() == f["e2e_ns"]).all()
    assert f.select(pl.all_horizontal(pl.col(c).fill_null(0) >= 0 for c in COLUMNS).all()).item() or not f.height
    assert x.over_time["e2e_ns"].sum() == f["e2e_ns"].sum()
    assert x.over_time["requests"].sum() == f.height
    assert x.over_time.height <= 500 and x.steps_over_time.height <= 500
    for g in x.groups.values():
        assert sum(v for v in g.ns.values() if v is not None) == pytest.approx(g.e2e_ns, rel=1e-12, abs=1e-6)
        assert sum(v for v in g.shares.values() if v is not None) == pytest.approx(1 if g.e2e_ns else 0)
    if x.steps is not None:
        for k in (x.steps.all, *x.steps.kinds):
            assert sum(k.pieces.values()) == k.took_ns
            assert k.pieces["compute"] + k.pieces["state"] <= k.roofline_ns + k.steps


# --- the published trap, X11: Splitwise's measurements of Llama-2-70B


@pytest.mark.parametrize(
    ("platform", "first_ms", "token_ms", "bound_ms"), [(A100, 93.0, 45.0, 8.5), (H100, 53.9, 30.6, 5.2)], ids=["a100", "h100"]
)
def test_what_bandwidth_does_not_bound_is_no_state(
    platform: dict[str, Any], first_ms: float, token_ms: float, bound_ms: float
) -> None:
    steps = [prompt(round(first_ms * MS)), *(token(round(token_ms * MS), 512 + i) for i in range(127))]
    x = layers(engine_trace(steps), platform=platform)
    exact(x)
    assert x.steps is not None
    decode = next(k for k in x.steps.kinds if k.kind == "decode")
    assert decode.pieces["state"] / 127 / MS == pytest.approx(bound_ms, abs=0.06)
    assert decode.pieces["state"] / decode.took_ns <= bound_ms / token_ms
    assert decode.pieces["compute"] == 0 and decode.pieces["scheduling"] == 0
    assert decode.pieces["unexplained"] == decode.took_ns - decode.pieces["state"]
    assert decode.times_roofline == pytest.approx(token_ms / bound_ms, rel=0.01)
    # The answer is neither state nor scheduling: it says what to record.
    assert x.bound is None
    assert any("record schedule_ns, launch_ns, update_ns, collective_ns, device_ns" in u for u in x.unseen)
    assert not x.warnings  # 5 × is what host and collectives can cost


def test_recorded_host_and_collective_time_makes_it_scheduling() -> None:
    steps = [
        prompt(93 * MS),
        *(token(45 * MS, schedule_ns=5 * MS, launch_ns=10 * MS, update_ns=3 * MS, collective_ns=12 * MS),) * 100,
    ]
    x = layers(engine_trace(steps), platform=A100)
    exact(x)
    assert x.steps is not None
    decode = next(k for k in x.steps.kinds if k.kind == "decode")
    assert decode.pieces["scheduling"] == 100 * 30 * MS
    assert decode.pieces["unexplained"] == 100 * 15 * MS - decode.pieces["state"]
    assert x.bound == "scheduling"
    assert decode.host_share == pytest.approx(30 / 45)


def test_recorded_host_time_never_takes_the_roofline() -> None:
    """Host time that ran beside the device: the roofline's time stays, whatever the host says."""
    x = layers(engine_trace([prompt(93 * MS), *(token(45 * MS, schedule_ns=44 * MS),) * 10]), platform=A100)
    assert x.steps is not None
    decode = next(k for k in x.steps.kinds if k.kind == "decode")
    assert decode.pieces["scheduling"] == 450 * MS - decode.pieces["state"]
    assert decode.pieces["unexplained"] == 0


# --- the users' questions


def test_how_much_of_each_step_does_the_gpu_wait_for_python() -> None:
    """A24: 38 % of the time is GPU work, 5 to 13 ms a step idle."""
    server = LLAMA70.model_copy(update={"parameters": 8_030_000_000, "weight_bytes": 16_060_000_000, "layers": 32, "heads": 32,
                                        "config": {}})  # fmt: skip
    steps = [prompt(20 * MS, device_ns=8 * MS), *(token(round(18.4 * MS), device_ns=round(7.6 * MS)),) * 200]
    x = layers(engine_trace(steps, server=server, gap_ns=round(1.6 * MS)), platform=H100)
    exact(x)
    assert x.steps is not None
    decode = next(k for k in x.steps.kinds if k.kind == "decode")
    assert decode.device_share == pytest.approx(0.38, abs=0.001)
    assert decode.host_ns / decode.steps / MS == pytest.approx(10.8)
    # 16.06 GB of weights at 3.35 TB/s bound 4.8 ms of it; the other 2.8 ms of device time are slow kernels, not scheduling.
    assert decode.pieces["state"] / 200 / MS == pytest.approx(4.82, abs=0.03)
    assert decode.pieces["scheduling"] == 200 * round(10.8 * MS)
    assert x.bound == "scheduling"
    assert x.shares["scheduling"] == pytest.approx((10.8 + 1.6) / 20, abs=0.01)


def test_one_python_thread_is_scheduling_and_not_compute() -> None:
    """A26: CPU at 100 %, the SMs at 60 to 75 %: 128 at once on a 7B model."""
    server = LLAMA70.model_copy(update={"parameters": 7_240_000_000, "weight_bytes": 14_480_000_000, "layers": 32, "heads": 32,
                                        "config": {}, "max_sequences": 128})  # fmt: skip
    step = token(24 * MS, 128 * 200, decode_requests=128, decode_tokens=128, device_ns=17 * MS, schedule_ns=7 * MS)
    x = layers(engine_trace([prompt(40 * MS, device_ns=30 * MS), *(step,) * 50], server=server, gap_ns=3 * MS, requests=8,
                            wait_ns=200 * MS), platform=A100)  # fmt: skip
    exact(x)
    assert x.bound == "scheduling"
    assert x.headline.startswith("Scheduling takes most of the latency")
    assert (x.shares["scheduling"] or 0) > 4 * (x.shares["compute"] or 0)


def test_which_kernel_path_am_i_on() -> None:
    """A60: Qwen3-32B on four B200, 90 tokens a second where 5000 were had."""
    size = {"parameters": 32_800_000_000, "weight_bytes": 17_000_000_000, "layers": 64}
    qwen = LLAMA70.model_copy(update={**size, "kv_dtype": "fp8", "config": {"tensor_parallel_size": 4}})
    steps = [
        prompt(600 * MS),
        *(token(round(1000 / 90 * 8 * MS), 8 * 1000, decode_requests=8, decode_tokens=8, schedule_ns=MS),) * 40,
    ]
    x = layers(engine_trace(steps, server=qwen, requests=8), platform=B200)
    exact(x)
    assert x.steps is not None and x.steps.all.times_roofline is not None and x.steps.all.times_roofline > 50
    assert len(x.warnings) == 1 and "which kernel path runs" in x.warnings[0]
    assert x.bound is None


def test_steps_faster_than_the_roofline_contradict_the_platform() -> None:
    x = layers(engine_trace([prompt(93 * MS), *(token(5 * MS),) * 20]), platform=A100)  # bounded at 8.5 ms
    exact(x)
    assert len(x.warnings) == 1 and "faster than its roofline" in x.warnings[0] and "wrong" in x.warnings[0]
    assert "20 steps of 21" in x.warnings[0] and "59%" in x.warnings[0]
    assert total(x) == {"compute": None, "state": None, "scheduling": 0, "unexplained": 0, "undivided": 193 * MS, "outside": 0}
    assert x.steps is not None and x.steps.as_dict()["faster_than_roofline"]["steps"] == 20


def test_one_step_faster_than_the_roofline_is_left_undivided() -> None:
    x = layers(engine_trace([prompt(93 * MS), token(5 * MS), *(token(45 * MS),) * 99]), platform=A100)
    exact(x)
    assert len(x.warnings) == 1 and "1 step of 101" in x.warnings[0]
    assert total(x)["undivided"] == 5 * MS
    assert (total(x)["state"] or 0) > 0


# --- without a platform


def test_without_a_platform_the_steps_are_not_divided() -> None:
    x = layers(engine_trace([prompt(93 * MS), *(token(45 * MS),) * 9], wait_ns=100 * MS))
    exact(x)
    assert total(x) == {
        "compute": None, "state": None, "scheduling": 100 * MS, "unexplained": 0, "undivided": 498 * MS, "outside": 0,
    }  # fmt: skip
    assert any("--platform" in u for u in x.unseen)
    assert x.headline == "Without --platform the layer of 83% of latency is not told; of what is told scheduling leads with 17%."
    assert x.as_dict()["groups"]["all"]["shares"]["compute"] is None


def test_without_a_platform_host_time_is_derived_from_the_trace_itself() -> None:
    x = layers(engine_trace([prompt(93 * MS, schedule_ns=3 * MS), *(token(45 * MS, schedule_ns=5 * MS, update_ns=MS),) * 10]))
    exact(x)
    assert total(x)["scheduling"] == 3 * MS + 10 * 6 * MS
    assert total(x)["undivided"] == 90 * MS + 10 * 39 * MS
    assert any("derived from the trace itself" in n for n in x.notes)


def test_the_platform_of_the_manifest_is_used() -> None:
    graph = {"nodes": [{"name": "gpu0", "kind": "compute", "flops_per_s": 312e12, "memory_bytes_per_s": 2039e9}]}
    steps = [prompt(93 * MS), *(token(45 * MS),) * 9]
    told = layers(engine_trace(steps, platform=graph))
    assert total(told) == total(layers(engine_trace(steps), platform=A100))
    assert told.rooflines[0].platform == "gpu0"


def test_a_model_of_unknown_size_says_what_is_missing() -> None:
    server = LLAMA70.model_copy(update={"parameters": None})
    x = layers(engine_trace([prompt(93 * MS)], server=server), platform=A100)
    assert any("needs parameters" in u for u in x.unseen)
    assert total(x)["compute"] is None


# --- special steps


def test_under_asynchronous_scheduling_host_time_shows_nothing() -> None:
    server = LLAMA70.model_copy(update={"config": {"tensor_parallel_size": 8, "async_scheduling": True}})
    steps = [prompt(93 * MS), *(token(45 * MS, schedule_ns=20 * MS),) * 10]
    x = layers(engine_trace(steps, server=server), platform=A100)
    exact(x)
    assert total(x)["scheduling"] == 0
    assert any("asynchronously" in u for u in x.unseen)
    told = layers(
        engine_trace([prompt(93 * MS), *(token(45 * MS, schedule_ns=20 * MS, device_ns=40 * MS),) * 10], server=server),
        platform=A100,
    )
    assert total(told)["scheduling"] == 50 * MS


def test_where_the_device_tells_its_time_the_host_adds_nothing() -> None:
    """The device works 40 of 45 ms: 20 ms of scheduling ran beside it for the most part."""
    x = layers(engine_trace([prompt(93 * MS), *(token(45 * MS, schedule_ns=20 * MS, device_ns=40 * MS),) * 10]), platform=A100)
    assert total(x)["scheduling"] == 50 * MS
    # Collectives run on the device.
    both = token(45 * MS, schedule_ns=20 * MS, device_ns=40 * MS, collective_ns=7 * MS)
    assert total(layers(engine_trace([prompt(93 * MS), *(both,) * 10]), platform=A100))["scheduling"] == 120 * MS


@pytest.mark.parametrize(("token_ms", "said"), [(80, False), (90, True)])
def test_ten_times_the_roofline_is_said(token_ms: int, said: bool) -> None:
    x = layers(engine_trace([token(token_ms * MS, 512 + i) for i in range(20)]), platform=A100)
    assert any("which kernel path" in w for w in x.warnings) == said


def test_time_between_steps_is_scheduling_over_time_too() -> None:
    x = layers(engine_trace([prompt(93 * MS), *(token(45 * MS, schedule_ns=MS),) * 10], gap_ns=4 * MS), platform=A100)
    assert x.steps is not None and x.steps.all.between_ns == 10 * 4 * MS
    assert x.steps_over_time["scheduling_ns"].sum() == 10 * 5 * MS
    assert total(x)["scheduling"] == 10 * 5 * MS


def test_a_step_of_unknown_composition_is_undivided() -> None:
    steps = [prompt(93 * MS), token(45 * MS), token(45 * MS, decode_context_tokens=None, schedule_ns=2 * MS)]
    x = layers(engine_trace(steps), platform=A100)
    exact(x)
    assert total(x)["undivided"] == 43 * MS
    assert total(x)["scheduling"] == 2 * MS


def test_pipeline_ranks_of_a_step_are_one() -> None:
    t = engine_trace([prompt(90 * MS), token(40 * MS)])
    rows = t.table("steps").collect().to_dicts()
    two = []
    for r in rows:
        middle = (r["start_ns"] + r["end_ns"]) // 2
        two += [r | {"end_ns": middle, "device_ns": 15 * MS}, r | {"pp_rank": 1, "start_ns": middle, "device_ns": 15 * MS}]
    kept = {n: t.table(n).collect().to_dicts() for n in ("requests", "stages", "residency")}
    x = layers(MemoryTrace({**kept, "steps": two}, t.manifest), platform=A100)
    exact(x)
    assert x.steps is not None and x.steps.all.steps == 2 and x.steps.all.took_ns == 130 * MS
    assert x.steps.all.host_ns == 60 * MS + 10 * MS


def test_a_step_given_twice_counts_once() -> None:
    t = engine_trace([prompt(93 * MS), token(45 * MS, schedule_ns=MS)])
    tables = {n: t.table(n).collect().to_dicts() for n in ("requests", "stages", "residency", "steps")}
    once = layers(t, platform=A100)
    x = layers(MemoryTrace({**tables, "steps": tables["steps"] * 2}, t.manifest), platform=A100)
    assert x.steps == once.steps
    assert total(x) == total(once)


def test_recomputed_tokens_are_state_as_far_as_the_roofline_goes() -> None:
    """A preempted request computes its prompt again: paid only because its KV was thrown away."""
    t = engine_trace([prompt(93 * MS), token(45 * MS), prompt(93 * MS), token(45 * MS)])
    common = {"request": 0, "sequence": 0, "server": "s", "dp_rank": 0}
    runs = [
        common | {"first_step": 0, "last_step": 0, "phase": "chunk", "tokens_per_step": 512, "context_at_start": 0},
        common | {"first_step": 1, "last_step": 1, "phase": "decode", "tokens_per_step": 1, "context_at_start": 512},
        common | {"first_step": 2, "last_step": 2, "phase": "chunk", "tokens_per_step": 512, "context_at_start": 0},
        common | {"first_step": 3, "last_step": 3, "phase": "decode", "tokens_per_step": 1, "context_at_start": 513},
    ]
    tables = {n: t.table(n).collect().to_dicts() for n in ("requests", "stages", "steps")}
    m = MemoryTrace({**tables, "residency": runs}, t.manifest)
    acc = account(m)
    assert acc.parts["recompute_ns"].to_list() == [93 * MS]
    x = layers(m, accounting=acc, platform=A100)
    exact(x)
    arithmetic = (2 * 69e9 * 512 + 4 * 80 * 64 * 128 * 512 * 256) / (8 * 312e3)
    assert total(x)["compute"] == pytest.approx(arithmetic, abs=2)  # of the first time only
    assert total(x)["state"] == pytest.approx(arithmetic + 2 * 8.47 * MS, rel=0.002)


# --- laws

few = st.integers(0, 3)
maybe = st.one_of(st.none(), st.integers(-5, 60 * MS))
step = st.builds(
    lambda took, p, d, **host: (prompt(took) if p else token(took)) | {"decode_requests": d, "decode_tokens": d, **host},
    st.integers(0, 200 * MS), st.booleans(), st.one_of(st.none(), st.integers(0, 4)),
    schedule_ns=maybe, launch_ns=maybe, update_ns=maybe, device_ns=maybe, collective_ns=maybe,
)  # fmt: skip


@given(
    st.lists(step, min_size=1, max_size=8), st.integers(0, 3 * MS), st.integers(1, 3), st.booleans(), st.integers(0, 50 * MS),
    st.sampled_from([None, A100, H100, {"name": "slow", "flops_per_s": 1e12, "memory_bytes_per_s": 1e9}]), st.booleans(),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_layers_add_up_exactly(
    steps: list[dict[str, Any]], gap: int, n: int, residency: bool, wait: int, platform: dict[str, Any] | None, asynchronous: bool
) -> None:
    server = LLAMA70.model_copy(update={"config": {"tensor_parallel_size": 8, "async_scheduling": asynchronous}})
    t = engine_trace(steps, gap_ns=gap, requests=n, residency=residency, wait_ns=wait, server=server)
    acc = account(t)
    x = layers(t, accounting=acc, platform=platform)
    exact(x)
    assert x.per_request["request"].to_list() == acc.parts["request"].to_list()
    # The parts outside steps are those of the accounting, whatever the steps say.
    outside = sum(int(acc.parts[p + "_ns"].fill_null(0).sum()) for p, (layer, _) in LAYER_OF_PART.items() if layer == "outside")
    assert int(x.per_request["outside_ns"].sum()) == outside


@given(
    st.lists(st.integers(0, 1 << 40), min_size=1, max_size=6),
    st.lists(st.lists(st.integers(0, 1 << 40), min_size=6, max_size=6), min_size=5, max_size=5),
)
@settings(max_examples=200, deadline=None)
def test_a_whole_divided_is_the_whole(whole: list[int], ratio: list[list[int]]) -> None:
    w = np.array(whole, dtype=np.int64)
    r = np.array(ratio, dtype=np.int64)[:, : len(w)]
    out = divide(w, r)
    assert (out >= 0).all()
    assert (out.sum(axis=0) == w).all()
    sums = r.sum(axis=0)
    for j in range(len(w)):
        for i in range(5):
            want = whole[j] * int(r[i, j]) / int(sums[j]) if sums[j] else (whole[j] if i == 4 else 0)
            assert abs(int(out[i, j]) - want) <= 5


def test_a_faster_memory_never_makes_more_of_it_state() -> None:
    steps = [prompt(93 * MS), *(token(45 * MS, 512 + i) for i in range(20))]
    shares = [
        total(layers(engine_trace(steps), platform={"name": "x", "flops_per_s": 312e12, "memory_bytes_per_s": b}))["state"] or 0
        for b in (1000e9, 2000e9, 4000e9, 8000e9)
    ]
    assert shares == sorted(shares, reverse=True) and shares[0] > shares[-1]


def test_every_part_has_a_layer_and_a_reason() -> None:
    assert list(LAYER_OF_PART) == [p.name for p in PARTS]
    for p in PARTS:
        layer, why = layer_of(p.column)
        assert (layer in LAYERS or layer == "steps") and why
    assert {layer_of(p)[0] for p in ("client", "network_in")} == {"outside"}
    assert {layer_of(p)[0] for p in ("queue_kv", "preempted", "transfer", "recompute")} == {"state"}
    assert {layer_of(p)[0] for p in ("queue_room", "queue_slots", "queue_budget", "host_gap", "skipped", "handover")} == {
        "scheduling"
    }


# --- real captures, hostile traces


@pytest.mark.parametrize("name", ["steady", "preempted"])
@pytest.mark.parametrize("platform", [None, CPU], ids=["unknown", "cpu"])
def test_real_captures(name: str, platform: dict[str, Any] | None) -> None:
    t = hoptrace.open(DATA / f"{name}.trace")
    acc = account(t)
    x = layers(t, accounting=acc, platform=platform)
    exact(x)
    assert x.steps is not None
    # By hand, from the table: vLLM's recorder gives schedule_ns and update_ns of each step.
    raw = t.table("steps").collect()
    host = (raw["schedule_ns"] + raw["update_ns"]).sum()
    assert x.steps.all.host_ns == host
    assert x.steps.all.took_ns == (raw["end_ns"] - raw["start_ns"]).sum()
    if platform is None:
        assert x.steps.all.pieces["scheduling"] == host
        assert x.steps.all.pieces["undivided"] == x.steps.all.took_ns - host
    # The SQL that `explain` prints gives the same.
    sql = next(term.sql for term in TERMS if term.name == "host_share")
    told = {r["kind"]: r for r in t.sql(sql).to_dicts()}
    for k in x.steps.kinds:
        assert (told[k.kind]["steps"], told[k.kind]["took_ns"]) == (k.steps, k.took_ns)
        assert told[k.kind]["host_ns"] == k.host_ns
    # What waited for KV space is state, whatever the steps are.
    waited = sum(int(acc.parts[p].fill_null(0).sum()) for p in ("queue_kv_ns", "preempted_ns"))
    assert int(x.per_request["state_ns"].fill_null(0).sum()) >= waited
    if name == "preempted":
        assert waited > 0


@pytest.mark.parametrize("name", ["steady", "preempted"])
def test_real_captures_by_plain_loops(name: str) -> None:
    """Each request's own steps one by one, in plain Python from the stored rows: what `layers` takes from running sums."""
    t = hoptrace.open(DATA / f"{name}.trace")
    server = t.manifest.servers[0]
    acc = account(t)
    x = layers(t, accounting=acc, platform=CPU)
    looked_up = server.config["vocabulary"] * (server.hidden_size or 0)
    flop = 2 * ((server.parameters or 0) - looked_up)
    pair = 4 * (server.layers or 0) * (server.heads or 0) * (server.head_size or 0)
    kv = 2 * (server.layers or 0) * (server.kv_heads or 0) * (server.head_size or 0) * 4  # float32
    split: dict[int, tuple[int, int, int, int]] = {}
    for r in t.table("steps").collect().to_dicts():
        p, n, d, m = r["prefill_tokens"], max(r["prefill_requests"], 1), r["decode_tokens"], max(r["decode_requests"], 1)
        pairs = p * (r["prefill_context_tokens"] / n + p / n / 2) + d * r["decode_context_tokens"] / m
        arithmetic = ((p + d) * flop + pairs * pair) / 200
        memory = ((server.weight_bytes or 0) + kv * (r["prefill_context_tokens"] + r["decode_context_tokens"] + p + d)) / 40
        took = r["end_ns"] - r["start_ns"]
        assert max(arithmetic, memory) < took  # no step of these captures beats this platform
        least = int(max(arithmetic, memory))
        host = min(r["schedule_ns"] + r["update_ns"], took - least)
        compute, state = (least, 0) if arithmetic >= memory else (0, least)
        split[r["step"]] = (compute, state, host, took - least - host)
    mine: dict[int, list[int]] = {}
    for run in t.table("residency").collect().to_dicts():
        if run["phase"] in ("chunk", "decode"):
            sums = mine.setdefault(run["request"], [0, 0, 0, 0])
            for s in range(run["first_step"], run["last_step"] + 1):
                sums[:] = [a + b for a, b in zip(sums, split[s], strict=True)]
    in_steps = ("prefill_ns", "prefill_interference_ns", "decode_ns", "decode_interference_ns")
    checked = 0
    parts = {r["request"]: r for r in acc.parts.fill_null(0).to_dicts()}
    for r in x.per_request.to_dicts():
        part, sums = parts[r["request"]], mine[r["request"]]
        # Where the accounting found all of these steps' time, and nothing was computed twice, the figures are the same.
        if sum(part[c] for c in in_steps) != sum(sums) or part["recompute_ns"]:
            continue
        checked += 1
        assert abs(r["compute_ns"] - sums[0]) <= 2
        assert abs(r["state_ns"] - sums[1] - part["queue_kv_ns"] - part["preempted_ns"]) <= 2
        assert abs(r["unexplained_ns"] - sums[3] - part["unexplained_ns"] - part["queue_full_ns"] - part["queue_unknown_ns"]) <= 2
    assert checked >= 10


def test_a_request_log_has_no_layers() -> None:
    t = MemoryTrace({"requests": [{"request": 0, "arrival_ns": 5, "prompt_tokens": 3, "output_tokens": 2}]})
    x = layers(t)
    assert x.groups == {} and x.bound is None and x.steps is None
    assert x.as_dict()["groups"] == {}
    exact(x)


@pytest.mark.parametrize("platform", [None, A100])
def test_an_empty_trace(platform: dict[str, Any] | None) -> None:
    x = layers(MemoryTrace({}, Manifest(origin="recorded", closed=True)), platform=platform)
    exact(x)
    assert x.per_request.height == 0 and x.unseen


def test_hostile_steps() -> None:
    big = (1 << 63) - 1
    t = engine_trace([prompt(93 * MS), *(token(45 * MS),) * 3])
    tables: dict[str, Any] = {n: t.table(n).collect().to_dicts() for n in ("requests", "stages", "residency", "steps")}
    tables["steps"] += [
        {"server": "s", "step": 10, "start_ns": 5, "end_ns": 1, "decode_requests": 1},  # ends before it begins
        {"server": "s", "step": 11, "start_ns": -big, "end_ns": big, "prefill_tokens": big, "decode_requests": big},
        {"server": "elsewhere", "step": 0, "start_ns": 0, "end_ns": 10, "schedule_ns": big},
        {"server": "s", "step": 12, "start_ns": 7, "end_ns": 9, "prefill_tokens": -4, "device_ns": -big},
    ]
    x = layers(MemoryTrace(tables, t.manifest), platform=A100)
    exact(x)
    assert x.steps is not None and x.steps.all.steps == 6
    assert any("elsewhere" in u for u in x.unseen)


def test_text_and_dict() -> None:
    answer = Ceiling("host", "with host cost zero", throughput=2.63, e2e=2.6, ttft=None, tpot=2.7, error={"e2e": 0.04})
    unasked = Ceiling("front", "with no front", left_out="Nothing is told.")
    steps = [prompt(93 * MS), *(token(45 * MS, schedule_ns=MS),) * 9]
    x = layers(engine_trace(steps), platform=A100, ceilings=[answer, unasked])
    for full in (False, True):
        console = Console(width=160, record=True, file=StringIO())
        console.print(Group(*blocks(x, full=full)))
        text = console.export_text()
        assert ("with host cost zero" if full else "host 2.6 ×") in text
        assert ("each step's own" in text) == full
    d = x.as_dict()
    assert d["ceilings"][0]["e2e"] == 2.6 and d["ceilings"][1]["left_out"] == "Nothing is told."
    assert set(d["groups"]) == {"all", "p50", "p95", "p99", "slowest"}
    assert d["layer_of_part"]["queue_kv"]["layer"] == "state"


def test_charts() -> None:
    pytest.importorskip("altair")
    from hoptrace.app.charts_layers import groups, over_time

    x = layers(hoptrace.open(DATA / "preempted.trace"), platform=CPU)
    first = int(x.over_time["from_ns"][0])
    data = over_time(x.over_time, first).to_dict()
    values = next(iter(data["datasets"].values()))
    assert {v["layer"] for v in values} >= {"state", "scheduling", "compute"}
    by_bin: dict[float, float] = {}
    for v in values:
        by_bin[v["from_s"]] = by_bin.get(v["from_s"], 0) + v["share"]
    assert all(s == pytest.approx(1) for s in by_bin.values())
    assert over_time(x.steps_over_time, first).to_dict()
    rows = [{"row": n, "layer": k, "share": g.shares[k], "ns": g.ns[k]} for n, g in x.groups.items() for k in LAYERS]
    assert groups(pl.DataFrame(rows), list(x.groups)).to_dict()
