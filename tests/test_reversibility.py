"""Reversibility: against a count request by request, a worked example, real captures, hostile rows."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console, Group
from support.kv_spaces import END, Space, Step, now, spaces, trace_of
from support.memory import MemoryTrace
from support.merged import merged

import hoptrace
from hoptrace.analysis.memory import reversibility_holders
from hoptrace.analysis.memory.reversibility import HORIZONS_S, MOMENTS, TERMS, Reclaim, Reversibility, reversibility
from hoptrace.analysis.memory.reversibility_text import blocks
from hoptrace.manifest import Manifest, Server
from hoptrace.reader import Trace

DATA = Path(__file__).parent / "data" / "vllm_traces"
UNIT = 10**8  # of time in `kv_spaces`: 0.1 s
BYTES = 4
TABLES = ("steps", "residency", "stages", "requests", "coverage")

# Requests 0 (12 tokens after the first step, 22 after the second) and 1 (22 after the first, its last) on a server of four slots.
WORKED = Space("a", 0, 100, [Step(0, 10, 40, running=2), Step(20, 30, 22)], [(0, 1, 10, 0, 5), (0, 0, 20, 0, 5)], slots=4)
LINK = {"name": "out", "a": "a-hbm", "b": "elsewhere", "bytes_per_s": 100.0}
SLOW = {"name": "slow", "a": "elsewhere", "b": "server:a", "bytes_per_s": 1.0}
PLATFORM = {"nodes": [{"name": "a-hbm", "server": "a"}], "links": [LINK, SLOW, {"name": "unknown", "a": "a-hbm", "b": "x"}]}


def text(r: Reversibility, *, full: bool = False) -> str:
    out = StringIO()
    Console(file=out, width=200, color_system=None).print(Group(*blocks(r, full=full)))
    return out.getvalue()


def of(r: Reversibility, what: str, name: str) -> Reclaim:
    return next(x for x in r.reclaim if (x.what, x.name) == (what, name))


def shares(r: Reversibility, what: str, name: str, column: str = "share") -> dict[tuple[int, float], float]:
    mine = r.moments.filter((pl.col("what") == what) & (pl.col("name") == name))
    return {(t, h): v for t, h, v in mine.select("time_ns", "horizon_s", column).rows()}


def laws(r: Reversibility) -> None:
    """Of whatever rows."""
    for x in r.reclaim:
        assert 0 <= x.free_mean <= 1
        least = x.free_mean
        moved = 0.0
        for w in x.within:
            assert 0 <= w.worst <= w.p5 <= 1 and w.worst <= w.mean + 1e-12 <= 1 + 2e-12
            assert w.mean >= least - 1e-12
            least = w.mean
            if w.moved_mean is not None and w.moved_worst is not None and w.moved_bytes is not None:
                assert w.moved_worst >= w.worst and w.mean - 1e-12 <= w.moved_mean <= 1 + 1e-12 and w.moved_bytes >= 0
                assert w.moved_mean >= moved - 1e-12
                moved = w.moved_mean
    grown = (
        r.moments.filter(pl.col("horizon_s").is_not_null())
        .sort("horizon_s")
        .group_by("what", "name", "time_ns", maintain_order=True)
    )
    for column in ("share", "moved_share"):
        values = grown.agg(pl.col(column).diff().min().alias("least"))["least"].drop_nulls()
        assert values.is_empty() or values.min() >= 0  # type: ignore[operator]
    for d in r.drains:
        known = [v for v in (d.p50_ns, d.p95_ns, d.max_ns) if v is not None]
        assert known == sorted(known) and all(v >= 0 for v in known)
        assert d.open + d.idle <= d.moments
    assert r.fastest is None or all(d.kind != "server" or not d.mean_ns or r.fastest.mean_ns <= d.mean_ns for d in r.drains)  # type: ignore[operator]
    json.dumps(r.as_dict(), allow_nan=False)
    text(r)
    text(r, full=True)


def test_a_worked_example() -> None:
    """At 0.5 s 40 tokens are in use, 34 of them known: 12 until 3.0 s, 22 until 1.0 s. At 3.0 s the space is empty."""
    r = reversibility(trace_of([WORKED], UNIT, platform=PLATFORM), moments=[5 * UNIT])
    laws(r)
    assert [shares(r, "kv", "a")[5 * UNIT, h] for h in HORIZONS_S] == [0.60, 0.82, 1.0, 1.0]
    # 100 bytes a second carry 2 tokens of 4 bytes in 0.1 s, and the 18 that are left in 1 s.
    assert [shares(r, "kv", "a", "moved_share")[5 * UNIT, h] for h in HORIZONS_S] == [0.62, 1.0, 1.0, 1.0]
    kv = of(r, "kv", "a")
    assert [w.moved_bytes for w in kv.within] == [8, 72, 0, 0]
    assert (kv.link, kv.bytes_per_s, kv.free_mean, kv.growth_mean) == ("out", 100.0, 0.6, 0.1)
    assert [shares(r, "slots", "a")[5 * UNIT, h] for h in HORIZONS_S] == [0.5, 0.75, 1.0, 1.0]
    server, role = r.drains
    assert (server.name, server.max_ns, role.name, role.max_ns) == ("a", 25 * UNIT, "both", 25 * UNIT)
    assert server.resident_bytes == 40 * BYTES
    assert "moved over out" in text(r)


def test_between_two_steps_only_those_are_there_who_come_again() -> None:
    r = reversibility(trace_of([WORKED], UNIT), moments=[15 * UNIT])
    # min(40, 22) tokens in use, 12 of them known to be held until 3.0 s.
    assert [shares(r, "kv", "a")[15 * UNIT, h] for h in HORIZONS_S] == [0.78, 0.78, 1.0, 1.0]
    assert any("No link with a known rate leaves a" in u for u in r.unseen)


def test_within_includes_the_last_instant() -> None:
    """Request 1 ends 0.1 s after 0.9 s. The space is empty 1 s after 2.0 s, and 8 of its 30 tokens then are nobody's that is
    known."""
    unknown = Space("a", 0, 100, [Step(0, 10, 40, running=2), Step(20, 30, 30)], WORKED.requests, slots=4)
    r = reversibility(trace_of([unknown], UNIT), moments=[0, 9 * UNIT, 20 * UNIT])
    found = shares(r, "kv", "a")
    assert found[9 * UNIT, 0.1] == 0.82
    assert (found[20 * UNIT, 0.1], found[20 * UNIT, 1.0]) == (0.7, 1.0)
    # Both requests came at 0: they are there at that instant.
    assert r.drains[0].max_ns == 30 * UNIT


def test_latency_takes_of_the_time_to_move() -> None:
    late = PLATFORM | {"links": [LINK | {"latency_ns": 6e7}]}
    r = reversibility(trace_of([WORKED], UNIT, platform=late), moments=[5 * UNIT])
    assert shares(r, "kv", "a", "moved_share")[5 * UNIT, 0.1] == 0.61


def test_shared_blocks_go_back_with_the_last_of_them() -> None:
    """Two requests of 22 and 12 tokens in 24 places: they share at least 10, so the first to leave gives back no more than 12."""
    shared = Space("a", 0, 100, [Step(0, 10, 24), Step(20, 30, 22)], WORKED.requests)
    r = reversibility(trace_of([shared], UNIT), moments=[5 * UNIT])
    assert shares(r, "kv", "a")[5 * UNIT, 1.0] == pytest.approx((100 - 24 + 12) / 100)


@settings(max_examples=60)
@given(spaces(), st.sampled_from([None, 1, 2]), st.sampled_from([1, 3, 10**6]))
def test_against_a_count_request_by_request(given_spaces: list[Space], rows: int | None, pairs: int) -> None:
    moments = [t * UNIT + 7 for t in range(0, END, 4)]
    trace = trace_of(given_spaces, UNIT)
    was = reversibility_holders._PAIRS
    reversibility_holders._PAIRS = pairs
    try:
        r = reversibility(trace, moments=moments, rows=rows)
    finally:
        reversibility_holders._PAIRS = was
    laws(r)
    ranks = {n: sum(s.server == n for s in given_spaces) for n in {s.server for s in given_spaces}}
    for s in given_spaces:
        name = s.server if ranks[s.server] == 1 else f"{s.server}/{s.dp_rank}"
        found = shares(r, "kv", name)
        want = {(t, h): share for t in moments for h in HORIZONS_S if (share := _kv(s, t, h)) is not None}
        assert found == pytest.approx(want)
    for server in ranks:
        stays = [
            (s.steps[f].start - before, s.steps[f].start, s.steps[n].end)
            for s in given_spaces if s.server == server for f, n, _, before, _ in s.requests
        ]  # fmt: skip
        if not stays:
            continue
        drained = r.moments.filter((pl.col("what") == "drain") & (pl.col("name") == server) & (pl.col("kind") == "server"))
        for t, v in drained.select("time_ns", "drain_ns").rows():
            assert v == max([e * UNIT - t for b, _, e in stays if b * UNIT <= t < e * UNIT], default=0)
        slots = next(s.slots for s in given_spaces if s.server == server)
        if slots is None:
            continue
        slots *= ranks[server]
        for (t, h), share in shares(r, "slots", server).items():
            still = sum(b * UNIT <= t and e * UNIT > t + round(h * 1e9) for _, b, e in stays)
            assert share == max(slots - still, 0) / slots


def _kv(s: Space, t: int, horizon: float) -> float | None:
    """The share of one space that could be handed over, by the rule in words."""
    used = now(s, t // UNIT).used
    if used is None or s.capacity is None or (used and not s.requests):
        return None
    begun = [i for i, x in enumerate(s.steps) if x.start * UNIT <= t]
    held = remaining = 0
    if begun:
        i = begun[-1]
        inside = t < s.steps[i].end * UNIT
        for first, last, each, _, _ in s.requests:
            if first <= i and (i <= last if inside else i < last):
                tokens = -(-(2 + each * (i - first + 1)) // s.block) * s.block
                held += tokens
                remaining += tokens if s.steps[last].end * UNIT - t > round(horizon * 1e9) else 0
    until = min((t + round(horizon * 1e9)) // UNIT, END - 1)
    empty = any(now(s, u).used == 0 for u in range(t // UNIT, until + 1))
    freed = used if empty else max(min(held, used) - remaining, 0)
    return (s.capacity - used + freed) / s.capacity


def test_who_never_ends_is_said() -> None:
    trace = trace_of([WORKED], UNIT)
    rows = {n: trace.table(n).collect().to_dicts() for n in TABLES}
    rows["stages"][0]["end_ns"] = None
    r = reversibility(MemoryTrace(rows, trace.manifest), moments=[5 * UNIT, 80 * UNIT])
    server = r.drains[0]
    assert (server.open, server.mean_ns) == (2, None)
    assert any("whose end nobody saw" in u for u in r.unseen)
    # The space is seen empty at 3.0 s all the same.
    assert shares(r, "kv", "a")[5 * UNIT, 1.0] == 0.82 and shares(r, "kv", "a")[5 * UNIT, 10.0] == 1.0


def test_roles_drain_apart() -> None:
    trace = trace_of([WORKED], UNIT)
    rows = {n: trace.table(n).collect().to_dicts() for n in TABLES}
    for row, role in zip(rows["stages"], ("decode", "prefill"), strict=True):
        row["role"] = role
    r = reversibility(MemoryTrace(rows, trace.manifest), moments=[5 * UNIT])
    assert {(d.kind, d.name): d.max_ns for d in r.drains} == {
        ("server", "a"): 25 * UNIT, ("role", "decode"): 25 * UNIT, ("role", "prefill"): 5 * UNIT,
    }  # fmt: skip
    assert "role prefill: 500 ms at the mean" in text(r)


def test_what_is_not_told_is_left_out_and_said() -> None:
    trace = trace_of([Space("a", 0, None, WORKED.steps, WORKED.requests)], UNIT)
    r = reversibility(trace)
    assert not r.reclaim and r.drains
    assert any("How much KV space a has" in u for u in r.unseen) and any("its slots are left out" in u for u in r.unseen)
    # Who holds the space is not known: free now is, what comes back is not.
    trace = trace_of([Space("a", 0, 100, WORKED.steps, [])], UNIT)
    r = reversibility(trace, moments=[5 * UNIT])
    assert not r.reclaim and any("does not tell how much KV of a each request held" in u for u in r.unseen)
    r = reversibility(MemoryTrace({}))
    assert (r.reclaim, r.drains, r.fastest, r.moments.height) == ([], [], None, 0) and r.unseen
    assert blocks(r) == []


def test_requests_without_stages_drain_their_only_server() -> None:
    manifest = Manifest(origin="recorded", servers=[Server(name="s", max_sequences=2)], closed=True)
    requests = [{"request": i, "arrival_ns": i * UNIT, "scheduled_ns": i * UNIT, "finish_ns": (i + 10) * UNIT} for i in range(2)]
    r = reversibility(MemoryTrace({"requests": requests}, manifest))
    assert len(r.moments.filter(pl.col("what") == "drain")) == MOMENTS
    assert [(d.name, d.max_ns is not None and 9.9 * UNIT < d.max_ns <= 10 * UNIT) for d in r.drains] == [("s", True)]
    # A log of arrivals alone: nobody knows who was there.
    r = reversibility(MemoryTrace({"requests": [{"request": 0, "arrival_ns": 0}]}, manifest))
    assert not r.drains and r.unseen


def _capture(name: str) -> Trace:
    return hoptrace.open(DATA / f"{name}.trace")


def test_a_real_capture_against_its_raw_rows() -> None:
    """Some moments of the capture that preempts: who holds what, row by row in plain Python."""
    trace = _capture("preempted")
    steps = trace.table("steps").collect().sort("start_ns").to_dicts()
    runs = [x for x in trace.table("residency").collect().to_dicts() if x["phase"] != "preempted"]
    spans: dict[int, tuple[int, int]] = {}
    for x in runs:
        first, last = spans.get(x["request"], (x["first_step"], x["last_step"]))
        spans[x["request"]] = (min(first, x["first_step"]), max(last, x["last_step"]))
    empty = [s["end_ns"] for s in steps if not any(f <= s["step"] < n for f, n in spans.values())]
    ends: dict[int, list[int]] = {}
    for x in trace.table("stages").collect().to_dicts():
        if x["end_ns"] is not None:
            ends.setdefault(x["request"], []).append(x["end_ns"])
    middle = [s for s in steps if s["running"] > 3][::9]
    moments = [(s["start_ns"] + s["end_ns"]) // 2 for s in middle]
    r = reversibility(trace, moments=moments)
    laws(r)
    found = shares(r, "kv", "vllm")
    assert len(moments) > 15 and len(found) == len(moments) * len(HORIZONS_S)
    for s, t in zip(middle, moments, strict=True):
        held = {}
        for x in runs:
            if x["first_step"] <= s["step"] <= x["last_step"]:
                tokens = x["context_at_start"] + x["tokens_per_step"] * (s["step"] - x["first_step"] + 1)
                held[x["request"]] = -(-tokens // 32) * 32
        assert 1 <= len(held) <= 8
        for h in HORIZONS_S[:2]:
            remaining = sum(v for k, v in held.items() if min(e for e in ends[k] if e > t) - t > h * 1e9)
            freed = max(min(sum(held.values()), s["kv_used_tokens"]) - remaining, 0)
            if min(e for e in empty if e > t) - t <= h * 1e9:
                freed = s["kv_used_tokens"]
            assert found[t, h] == (2528 - s["kv_used_tokens"] + freed) / 2528
    # At the worst moment nothing is free, and what ends within a second is little.
    whole = of(reversibility(trace), "kv", "vllm")
    assert whole.within[0].worst < 0.05 and whole.within[2].worst == 1.0
    assert whole.dropped_bytes is not None and whole.dropped_bytes > 0


def test_two_servers_drain_at_their_own_times() -> None:
    tight, wide = _capture("preempted"), _capture("steady")
    begin = [t.table("steps").select(pl.col("start_ns").min()).collect().item() for t in (tight, wide)]
    r = reversibility(merged([(tight, "tight", 0), (wide, "wide", begin[0] - begin[1])]))
    laws(r)
    by_name = {d.name: d for d in r.drains if d.kind == "server"}
    assert r.fastest is not None and r.fastest.name == "wide"
    # tight was recorded for 36 s of the 123 s, and is judged over these.
    assert by_name["tight"].moments < 0.32 * by_name["wide"].moments
    assert 10e9 < by_name["tight"].max_ns < 12e9  # type: ignore[operator]


_NUMBER = st.sampled_from([0, 1, -1, 5, 100, 2**63 - 1, -(2**63), 2**62, 2**32, 2**40])
_ANY = st.one_of(st.none(), _NUMBER)


@settings(max_examples=60)
@given(st.data())
def test_hostile_rows(data: st.DataObject) -> None:
    some = data.draw
    name = st.sampled_from(["s", "x", ""])
    steps = [
        {"server": some(name), "dp_rank": some(_ANY), "step": some(_NUMBER), "start_ns": some(_NUMBER), "end_ns": some(_NUMBER),
         "kv_used_tokens": some(_ANY), "kv_capacity_tokens": some(_ANY)}
        for _ in range(some(st.integers(0, 4)))
    ]  # fmt: skip
    runs = [
        {"request": some(st.integers(0, 2)), "server": some(name), "dp_rank": some(_ANY), "first_step": some(_NUMBER),
         "last_step": some(_NUMBER), "phase": some(st.sampled_from(["decode", "preempted"])), "tokens_per_step": some(_ANY),
         "context_at_start": some(_ANY)}
        for _ in range(some(st.integers(0, 3)))
    ]  # fmt: skip
    stages = [
        {"request": some(st.integers(0, 2)), "stage": 0, "server": some(st.one_of(st.none(), name)), "enqueued_ns": some(_ANY),
         "scheduled_ns": some(_ANY), "end_ns": some(_ANY), "role": some(st.sampled_from([None, "both", "decode"]))}
        for _ in range(some(st.integers(0, 3)))
    ]  # fmt: skip
    moments = some(st.one_of(st.none(), st.lists(_NUMBER, max_size=4)))
    laws(reversibility(MemoryTrace({"steps": steps + steps[:1], "residency": runs, "stages": stages}), moments=moments))


def test_terms_are_whole() -> None:
    assert len({t.name for t in TERMS}) == len(TERMS)
    assert all(t.formula and t.doc and t.unit for t in TERMS)


def test_charts() -> None:
    from hoptrace.analysis.memory.stranding import stranding
    from hoptrace.app import charts_stranding

    trace = trace_of([WORKED, Space("b", 0, 100, [Step(0, 50, 95)], [(0, 0, 1, 0, 5)])], UNIT)
    r, s = reversibility(trace), stranding(trace)
    rows: list[dict[str, Any]] = []
    for x in r.reclaim:
        rows += [{"what": x.what, "name": x.name, "horizon_s": w.horizon_s, "mean": w.mean, "worst": w.worst} for w in x.within]
    charts = (charts_stranding.space_in_use(s.series, 0), charts_stranding.reclaimable(pl.DataFrame(rows)))
    for chart in (*charts, charts_stranding.drain(r.moments, 0)):
        assert 0 < sum(len(d) for d in chart.to_dict()["datasets"].values()) <= 5000
    assert sum(len(d) for d in charts_stranding.space_in_use(s.series, 0).to_dict()["datasets"].values()) == 3 * s.series.height
