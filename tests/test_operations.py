"""Operations by kind: one source each, what lost is said, unknown is not 0; and what the kernel says of stolen time."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.memory import MemoryTrace

from hoptrace.access import ACCESS
from hoptrace.analysis.arranging.coordination import TERMS, Coordination, coordination
from hoptrace.analysis.arranging.coordination_text import blocks
from hoptrace.analysis.arranging.hidden import TERMS as HIDDEN_TERMS
from hoptrace.analysis.latency.accounting import account
from hoptrace.analysis.moves.ledger import ledger
from hoptrace.app.charts_coordination import operations as chart
from hoptrace.manifest import Manifest, Server
from hoptrace.reader import open_trace

VLLM = Path(__file__).parent / "data" / "vllm_traces"
SAMPLES = Path(__file__).parents[1] / "sample_traces"
REQUESTS = [{"request": 1, "arrival_ns": 0, "output_tokens": 10}, {"request": 2, "arrival_ns": 0, "output_tokens": 10}]


def of(rows: dict[str, list[dict[str, Any]]], manifest: Manifest | None = None) -> Coordination:
    return coordination(MemoryTrace({"requests": REQUESTS, **rows}, manifest))


def rows_of(c: Coordination, kind: str) -> list[dict[str, Any]]:
    return c.operations.filter(pl.col("kind") == kind).to_dicts()


def step(n: int, **columns: Any) -> dict[str, Any]:
    return {"server": "s", "step": n, "start_ns": n * 10, "end_ns": n * 10 + 10, "origin": "observed", **columns}


def text_of(c: Coordination, *, full: bool) -> str:
    console = Console(width=200, no_color=True, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    for block in blocks(c, full=full):
        console.print(block)
    return console.export_text()


def test_one_source_a_kind() -> None:
    waits = [
        {"start_ns": 0, "end_ns": 5, "server": "s", "step": 1, "kind": "launch", "count": 7, "basis": "counted"},
        {"start_ns": 0, "end_ns": 5, "server": "s", "step": 1, "kind": "batch", "count": 1, "basis": "counted"},
        {"start_ns": 0, "end_ns": 9, "request": 1, "kind": "message", "on": "proxy", "count": 2, "basis": "counted"},
        {"start_ns": 0, "end_ns": 9, "request": 1, "kind": "queue", "on": "server", "count": 1, "basis": "derived"},
    ]
    moves = [
        {"start_ns": 0, "request": 1, "object": "tokens", "src": "server:s", "dst": "client", "mechanism": "message", "bytes": 9,
         "transfers": 6, "basis": "counted"}
    ]  # fmt: skip
    stages = [{"request": i, "stage": 0, "server": "s", "scheduled_ns": 1} for i in (1, 2)]
    c = of({"steps": [step(0, launches=40), step(1, launches=60)], "waits": waits, "moves": moves, "stages": stages})
    launch, batch, queue = rows_of(c, "launch"), rows_of(c, "batch"), rows_of(c, "queue")
    assert [(r["operations"], r["source"], r["basis"], r["at_least"]) for r in launch] == [
        (100, "steps.launches", "counted", False)
    ]
    assert (launch[0]["per_output_token"], launch[0]["per_request"], launch[0]["per_step"]) == (5.0, 50.0, 50.0)
    assert [(r["operations"], r["basis"]) for r in batch] == [(2, "derived")]
    assert [(r["operations"], r["on"]) for r in queue if r["basis"] == "derived"] == [(2, "engine")]
    assert [(r["operations"], r["on"]) for r in rows_of(c, "message")] == [(6, "tokens")]
    lost = {(t.kind, t.operations, winner) for t, winner in c.also}
    assert {
        ("launch", 7, "steps.launches"),
        ("batch", 1, "steps (one decision each)"),
        ("queue", 1, "stages (one entry each)"),
    } <= lost
    assert ("message", 2, "moves.transfers of mechanism message") in lost


def test_waits_stand_in_and_keep_their_bases_apart() -> None:
    waits = [
        {"start_ns": 0, "end_ns": 5, "request": 1, "kind": "sync", "count": 3, "basis": "counted"},
        {"start_ns": 5, "end_ns": 9, "request": 1, "kind": "sync", "basis": "assumed"},
    ]
    rows = {r["basis"]: r for r in rows_of(of({"waits": waits}), "sync")}
    assert (rows["counted"]["operations"], rows["counted"]["at_least"], rows["counted"]["wait_ns"]) == (3, False, 5)
    # A row that does not say its repeats is one at least.
    assert (rows["assumed"]["operations"], rows["assumed"]["at_least"]) == (1, True)


def test_steps_that_tell_only_partly_and_other_ranks() -> None:
    steps = [step(0, syncs=4, pp_rank=0), step(0, syncs=9, pp_rank=1), step(1, pp_rank=0), step(2, syncs=2, origin="replayed")]
    rows = rows_of(of({"steps": steps}), "sync")
    assert [(r["operations"], r["basis"], r["at_least"]) for r in rows] == [(4, "counted", True), (2, "derived", False)]


def test_preempted_requests_enter_the_queue_again_once() -> None:
    stages = [{"request": 1, "stage": 0, "server": "s", "scheduled_ns": 1, "end_reason": "done"}]
    c = of({"steps": [step(0, preempted=1), step(1, preempted=0)], "stages": stages})
    assert [(r["operations"], r["on"]) for r in rows_of(c, "queue")] == [(1, "engine"), (1, "engine, again")]
    # Where the second stay is a row of its own, it is counted there.
    stages = [dict(stages[0], end_reason="preempted"), dict(stages[0], stage=1)]
    c = of({"steps": [step(0, preempted=1)], "stages": stages})
    assert [r["operations"] for r in rows_of(c, "queue")] == [2]


def test_assumed_operations_follow_the_access_paths() -> None:
    move = {"start_ns": 0, "object": "kv", "src": "server:s", "dst": "server:t", "basis": "counted"}
    moves = [{**move, "mechanism": "rdma", "transfers": 30, "bytes": 1}, {**move, "mechanism": None, "transfers": 5}]
    c = of({"moves": moves})
    hops = [h.kind for h in ACCESS["rdma"].hops if not h.payload]
    for kind, hop in (("doorbell", "doorbell"), ("poll", "poll"), ("queue", "queue entry")):
        (row,) = rows_of(c, kind)
        assert (row["operations"], row["basis"], row["at_least"], row["on"]) == (30 * hops.count(hop), "assumed", True, "rdma")
    # One recorded poll is better than any assumption, and the two are not added up.
    waits = [{"start_ns": 0, "end_ns": 1, "request": 1, "kind": "poll", "count": 4, "basis": "counted"}]
    c = of({"moves": moves, "waits": waits})
    assert [(r["operations"], r["basis"]) for r in rows_of(c, "poll")] == [(4, "counted")]
    assert ("poll", 30) in {(t.kind, t.operations) for t, _ in c.also}


def test_a_message_within_the_host_takes_no_adapter() -> None:
    move = {
        "start_ns": 0, "request": 1, "server": "s", "object": "tokens", "src": "server:s", "dst": "client", "path": ["a", "b"],
        "mechanism": "message", "transfers": 10, "bytes": 100, "basis": "counted",
    }  # fmt: skip
    near = Manifest(origin="recorded", servers=[Server(name="s", url="http://127.0.0.1:8000")])
    far = Manifest(origin="recorded", servers=[Server(name="s", url="http://10.0.0.2:8000")])
    assert "doorbell" in of({"moves": [move]}, near).unknown
    assert [(r["operations"], r["on"]) for r in rows_of(of({"moves": [move]}, far), "doorbell")] == [(20, "message")]
    assert [(r["operations"], r["on"]) for r in rows_of(of({"moves": [move]}, near), "interrupt")] == [(20, "loopback")]


def counter(entity: str, name: str, last: int, **columns: Any) -> list[dict[str, Any]]:
    common = {"entity": entity, "name": name, "semantics": "cumulative", "width_bits": 64, **columns}
    return [{**common, "time_ns": t, "value_int": v} for t, v in ((0, 0), (1000, last))]


def test_is_another_process_stealing_my_step() -> None:
    """The question of the noisy neighbours: run-queue delay, whose, by step, and who took the CPU meanwhile."""
    rows = [
        *counter("process:7", "on_cpu_ns", 100), *counter("process:7", "run_delay_ns", 20),
        *counter("process:7", "timeslices", 40),
        *counter("process:8", "on_cpu_ns", 100), *counter("process:8", "run_delay_ns", 280),
        *counter("process:8", "timeslices", 60),
        *counter("thread:8/8", "voluntary_switches", 50), *counter("thread:8/8", "involuntary_switches", 9),
        *counter("thread:8/8", "timeslices", 60), *counter("cpu", "user_ns", 1000), *counter("pressure", "cpu_some_ns", 600),
    ]  # fmt: skip
    events = [{"time_ns": 0, "kind": "process", "detail": "process 8 is the server's: engine (VLLM::EngineCore)"}]
    c = of({"counters": rows, "events": events, "steps": [step(0), step(1)]})
    o = c.os
    assert o is not None and o.run_delay_share == 300 / 500 and o.per_step(o.run_delay_ns) == 150.0
    assert [(p.entity, p.role, p.run_delay_ns) for p in o.by_process] == [("process:8", "engine", 280), ("process:7", None, 20)]
    assert o.foreign_cpu_share == 0.8 and o.pressure_share == 0.6
    assert o.switches_at_least, "the threads that were looked at have 60 of 100 time slices"
    assert rows_of(c, "switch")[0]["at_least"]
    said = text_of(c, full=False)
    assert "other processes took 80% of the busy CPU time" in said and "Most of it: engine" in said
    # Alone on the machine it is its own threads that are too many.
    alone = [r for r in rows if r["entity"] != "cpu"] + counter("cpu", "user_ns", 200)
    assert "its own threads are more than the CPUs" in text_of(of({"counters": alone}), full=False)


def test_system_calls_tell_of_locks_polls_and_doorbells() -> None:
    calls = [
        {**row, "source": "tracepoints"}
        for name, n in (("futex_calls", 40), ("poll_calls", 20), ("ioctl_calls", 10))
        for row in counter("process:7", name, n)
    ]
    rows = [*counter("process:7", "on_cpu_ns", 100), *calls]
    waits = [{"start_ns": 0, "end_ns": 9, "server": "s", "kind": "poll", "count": 3, "basis": "counted"}]
    c = of({"counters": rows, "waits": waits})
    (lock,), (poll,) = rows_of(c, "lock"), rows_of(c, "poll")
    assert (lock["operations"], lock["basis"], lock["per_output_token"], lock["at_least"]) == (40, "counted", 2.0, True)
    assert (poll["operations"], poll["source"]) == (20, "counters.poll_calls")
    assert [(t.kind, t.operations, won) for t, won in c.also] == [("poll", 3, "counters.poll_calls")]
    assert "doorbell" in c.unknown, "without a GPU a request to a driver tells of no doorbell"
    assert any("makes none" in n for n in c.notes)
    # On a host with a GPU the requests to its driver stand in; what the uncore counted goes before.
    gpus = Manifest(origin="recorded", platform={"nodes": [{"name": "gpu0", "kind": "compute"}]}, closed=True)
    (bell,) = rows_of(of({"counters": rows}, gpus), "doorbell")
    assert (bell["operations"], bell["basis"], bell["source"]) == (10, "derived", "counters.ioctl_calls (a stand-in)")
    uncore = [{**r, "unit": "bytes"} for r in counter("iio:0/2/3", "outbound_write_bytes", 8005)]
    (bell,) = rows_of(of({"counters": rows + uncore}, gpus), "doorbell")
    assert (bell["operations"], bell["basis"], bell["at_least"], bell["on"]) == (1000, "derived", True, "the whole machine")
    # Tracepoints by CPU tell of all that runs there.
    machine = [{**r, "entity": "cpu"} for r in calls]
    (lock,) = rows_of(of({"counters": [*counter("process:7", "on_cpu_ns", 100), *machine]}), "lock")
    assert (lock["on"], lock["at_least"]) == ("the whole machine", False)


def test_switches_of_all_threads_are_no_lower_bound() -> None:
    rows = [
        *counter("process:7", "timeslices", 100), *counter("process:7", "voluntary_switches", 30),
        *counter("thread:7/7", "timeslices", 20), *counter("thread:7/7", "voluntary_switches", 9),
    ]  # fmt: skip
    (switch,) = rows_of(of({"counters": rows}), "switch")
    assert (switch["operations"], switch["at_least"]) == (30, False)


@pytest.mark.parametrize("name", ["steady", "preempted"])
def test_on_real_captures(name: str) -> None:
    """Against plain loops over the stored rows."""
    trace = open_trace(VLLM / f"{name}.trace")
    c = coordination(trace)
    steps = [s for s in trace.table("steps").collect().to_dicts() if not s["pp_rank"]]
    stays = trace.table("stages").collect().to_dicts()
    moves = trace.table("moves").collect().to_dicts()
    assert [r["operations"] for r in rows_of(c, "batch")] == [len(steps)] and c.steps == len(steps)
    stamped = [s for s in stays if s["enqueued_ns"] is not None or s["scheduled_ns"] is not None]
    entered = sum(s["end_reason"] != "refused" for s in stamped)
    engine = {r["on"]: r["operations"] for r in rows_of(c, "queue")}
    assert engine["engine"] == entered
    assert engine.get("engine, again", 0) == sum(s["preempted"] for s in steps) and ("engine, again" in engine) == (
        name == "preempted"
    )
    sent: dict[str, int] = defaultdict(int)
    for m in moves:
        if m["mechanism"] == "message":
            sent[m["object"]] += 1 if m["transfers"] is None else m["transfers"]
    assert {r["on"]: r["operations"] for r in rows_of(c, "message")} == dict(sent)
    told = {(r["kind"], r["on"]): r for r in c.operations.to_dicts()}
    counters = trace.table("counters").filter(pl.col("name") == "voluntary_switches").collect().to_dicts()
    series: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    for r in counters:
        series[r["entity"], r["incarnation"]].append((r["time_ns"], r["value_int"]))
    switched = sum(max(v)[1] - min(v)[1] for v in series.values())
    if ("switch", "voluntary") in told:
        assert told["switch", "voluntary"]["operations"] == switched
    json.dumps(c.as_dict())
    assert "Operations per output token" in text_of(c, full=False) and "Unknown, not 0" in text_of(c, full=True)


def test_of_a_workload_nothing_is_known() -> None:
    c = coordination(open_trace(SAMPLES / "azure-2023-conv.trace"))
    assert not c.operations.height and len(c.unknown) == 11
    assert "Unknown, not 0" in text_of(c, full=True)


@pytest.mark.parametrize("term", [t for t in (*TERMS, *HIDDEN_TERMS) if t.sql], ids=lambda t: t.name)
def test_the_sql_of_each_term_runs(term: Any) -> None:
    assert open_trace(VLLM / "preempted.trace").sql(term.sql).width > 1


def test_the_chart_has_a_bar_by_kind_and_basis() -> None:
    c = coordination(open_trace(VLLM / "preempted.trace"))
    for per in ("per_output_token", "per_request", "per_step"):
        spec = chart(c.operations, per).to_dict()
        (data,) = spec["datasets"].values()
        assert {(r["kind"], r["basis"]) for r in data} == set(c.operations.select("kind", "basis").unique().rows())
        assert all(0 < r["low"] < r["each"] for r in data), "no bar may be of no length or turn round"
    assert chart(c.operations.clear()).to_dict()


# Accounting and ledger have hostile inputs of their own; here they only take time.
NO_LATENCY, NO_LEDGER = account(MemoryTrace({"requests": REQUESTS})), ledger(MemoryTrace({"requests": REQUESTS}))
INT = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-3, 9)


@given(
    st.fixed_dictionaries(
        {
            "steps": st.lists(
                st.fixed_dictionaries(
                    {
                        "server": st.sampled_from(["s", "?"]), "step": st.integers(0, 3), "start_ns": INT, "end_ns": INT,
                        "launches": st.none() | INT, "syncs": st.none() | INT, "preempted": st.none() | INT,
                        "origin": st.sampled_from([None, "observed", "replayed"]), "pp_rank": st.sampled_from([None, 0, 1]),
                    }
                ),
                max_size=4,
            ),
            "waits": st.lists(
                st.fixed_dictionaries(
                    {
                        "start_ns": INT, "end_ns": INT, "count": st.none() | INT,
                        "kind": st.sampled_from(["poll", "lock", "host"]),
                        "basis": st.sampled_from([None, "counted"]),
                    }
                ),
                max_size=4,
            ),
            "moves": st.lists(
                st.fixed_dictionaries(
                    {
                        "start_ns": INT, "object": st.just("kv"), "src": st.just("a"), "dst": st.just("b"),
                        "bytes": st.none() | INT, "transfers": st.none() | INT, "control_ops": st.none() | INT,
                        "mechanism": st.sampled_from([None, "rdma", "message"]),
                    }
                ),
                max_size=4,
            ),
        }
    )
)  # fmt: skip
@settings(max_examples=12, deadline=None)
def test_hostile_inputs(rows: dict[str, list[dict[str, Any]]]) -> None:
    trace = MemoryTrace({"requests": REQUESTS, **rows})
    c = coordination(trace, accounting=NO_LATENCY, moved=NO_LEDGER)
    json.dumps(c.as_dict())
    text_of(c, full=True)
    assert not c.operations.height or (c.operations["operations"] >= 0).all()
    assert set(c.unknown).isdisjoint(c.operations["kind"].to_list())
