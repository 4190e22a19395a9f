"""Records of the plug-in as rows: composition, residency, preemption, joins, connector statistics, sums."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoptrace.collectors.engines import vllm_watched
from hoptrace.collectors.engines.vllm_join import Join
from hoptrace.collectors.engines.vllm_moves import mechanism_of, transfers
from hoptrace.collectors.engines.vllm_sums import Sums
from hoptrace.collectors.engines.vllm_told import Told
from hoptrace.collectors.engines.vllm_watched import Families, Watched, end_reason, role_of, tier_of

CONFIG = {"block_size_tokens": 16, "block_count": 100, "kv_capacity_tokens": 1600}
MS = 1_000_000


class Rows:
    """What is handed over, by table."""

    def __init__(self) -> None:
        self.by: dict[str, list[dict[str, Any]]] = {}

    def emit(self, who: str, table: str, row: dict[str, Any], done: bool) -> None:
        self.by.setdefault(table, []).append({"who": who, **row})

    def write(self, table: str, row: dict[str, Any]) -> None:
        self.by.setdefault(table, []).append(row)

    def last(self, table: str, who: str) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for row in self.by.get(table, []):
            if row["who"] == who:
                merged |= {k: v for k, v in row.items() if v is not None}
        return merged


@pytest.fixture
def rows() -> Rows:
    return Rows()


def watched(rows: Rows, **config: Any) -> Watched:
    return Watched("s", 0, CONFIG | config, lambda t: t + 1000, rows.emit)


def step(
    n: int, shares: list[tuple[int, int, int, int]], new: list[int] | None = None, at: int | None = None, **more: Any
) -> Any:
    """A record "c": shares are (number, tokens, before, made)."""
    t = (n if at is None else at) * 10 * MS
    q, z, b, o = (list(x) for x in zip(*shares, strict=True))
    base = {
        "k": "c",
        "n": n,
        "t": [t, t + MS, t + 7 * MS, t + 8 * MS],
        "q": q,
        "z": z,
        "b": b,
        "o": o,
        "new": new or [0],
        "r": len(q),
    }
    return base | {"y": [], "m": [], "g": t + 8 * MS} | more


def told_of(number: int, name: str, prompt: int, flags: int = 0) -> dict[str, Any]:
    return {"k": "a", "t": 5, "l": [[number, name, prompt, 50, 0, 5, flags]]}


def test_a_step_of_chunks_and_decodes(rows: Rows) -> None:
    w = watched(rows)
    for number, prompt in ((1, 100), (2, 60), (3, 64)):
        w.told(told_of(number, f"r{number}", prompt))
    row = w.step(step(7, [(1, 1, 104, 5), (2, 1, 59 + 3, 3), (3, 24, 40, 0)], kb=12, w=4, wq=[3, 200, 1, 90], sp=[6, 2], pre=[]))
    assert row == {
        "server": "s", "dp_rank": 0, "pp_rank": 0, "step": 7, "start_ns": 70 * MS + 1000, "end_ns": 78 * MS + 1000,
        "schedule_ns": MS, "update_ns": MS, "prefill_requests": 1, "prefill_tokens": 24, "prefill_context_tokens": 40,
        "decode_requests": 2,
        "decode_tokens": 2, "decode_context_tokens": 104 + 62, "prefill_length_variance": 0.0,
        "decode_context_variance": ((104 - 83) ** 2 + (62 - 83) ** 2) / 2, "queued_prefill_requests": 3,
        "queued_prefill_tokens": 200,
        "queued_decode_requests": 1, "queued_decode_context_tokens": 90, "running": 3, "waiting": 4, "kv_used_tokens": 192,
        "kv_capacity_tokens": 1600, "preempted": 0, "draft_proposed": 6, "draft_accepted": 2, "origin": "observed",
    }  # fmt: skip


def test_kv_in_use_is_unknown_where_blocks_hold_different_numbers_of_tokens(rows: Rows) -> None:
    w = watched(rows, kv_capacity_tokens=900)
    row = w.step(step(0, [(1, 1, 10, 5)], kb=12))
    assert row["kv_used_tokens"] is None and row["kv_capacity_tokens"] == 900


def test_steps_of_asynchronous_scheduling_follow_each_other(rows: Rows) -> None:
    """The next batch is chosen before the results of this one are in: no step begins before the one ahead ends."""
    w = watched(rows)
    a = w.step(step(0, [(1, 1, 10, 5)], t=[0, 1 * MS, 20 * MS, 21 * MS]))
    b = w.step(step(1, [(1, 1, 11, 6)], t=[2 * MS, 3 * MS, 40 * MS, 41 * MS]))
    c = w.step(step(2, [(1, 1, 12, 7)], t=[60 * MS, 61 * MS, 70 * MS, 71 * MS]))
    assert [(r["start_ns"] - 1000, r["end_ns"] - 1000) for r in (a, b, c)] == [
        (0, 21 * MS), (21 * MS, 41 * MS), (60 * MS, 71 * MS),
    ]  # fmt: skip
    assert b["schedule_ns"] == MS


def test_the_life_of_a_request(rows: Rows) -> None:
    """Two chunks, two tokens, preempted, its own blocks found again, computed again up to where it was, one token, done."""
    w = watched(rows)
    w.told(told_of(1, "r", 40))
    w.step(step(0, [(1, 30, 0, 0)], new=[1]))
    w.step(step(1, [(1, 10, 30, 0)], y=[1], m=[1], ps=[[1, 40, 0, 0]]))
    w.step(step(2, [(1, 1, 40, 1)], y=[1], m=[1]))
    w.step(step(3, [(9, 1, 50, 3)], pre=[1]))
    w.step(step(4, [(9, 1, 51, 4), (1, 26, 16, 2)], new=[0, 1], y=[1], m=[1], f=[[1, "length"]]))
    runs = [{k: v for k, v in r.items() if k not in ("who", "server", "dp_rank")} for r in rows.by["residency"]]
    assert runs == [
        {"first_step": 0, "last_step": 0, "phase": "chunk", "tokens_per_step": 30, "context_at_start": 0},
        {"first_step": 1, "last_step": 1, "phase": "chunk", "tokens_per_step": 10, "context_at_start": 30},
        {"first_step": 2, "last_step": 2, "phase": "decode", "tokens_per_step": 1, "context_at_start": 40},
        {"first_step": 3, "last_step": 3, "phase": "preempted", "tokens_per_step": 0},
        {"first_step": 4, "last_step": 4, "phase": "chunk", "tokens_per_step": 26, "context_at_start": 16},
    ]
    stay = rows.last("stages", "r")
    assert stay["end_reason"] == "done" and stay["role"] == "both" and stay["cached_tokens"] == 0
    # 41 tokens had been computed; 16 were found again, 25 computed a second time, one is new
    assert (stay["resumed_tokens"], stay["recomputed_tokens"]) == (16, 25)
    request = rows.last("requests", "r")
    assert request["queued_ns"] == request["arrival_ns"] == 1005 and request["scheduled_ns"] == 1000
    assert request["first_token_ns"] == request["engine_first_token_ns"] == 18 * MS + 1000
    assert [(t["index"], t["count"], t["vantage"]) for t in rows.by["tokens"]] == [(i, 1, "engine") for i in range(3)]
    assert request["last_token_ns"] == rows.by["tokens"][-1]["time_ns"] == 48 * MS + 1000


def test_a_request_that_is_aborted_while_a_step_is_under_way(rows: Rows) -> None:
    """vLLM takes aborts while it waits for the model: "x" comes before the "c" of the step, which computed its token all the same
    (recorded so of vLLM 0.32: a client that left)."""
    w = watched(rows)
    w.told(told_of(1, "r", 40))
    w.told(told_of(2, "s", 20))
    w.step(step(0, [(1, 40, 0, 0)], new=[1], y=[1], m=[1]))
    w.step(step(1, [(1, 1, 40, 1)], y=[1], m=[1]))
    w.gone({"k": "x", "t": 23 * MS, "l": [[1, "FINISHED_ABORTED"], [2, "FINISHED_ABORTED"]]})
    row = w.step(step(2, [(1, 1, 41, 2), (2, 20, 0, 0)], new=[1]))
    w.step(step(3, [(9, 1, 41, 2)]))
    w.flush()
    assert (row["decode_tokens"], row["prefill_tokens"]) == (1, 20)
    runs = [(r["who"], r["first_step"], r["last_step"], r["phase"], r["tokens_per_step"]) for r in rows.by["residency"]]
    assert runs == [("r", 0, 0, "chunk", 40), ("r", 1, 1, "decode", 1), ("r", 2, 2, "decode", 1), ("s", 2, 2, "chunk", 20)]
    assert rows.last("requests", "r")["output_tokens"] == 2 and rows.last("requests", "s")["output_tokens"] == 0
    assert rows.last("stages", "s")["scheduled_ns"] == rows.last("requests", "s")["scheduled_ns"] == 20 * MS + 1000
    assert not w._leaving and w.unknown == 1


def test_prompts_of_a_batch_add_up(rows: Rows) -> None:
    w = watched(rows)
    for number, prompt in enumerate((40, 40, 30, 30)):
        w.told(told_of(number, f"{number % 2}_cmpl-x-{number // 2}-1a2b3c4d", prompt))
    assert rows.by["requests"][-1]["prompt_tokens"] == 70, "each prompt once, whatever n"


def test_equal_shares_are_one_run_and_a_gap_is_skipped(rows: Rows) -> None:
    w = watched(rows)
    w.told(told_of(1, "r", 4))
    w.step(step(0, [(1, 4, 0, 0)], new=[1], at=0))
    for n in (1, 2, 3):
        w.step(step(n, [(1, 1, 3 + n, n)]))
    w.step(step(4, [(2, 1, 9, 9)]))
    w.step(step(5, [(1, 1, 7, 4)]))
    w.gone({"k": "x", "t": 60 * MS, "l": [[1, "FINISHED_ABORTED"]]})
    runs = [(r["first_step"], r["last_step"], r["phase"], r.get("context_at_start")) for r in rows.by["residency"]]
    assert runs == [(0, 0, "chunk", 0), (1, 3, "decode", 4), (4, 4, "skipped", None), (5, 5, "decode", 7)]
    assert rows.last("stages", "r")["end_reason"] == "cancelled"
    assert rows.last("requests", "r")["error"] == "aborted in the engine"


def test_open_runs_are_written_each_second(rows: Rows) -> None:
    """A kill of hoptrace loses no more than that; the pieces join without gap or overlap."""
    w = watched(rows)
    w.told(told_of(1, "r", 1))
    for n in range(400):
        w.step(step(n, [(1, 1, n, n)], new=[1] if n == 0 else [0]))
    runs = [(r["first_step"], r["last_step"]) for r in rows.by["residency"] if r["phase"] == "decode"]
    assert 2 <= len(runs) <= 5
    assert all(b[0] == a[1] + 1 for a, b in pairwise(runs))
    w.close()
    runs = [(r["first_step"], r["last_step"], r["phase"]) for r in rows.by["residency"]]
    assert runs[-1][1] == 399 and all(r[2] != "skipped" for r in runs)
    count = len(runs)
    w.close()
    assert len(rows.by["residency"]) == count, "closing twice writes nothing twice"


def test_sequences_of_one_request_on_two_ranks(rows: Rows) -> None:
    """n = 2 on two ranks, the second rank's records later but its token earlier: first and last of both, each its own stay."""
    families: Families = OrderedDict()
    a, b = (Watched("s", rank, CONFIG, lambda t: t, rows.emit, families) for rank in (0, 1))
    a.told(told_of(1, "0_cmpl-x-0-01234567", 8))
    a.step(step(0, [(1, 8, 0, 0)], new=[1], at=5, y=[1], m=[1], f=[[1, "length"]]))
    b.told(told_of(1, "1_cmpl-x-0-01234567", 8))
    b.step(step(0, [(1, 8, 0, 0)], new=[1], at=2, y=[1], m=[1]))
    b.step(step(1, [(1, 1, 8, 1)], at=9, y=[1], m=[1], f=[[1, "length"]]))
    merged: dict[str, Any] = {}
    for row in rows.by["requests"]:
        merged |= {k: v for k, v in row.items() if v is not None}
    assert merged["request_id"] == "cmpl-x"
    assert (merged["first_token_ns"], merged["last_token_ns"], merged["finish_ns"]) == (28 * MS, 98 * MS, 98 * MS)
    assert merged["scheduled_ns"] == 20 * MS
    # The name again, later, is another request
    a.told({"k": "a", "t": 500 * MS, "l": [[2, "cmpl-x-0-76543210", 8, 50, 0, 500 * MS, 0]]})
    assert rows.by["requests"][-1]["queued_ns"] == 500 * MS


def test_memory_is_bounded_where_ends_are_never_told(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_watched, "_MOST", 10)
    w = watched(rows)
    for i in range(50):
        w.told(told_of(i, f"r{i}", 4))
    assert w.identifier(39) is None and w.identifier(40) == "r40"
    w.gone({"k": "x", "t": 5, "l": [[3, "x"], [45, "FINISHED_ABORTED"]]})
    assert rows.last("stages", "r45")["end_reason"] == "cancelled" and "end_reason" not in rows.last("stages", "r3")


def test_a_request_under_way_counts_in_steps_only(rows: Rows) -> None:
    w = watched(rows)
    w.told({"k": "a", "t": 5, "l": [[1, "r", 100, 50, 0, None, 0]]})
    row = w.step(step(40, [(1, 1, 120, 21)], y=[1], m=[1], f=[[1, "stop"]]))
    assert (row["decode_requests"], row["decode_context_tokens"], w.partial) == (1, 120, 1) and rows.by == {}


def test_found_tokens_of_a_version_that_does_not_tell_the_tiers(rows: Rows) -> None:
    w = watched(rows)
    w.told(told_of(1, "r", 40))
    w.step(step(0, [(1, 8, 32, 0)], new=[1], y=[1], m=[1], f=[[1, "stop"]]))
    stay = rows.last("stages", "r")
    assert stay["cached_tokens"] == 32 and "cached_device_tokens" not in stay


def test_prefill_and_decode_sides(rows: Rows) -> None:
    w = watched(rows, kv_connector="NixlConnector")
    w.told(told_of(1, "p", 40, flags=1))
    w.told(told_of(2, "d", 40, flags=2))
    w.step(
        step(0, [(1, 40, 0, 0), (2, 1, 39, 0)], new=[2], y=[1, 2], m=[1, 1], ps=[[1, 40, 0, 0], [2, 0, 16, 24]],
             f=[[1, "length"]])
    )  # fmt: skip
    assert w.identifier(2) == "d" and w.identifier(1) is None
    assert [(t["who"], t["index"]) for t in rows.by["tokens"]] == [("d", 0)], "the prefill's token reaches nobody"
    assert not {"engine_first_token_ns", "max_tokens"} & set(rows.last("requests", "p"))
    w.gone({"k": "x", "t": 90 * MS, "l": [[2, "FINISHED_ABORTED"]]})
    assert (rows.last("stages", "p")["role"], rows.last("stages", "p")["end_reason"]) == ("prefill", "handed over")
    stay = rows.last("stages", "d")
    assert (stay["role"], stay["cached_tokens"], stay["cached_device_tokens"]) == ("decode", 40, 16)
    # The whole prompt was there; its last token is computed again
    assert (stay["cached_peer_tokens"], stay["recomputed_tokens"]) == (24, 1)


def test_numbers_go_on_over_a_restart(rows: Rows) -> None:
    w = watched(rows)
    w.told(told_of(1, "r", 4))
    w.step(step(41, [(1, 4, 0, 0)], new=[1]))
    w.restart(CONFIG)
    row = w.step(step(0, [(1, 1, 9, 5)], at=100))
    assert row["step"] == 42 and w.unknown == 1, "number 1 is another request now"
    assert [r["last_step"] for r in rows.by["residency"]] == [41]


def test_words_of_vllm() -> None:
    assert [end_reason(s) for s in ("stop", "length", "repetition", "abort", "error")] == ["done"] * 3 + ["cancelled", "failed"]
    assert end_reason("length", sent_on=True) == "handed over"
    asked = ((0, None), (1, None), (2, "kv_producer"), (0, "kv_producer"), (0, "kv_consumer"), (0, "kv_both"))
    assert [role_of(*x) for x in asked] == [
        "both", "prefill", "decode", "prefill", "decode", "both",
    ]  # fmt: skip
    assert [tier_of(n) for n in ("NixlConnector", "OffloadingConnector", "LMCacheConnectorV1", None)] == [
        "cached_peer_tokens", "cached_host_tokens", None, None,
    ]  # fmt: skip


# -- joins ------------------------------------------------------------------------------------------------------------

Kind = st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 2), st.integers(0, 3))


@given(st.lists(Kind, max_size=30), st.sets(st.integers(0, 29)), st.integers(0, 5))
def test_every_step_finds_its_record(kinds: list[Any], dummies: set[int], at: int) -> None:
    """Dummy iterations count on one side only; the records come while the steps go on. All join, each to its own step."""
    join = Join()
    index = 0
    for n, kind in enumerate(kinds):
        index += n in dummies
        join.step(n, (*kind[:3], n), 100 + n)
        assert join.match(index, (*kind[:3], n)) == 100 + n
        index += 1
    assert (join.joined, join.alone, join.skipped) == (len(kinds), 0, 0)


def test_alike_steps_are_joined_in_order() -> None:
    """919 steps of one composition: 919 joins, by number."""
    join = Join()
    for n in range(919):
        join.step(n, (0, 0, 1, 1), n)
    assert [join.match(n, (0, 0, 1, 1)) for n in range(919)] == list(range(919))
    assert (join.joined, join.alone, join.skipped) == (919, 0, 0)


def test_what_one_side_missed_is_counted() -> None:
    join = Join()
    for n in range(6):
        join.step(n, (0, 0, 1, n), n)
    assert join.match(0, (0, 0, 1, 0)) == 0
    assert join.match(3, (0, 0, 1, 3)) == 3, "records 1 and 2 were lost"
    assert join.match(9, (5, 5, 5, 5)) is None, "no such step was seen"
    assert join.match(4, (0, 0, 1, 4)) == 4
    assert (join.joined, join.alone, join.skipped) == (3, 1, 2)
    join.restart()
    join.step(0, (1, 9, 0, 0), 6)
    assert join.match(0, (1, 9, 0, 0)) == 6 and join.skipped == 3


# -- connectors -------------------------------------------------------------------------------------------------------


def test_nixl_transfers_are_moves_and_waits() -> None:
    stats = {
        "transfer_duration": [0.05, 0.01], "post_duration": [0.002, 0.0], "bytes_transferred": [1000, 200],
        "num_descriptors": [8, 2], "num_failed_transfers": [1], "num_failed_notifications": [], "num_kv_expired_reqs": [1, 1],
    }  # fmt: skip
    found = transfers(stats, 100 * MS, "server:d", connector="NixlConnector", mechanism="rdma", name="kv_connector")
    assert found.moves == [
        {"object": "kv", "src": "remote", "dst": "server:d", "start_ns": start, "end_ns": 100 * MS, "bytes": size, "transfers": n,
         "mechanism": "rdma", "basis": "counted"}
        for start, size, n in ((50 * MS, 1000, 8), (90 * MS, 200, 2))
    ]  # fmt: skip
    assert [(w["kind"], w["start_ns"], w["end_ns"], w["on"]) for w in found.waits] == [
        ("serialize", 50 * MS, 52 * MS, "NixlConnector"), ("transfer", 52 * MS, 100 * MS, "NixlConnector"),
        ("transfer", 90 * MS, 100 * MS, "NixlConnector"),
    ]  # fmt: skip
    assert found.sums == [
        ("kv_connector:num_failed_transfers", 1), ("kv_connector:num_kv_expired_reqs", 2),
    ]  # fmt: skip


def test_offloading_moves_both_ways() -> None:
    stats = {
        "vllm:kv_offload_load_bytes": 4096, "vllm:kv_offload_load_time": 0.002, "vllm:kv_offload_load_size": [4096],
        "vllm:kv_offload_store_bytes": 100, "vllm:kv_offload_allocation_failure": 3,
    }  # fmt: skip
    found = transfers(stats, 10 * MS, "server:s")
    assert [(m["src"], m["dst"], m["bytes"], m["start_ns"], m["transfers"]) for m in found.moves] == [
        ("server:s/offload", "server:s", 4096, 8 * MS, 1), ("server:s", "server:s/offload", 100, 10 * MS, None),
    ]  # fmt: skip
    assert found.sums == [("kv:vllm:kv_offload_allocation_failure", 3)]


def test_connectors_in_connectors_and_unknown_shapes() -> None:
    nested = {
        "NixlConnector": {"data": {"transfer_duration": [0.01], "bytes_transferred": [5]}},
        "Strange": {"cache_hits": [1, 2], "host_cache_usage_perc": [0.5, 0.25], "level": 7, "words": "no", "none": None},
    }
    found = transfers(nested, MS * 100, "server:s", name="kv")
    assert [(m["bytes"], m["transfers"]) for m in found.moves] == [(5, None)]
    assert found.sums == [("kv:Strange:cache_hits", 3)]
    assert ("kv:Strange:host_cache_usage_perc", 0.25) in found.gauges and ("kv:Strange:level", 7) in found.gauges
    # Lists that do not fit each other are no transfers, and are not lost
    odd = transfers({"transfer_duration": [0.1, 0.2], "bytes_transferred": [5]}, 1, "n")
    assert odd.moves == [] and odd.sums == [("kv:transfer_duration", pytest.approx(0.3)), ("kv:bytes_transferred", 5)]
    assert transfers("text", 1, "n").moves == []


def test_mechanism_only_where_the_transports_leave_no_doubt() -> None:
    assert [mechanism_of(t) for t in ("rc,ud,self", "tcp,self", "tcp,shm,self,posix", "^tcp", "all", "self", None)] == [
        "rdma", "message", None, None, None, None, None,
    ]  # fmt: skip


# -- the stat logger alone --------------------------------------------------------------------------------------------


def told(rows: Rows, **config: Any) -> Told:
    return Told("s", CONFIG | {"iteration_details": True} | config, lambda t: t + 1000, rows.emit, rows.write)


def test_a_step_from_the_stat_logger(rows: Rows) -> None:
    t = told(rows)
    t.record(
        {"k": "s", "t": 50 * MS, "i": [3, 1, 40, 2, 2, 20 * MS, 0, 0, 0], "r": 3, "w": 1, "d": 2, "u": 0.12, "sd": [2, 8, 3]}
    )
    assert t.take(None) == 1
    (row,) = rows.by["steps"]
    assert row == {
        "server": "s", "dp_rank": 0, "pp_rank": 0, "step": 3, "prefill_requests": 1, "prefill_tokens": 40, "decode_requests": 2,
        "decode_tokens": 2, "running": 3, "waiting": 3, "kv_used_tokens": 192, "kv_capacity_tokens": 1600, "draft_proposed": 8,
        "draft_accepted": 3, "origin": "observed", "start_ns": 30 * MS + 1000, "end_ns": 50 * MS + 1000,
    }  # fmt: skip


@given(st.lists(st.tuples(st.integers(1, 30 * MS), st.integers(0, 40 * MS), st.integers(0, 5 * MS)), max_size=40))
def test_no_step_is_lost_or_overlaps(steps: list[tuple[int, int, int]]) -> None:
    """Steps of any length, told with any delay: each is there once with its own length, in order."""
    rows = Rows()
    t = told(rows)
    end = heard = 0
    for i, (length, delay, gap) in enumerate(steps):
        end += gap + length
        heard = max(heard, end + delay)
        t.record({"k": "s", "t": heard, "i": [i, 0, 0, 1, 1, length, 0, 0, 0]})
        t.take(heard + 1000)
    t.take(None)
    made = rows.by.get("steps", [])
    assert [r["step"] for r in made] == list(range(len(steps))) and t.unplaced == 0
    for a, b in pairwise(made):
        assert a["end_ns"] <= b["start_ns"]
    if not t.cut:
        assert [r["end_ns"] - r["start_ns"] for r in made] == [s[0] for s in steps]


def test_without_details_there_are_no_steps_but_sums(rows: Rows) -> None:
    t = told(rows, iteration_details=False)
    t.record({"k": "s", "t": 5, "r": 2, "w": 1, "u": 0.5, "n": [3, 7, 32, 0, 32, 39, 1], "p": [1, 39, 32, 0, 0, 0]})
    t.record({"k": "s", "t": 9, "r": 2, "w": 0, "u": 0.5, "n": [2, 0, 0, 0, 0, 0, 0]})
    assert t.take(None) == 0 and "steps" not in rows.by
    found = {r["name"]: (r["value_int"] if r["value_float"] is None else r["value_float"], r["semantics"]) for r in t.sums.rows()}
    assert found == {
        "plugin:generation_tokens": (5, "delta"), "plugin:prompt_tokens_computed": (7, "delta"),
        "plugin:prompt_tokens_local_cache": (32, "delta"), "plugin:prompt_tokens_cached": (32, "delta"),
        "plugin:prompt_tokens": (39, "delta"), "plugin:preemptions_reported": (1, "delta"),
        "plugin:prefix_cache_requests": (1, "delta"), "plugin:prefix_cache_queries": (39, "delta"),
        "plugin:prefix_cache_hits": (32, "delta"), "plugin:running": (2, "gauge"), "plugin:waiting": (0, "gauge"),
        "plugin:kv_cache_usage": (0.5, "gauge"),
    }  # fmt: skip
    assert t.sums.rows() == []


FINISHED = ["cmpl-a-0", "length", 900 * MS, 10, 5, 5, 4, 0, 100 * MS, 200 * MS, 700 * MS]


def test_times_of_a_request_are_the_engines_or_derived(rows: Rows) -> None:
    t = told(rows)
    t.record({"k": "s", "t": 2000 * MS, "f": [[*FINISHED, 1190 * MS, 1290 * MS, 1490 * MS, 1990 * MS]]})
    t.record({"k": "s", "t": 2000 * MS, "f": [["cmpl-b-0", *FINISHED[1:]]]})
    exact, derived = rows.last("requests", "cmpl-a-0"), rows.last("requests", "cmpl-b-0")
    names = ("received_ns", "queued_ns", "scheduled_ns", "engine_first_token_ns", "finish_ns")
    assert [(exact[n] - 1000) // MS for n in names] == [1100, 1190, 1290, 1490, 2000]
    assert [(derived[n] - 1000) // MS for n in names] == [1100, 1200, 1300, 1500, 2000]
    assert exact["request_id"] == "cmpl-a" and (exact["prompt_tokens"], exact["output_tokens"], exact["max_tokens"]) == (10, 5, 5)
    stay = rows.last("stages", "cmpl-a-0")
    assert (stay["cached_tokens"], stay["cached_device_tokens"], stay["end_reason"]) == (4, 4, "done")
    assert (stay["end_ns"] - 1000) // MS == 1990


def test_a_prefill_server_says_nothing_of_the_answer(rows: Rows) -> None:
    """Else one token, where the decoder made many, if the prefill server is the one that is read last."""
    told(rows, kv_role="kv_producer").record({"k": "s", "t": 2000 * MS, "f": [FINISHED]})
    row = rows.last("requests", FINISHED[0])
    assert row["prompt_tokens"] == 10 and rows.last("stages", FINISHED[0])["end_reason"] == "handed over"
    assert not {"engine_first_token_ns", "output_tokens", "max_tokens", "finish_reason"} & set(row)


def test_sequences_of_one_request_add_up(rows: Rows) -> None:
    """n = 3: three ends under one name. The prompt counts once, outputs add up, each sequence has its stay."""
    t = told(rows)
    for i in range(3):
        t.record({"k": "s", "t": (2000 + i) * MS, "f": [[*FINISHED, 1190 * MS, 1290 * MS, (1490 - i) * MS, 1990 * MS]]})
    row = rows.last("requests", "cmpl-a-0")
    assert (row["prompt_tokens"], row["output_tokens"]) == (10, 15) and (row["engine_first_token_ns"] - 1000) // MS == 1488
    assert [s.get("sequence") for s in rows.by["stages"]] == [None, 1, 2]
    # The client uses the name again later: that is another request
    t.record({"k": "s", "t": 9000 * MS, "f": [[*FINISHED, 8190 * MS, 8290 * MS, 8490 * MS, 8990 * MS]]})
    assert rows.last("requests", "cmpl-a-0")["output_tokens"] == 5


def test_steps_of_a_watched_engine_come_from_there(rows: Rows) -> None:
    t = told(rows)
    t.joins[0] = join = Join()
    join.step(4, (0, 0, 1, 1), 4)
    t.arrived[0] = [(40 * MS, "cmpl-x"), (60 * MS, "cmpl-y")]
    kv = {"transfer_duration": [0.001], "bytes_transferred": [7], "num_descriptors": [1]}
    t.record({"k": "s", "t": 50 * MS, "i": [4, 0, 0, 1, 1, MS, 0, 0, 0], "kv": kv, "f": [FINISHED]})
    t.record({"k": "s", "t": 51 * MS, "i": [5, 0, 0, 0, 0, MS, 0, 0, 1]})
    assert t.take(None) == 0 and "steps" not in rows.by and "stages" not in rows.by
    (move,) = rows.by["moves"]
    assert (move["who"], move["step"], move["server"]) == ("cmpl-x", 4, "s")
    assert (join.joined, t.dummies) == (1, 1) and t.arrived[0] == [(60 * MS, "cmpl-y")]


@pytest.mark.parametrize(
    ("came", "sizes", "whose"),
    [
        ([(1, "x")], [7], ["x"]), ([(1, "x")], [7, 8], [None, None]), ([(1, "x"), (2, "y")], [7], [None]),
        ([(1, "")], [7], [None]), ([], [7], [None]), ([(90 * MS, "x")], [7], [None]),
    ],
)  # fmt: skip
def test_a_transfer_is_a_requests_only_where_there_is_no_other(
    rows: Rows, came: list[tuple[int, str]], sizes: list[int], whose: list[str | None]
) -> None:
    t = told(rows)
    t.arrived[0] = list(came)
    kv = {"transfer_duration": [0.001] * len(sizes), "bytes_transferred": sizes}
    t.record({"k": "s", "t": 50 * MS, "kv": kv, "r": 0})
    assert [m.get("who") for m in rows.by["moves"]] == whose
    assert [m["step"] for m in rows.by["moves"]] == [None] * len(sizes), "it may come in a step without tokens, which is none"


def test_a_restart_counts_on(rows: Rows) -> None:
    t = told(rows)
    for index in (0, 1, 1):
        t.record({"k": "s", "t": (index + 1) * 50 * MS, "i": [index, 0, 0, 1, 1, MS, 0, 0, 0]})
    assert t.late == 1
    t.restart(CONFIG | {"iteration_details": True})
    t.record({"k": "s", "t": 900 * MS, "i": [0, 0, 0, 1, 1, MS, 0, 0, 0]})
    t.take(None)
    assert [r["step"] for r in rows.by["steps"]] == [0, 1, 2]


def test_sums_take_numbers_only() -> None:
    sums = Sums("s")
    for value in (None, True, float("nan"), "3", 0):
        sums.add(0, "x", value, "1", 5)
        sums.gauge(0, "y", None, "1", 5)
    assert sums.rows() == []
    sums.record({"kf": {"in_progress": 2}, "r": 1}, 1, 7)
    (row,) = sums.rows()
    assert (row["entity"], row["name"], row["value_int"]) == ("server:s/engine:1", "plugin:kv_fetch_requests:in_progress", 2)
    sums.record({"r": 1}, 1, 9)
    (row,) = sums.rows()
    assert (row["value_int"], row["time_ns"]) == (0, 9)
