"""Stranding: exact against a count nanosecond by nanosecond, worked examples, two real captures as one deployment, hostile
rows."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console, Group
from support.kv_spaces import END, Now, Space, Step, now, spaces, trace_of
from support.memory import MemoryTrace
from support.merged import merged

import hoptrace
from hoptrace.analysis.memory.stranding import TERMS, Stranding, stranding
from hoptrace.analysis.memory.stranding_exact import dot
from hoptrace.analysis.memory.stranding_rank import merge, occupied
from hoptrace.analysis.memory.stranding_text import blocks
from hoptrace.manifest import Manifest, Server
from hoptrace.reader import Trace

DATA = Path(__file__).parent / "data" / "vllm_traces"
BYTES = 4  # of one token's KV in `kv_spaces`


def text(s: Stranding, *, full: bool = False) -> str:
    out = StringIO()
    Console(file=out, width=200, color_system=None).print(Group(*blocks(s, full=full)))
    return out.getvalue()


def laws(found: Stranding) -> None:
    """Of whatever rows."""
    for x in found.spaces:
        assert 0 <= x.held_x_ns <= x.used_x_ns
        assert 0 <= x.covered_ns <= x.recorded_ns
        if x.provisioned_x_ns is not None and x.idle_x_ns is not None:
            assert x.used_x_ns + x.idle_x_ns == x.provisioned_x_ns
            assert x.stranded_x_ns is None or 0 <= x.stranded_x_ns <= x.idle_x_ns
            assert x.queued_x_ns is None or 0 <= x.queued_x_ns <= x.idle_x_ns
            assert x.capacity is not None and x.peak <= x.capacity
        mine = found.series.filter(pl.col("name") == x.name)
        assert mine["covered_ns"].sum() == pytest.approx(x.covered_ns)
        assert (mine["covered_ns"] * mine["used"]).sum() == pytest.approx(x.used_x_ns)
        if x.stranded_x_ns is not None:
            assert (mine["covered_ns"] * mine["stranded"]).sum() == pytest.approx(x.stranded_x_ns)
    p = found.pool
    if p is not None:
        assert p.mean_of_sum <= p.peak_of_sum <= p.sum_of_peaks <= p.provisioned
        assert p.lendable_x_ns is None or (p.wanted_x_ns is not None and 0 <= p.lendable_x_ns <= p.wanted_x_ns)
    json.dumps(found.as_dict(), allow_nan=False)
    text(found, full=True)
    text(found)


@settings(max_examples=60)
@given(spaces(), st.sampled_from([None, 1, 2, 3]))
def test_exact_against_a_count_by_nanosecond(given_spaces: list[Space], rows: int | None) -> None:
    found = stranding(trace_of(given_spaces), rows=rows)
    laws(found)
    given_spaces = sorted(given_spaces, key=lambda s: (s.server, s.dp_rank))
    line = {t: [now(s, t) for s in given_spaces] for t in range(END)}
    assert [(x.server, x.dp_rank) for x in found.spaces] == [(s.server, s.dp_rank) for s in given_spaces]
    counted = [i for i, s in enumerate(given_spaces) if any(x.used is not None for x in s.steps)]
    assert len(counted) == len(given_spaces)
    for i, (x, s) in enumerate(zip(found.spaces, given_spaces, strict=True)):
        mine = [(t, at[i], at) for t, at in line.items() if at[i].used is not None]
        used = [n.used or 0 for _, n, _ in mine]
        assert x.covered_ns == len(mine)
        assert x.used_x_ns == BYTES * sum(used)
        assert x.peak == BYTES * max(used, default=0)
        if s.capacity is None or not mine:
            assert x.idle_x_ns is None and x.stranded_x_ns is None and x.over_90_ns is None
            continue
        assert x.capacity == BYTES * s.capacity
        assert x.provisioned_x_ns == BYTES * s.capacity * len(mine)
        assert x.idle_x_ns == BYTES * sum(s.capacity - u for u in used)
        assert x.over_90_ns == sum(10 * u > 9 * s.capacity for u in used)
        if x.stranded_x_ns is not None:  # null where nobody tells whether somebody waits
            others = [any(n.lacks for j, n in enumerate(at) if j != i) for _, _, at in mine]
            assert x.stranded_x_ns == BYTES * sum(s.capacity - u for u, o in zip(used, others, strict=True) if o)
            waits = [any(n.waits for j, n in enumerate(at) if j != i) for _, _, at in mine]
            assert x.queued_x_ns == BYTES * sum(s.capacity - u for u, o in zip(used, waits, strict=True) if o)
            assert x.lacking_ns == sum(n.lacks for _, n, _ in mine)
    if found.pool is None:
        return
    assert len(given_spaces) > 1
    whole = [at for at in line.values() if all(n.used is not None for n in at)]
    assert found.pool.common_ns == len(whole) > 0
    caps = [s.capacity for s in given_spaces]
    assert None not in caps
    assert found.pool.provisioned == BYTES * sum(c or 0 for c in caps)
    assert found.pool.peak_of_sum == BYTES * max(sum(n.used or 0 for n in at) for at in whole)
    assert found.pool.sum_of_peaks == BYTES * sum(max(at[i].used or 0 for at in whole) for i in range(len(caps)))
    if found.pool.wanted_x_ns is not None:
        wanted = [sum(n.wanted or 0 for n in at) for at in whole]
        spare = [sum((c or 0) - (n.used or 0) for n, c in zip(at, caps, strict=True) if not n.lacks) for at in whole]
        assert found.pool.wanted_x_ns == BYTES * sum(wanted)
        assert found.pool.lendable_x_ns == BYTES * sum(min(w, s) for w, s in zip(wanted, spare, strict=True))


A = Space("a", 0, 100, [Step(0, 10, 60), Step(70, 80, 80)], [(0, 1, 1, 0, 5)], slots=4)
B = Space("b", 0, 100, [Step(0, 50, 95, waiting=1, queued=10), Step(50, 60, 40)], [(0, 1, 1, 0, 5), (1, 1, 1, 49, 10)], slots=4)


def test_a_worked_example() -> None:
    """a: 60 tokens for 70 ns (between its steps the lesser of 60 and 80), 80 for 10 ns, nothing for 10 ns. b: 95 for 50 ns, 40
    for 10 ns, nothing for 30 ns; for 49 of the first 50 ns a prompt of 10 tokens waits for 5 free ones."""
    found = stranding(trace_of([A, B]))
    a, b = found.spaces
    assert (a.used_x_ns, b.used_x_ns) == (BYTES * (60 * 70 + 80 * 10), BYTES * (95 * 50 + 40 * 10))
    assert (a.idle_x_ns, b.idle_x_ns) == (BYTES * (9000 - 5000), BYTES * (9000 - 5150))
    assert (b.lacking_ns, a.lacking_ns) == (0, 0)  # at the step's start, 1 ns before it came, nobody waits in the stamps


def test_a_queue_of_known_length_strands() -> None:
    """As above, with the prompt there from the start: b lacks KV for its first step, and a's 40 idle tokens are stranded for 50
    ns."""
    b = Space("b", 0, 100, B.steps, [(0, 1, 1, 0, 5), (1, 1, 1, 50, 10)], slots=4)
    found = stranding(trace_of([A, b]))
    one, two = found.spaces
    assert (one.stranded_x_ns, two.stranded_x_ns) == (BYTES * 40 * 50, 0)
    assert (one.lacking_ns, two.lacking_ns, two.over_90_ns) == (0, 50, 50)
    pool = found.pool
    assert pool is not None
    assert (pool.sum_of_peaks, pool.peak_of_sum, pool.provisioned) == (BYTES * 175, BYTES * 155, BYTES * 200)
    assert pool.saving == pytest.approx(20 / 175)
    assert pool.saving_of_provisioned == pytest.approx(45 / 200)
    # One waits and three slots are free, so all 10 queued tokens could run; 5 are free.
    assert (pool.wanted_x_ns, pool.lendable_x_ns) == (BYTES * 5 * 50, BYTES * 5 * 50)
    said = text(found)
    assert "stranded" in said and "One pool behind all 2 would need 620 B at its peak" in said


def test_room_for_the_first_in_the_queue_is_no_lack() -> None:
    for prompt, lacking in ((5, 0), (6, 50)):
        b = Space("b", 0, 100, B.steps, [(0, 1, 1, 0, 5), (1, 1, 1, 50, prompt)], slots=4)
        assert stranding(trace_of([A, b])).spaces[1].lacking_ns == lacking


def test_samples_where_no_step_tells() -> None:
    """A tenth, then a half of 100 tokens; each sample speaks half-way to its neighbours, the last as far as 3/4 of their
    distance."""
    manifest = Manifest(origin="recorded", servers=[Server(name="s", kv_capacity_tokens=100, model="m")], closed=True)
    gauge: dict[str, Any] = {
        "entity": "server:s",
        "name": 'vllm:kv_cache_usage_perc{engine="0"}',
        "semantics": "gauge",
        "unit": "ratio",
    }
    counters = [gauge | {"time_ns": t, "value_float": v} for t, v in ((100, 0.1), (200, 0.1), (300, 0.5), (400, 0.5))]
    found = stranding(MemoryTrace({"counters": counters}, manifest))
    (x,) = found.spaces
    assert (x.basis, x.covered_ns, x.used_x_ns, x.peak) == ("derived", 450, 10 * 225 + 50 * 225, 50)
    assert any("from samples" in n for n in found.notes)
    steps = [{"server": "s", "step": 0, "start_ns": 0, "end_ns": 9, "kv_used_tokens": 7}]
    assert stranding(MemoryTrace({"counters": counters, "steps": steps}, manifest)).spaces[0].peak == 7


def test_samples_of_a_real_capture_against_its_steps() -> None:
    """vLLM's gauge against vLLM's steps: the same server, asked once a second."""
    trace = _capture("preempted")
    rows = {n: trace.table(n).collect().to_dicts() for n in ("requests", "stages", "coverage")}
    usage = trace.table("counters").filter(pl.col("name").str.starts_with("vllm:kv_cache_usage_perc")).collect().to_dicts()
    (sampled,) = stranding(MemoryTrace(rows | {"counters": usage}, trace.manifest)).spaces
    (told,) = stranding(trace).spaces
    assert sampled.capacity == told.capacity and sampled.basis == "derived"
    assert sampled.mean is not None and told.mean is not None
    assert 0.8 < sampled.mean / told.mean < 0.85  # the note says it: 17 % less


def test_ranks_of_one_server_strand_each_other() -> None:
    b = Space("a", 1, 100, B.steps, [(0, 1, 1, 0, 5), (1, 1, 1, 50, 10)], slots=4)
    found = stranding(trace_of([A, b]))
    assert [x.name for x in found.spaces] == ["a/0", "a/1"]
    assert found.spaces[0].stranded_x_ns == BYTES * 40 * 50


def test_a_wait_that_was_recorded_counts() -> None:
    trace = trace_of([A, Space("b", 0, 100, [Step(0, 50, 10)], [(0, 0, 1, 0, 5)], slots=4)])
    rows = {n: trace.table(n).collect().to_dicts() for n in ("steps", "residency", "stages", "requests", "coverage")}
    wait: dict[str, Any] = {"server": "b", "kind": "capacity", "on": "kv"}
    waits = [{"start_ns": 0, "end_ns": 30} | wait, {"start_ns": 0, "end_ns": 5} | wait, {"start_ns": 60, "end_ns": 65} | wait]
    found = stranding(MemoryTrace(rows | {"waits": waits}, trace.manifest))
    # What a step says holds until it ends: b's step began while a wait ran; between its steps nobody was there to see.
    assert found.spaces[1].lacking_ns == 50
    full = [{**s, "running": 4} for s in rows["steps"]]  # of four slots: whoever waits then waits for one of them
    assert stranding(MemoryTrace(rows | {"waits": waits, "steps": full}, trace.manifest)).spaces[1].lacking_ns == 0
    other = [w | {"on": "slot"} for w in waits]
    assert stranding(MemoryTrace(rows | {"waits": other}, trace.manifest)).spaces[1].lacking_ns == 0


def test_full_slots_are_no_lack_of_memory() -> None:
    b = Space("b", 0, 100, B.steps, [(0, 1, 1, 0, 5), (1, 1, 1, 50, 10)], slots=1)
    one = stranding(trace_of([A, b])).spaces[0]
    assert one.stranded_x_ns == 0
    assert one.queued_x_ns == BYTES * 40 * 50


def test_preemption_lacks_memory_whatever_is_free() -> None:
    b = Space("b", 0, 100, [Step(0, 50, 40, preempted=1)], [(0, 0, 1, 0, 5)])
    assert stranding(trace_of([A, b])).spaces[0].stranded_x_ns == BYTES * 40 * 50


def test_away_is_not_provisioned() -> None:
    trace = trace_of([A, B])
    rows = {n: trace.table(n).collect().to_dicts() for n in ("steps", "residency", "stages", "requests", "coverage")}
    events = [{"time_ns": 20, "server": "a", "kind": "stop"}, {"time_ns": 30, "server": "a", "kind": "start"}]
    a = stranding(MemoryTrace(rows | {"events": events}, trace.manifest)).spaces[0]
    assert a.covered_ns == END - 10
    assert a.used_x_ns == BYTES * (60 * 60 + 80 * 10)


def test_pipeline_stages_count_once() -> None:
    trace = trace_of([A])
    rows = {n: trace.table(n).collect().to_dicts() for n in ("steps", "residency", "stages", "requests", "coverage")}
    later = [s | {"pp_rank": p, "start_ns": s["start_ns"] + p, "end_ns": s["end_ns"] + p} for s in rows["steps"] for p in (0, 1)]
    one, two = stranding(trace), stranding(MemoryTrace(rows | {"steps": later}, trace.manifest))
    assert one.spaces == two.spaces


def test_without_capacity_says_what_to_do() -> None:
    found = stranding(trace_of([Space("llama", 0, None, A.steps, A.requests)]))
    (x,) = found.spaces
    assert x.capacity is None and x.idle_x_ns is None and x.stranded_share is None
    assert any("kv_capacity_tokens" in u and "llama" in u for u in found.unseen)
    assert "its size is not told" in text(found)
    manifest = Manifest(origin="recorded", servers=[Server(name="llama", kv_capacity_tokens=100)], closed=True)
    trace = trace_of([Space("llama", 0, None, A.steps, A.requests)])
    told = stranding(
        MemoryTrace({n: trace.table(n).collect().to_dicts() for n in ("steps", "residency", "stages", "coverage")}, manifest)
    )
    assert told.spaces[0].unit == "tokens" and told.spaces[0].idle_x_ns == 9000 - 5000
    assert any("KV geometry" in u for u in told.unseen)


def test_what_the_engine_does_not_say_is_derived_from_contexts() -> None:
    step = {"server": "s", "dp_rank": 0, "prefill_context_tokens": 5, "prefill_tokens": 10, "prefill_requests": 1,
            "decode_requests": 2, "decode_tokens": 2, "decode_context_tokens": 30, "kv_capacity_tokens": 100}  # fmt: skip
    trace = MemoryTrace({"steps": [step | {"step": 0, "start_ns": 0, "end_ns": 10}]})
    found = stranding(trace)
    assert (found.spaces[0].basis, found.spaces[0].used_x_ns) == ("derived", 47 * 10)
    assert any("derived" in n for n in found.notes)
    both = trace_of([A])
    rows = {n: both.table(n).collect().to_dicts() for n in ("steps", "residency", "stages", "coverage")}
    rows["steps"].append(step | {"step": 0, "start_ns": 0, "end_ns": 10})
    mixed = stranding(
        MemoryTrace(rows, Manifest(origin="recorded", servers=[Server(name="s"), *both.manifest.servers], closed=True))
    )
    assert mixed.pool is None  # one counted space: nothing to pool, and counted and derived are never added up


def test_held_is_at_most_what_the_contexts_in_the_step_take() -> None:
    """Used 80; three requests of 47 tokens together, in blocks of 4: 47 + 3 × 3 at most. With a fourth that skips the step:
    unknown."""
    prompt = {"prefill_context_tokens": 5, "prefill_tokens": 10, "prefill_requests": 1}
    answers = {"decode_requests": 2, "decode_tokens": 2, "decode_context_tokens": 30}
    step = {"server": "s", "dp_rank": 0, "step": 0, "start_ns": 0, "end_ns": 10, "kv_used_tokens": 80} | prompt | answers
    manifest = Manifest(origin="recorded", servers=[Server(name="s", block_size_tokens=4)], closed=True)
    for running, held in ((None, 56), (3, 56), (4, 80)):
        (x,) = stranding(MemoryTrace({"steps": [step | {"running": running}]}, manifest)).spaces
        assert (x.used_x_ns, x.held_x_ns) == (800, held * 10)


def test_cached_blocks_beside_what_is_held() -> None:
    """10 blocks of 4 tokens stored at 1, 3 evicted, all cleared at 60, one stored again: 7 blocks for most of the time, then
    1."""
    a = Space("a", 0, 100, [Step(0, 10, 12)], [(0, 0, 1, 0, 5)], block=4)
    trace = trace_of([a])
    rows = {n: trace.table(n).collect().to_dicts() for n in ("steps", "residency", "stages", "requests", "coverage")}

    def event(t: int, kind: str, n: int = 1) -> list[dict[str, Any]]:
        return [{"time_ns": t, "server": "a", "dp_rank": 0, "event": kind, "medium": "device", "bytes": 16}] * n

    other = [{"time_ns": 2, "server": "a", "dp_rank": 0, "event": "stored", "medium": "host", "bytes": 16}] * 50
    events = [
        *event(1, "stored", 10),
        *other,
        *event(2, "evicted", 3),
        *event(60, "cleared"),
        *event(60, "stored"),
        *event(89, "hit"),
    ]
    (x,) = stranding(MemoryTrace(rows | {"blocks": events}, trace.manifest)).spaces
    # The levels hold from the end of their part of the time (1 ns here): 10 from 2, 7 from 3, 1 from 61; bins end 1 ns later.
    assert x.cached == pytest.approx((10 + 7 * 58 + 1 * 30) * 16 / 90, rel=0.03)
    assert x.cached_idle is not None and x.cached is not None and x.cached_idle < x.cached


def test_gauges_and_platform() -> None:
    hbm_node = {"name": "a-hbm", "server": "a", "kind": "hbm", "capacity_bytes": 10_000}
    trace = trace_of([A, B], platform={"nodes": [hbm_node, {"name": "far", "capacity_bytes": 7}, {"name": "client"}]})
    rows = {n: trace.table(n).collect().to_dicts() for n in ("steps", "residency", "stages", "requests", "coverage")}
    gauge: dict[str, Any] = {"unit": "bytes", "semantics": "gauge", "status": "ok"}
    counters = [
        {"time_ns": t, "entity": "gpu:0", "name": n, "value_int": v} | gauge
        for t, n, v in [(0, "memory_used_bytes", 10), (30, "memory_used_bytes", 40), (40, "memory_used_bytes", 0),
                        (0, "memory_total_bytes", 100), (0, "process_virtual_memory_bytes", 9), (0, "queue_bytes", 3)]
    ]  # fmt: skip
    servers = [trace.manifest.servers[0].model_copy(update={"weight_bytes": 1000}), trace.manifest.servers[1]]
    found = stranding(MemoryTrace(rows | {"counters": counters}, trace.manifest.model_copy(update={"servers": servers})))
    by_name = {g.name: g for g in found.gauges}
    assert set(by_name) == {"memory_used_bytes", "memory_total_bytes"}
    used = by_name["memory_used_bytes"]
    assert (used.mean_bytes, used.peak_bytes, used.total_bytes) == ((10 * 30 + 40 * 10) / 40, 40, 100)
    hbm, far = found.platform
    assert (hbm.assigned_bytes, hbm.used_mean_bytes) == (1400, 1000 + BYTES * 5000 / 90)
    assert (far.capacity_bytes, far.assigned_bytes, far.used_mean_bytes) == (7, None, None)
    assert "Memory a-hbm" in text(found, full=True)


def _capture(name: str) -> Trace:
    return hoptrace.open(DATA / f"{name}.trace")


def test_a_real_capture_against_its_raw_rows() -> None:
    """Every step and gap of the capture, one by one, in plain Python."""
    trace = _capture("preempted")
    steps = trace.table("steps").collect().sort("start_ns").to_dicts()
    spans: dict[int, tuple[int, int]] = {}
    for r in trace.table("residency").collect().to_dicts():
        if r["phase"] != "preempted":
            first, last = spans.get(r["request"], (r["first_step"], r["last_step"]))
            spans[r["request"]] = (min(first, r["first_step"]), max(last, r["last_step"]))
    used = over = 0
    for s, then in zip(steps, [*steps[1:], None], strict=True):
        took = s["end_ns"] - s["start_ns"]
        used += s["kv_used_tokens"] * took
        over += took if 10 * s["kv_used_tokens"] > 9 * 2528 else 0
        if then is not None and any(f <= s["step"] < n for f, n in spans.values()):
            level, gap = min(s["kv_used_tokens"], then["kv_used_tokens"]), then["start_ns"] - s["end_ns"]
            used += level * gap
            over += gap if 10 * level > 9 * 2528 else 0
    (x,) = stranding(trace).spaces
    assert (x.capacity, x.peak) == (2528 * 12288, 2528 * 12288)
    assert x.used_x_ns == used * 12288 == 476_228_224_305_856_512
    assert x.over_90_ns == over == 11_719_370_222
    assert x.stranded_x_ns == 0 and x.lacking_ns is not None
    # Requests waited for KV from the first preemption until the queue was short: most of the time over 90 %.
    assert 9e9 < x.lacking_ns < over
    assert any("one KV space" in n for n in stranding(trace).notes)


def test_the_user_story_of_two_servers() -> None:
    """'One of my servers preempts while another's KV is half empty: what would a pool need?'"""
    tight, wide = _capture("preempted"), _capture("steady")
    begin = [t.table("steps").select(pl.col("start_ns").min()).collect().item() for t in (tight, wide)]
    found = stranding(merged([(tight, "tight", 0), (wide, "wide", begin[0] - begin[1])]))
    by_name = {x.name: x for x in found.spaces}
    assert by_name["tight"].stranded_x_ns == 0
    lacking = by_name["tight"].lacking_ns
    stranded = by_name["wide"].stranded_x_ns
    assert lacking == 9_560_051_810 and stranded is not None
    # wide holds 87,328 tokens and uses 40.9 MB at most: nearly all of it idles while tight lacks KV.
    assert (87328 * 12288 - 40_894_464) * lacking < stranded <= 87328 * 12288 * lacking
    pool = found.pool
    assert pool is not None
    assert (pool.sum_of_peaks, pool.peak_of_sum) == (31_064_064 + 40_894_464, 70_778_880)
    assert pool.wanted_x_ns == pool.lendable_x_ns and pool.wanted_x_ns
    assert "requests wait for it for 9.56 s" in text(found)
    assert "would have held 100% of it" in text(found)


def test_no_steps() -> None:
    found = stranding(MemoryTrace({}))
    assert (found.spaces, found.pool, found.series.height) == ([], None, 0)
    assert found.unseen and blocks(found) == [] and blocks(found, full=True) == []


_NUMBER = st.sampled_from([0, 1, -1, 5, 100, 2**63 - 1, -(2**63), 2**62, 2**32, 2**40])
_ANY = st.one_of(st.none(), _NUMBER)


@settings(max_examples=60)
@given(st.data())
def test_hostile_rows(data: st.DataObject) -> None:
    """Nulls, negative durations, duplicates, extremes, unknown servers: never an exception, never a broken law."""
    some = data.draw
    name = st.sampled_from(["s", "x", ""])
    step_columns = (
        "kv_used_tokens", "kv_capacity_tokens", "running", "waiting", "prefill_tokens", "decode_tokens", "prefill_context_tokens",
        "decode_context_tokens", "prefill_requests", "decode_requests", "queued_prefill_tokens", "queued_decode_requests",
        "queued_decode_context_tokens", "preempted",
    )  # fmt: skip
    number = _NUMBER
    steps = [
        {"server": some(name), "dp_rank": some(_ANY), "pp_rank": some(st.sampled_from([None, 0, 1])), "step": some(number),
         "start_ns": some(number), "end_ns": some(number)} | {c: some(_ANY) for c in step_columns}
        for _ in range(some(st.integers(0, 4)))
    ]  # fmt: skip
    runs = [
        {"request": some(st.integers(0, 2)), "server": some(name), "dp_rank": some(_ANY), "first_step": some(number),
         "last_step": some(number), "phase": some(st.sampled_from(["decode", "preempted"])), "tokens_per_step": some(_ANY),
         "context_at_start": some(_ANY)}
        for _ in range(some(st.integers(0, 3)))
    ]  # fmt: skip
    stages = [
        {"request": some(st.integers(0, 2)), "stage": 0, "server": some(st.one_of(st.none(), name)), "enqueued_ns": some(_ANY),
         "scheduled_ns": some(_ANY), "end_ns": some(_ANY), "prompt_tokens": some(_ANY), "cached_tokens": some(_ANY)}
        for _ in range(some(st.integers(0, 3)))
    ]  # fmt: skip
    found = stranding(
        MemoryTrace({"steps": steps + steps[:1], "residency": runs, "stages": stages}), rows=some(st.sampled_from([None, 1]))
    )
    laws(found)


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1)), max_size=6))
def test_products_are_exact(pairs: list[tuple[int, int]]) -> None:
    a, b = (np.array([p[i] for p in pairs], dtype=np.int64) for i in (0, 1))
    assert dot(a, b) == sum(x * y for x, y in pairs)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=8))
def test_merged_intervals(pairs: list[tuple[int, int]]) -> None:
    first = np.array([a for a, _ in pairs], dtype=np.int64)
    last = np.array([a + n for a, n in pairs], dtype=np.int64)
    begin, end = merge(first, last)
    assert {x for a, n in pairs for x in range(2 * a, 2 * (a + n) + 1)} == {
        x for a, b in zip(begin.tolist(), end.tolist(), strict=True) for x in range(2 * a, 2 * b + 1)
    }
    assert (begin[1:] > end[:-1]).all()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30), st.integers(0, 8)), min_size=1, max_size=12), st.integers(1, 12))
def test_batches_of_requests_change_nothing(runs: list[tuple[int, int, int]], rows: int) -> None:
    frame = pl.LazyFrame(
        {"request": [r for r, _, _ in runs], "sequence": [0] * len(runs), "server": ["s"] * len(runs), "dp_rank": [0] * len(runs),
         "first_step": [a for _, a, _ in runs], "last_step": [a + n for _, a, n in runs], "phase": ["decode"] * len(runs)}
    )  # fmt: skip
    whole, parts = occupied(frame), occupied(frame, rows)
    assert [x.tolist() for x in whole["s", 0]] == [x.tolist() for x in parts["s", 0]]


@pytest.mark.parametrize("term", [t for t in TERMS if t.sql], ids=lambda t: t.name)
def test_the_sql_of_each_term_runs(term: Any) -> None:
    found = _capture("preempted").sql(term.sql)
    if term.name == "cached_idle":
        blocks_ = _capture("preempted").table("blocks").collect()
        kept = (blocks_["event"] == "stored").sum() - (blocks_["event"] == "evicted").sum()
        assert found["blocks"].sum() == kept == 74
    else:
        assert found.columns == ["server", "start_ns", "end_ns"]


def test_terms_are_whole() -> None:
    assert len({t.name for t in TERMS}) == len(TERMS)
    assert all(t.formula and t.doc and t.unit for t in TERMS)


def test_the_reference_itself() -> None:
    assert now(A, 20) == Now(60) and now(A, 85) == Now(0) and now(B, 70).used == 0


def test_a_hole_in_the_coverage_is_neither_idle_nor_stranded() -> None:
    """`b` holds 20 of 100 tokens for 10 s while `a`, full, lets requests wait for 5 s; from 3 s to 7 s nobody saw `b`."""
    second = 1_000_000_000
    shape = {"layers": 1, "kv_heads": 1, "head_size": 1, "kv_dtype": "f16", "kv_capacity_tokens": 100, "max_sequences": 4}
    both = Manifest(origin="recorded", servers=[Server(name=n, **shape) for n in "ab"])  # type: ignore[arg-type]

    def step(server: str, i: int, used: int) -> dict[str, Any]:
        return {
            "server": server, "step": i, "start_ns": i * second, "end_ns": (i + 1) * second, "prefill_requests": 0,
            "prefill_tokens": 0, "prefill_context_tokens": 0, "decode_requests": 1, "decode_tokens": 1,
            "decode_context_tokens": used - 1, "running": 1, "waiting": int(server == "a" and i >= 5), "kv_used_tokens": used,
            "kv_capacity_tokens": 100, "origin": "observed",
        }  # fmt: skip

    a = [step("a", i, 100) for i in range(10)]
    b = [step("b", i, 20) for i in range(10)]
    seen = [(0, 3), (7, 10)]
    stretches = [("a", 0, 10), *(("b", low, high) for low, high in seen)]
    cover = [{"table": "steps", "server": s, "from_ns": x * second, "to_ns": y * second} for s, x, y in stretches]
    mine = [s for s in b if not 3 <= s["step"] < 7]
    # Who was there is known: nobody, as it seems, from 3 s to 7 s.
    stay = {"stage": 0, "server": "b", "enqueued_ns": 0}
    stays = [stay | {"request": i, "scheduled_ns": x * second, "end_ns": y * second} for i, (x, y) in enumerate(seen)]
    runs = [
        {"request": i, "server": "b", "first_step": x, "last_step": y - 1, "phase": "decode"} for i, (x, y) in enumerate(seen)
    ]
    whole = stranding(MemoryTrace({"steps": a + b}, both)).spaces[1]
    assert (whole.covered_ns, whole.mean, whole.idle_x_ns, whole.stranded_x_ns) == (
        10 * second, 20 * BYTES, 800 * BYTES * second, 400 * BYTES * second,
    )  # fmt: skip
    found = stranding(MemoryTrace({"steps": a + mine, "stages": stays, "residency": runs, "coverage": cover}, both))
    x = found.spaces[1]
    assert (x.covered_ns, x.recorded_ns, x.mean) == (6 * second, 10 * second, 20 * BYTES)
    assert (x.idle_x_ns, x.stranded_x_ns) == (480 * BYTES * second, 240 * BYTES * second)
    assert found.pool is not None and found.pool.common_ns == 6 * second
    laws(found)
