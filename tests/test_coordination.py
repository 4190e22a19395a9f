"""Coordination: shares, operations, semantic density, and counters through wraps, resets and restarts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.memory import MemoryTrace

from hoptrace.analysis.arranging.coordination import coordination
from hoptrace.analysis.arranging.operations import KINDS
from hoptrace.analysis.counters import counter_totals

REQUEST = {
    "request": 1, "arrival_ns": 0, "intended_ns": 0, "sent_ns": 10, "received_ns": 30, "first_token_ns": 60, "last_token_ns": 90,
    "finish_ns": 100, "output_tokens": 5,
}  # fmt: skip
STAGE = {"request": 1, "stage": 0, "server": "s", "enqueued_ns": 40, "scheduled_ns": 40, "end_ns": 90}


def sample(time: int, value: float | None, **columns: Any) -> dict[str, Any]:
    key = "value_float" if isinstance(value, float) else "value_int"
    return {"time_ns": time, "entity": "process:7", "name": "n", "semantics": "cumulative", key: value, **columns}


def total(*samples: dict[str, Any]) -> dict[str, Any]:
    frame = counter_totals(MemoryTrace({"counters": list(samples)}))
    assert frame.height == 1
    return frame.row(0, named=True)


def test_shares_and_operations() -> None:
    waits = [
        {"start_ns": 30, "end_ns": 40, "request": 1, "kind": "message", "on": "proxy", "count": 2, "basis": "counted"},
        {"start_ns": 50, "end_ns": 54, "server": "s", "kind": "host", "basis": "derived"},
        {"start_ns": 55, "end_ns": 56, "server": "s", "kind": "transfer", "basis": "counted"},
    ]
    c = coordination(MemoryTrace({"requests": [REQUEST], "stages": [STAGE], "waits": waits}))
    # client 10, network 20, proxy 10, delivery 10 of 100.
    assert c.share["all"] == 0.5 and c.share["p99"] == 0.5
    assert c.parts_ns["client"] == 10 and c.parts_ns["host_gap"] is None
    rows = {r["kind"]: r for r in c.waits.to_dicts()}
    assert set(rows) == {"message", "host"}
    assert (rows["message"]["operations"], rows["message"]["wait_ns"], rows["message"]["per_output_token"]) == (2, 10, 0.4)
    assert (rows["host"]["waits"], rows["host"]["operations"], rows["host"]["basis"]) == (1, 1, "derived")


def test_semantic_density_by_basis() -> None:
    def move(**columns: Any) -> dict[str, Any]:
        return {"start_ns": 0, "object": "kv", "src": "a", "dst": "b", **columns}

    moves = [
        move(bytes=1000, control_ops=5, transfers=2, basis="counted"),
        move(bytes=1000, control_ops=None, basis="counted"),
        move(bytes=64, control_ops=4, basis="assumed"),
    ]
    c = coordination(MemoryTrace({"requests": [REQUEST], "moves": moves}))
    # The move that does not say its operations has no mechanism either: it is left out, not taken for one without any.
    assert {d.basis: d.bytes_per_op for d in c.density} == {"counted": 100.0, "assumed": 16.0}
    moves[1] |= {"mechanism": "rdma", "transfers": 4, "path": ["a", "b"]}
    density = coordination(MemoryTrace({"requests": [REQUEST], "moves": moves})).density
    found = {(d.object, d.mechanism, d.basis, d.ops_of): (d.payload_bytes, d.control_ops, d.bytes_per_op) for d in density}
    # 4 writes, each with queue entry, doorbell, descriptor fetch, completion and poll.
    assert found == {
        ("kv", None, "counted", "moves.control_ops"): (1000, 10, 100.0),
        ("kv", None, "assumed", "moves.control_ops"): (64, 4, 16.0),
        ("kv", "rdma", "assumed", "access path of rdma"): (1000, 20, 50.0),
    }


def test_a_cumulative_counter() -> None:
    row = total(sample(0, 100), sample(10, 130), sample(30, 190))
    assert (row["total"], row["counted_ns"], row["breaks"], row["falls"]) == (90, 30, 0, 0)


def test_one_sample_counts_nothing() -> None:
    assert total(sample(0, 100))["total"] is None


def test_a_wrap_of_known_width() -> None:
    row = total(sample(0, (1 << 32) - 10, width_bits=32), sample(1, 5, width_bits=32))
    assert (row["total"], row["falls"]) == (15, 1)


def test_a_reset_is_no_wrap() -> None:
    # From 1000 to 5 in 32 bits would be an increase of almost the whole range: it was reset, and has counted 5 since.
    assert total(sample(0, 1000, width_bits=32), sample(1, 5, width_bits=32))["total"] == 5
    assert total(sample(0, 1000, width_bits=64), sample(1, 5, width_bits=64))["total"] == 5
    assert total(sample(0, 1000), sample(1, 5), sample(2, 9))["total"] == 9


def test_a_new_incarnation_is_a_new_baseline() -> None:
    row = total(
        sample(0, 100, incarnation="a"),
        sample(1, 120, incarnation="a"),
        sample(2, 500, incarnation="b"),
        sample(3, 505, incarnation="b"),
    )
    assert (row["total"], row["breaks"], row["falls"]) == (25, 1, 0)


def test_values_that_are_no_values_are_left_out() -> None:
    row = total(sample(0, 10), sample(1, None, status="lost"), sample(2, 14), sample(3, 99, status="stale"))
    assert row["total"] == 4 and row["samples"] == 2


def test_large_integers_keep_their_difference() -> None:
    big = (1 << 62) + 1
    assert total(sample(0, big), sample(1, big + 3))["total"] == 3


def test_gauges_are_weighted_by_time() -> None:
    row = total(*(sample(t, v, semantics="gauge") for t, v in ((0, 1.0), (10, 3.0), (40, 0.0))))
    assert row["mean"] == pytest.approx((1 * 10 + 3 * 30) / 40) and row["largest"] == 3 and row["total"] is None


def test_deltas_add_up() -> None:
    assert total(*(sample(t, v, semantics="delta") for t, v in ((0, 5), (1, 7))))["total"] == 12


@given(st.lists(st.integers(0, 1 << 33), min_size=1, max_size=20), st.sampled_from([8, 16, 32]))
@settings(max_examples=40)
def test_wraps_are_undone_where_samples_are_close(steps: list[int], bits: int) -> None:
    """Any counter whose increases stay under half of its range is read back in full, however often it wraps."""
    increases = [s % (1 << (bits - 1)) for s in steps]
    value, rows = 3, [sample(0, 3, width_bits=bits)]
    for i, n in enumerate(increases):
        value += n
        rows.append(sample(i + 1, value % (1 << bits), width_bits=bits))
    assert total(*rows)["total"] == sum(increases)


def test_figures_of_the_operating_system() -> None:
    def counter(entity: str, name: str, first: int, last: int) -> list[dict[str, Any]]:
        return [
            {
                "time_ns": t,
                "entity": entity,
                "name": name,
                "semantics": "cumulative",
                "value_int": v,
                "width_bits": 64,
                "unit": "ns",
            }
            for t, v in ((0, first), (1000, last))
        ]

    rows = [
        *counter("process:7", "on_cpu_ns", 50, 350),
        *counter("process:7", "cpu_user_ns", 0, 10_000_000),  # in ticks: the finer one is taken
        *counter("process:7", "run_delay_ns", 0, 100),
        *counter("thread:7/7", "voluntary_switches", 5, 15),
        *counter("thread:7/8", "voluntary_switches", 0, 10),
        *counter("thread:7/8", "on_cpu_ns", 0, 200),  # within the process's
        *counter("cpu", "user_ns", 0, 800),
        *counter("cpu", "system_ns", 0, 100),
        *counter("cpu", "steal_ns", 0, 100),
        *counter("cpu", "idle_ns", 0, 5000),
        *counter("hoptrace:9", "on_cpu_ns", 1000, 1050),
    ]
    figures = coordination(MemoryTrace({"requests": [REQUEST], "counters": rows})).os
    assert figures is not None
    assert (figures.processes, figures.cpu_ns, figures.run_delay_ns, figures.run_delay_share) == (1, 300, 100, 0.25)
    assert (figures.voluntary_switches, figures.involuntary_switches) == (20, None)
    assert figures.per_token(figures.cpu_ns) == 60.0
    assert (figures.hoptrace_cpu_ns, figures.hoptrace_cpu_share) == (50, 0.05)
    assert figures.foreign_cpu_share == 0.65, "1000 busy, 300 the server's, 50 the capture's"
    told = figures.as_dict()
    assert (told["hoptrace_cpu_ns"], told["hoptrace_cpu_ns_per_output_token"]) == (50, 10.0)
    assert (told["hoptrace_cpu_share"], told["foreign_cpu_share"]) == (0.05, 0.65)

    # The server runs inside the capturing process: its time is there once.
    inside = [*rows[:-1], *counter("hoptrace:7", "on_cpu_ns", 1000, 1300)]
    figures = coordination(MemoryTrace({"requests": [REQUEST], "counters": inside})).os
    assert figures is not None and (figures.hoptrace_cpu_ns, figures.foreign_cpu_share) == (None, 0.7)


def test_what_is_not_recorded_is_said() -> None:
    c = coordination(MemoryTrace({}))
    assert c.share == {} and c.os is None and c.density == [] and len(c.unseen) == 3
    assert set(c.unknown) == set(KINDS) and not c.operations.height
    assert all(k["why_unknown"].startswith("nobody recorded it: would need") for k in c.as_dict()["operations"].values())
