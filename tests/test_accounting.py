"""Law 1: a request's parts are ≥ 0 and add up to its end-to-end time exactly, whatever the trace; and each is what it says."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.memory import MemoryTrace
from support.rows import rows_of

from hoptrace.analysis.latency.accounting import Accounting, account
from hoptrace.analysis.latency.parts import CLASSES, FULL, PARTS
from hoptrace.manifest import Manifest, ReplayInfo, Server
from hoptrace.schema import PHASES, TABLES, WAIT_KINDS
from hoptrace.stepcost import fixed

COLUMNS = [p.column for p in PARTS]
SERVERS = ("s", "t", None)
times = st.none() | st.integers(-50, 1000)
sure = st.integers(-50, 1000)


def held(a: Accounting) -> None:
    """Law 1 for every row, and the views that are made of the parts agree with it."""
    for row in a.parts.to_dicts():
        values = [row[c] for c in COLUMNS if row[c] is not None]
        assert min(values) >= 0, row
        assert sum(values) == row["e2e_ns"] == row["finish_ns"] - row["arrival_ns"], row
    for row in a.classes.to_dicts():
        assert sum(row[c.replace(" ", "_") + "_ns"] for c in CLASSES) == row["e2e_ns"]
    # The spans tile each request's life in order.
    for (request,), spans in a.spans.group_by("request"):
        life = a.parts.row(by_predicate=pl.col("request") == request, named=True)
        assert spans["start_ns"].to_list() == [life["arrival_ns"], *spans["end_ns"].to_list()[:-1]]
        assert spans["end_ns"][-1] == life["finish_ns"]
        assert (spans["end_ns"] > spans["start_ns"]).all()
    for c in a.compositions.values():
        if c.e2e_ns:
            assert sum(v or 0 for v in c.class_shares.values()) == pytest.approx(1)
    if a.tail is not None:
        more = dict(a.tail.more)
        assert all(v > 0 for v in more.values())


def request(i: int, **stamps: Any) -> dict[str, Any]:
    return {"request": i, "arrival_of": "received", **stamps}


@st.composite
def traces(draw: st.DrawFn) -> MemoryTrace:
    """Few requests, servers and steps, any stamps: out of order, missing, beyond the finish, on unknown servers."""
    n = draw(st.integers(1, 4))
    requests = [
        request(
            i,
            arrival_ns=draw(st.integers(0, 200)),
            finish_ns=draw(times),
            error=draw(st.sampled_from([None, None, None, "broken"])),
            **{c: draw(times) for c in (
                "intended_ns", "sent_ns", "received_ns", "queued_ns", "scheduled_ns", "first_token_ns", "last_token_ns"
            )},
            prompt_tokens=draw(st.none() | st.integers(0, 20)),
            output_tokens=draw(st.none() | st.integers(0, 20)),
        )
        for i in range(n)
    ]  # fmt: skip
    stages = [
        {
            "request": draw(st.integers(0, n)),
            "sequence": draw(st.sampled_from([None, 0, 1])),
            "attempt": draw(st.sampled_from([None, 0, 1])),
            "stage": draw(st.integers(0, 2)),
            "server": draw(st.sampled_from(SERVERS)),
            "dp_rank": draw(st.sampled_from([None, 0, 1])),
            "role": draw(st.sampled_from([None, "prefill", "decode", "both"])),
            "enqueued_ns": draw(times),
            "scheduled_ns": draw(times),
            "end_ns": draw(times),
            "cached_tokens": draw(st.none() | st.integers(0, 5)),
        }
        for _ in range(draw(st.integers(0, 5)))
    ]
    steps = [
        {
            "server": draw(st.sampled_from(["s", "t"])),
            "dp_rank": draw(st.sampled_from([None, 0, 1])),
            "pp_rank": draw(st.sampled_from([None, 0, 1])),
            "step": draw(st.integers(0, 8)),
            "start_ns": draw(sure),
            "end_ns": draw(sure),
            **{c: draw(st.none() | st.integers(0, 9)) for c in (
                "prefill_requests", "prefill_tokens", "prefill_context_tokens", "decode_requests", "decode_tokens",
                "decode_context_tokens", "kv_used_tokens", "kv_capacity_tokens",
            )},
        }
        for _ in range(draw(st.integers(0, 10)))
    ]  # fmt: skip
    residency = [
        {
            "request": draw(st.integers(0, n)),
            "sequence": draw(st.sampled_from([None, 0, 1])),
            "server": draw(st.sampled_from(["s", "t", "nowhere"])),
            "dp_rank": draw(st.sampled_from([None, 0, 1])),
            "first_step": draw(st.integers(-1, 9)),
            "last_step": draw(st.integers(-1, 9)),
            "phase": draw(st.sampled_from(PHASES)),
            "tokens_per_step": draw(st.none() | st.integers(0, 5)),
            "context_at_start": draw(st.none() | st.integers(0, 9)),
        }
        for _ in range(draw(st.integers(0, 8)))
    ]
    waits = [
        {
            "request": draw(st.none() | st.integers(0, n)),
            "kind": draw(st.sampled_from(WAIT_KINDS)),
            "start_ns": draw(sure),
            "end_ns": draw(sure),
        }
        for _ in range(draw(st.integers(0, 5)))
    ]
    moves = [
        {
            "request": draw(st.none() | st.integers(0, n)),
            "object": "kv",
            "src": "a",
            "dst": "b",
            "start_ns": draw(sure),
            "end_ns": draw(times),
        }
        for _ in range(draw(st.integers(0, 2)))
    ]
    tokens = [
        {"request": draw(st.integers(0, n)), "index": draw(st.integers(0, 5)), "time_ns": draw(sure)}
        for _ in range(draw(st.integers(0, 5)))
    ]
    servers = [
        Server(name=s, max_sequences=draw(st.sampled_from([None, 1, 2])), max_batched_tokens=draw(st.sampled_from([None, 4])))
        for s in draw(st.sampled_from([["s"], ["s", "t"], []]))
    ]
    work = {"steps": steps, "residency": residency, "waits": waits, "moves": moves, "tokens": tokens}
    return MemoryTrace({"requests": requests, "stages": stages, **work}, Manifest(origin="recorded", servers=servers))


@given(traces(), st.booleans())
@settings(max_examples=100)
def test_parts_add_up_on_hostile_traces(trace: MemoryTrace, with_cost: bool) -> None:
    cost = fixed(step_ns=5, prefill_token_ns=7, decode_request_ns=3) if with_cost else None
    a = account(trace, cost=cost)
    held(a)
    counted = a.finished + a.failed + a.unfinished + a.impossible
    assert counted == trace.table("requests").collect().height
    assert all(s.endswith(".") for s in a.unseen)


@given(st.data())
@settings(max_examples=40)
def test_parts_add_up_on_rows_of_any_values(data: st.DataObject) -> None:
    """Any values that the schema holds, extremes of int64 included."""
    names = ("requests", "stages", "tokens", "steps", "residency", "moves", "waits")
    drawn = {n: data.draw(st.lists(rows_of(TABLES[n], keys=3), max_size=4)) for n in names}
    rows = {n: [_required(n, r) for r in given] for n, given in drawn.items()}
    held(account(MemoryTrace(rows)))


def _required(name: str, row: dict[str, Any]) -> dict[str, Any]:
    filler: dict[str, Any] = {
        "object": "kv",
        "src": "a",
        "dst": "b",
        "kind": "queue",
        "phase": "chunk",
        "server": "s",
        "source": "test",
    }
    full = dict(row)
    for c in TABLES[name].columns:
        if c.required and full.get(c.name) is None:
            full[c.name] = filler.get(c.name, 0)
    return full


def one(rows: dict[str, list[dict[str, Any]]], manifest: Manifest | None = None, **kw: Any) -> dict[str, int]:
    """The parts of the only request that are not 0, unseen ones left out."""
    a = account(MemoryTrace(rows, manifest), **kw)
    held(a)
    row = a.parts.row(0, named=True)
    return {p.name: row[p.column] for p in PARTS if row[p.column]}


STAMPS = {
    "intended_ns": 0, "sent_ns": 10, "received_ns": 30, "arrival_ns": 0, "arrival_of": "intended", "first_token_ns": 200,
    "last_token_ns": 400, "finish_ns": 420, "prompt_tokens": 10, "output_tokens": 3,
}  # fmt: skip
STAY = {"request": 1, "stage": 0, "server": "s", "role": "both", "enqueued_ns": 40, "scheduled_ns": 100, "end_ns": 400}


def test_stamps_alone() -> None:
    assert one({"requests": [request(1) | STAMPS], "stages": [STAY]}) == {
        "client": 10, "network_in": 20, "proxy": 10, "queue_room": 60, "prefill": 100, "decode": 200, "delivery": 20
    }  # fmt: skip


def step(number: int, start: int, end: int, prefill: int, decode: int, context: int) -> dict[str, Any]:
    return {
        "server": "s", "step": number, "start_ns": start, "end_ns": end, "prefill_tokens": prefill, "prefill_context_tokens": 0,
        "decode_requests": decode, "decode_tokens": decode, "decode_context_tokens": context,
    }  # fmt: skip


STEPS = [step(0, 110, 200, 10, 0, 0), step(1, 205, 300, 5, 1, 10), step(2, 305, 400, 0, 1, 11)]
CHUNK = {
    "request": 1,
    "server": "s",
    "first_step": 0,
    "last_step": 0,
    "phase": "chunk",
    "tokens_per_step": 10,
    "context_at_start": 0,
}
DECODE = {
    "request": 1,
    "server": "s",
    "first_step": 1,
    "last_step": 2,
    "phase": "decode",
    "tokens_per_step": 1,
    "context_at_start": 10,
}


def test_steps_split_prefill_and_decode() -> None:
    rows = {"requests": [request(1) | STAMPS], "stages": [STAY], "steps": STEPS, "residency": [CHUNK, DECODE]}
    base = {"client": 10, "network_in": 20, "proxy": 10, "queue_room": 60, "prefill": 90, "delivery": 20}
    # Gaps: 100–110, 200–205, 300–305. Too few steps to fit a cost: the mixed step is work whole, and the report says so.
    assert one(rows) == base | {"host_gap": 20, "decode": 190}
    a = account(MemoryTrace(rows))
    assert a.parts["decode_interference_ns"].to_list() == [None]
    assert any("no step cost can be fitted" in s for s in a.unseen)
    # 5 prompt tokens of 7 ns in the decoder's first step are not its own work.
    cost = fixed(step_ns=5, prefill_token_ns=7, decode_request_ns=3)
    assert one(rows, cost=cost) == base | {"host_gap": 20, "decode": 155, "decode_interference": 35}


def test_interference_is_never_more_than_the_step() -> None:
    rows = {"requests": [request(1) | STAMPS], "stages": [STAY], "steps": STEPS, "residency": [CHUNK, DECODE]}
    parts = one(rows, cost=fixed(step_ns=5, prefill_token_ns=1e6))
    # Alone the step would have cost 5 ns of 5,000,005: of its 95 ns, less than one is the decoder's.
    assert parts["decode_interference"] == 94 and parts["decode"] == 96


def test_skipped_and_preempted() -> None:
    rows = {
        "requests": [request(1) | STAMPS],
        "stages": [STAY],
        "steps": STEPS,
        "residency": [
            CHUNK,
            DECODE | {"first_step": 2, "last_step": 2},
            DECODE | {"first_step": 1, "last_step": 1, "phase": "skipped"},
        ],
    }
    parts = one(rows)
    assert parts["skipped"] == 95 and parts["decode"] == 95 and parts["host_gap"] == 20
    rows["residency"][2]["phase"] = "preempted"
    parts = one(rows)
    # Until it is taken up again no step holds a place for it.
    assert parts["preempted"] == 100 and parts["decode"] == 95 and parts["host_gap"] == 15
    # A step that runs while no row of residency speaks of the request: left out of it too.
    rows["residency"].pop()
    assert one(rows)["skipped"] == 95


def test_recomputed_tokens_are_repeated_work() -> None:
    again = {
        "request": 1,
        "server": "s",
        "first_step": 2,
        "last_step": 2,
        "phase": "chunk",
        "tokens_per_step": 10,
        "context_at_start": 2,
    }
    rows = {"requests": [request(1) | STAMPS], "stages": [STAY], "steps": STEPS, "residency": [CHUNK, again]}
    parts = one(rows)
    # 8 of the 10 tokens had been computed: context 2 to 10.
    assert parts["recompute"] == 95 * 8 // 10
    assert parts["prefill"] == 90 + 95 - 76


def test_a_recorded_recompute_takes_over_inside_steps() -> None:
    rows = {
        "requests": [request(1) | STAMPS],
        "stages": [STAY],
        "steps": STEPS,
        "residency": [CHUNK, DECODE],
        "waits": [{"request": 1, "kind": "recompute", "start_ns": 150, "end_ns": 190}],
    }
    parts = one(rows)
    assert parts["recompute"] == 40 and parts["prefill"] == 50


def test_capacity_and_room() -> None:
    other = {"stage": 0, "server": "s", "role": "both", "enqueued_ns": 0}
    rows = {
        "requests": [request(1) | STAMPS, request(2, arrival_ns=0), request(3, arrival_ns=0)],
        # Both slots are taken from 50 to 90 only; a request that never ends holds its slot.
        "stages": [
            STAY,
            other | {"request": 2, "scheduled_ns": 20, "end_ns": None},
            other | {"request": 3, "scheduled_ns": 50, "end_ns": 90},
        ],
    }
    parts = one(rows)
    assert parts["queue_slots"] == 40 and parts["queue_room"] == 20
    unknown = Manifest(origin="recorded", servers=[Server(name="s")])
    parts = one(rows, unknown)
    assert parts["queue_unknown"] == 60 and not any(f"queue_{c}" in parts for c in FULL)


def test_budget_and_kv_fill_a_server() -> None:
    kv = [s | {"kv_used_tokens": 95, "kv_capacity_tokens": 100} for s in STEPS]
    rows = {
        "requests": [request(1) | STAMPS | {"scheduled_ns": 320}, request(2, arrival_ns=0)],
        "stages": [
            STAY | {"scheduled_ns": 320},
            {"request": 2, "stage": 0, "server": "s", "role": "both", "scheduled_ns": 20, "end_ns": 330},
        ],
        "steps": kv,
    }
    # From the first step on 5 places are free, and the head of the queue needs 10: full from 110 to 320.
    assert one(rows)["queue_kv"] == 210
    # Who leaves frees his KV: between two steps with nobody on the server it is not full.
    rows["stages"][1]["end_ns"] = STEPS[1]["end_ns"] + 5
    assert one(rows)["queue_kv"] == STEPS[1]["end_ns"] + 5 - 110 + (320 - STEPS[2]["start_ns"])
    rows["steps"] = STEPS
    budget = Manifest(origin="recorded", servers=[Server(name="s", max_sequences=2, max_batched_tokens=6)])
    # Steps 0 (10 tokens) and 1 (5 + 1) use the budget of 6 up, step 2 does not; the queue is looked at when the next one begins.
    rows["stages"][1]["end_ns"] = 330
    assert one(rows, budget)["queue_budget"] == STEPS[2]["start_ns"] - STEPS[0]["start_ns"]


def test_waits_that_end_later_win() -> None:
    rows = {
        "requests": [request(1) | STAMPS],
        "stages": [STAY],
        "waits": [
            {"request": 1, "kind": "transfer", "start_ns": 50, "end_ns": 80},
            {"request": 1, "kind": "capacity", "start_ns": 45, "end_ns": 70},
            {"request": 1, "kind": "host", "start_ns": 60, "end_ns": 80},
        ],
    }
    parts = one(rows)
    # 45–50 capacity; 50–60 transfer (ends at 80, capacity at 70); 60–80 host (ends with transfer, and comes first in the order).
    assert (parts["queue_full"], parts["transfer"], parts["host_gap"], parts["queue_room"]) == (5, 10, 20, 25)


def test_a_handover_between_two_servers() -> None:
    servers = Manifest(origin="recorded", servers=[Server(name="p", max_sequences=1), Server(name="d", max_sequences=1)])
    rows = {
        "requests": [request(1, arrival_ns=0, received_ns=0, finish_ns=500, first_token_ns=200, last_token_ns=480)],
        "stages": [
            {"request": 1, "stage": 0, "server": "p", "role": "prefill", "enqueued_ns": 5, "scheduled_ns": 20, "end_ns": 200},
            {"request": 1, "stage": 1, "server": "d", "role": "decode", "enqueued_ns": 260, "scheduled_ns": 270, "end_ns": 480},
        ],
        "moves": [{"request": 1, "object": "kv", "src": "memory:p", "dst": "memory:d", "start_ns": 200, "end_ns": 230}],
    }
    assert one(rows, servers) == {
        "proxy": 5, "handover": 30 + 10, "queue_room": 15, "prefill": 180, "transfer": 30, "decode": 210, "delivery": 20
    }  # fmt: skip


def test_time_after_runs_that_do_not_cover_the_output_is_unexplained() -> None:
    rows = {"requests": [request(1) | STAMPS | {"output_tokens": 50}], "stages": [STAY], "steps": STEPS[:2], "residency": [CHUNK]}
    parts = one(rows)
    assert parts["unexplained"] == 200 and parts["delivery"] == 20


def test_the_fit_of_a_real_cost_bounds_its_standard_error() -> None:
    steps, runs, requests, stages, clock = [], [], [], [], 0
    for i in range(60):
        mixed, context = i % 3 == 0, 10 + i
        length = 1_000_000 + 10_000 * context + (3_000_000 if mixed else 0) + (i * 7919 % 1000) * 100
        steps.append(step(i, clock, clock + length, 100 + 10 * (i % 5) if mixed else 0, 1, context))
        clock += length
    requests.append(request(1, arrival_ns=0, received_ns=0, finish_ns=clock, last_token_ns=clock, output_tokens=60))
    stages.append({"request": 1, "stage": 0, "server": "s", "enqueued_ns": 0, "scheduled_ns": 0, "end_ns": clock})
    runs.append(
        {
            "request": 1,
            "server": "s",
            "first_step": 0,
            "last_step": 59,
            "phase": "decode",
            "tokens_per_step": 1,
            "context_at_start": 10,
        }
    )
    a = account(MemoryTrace({"requests": requests, "stages": stages, "steps": steps, "residency": runs}))
    held(a)
    found, error = a.parts["decode_interference_ns"][0], a.interference_se["interference_se_ns"][0]
    assert error is not None and error > 0
    assert found == pytest.approx(20 * 3_000_000, rel=0.05)
    assert abs(found - 20 * 3_000_000) < 6 * error


def test_percentiles_and_tail() -> None:
    rows = {
        "requests": [
            request(i, arrival_ns=0, received_ns=0, first_token_ns=10, last_token_ns=100 + i, finish_ns=100 + i)
            for i in range(200)
        ],
        "stages": [
            {"request": i, "stage": 0, "server": "s", "enqueued_ns": 0, "scheduled_ns": 0, "end_ns": 10} for i in range(200)
        ],
    }
    a = account(MemoryTrace(rows))
    # Ranks 90 to 109 of 199 lie within 5 % of the median's, 188 to 191 within 1 % of p95's, 197 and 198 within 0.5 % of p99's.
    assert (a.compositions["p50"].requests, a.compositions["p50"].e2e_ns) == (20, 199.5)
    assert (a.compositions["p95"].requests, a.compositions["p95"].e2e_ns) == (4, 289.5)
    assert (a.compositions["p99"].requests, a.compositions["p99"].e2e_ns) == (2, 297.5)
    assert a.compositions["all"].requests == 200
    assert a.tail is not None
    assert (a.tail.slowest.requests, a.tail.slowest.e2e_ns) == (2, 298.5)
    assert a.tail.more == [("decode", 298.5 - 199.5)]


def test_failed_and_unfinished_are_counted_apart() -> None:
    rows = {
        "requests": [
            request(1) | STAMPS,
            request(2, arrival_ns=0, finish_ns=10, error="The stream broke."),
            request(3, arrival_ns=0),
            request(4, arrival_ns=50, finish_ns=20),
        ]
    }
    a = account(MemoryTrace(rows))
    assert (a.finished, a.failed, a.unfinished, a.impossible) == (1, 1, 1, 1)
    assert any("end before they arrive" in s for s in a.unseen)


def test_no_requests_at_all() -> None:
    a = account(MemoryTrace({"counters": [{"time_ns": 0, "entity": "cpu", "name": "user_ns", "value_int": 1}]}))
    assert a.parts.height == 0 and a.parts.columns[:4] == ["request", "arrival_ns", "finish_ns", "e2e_ns"]
    assert a.compositions == {} and a.shares == {} and a.tail is None
    assert a.unseen == ["No finished request was recorded: there is no latency to account for."]


def test_sums_of_e2e_beyond_int64() -> None:
    far = 1 << 60
    rows = {"requests": [request(i, arrival_ns=-far, finish_ns=far - i, last_token_ns=0, first_token_ns=-5) for i in range(9)]}
    a = account(MemoryTrace(rows))
    held(a)
    assert a.finished + a.impossible == 9


# -- what a trace cannot show is null, not 0 ---------------------------------------------------------------------------


def _engine(alone: int, mixed: int, decode: int) -> dict[str, list[dict[str, Any]]]:
    """Steps of 50 ms, 12 ms more where there is a prompt; a request that decodes in all but the ``alone`` first ones."""
    steps, clock = [], 0
    for i in range(alone + mixed + decode):
        prefill, decoders = i < alone + mixed, i >= alone
        length = 50 + 12 * prefill
        steps.append(step(i, clock, clock + length, 7 if prefill else 0, 1 if decoders else 0, 10 + i if decoders else 0))
        clock += length
    start = steps[alone]["start_ns"]
    row = request(1, arrival_ns=start, received_ns=start, finish_ns=clock, last_token_ns=clock, output_tokens=mixed + decode)
    stay = {"request": 1, "stage": 0, "server": "s", "enqueued_ns": start, "scheduled_ns": start, "end_ns": clock}
    run = DECODE | {"first_step": alone, "last_step": alone + mixed + decode - 1}
    return {"requests": [row], "stages": [stay], "steps": steps, "residency": [run]}


def test_a_split_that_a_fit_cannot_tell_is_unseen() -> None:
    a = account(MemoryTrace(_engine(alone=1, mixed=60, decode=0)))
    held(a)
    # Without steps of decoders alone nobody knows what the prompts added; without prompts alone, what the decoders did.
    assert a.parts["decode_interference_ns"].to_list() == a.parts["prefill_interference_ns"].to_list() == [None]
    assert sum("Interference on " in s and "too few to tell" in s for s in a.unseen) == 2
    a = account(MemoryTrace(_engine(alone=1, mixed=60, decode=60)))
    held(a)
    assert a.parts["prefill_interference_ns"].to_list() == [None]
    assert a.parts["decode_interference_ns"][0] == pytest.approx(60 * 12, rel=0.05)
    assert [s[:23] for s in a.unseen if "Interference" in s] == ["Interference on prefill"]


def test_steps_that_do_not_say_what_was_in_them_bound_interference() -> None:
    rows = _engine(alone=6, mixed=30, decode=30)
    assert not any("lower bound" in s for s in account(MemoryTrace(rows)).unseen)
    rows["steps"][10]["prefill_tokens"] = None
    assert any("1 of 66 steps do not say" in s and "lower bound" in s for s in account(MemoryTrace(rows)).unseen)


def test_the_cost_in_the_manifest_is_taken_not_fitted() -> None:
    cost = fixed(step_ns=50, any_prefill_ns=12)
    info = ReplayInfo(parent="p", policy={}, cost_model={"step": cost.to_dict()}, seed=0)
    manifest = Manifest(origin="replayed", servers=[Server(name="s", max_sequences=2)], replay=info, closed=True)
    # Two steps alone would not do for a fit, and one cost could not be told from the other.
    a = account(MemoryTrace(_engine(alone=1, mixed=3, decode=1), manifest))
    held(a)
    assert a.parts["decode_interference_ns"].to_list() == [3 * 12] and a.parts["prefill_interference_ns"].to_list() == [0]
    assert not any("Interference" in s for s in a.unseen)
    assert any("the trace's manifest names" in n for n in a.notes)


def test_an_answer_in_one_piece_has_prefill_and_decode_from_the_engines_stamps() -> None:
    row = request(1, arrival_ns=0, received_ns=0, engine_first_token_ns=200, finish_ns=420, output_tokens=30)
    a = account(MemoryTrace({"requests": [row], "stages": [STAY]}))
    held(a)
    got = a.parts.row(0, named=True)
    assert (got["prefill_ns"], got["decode_ns"], got["unexplained_ns"], got["delivery_ns"]) == (100, 220, 0, None)
    assert any("are inside prefill and decode" in s for s in a.unseen)
    blind = account(MemoryTrace({"requests": [row | {"engine_first_token_ns": None}], "stages": [STAY]}))
    held(blind)
    assert blind.parts["prefill_ns"].to_list() == blind.parts["decode_ns"].to_list() == [None]
    assert blind.parts["unexplained_ns"].to_list() == [320]
    assert not any("inside prefill and decode" in s for s in blind.unseen)
    assert any("their time in the engine is unexplained" in s for s in blind.unseen)


def test_what_nobody_could_have_seen_is_null() -> None:
    message = {"request": 1, "object": "tokens", "src": "server:s", "dst": "client", "mechanism": "message", "start_ns": 200}
    steps = [s | {"origin": "reconstructed"} for s in STEPS]
    rows = {
        "requests": [request(1) | STAMPS],
        "stages": [STAY],
        "steps": steps,
        "residency": [CHUNK, DECODE],
        "moves": [message],
        "waits": [{"request": 1, "kind": "message", "on": "proxy", "start_ns": 30, "end_ns": 40}],
    }
    hidden = ["transfer", "preempted", "recompute"]
    a = account(MemoryTrace(rows))
    assert all(a.parts[h + "_ns"].to_list() == [None] for h in hidden)
    assert a.shares["all"]["carrying"] is None and a.shares["all"]["repeated work"] is None
    assert any(s.startswith("Transfers:") for s in a.unseen)
    assert any(s.startswith("Preemption and repeated work:") for s in a.unseen)
    # An engine that counts preemptions, tells contexts, and a move of KV: now 0 is 0.
    rows["steps"] = [s | {"origin": "observed", "preempted": 0} for s in STEPS]
    rows["moves"] = [message | {"object": "kv", "src": "memory:s", "dst": "memory:t"}]
    a = account(MemoryTrace(rows))
    assert all(a.parts[h + "_ns"].to_list() == [0] for h in hidden)
    assert a.shares["all"]["carrying"] == 0
    assert not any(s.startswith(("Transfers:", "Preemption")) for s in a.unseen)


def test_spans_bear_the_names_of_the_parts() -> None:
    """Reconstructed steps: a step that runs without the request is left out of steps, not time between steps."""
    rows = {
        "requests": [request(1) | STAMPS],
        "stages": [STAY],
        "steps": [s | {"origin": "reconstructed"} for s in STEPS],
        "residency": [CHUNK, DECODE | {"first_step": 2, "last_step": 2}],
    }
    a = account(MemoryTrace(rows))
    labels = set(a.spans["label"])
    assert labels <= {p.name for p in PARTS} and "skipped" in labels
