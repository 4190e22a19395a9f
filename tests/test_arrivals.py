"""Arrivals: as recorded, as sessions and clients send them, from N clients; rates, and law 3 on closed loops."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.workloads import MS, server, store

from hoptrace.errors import UsageError
from hoptrace.reader import Trace, open_trace
from hoptrace.replay.arrivals import arrange, parse_arrivals
from hoptrace.replay.run import run
from hoptrace.replay.workload import workload
from hoptrace.stepcost import fixed

COST = fixed(step_ns=5 * MS, prefill_token_ns=90_000, decode_request_ns=700_000, decode_context_token_ns=900)
SAMPLES = Path(__file__).parent / "data" / "vllm_traces"


def row(request: int, arrival_ms: int, finish_ms: int | None, **more: Any) -> dict[str, Any]:
    at = arrival_ms * MS
    return {
        "request": request, "arrival_ns": at, "received_ns": at, "arrival_of": "received", "prompt_tokens": 8, "output_tokens": 4,
        "finish_ns": None if finish_ms is None else finish_ms * MS, "source": "t", **more,
    }  # fmt: skip


def trace_of(path: Path, rows: list[dict[str, Any]]) -> Trace:
    return store(path, {"requests": pl.DataFrame(rows, infer_schema_length=None)}, server(), origin="imported")


def talk(path: Path) -> Trace:
    """0 → 2 → 4 is a conversation, 3 continues one that failed, 5 and 6 are of slot 7, 8 came before its parent had ended."""
    return trace_of(path, [
        row(0, 0, 100),
        row(1, 10, 20, error="HTTP 500"),
        row(2, 130, 200, parent_request=0),
        row(3, 140, 150, parent_request=1),
        row(4, 260, 300, parent_request=2, think_ns=60 * MS),
        row(5, 270, 310, client_slot=7),
        row(6, 315, 400, client_slot=7),
        row(7, 320, 500),
        row(8, 330, 600, parent_request=7),
    ])  # fmt: skip


def test_turns_wait_for_their_parents_and_clients_for_their_slots(tmp_path: Path) -> None:
    t = talk(tmp_path / "t.trace")
    work, how = arrange(workload(t), t)
    at = {int(r): i for i, r in enumerate(work.request)}
    assert work.after is not None and work.think_ns is not None and work.floor is not None
    waits = {r: (int(work.request[work.after[i]]), int(work.think_ns[i])) for r, i in at.items() if work.after[i] >= 0}
    assert waits == {2: (0, 30 * MS), 4: (2, 60 * MS), 6: (5, 5 * MS)}
    assert not work.floor.any()
    assert how.kind == "sessions" and how.linked == 3 and how.floored == 0
    assert how.reason == (
        "2 requests continue another's answer and come a think time later; "
        "1 request comes from 1 client slot, which waits for its answer"
    )
    assert how.notes == (
        "1 request continues one that is not replayed: arrived as recorded.",
        "1 request arrived before the one that went before had ended: arrived as recorded.",
    )


def test_an_unknown_pause_keeps_the_recorded_arrival_as_the_earliest(tmp_path: Path) -> None:
    t = trace_of(tmp_path / "t.trace", [row(0, 0, None), row(1, 500, None, parent_request=0), row(2, 600, None, parent_request=1,
                                                                                                 think_ns=9)])  # fmt: skip
    work, how = arrange(workload(t), t)
    assert work.after is not None and work.think_ns is not None and work.floor is not None
    assert work.after.tolist() == [-1, 0, 1]
    assert work.think_ns.tolist() == [0, 0, 9]
    assert work.floor.tolist() == [False, True, False]
    assert how.floored == 1 and "paused is unknown" in how.notes[0]
    # Faster servers get such a turn no sooner, slower ones later.
    for ms, arrives in ((1, 500 * MS), (200, 5 * 200 * MS)):
        r = run(t, "as-recorded", cost=fixed(step_ns=ms * MS))
        got = r.trace.table("requests").collect()
        assert got["arrival_ns"][1] >= 500 * MS
        assert got["arrival_ns"][1] == max(500 * MS, got["finish_ns"][0]), arrives


def test_a_rate_divides_arrivals_and_think_times(tmp_path: Path) -> None:
    t = talk(tmp_path / "t.trace")
    work, how = arrange(workload(t), t, None, Fraction(2))
    assert work.think_ns is not None
    assert sorted(work.think_ns[work.think_ns > 0].tolist()) == [5 * MS // 2, 15 * MS, 30 * MS]
    assert work.arrival_ns.tolist() == [a * MS // 2 for a in (0, 130, 140, 260, 270, 315, 320, 330)]
    assert how.label == "sessions, 2 times as fast" and not how.same


def test_recorded_arrivals_on_request_say_what_they_leave_out(tmp_path: Path) -> None:
    t = talk(tmp_path / "t.trace")
    work, how = arrange(workload(t), t, "recorded")
    assert work.after is None and how.label == "recorded" and how.same
    assert how.notes[0].startswith("The load was a closed loop; its arrivals are kept as recorded")
    plain = trace_of(tmp_path / "p.trace", [row(0, 0, 5), row(1, 9, 12)])
    assert arrange(workload(plain), plain)[1].kind == "recorded"
    assert arrange(workload(plain), plain)[1].reason == "no request says which one it waited for"
    with pytest.raises(UsageError, match="says which one it waited for"):
        arrange(workload(plain), plain, "sessions")


def test_a_loop_that_nobody_declared_is_noticed(tmp_path: Path) -> None:
    """One client, one request at a time, pauses of 1 ms: nothing in the rows says so but their times."""
    rng = np.random.default_rng(3)
    rows, now = [], 0
    for i in range(400):
        took = int(rng.integers(5, 400))
        rows.append(row(i, now, now + took))
        now += took
    t = trace_of(tmp_path / "t.trace", rows)
    how = arrange(workload(t), t)[1]
    assert how.kind == "recorded"
    assert how.notes and "Try --arrivals closed:1." in how.notes[0]


@pytest.mark.parametrize(
    "text", ["closed", "closed:0", "closed:-1", "closed:x", "closed:99999999999", "sessions:3", "often", "closed:1.5"]
)
def test_words_that_are_no_way_to_arrive(text: str) -> None:
    with pytest.raises(UsageError, match="no way to arrive"):
        parse_arrivals(text)


def test_words_that_are() -> None:
    assert parse_arrivals(None) == (None, None)
    assert parse_arrivals("recorded") == ("recorded", None)
    assert parse_arrivals("sessions") == ("sessions", None)
    assert parse_arrivals("closed:32") == ("closed", 32)


def loop(tmp: Path, clients: int, engine: str = "compiled") -> Trace:
    """A closed loop as a capture would have it: a log of lengths, sent by so many clients."""
    rows = [row(i, i, None) | {"prompt_tokens": 20 + (i * 37) % 200, "output_tokens": 1 + (i * 13) % 40} for i in range(80)]
    log = trace_of(tmp / "log.trace", rows)
    result = run(log, "as-recorded", cost=COST, arrivals=f"closed:{clients}", out=tmp / f"{engine}.trace", engine=engine)  # type: ignore[arg-type]
    assert result.requests["done"] == 80
    return open_trace(tmp / f"{engine}.trace")


@pytest.mark.parametrize("engine", ["compiled", "plain"])
def test_a_closed_loop_replayed_under_its_own_policy_is_the_trace(tmp_path: Path, engine: str) -> None:
    """Law 3, with the clients' arrivals and with the recorded ones."""
    seen = loop(tmp_path, 3, engine)
    r = seen.table("requests").collect()
    assert r["client_slot"].n_unique() == 3
    # Never more than three in flight, and each arrival but the first three is an end.
    assert set(r["arrival_ns"].sort()[3:]) <= set(r["finish_ns"])
    again = run(seen, "as-recorded", cost=COST, engine=engine)  # type: ignore[arg-type]
    assert again.arrivals.kind == "sessions" and again.arrivals.linked == 77
    assert again.own is not None and again.own_recorded is not None
    for comparison in (again.own, again.own_recorded):
        assert comparison.requests == (80, 80)
        assert all(e == 0 for m in comparison.errors().values() for e in m.values())


def test_an_open_loop_replay_of_a_closed_loop_is_wrong_where_it_matters(tmp_path: Path) -> None:
    """One slot instead of four under three clients: at most two wait. With arrivals kept as recorded the queue only grows."""
    seen = loop(tmp_path, 3)
    closed, kept = (run(seen, "one-slot", cost=COST, arrivals=a) for a in (None, "recorded"))
    truth = run(open_trace(tmp_path / "log.trace"), "one-slot", cost=COST, arrivals="closed:3").trace
    want = truth.table("requests").select((pl.col("finish_ns") - pl.col("arrival_ns")).mean()).collect().item()

    def e2e(t: Trace) -> float:
        return float(t.table("requests").select((pl.col("finish_ns") - pl.col("arrival_ns")).mean()).collect().item())

    assert e2e(closed.trace) == pytest.approx(want, rel=0.02)
    assert e2e(kept.trace) > 2 * want
    assert any("closed loop" in w for w in kept.trace.manifest.replay.warnings)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["steady", "preempted"])
def test_law_3_on_real_conversations(name: str) -> None:
    """Captures of vLLM with a conversation in them: the own-policy error with its arrivals is that with the recorded ones, but
    for the few requests that the pause moves."""
    r = run(open_trace(SAMPLES / f"{name}.trace"), "as-recorded", tokens=False, cost="fitted:mean")
    assert r.arrivals.kind == "sessions" and r.arrivals.linked == 1
    assert r.own is not None and r.own_recorded is not None
    for metric in ("ttft", "e2e"):
        a, b = r.own.get(metric, "mean").error_pct, r.own_recorded.get(metric, "mean").error_pct
        assert a is not None and b is not None and abs(a - b) < 2


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 60), st.integers(-1, 3), st.integers(0, 5)), min_size=1, max_size=12),
    st.fractions(min_value=Fraction(1, 8), max_value=8),
)
def test_nobody_waits_for_a_later_one(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, ...]], rate: Fraction
) -> None:
    """Predecessors stand earlier in the work, and pauses are never negative, whatever the links say."""
    made, at = [], 0
    for i, (gap, took, slot, parent) in enumerate(rows):
        at += gap
        links = {"client_slot": None if slot < 0 else slot, "parent_request": i - parent if 0 < parent <= i else None}
        made.append(row(i, at, at + took, **links))
    t = trace_of(tmp_path_factory.mktemp("a") / "t.trace", made)
    work, how = arrange(workload(t), t, None, rate)
    if how.kind == "recorded":
        assert work.after is None
        return
    assert work.after is not None and work.think_ns is not None
    assert (work.after < np.arange(work.n)).all() and (work.think_ns >= 0).all()
    assert how.linked == (work.after >= 0).sum()
