"""What the accounting can tell falls with what was recorded; the sum never does, and what fell is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support.memory import MemoryTrace
from support.small import small_trace
from support.synthetic import synthetic_trace

from hoptrace.analysis.latency.accounting import Accounting, account
from hoptrace.analysis.latency.parts import FULL, PARTS
from hoptrace.manifest import Manifest, Server

QUEUE_FULL = [f"queue_{cause}" for cause in FULL]
FULL = small_trace()
KNOWN_SLOTS = FULL.manifest
NO_SLOTS = Manifest(origin="recorded", servers=[Server(name="s")], closed=True)


def less(
    *, tables: tuple[str, ...] = (), columns: dict[str, tuple[str, ...]] | None = None, manifest: Manifest = KNOWN_SLOTS
) -> Accounting:
    """The accounting of the small trace without some tables or columns."""
    rows: dict[str, list[dict[str, Any]]] = {n: f.to_dicts() for n, f in FULL._frames.items() if n not in tables}
    for table, gone in (columns or {}).items():
        for row in rows[table]:
            for c in gone:
                row[c] = None
    a = account(MemoryTrace(rows, manifest))
    for row in a.parts.to_dicts():
        assert sum(row[p.column] or 0 for p in PARTS) == row["e2e_ns"]
    return a


def mean(a: Accounting, *names: str) -> float:
    return sum(a.compositions["all"].parts[n] or 0.0 for n in names)


def unseen(a: Accounting, name: str) -> bool:
    return a.parts[name + "_ns"].null_count() == a.parts.height


WHOLE = less()


def test_all_is_recorded() -> None:
    assert WHOLE.steps_origin == "observed"
    # No KV use, token budget or counter says what else a server may be full of; it has no transfers to show, and two steps with
    # prompts alone tell no prefill interference.
    none = ["queue_kv", "queue_budget", "queue_full", "prefill_interference", "transfer"]
    assert [p.name for p in PARTS if unseen(WHOLE, p.name)] == none
    assert mean(WHOLE, "unexplained", "queue_unknown") == 0
    assert [s.split(":")[0] for s in WHOLE.unseen] == ["Queueing", "Transfers", "Interference on prefill"]


def test_without_the_load_generator_the_clock_starts_at_the_proxy() -> None:
    rows: dict[str, list[dict[str, Any]]] = {n: f.to_dicts() for n, f in FULL._frames.items()}
    for r in rows["requests"]:
        r |= {"intended_ns": None, "sent_ns": None, "arrival_ns": r["received_ns"], "arrival_of": "received"}
    a = account(MemoryTrace(rows, KNOWN_SLOTS))
    assert unseen(a, "client") and unseen(a, "network_in") and not unseen(a, "proxy")
    assert any("intended or sent is unknown" in s for s in a.unseen)


def test_without_sent_the_client_is_in_the_network() -> None:
    a = less(columns={"requests": ("sent_ns",)})
    assert unseen(a, "client")
    assert mean(a, "network_in") == mean(WHOLE, "client", "network_in")


def test_without_the_proxys_hand_over_its_time_is_in_the_queue() -> None:
    a = less(columns={"stages": ("enqueued_ns",)}, tables=("waits",))
    assert unseen(a, "proxy")
    assert mean(a, "queue_room", *QUEUE_FULL) == mean(WHOLE, "proxy", "queue_room", *QUEUE_FULL)


def test_without_slots_queueing_has_no_cause() -> None:
    a = less(manifest=NO_SLOTS)
    assert unseen(a, "queue_room") and all(unseen(a, p) for p in QUEUE_FULL)
    assert mean(a, "queue_unknown") == mean(WHOLE, "queue_room", *QUEUE_FULL)
    assert any("number of slots is unknown" in s for s in a.unseen)
    assert a.shares["all"]["unexplained"] > 0.1 and a.shares["all"]["capacity"] == 0


def test_without_steps_prefill_and_decode_are_whole() -> None:
    a = less(tables=("steps", "residency", "tokens"))
    assert a.steps_origin is None
    for p in ("host_gap", "prefill_interference", "decode_interference", "skipped", "preempted", "recompute"):
        assert unseen(a, p)
    inside = ("host_gap", "prefill", "decode", "prefill_interference", "decode_interference", "skipped")
    assert mean(a, "prefill", "decode") == pytest.approx(mean(WHOLE, *inside))
    assert any("no steps are known" in s for s in a.unseen)


def test_from_tokens_alone_steps_are_reconstructed() -> None:
    a = less(tables=("steps", "residency"))
    assert a.steps_origin == "reconstructed"
    assert unseen(a, "host_gap") and any("reconstructed from token times" in s for s in a.unseen)
    assert mean(a, "unexplained") == 0
    assert mean(a, "prefill", "decode", "prefill_interference", "decode_interference") == pytest.approx(
        mean(WHOLE, "prefill", "decode", "prefill_interference", "decode_interference", "host_gap"), rel=0.05
    )


def test_without_schedule_and_steps_queue_and_prefill_cannot_be_told_apart() -> None:
    a = less(
        tables=("steps", "residency", "tokens", "waits"), columns={"stages": ("scheduled_ns",), "requests": ("scheduled_ns",)}
    )
    assert mean(a, "unexplained") == pytest.approx(
        mean(less(tables=("steps", "residency", "tokens")), "queue_room", *QUEUE_FULL, "prefill")
    )
    assert any("queueing and prefill cannot be told apart" in s for s in a.unseen)


def test_arrival_and_finish_alone_are_unexplained_whole() -> None:
    rows = [{"request": 1, "arrival_ns": 5, "finish_ns": 105}]
    a = account(MemoryTrace({"requests": rows}))
    assert a.parts["unexplained_ns"].to_list() == [100] and a.shares["all"]["unexplained"] == 1


def test_stamps_of_tokens_stand_in_for_those_of_the_request() -> None:
    a = less(columns={"requests": ("first_token_ns", "last_token_ns")}, tables=("steps", "residency"))
    assert mean(a, "unexplained") == 0 and not unseen(a, "delivery")


def test_a_hole_in_the_recording_of_steps_is_unexplained_not_host_time() -> None:
    steps = FULL._frames["steps"].sort("start_ns").to_dicts()
    hole = steps[30]["end_ns"], steps[40]["start_ns"]
    rows: dict[str, list[dict[str, Any]]] = {n: f.to_dicts() for n, f in FULL._frames.items()}
    rows["steps"] = [s for s in steps if not hole[0] < s["end_ns"] <= hole[1]]
    lost = {s["step"] for s in steps} - {s["step"] for s in rows["steps"]}
    rows["residency"] = [
        r | {"first_step": n, "last_step": n, "context_at_start": None}
        for r in rows["residency"] for n in range(r["first_step"], r["last_step"] + 1) if n not in lost
    ]  # fmt: skip
    blind = account(MemoryTrace(rows, KNOWN_SLOTS))
    rows["coverage"] = [
        {"table": "steps", "server": "s", "from_ns": 0, "to_ns": hole[0]},
        {"table": "steps", "server": None, "from_ns": hole[1], "to_ns": 10**12},
        {"table": "steps", "server": "s", "from_ns": 0, "to_ns": 10**12, "fraction": 0.9},  # not all of it: proves nothing
    ]
    told = account(MemoryTrace(rows, KNOWN_SLOTS))
    moved = mean(blind, "host_gap") - mean(told, "host_gap")
    assert moved > 0 and mean(told, "unexplained") - mean(blind, "unexplained") == pytest.approx(moved)


@pytest.mark.parametrize("stored", [True, False])
def test_little_is_unexplained_on_captures_with_residency(tmp_path: Path, stored: bool) -> None:
    """Law 1: at most 3 % at the median and 10 % at p99, whether the steps were observed or reconstructed from jittered tokens."""
    made = synthetic_trace(tmp_path / "t.trace", requests=60, jitter_ns=2e5, noise=0.05, store_steps=stored, seed=3)
    a = account(made.trace)
    share = a.parts.select((pl.col("unexplained_ns") + pl.col("queue_unknown_ns").fill_null(0)) / pl.col("e2e_ns")).to_series()
    assert a.parts.height == 60
    assert (share.quantile(0.5) or 0) <= 0.03 and (share.quantile(0.99) or 0) <= 0.10


def test_reconstructed_steps_account_as_the_true_ones_do(tmp_path: Path) -> None:
    true = account(synthetic_trace(tmp_path / "a.trace", requests=60, store_steps=True, seed=5).trace)
    told = account(synthetic_trace(tmp_path / "b.trace", requests=60, store_steps=False, seed=5).trace)
    for p in ("queue_room", *QUEUE_FULL, "prefill", "decode", "decode_interference"):
        assert mean(told, p) == pytest.approx(mean(true, p), rel=0.1, abs=2e6), p
