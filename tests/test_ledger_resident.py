"""Law 2: resident = before + produced + copied in - freed, on a cache played block by block and on real captures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.memory import MemoryTrace

import hoptrace
from hoptrace.analysis.moves.ledger_resident import residency
from hoptrace.manifest import Manifest, Server

REAL = Path(__file__).parent / "data/vllm_traces"
BLOCK = 4
COUNT = 6
SERVER = Server(name="s", block_size_tokens=BLOCK, block_count=COUNT)
MANIFEST = Manifest(origin="recorded", servers=[SERVER], closed=True)


def event(at: int, what: str, block: int | None = None, **more: Any) -> dict[str, Any]:
    return {"time_ns": at, "server": "s", "event": what, "hash": block, "medium": "device", "bytes": 10, **more}


@pytest.mark.parametrize(
    ("name", "stored", "evicted", "resident", "peak", "steps"),
    [("steady", 447, 0, 447, 447, 370), ("preempted", 382, 308, 74, 79, 325)],
)
def test_real_captures_keep_the_law(name: str, stored: int, evicted: int, resident: int, peak: int, steps: int) -> None:
    """vLLM's own events against its own steps; counts as they stand in the trimmed Parquet files (see tests/data/README.md)."""
    trace = hoptrace.open(REAL / f"{name}.trace")
    raw = trace.table("blocks").collect()["event"].value_counts()
    counts = dict(raw.rows())
    found = residency(trace)
    (b,) = found.blocks
    assert (b.produced_blocks, b.freed_blocks, b.before_blocks) == (counts["stored"], counts.get("evicted", 0), 0)
    assert (b.produced_blocks, b.freed_blocks, b.resident_blocks, b.peak_blocks) == (stored, evicted, resident, peak)
    assert b.balanced and b.produced_bytes == stored * 393_216
    checks = {c.name: c for c in found.checks}
    assert set(checks) == {"blocks_within_capacity", "in_use_within_cached", "computed_equals_stored"}
    assert checks["in_use_within_cached"].cases == steps and checks["in_use_within_cached"].holds, "to the block, in every step"
    assert checks["blocks_within_capacity"].holds and checks["computed_equals_stored"].holds


def test_what_is_lost_shows() -> None:
    """Take away events or double the steps of a real capture: a check says so."""
    trace = hoptrace.open(REAL / "preempted.trace")
    tables = {n: trace.table(n).collect().to_dicts() for n in ("blocks", "steps", "stages", "coverage")}
    lost = [b for i, b in enumerate(tables["blocks"]) if b["event"] != "stored" or i % 3]
    found = {c.name: c for c in residency(MemoryTrace(tables | {"blocks": lost}, trace.manifest)).checks}
    assert not found["in_use_within_cached"].holds and found["in_use_within_cached"].worst > 1
    assert "more were in use than cached" in found["in_use_within_cached"].says
    assert not found["computed_equals_stored"].holds
    twice = {c.name: c for c in residency(MemoryTrace(tables | {"steps": tables["steps"] * 2}, trace.manifest)).checks}
    assert not twice["computed_equals_stored"].holds and "twice" in twice["computed_equals_stored"].says
    half = {c.name: c for c in residency(MemoryTrace(tables | {"steps": tables["steps"][::2]}, trace.manifest)).checks}
    assert not half["computed_equals_stored"].holds and "steps are missing" in half["computed_equals_stored"].says


def test_before_copies_and_clearing() -> None:
    rows = [
        event(1, "evicted", 100),  # was there before
        event(2, "stored", 1), event(3, "stored", 2), event(3, "copied", 2, medium="host", bytes=None), event(4, "hit", 1),
        event(5, "cleared", medium=None, bytes=None), event(6, "stored", 3), event(7, "evicted", 3), event(8, "evicted", 9),
    ]  # fmt: skip
    device, host = residency(MemoryTrace({"blocks": rows}, MANIFEST)).blocks
    assert (device.before_blocks, device.produced_blocks, device.copied_in_blocks) == (1, 3, 0)
    # Evicted: the one from before, 3, and 9, which never came; dropped by the clearing: 1 and 2.
    assert (device.freed_blocks, device.resident_blocks, device.peak_blocks, device.hit_blocks) == (5, 0, 2, 1)
    assert device.unseen_blocks == 1 and not device.balanced
    assert (host.copied_in_blocks, host.freed_blocks, host.resident_blocks, host.balanced) == (1, 1, 0, True)
    assert host.copied_in_bytes is None


def test_more_than_there_is() -> None:
    rows = [event(i, "stored", i) for i in range(COUNT + 2)]
    (check,) = residency(MemoryTrace({"blocks": rows}, MANIFEST)).checks
    assert not check.holds and check.worst == 2
    # Without a size of blocks, and without steps, nothing more can be said; nor is it.
    bare = residency(MemoryTrace({"blocks": rows}, Manifest(origin="recorded", servers=[Server(name="s")])))
    assert bare.checks == [] and bare.blocks[0].resident_blocks == COUNT + 2
    none = residency(MemoryTrace({}))
    assert none.blocks == [] and none.unseen


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=30), st.integers(0, 40))
@settings(max_examples=20, deadline=None)
def test_a_cache_played_block_by_block(work: list[tuple[int, int]], lost: int) -> None:
    """Requests of one sequence each compute their whole blocks into a cache of six, which evicts the oldest that nobody uses."""
    cached: list[int] = []
    rows: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    now, fresh, peak = 0, 0, 0
    for number, (tokens, _) in enumerate(work):
        whole = min(tokens // BLOCK, COUNT)
        for _ in range(whole):
            now += 1
            if len(cached) == COUNT:
                rows.append(event(now, "evicted", cached.pop(0)))
            fresh += 1
            cached.append(fresh)
            rows.append(event(now, "stored", fresh))
        peak = max(peak, len(cached))
        now += 1
        used = min(whole + 1, COUNT)
        steps.append(
            {"server": "s", "step": number, "start_ns": now - 1, "end_ns": now, "running": 1, "kv_used_tokens": used * BLOCK,
             "kv_capacity_tokens": COUNT * BLOCK, "prefill_tokens": tokens, "decode_tokens": 0}
        )  # fmt: skip
    stages = [{"request": i, "stage": 0, "server": "s"} for i in range(len(work))]
    coverage = [{"table": "blocks", "from_ns": 0, "to_ns": now + 1}]
    found = residency(MemoryTrace({"blocks": rows, "steps": steps, "stages": stages, "coverage": coverage}, MANIFEST))
    if not rows:
        assert found.blocks == []
        return
    (b,) = found.blocks
    assert (b.resident_blocks, b.peak_blocks, b.before_blocks, b.balanced) == (len(cached), peak, 0, True)
    assert all(c.holds for c in found.checks)
    # An event that is lost is seen as a block from before, or as one too many or too few.
    gone = rows[lost % len(rows)]
    other = residency(MemoryTrace({"blocks": [r for r in rows if r is not gone], "steps": steps, "stages": stages}, MANIFEST))
    for x in other.blocks:
        away = -1 if gone["event"] == "stored" else 1
        assert x.resident_blocks - x.before_blocks == len(cached) + away


rows_drawn = st.lists(
    st.builds(
        event,
        st.integers(-5, 5),
        st.sampled_from(["stored", "copied", "evicted", "cleared", "hit"]),
        st.none() | st.integers(0, 3),
        medium=st.sampled_from(["device", "host", None]),
        server=st.sampled_from(["s", "t", None]),
        dp_rank=st.sampled_from([0, 1, None]),
        bytes=st.none() | st.sampled_from([-1, 0, (1 << 63) - 1]),
    ),
    max_size=20,
)


@given(rows_drawn)
@settings(max_examples=20, deadline=None)
def test_the_law_holds_for_any_rows(rows: list[dict[str, Any]]) -> None:
    for b in residency(MemoryTrace({"blocks": rows}, MANIFEST)).blocks:
        assert b.resident_blocks == (b.before_blocks + b.unseen_blocks + b.produced_blocks + b.copied_in_blocks - b.freed_blocks)
        assert 0 <= b.resident_blocks <= b.peak_blocks or b.peak_blocks == b.resident_blocks == 0
