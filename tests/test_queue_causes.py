"""What a server was full of while a request waited: recorded waits by `on`, preempted slots, sampled KV, pools nobody watches."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest
from support.memory import MemoryTrace

from hoptrace.analysis.latency.accounting import Accounting, account
from hoptrace.analysis.latency.composition import compositions, tail_of
from hoptrace.analysis.latency.levels import levels
from hoptrace.analysis.latency.parts import PARTS
from hoptrace.manifest import Manifest, Server

S = 1_000_000_000
POOL = Server(name="s", max_sequences=2, block_size_tokens=16, kv_capacity_tokens=1600, max_batched_tokens=512)


def waiting(server: Server = POOL, **tables: list[dict[str, Any]]) -> dict[str, int]:
    """Seconds of the parts of request 1, in the queue from 10 to 30 s, while request 2 holds a slot; prompt of 800 tokens."""
    rows = {
        "requests": [
            {"request": 1, "arrival_ns": 10 * S, "received_ns": 10 * S, "first_token_ns": 40 * S, "last_token_ns": 50 * S,
             "finish_ns": 50 * S, "prompt_tokens": 800},
            {"request": 2, "arrival_ns": 0, "received_ns": 0},
        ],
        "stages": [
            {"request": 1, "stage": 0, "server": "s", "enqueued_ns": 10 * S, "scheduled_ns": 30 * S, "end_ns": 50 * S},
            {"request": 2, "stage": 0, "server": "s", "enqueued_ns": 0, "scheduled_ns": 0, "end_ns": 60 * S},
        ],
    }  # fmt: skip
    a = account(MemoryTrace(rows | tables, Manifest(origin="recorded", servers=[server], closed=True)))
    row = a.parts.filter(request=1).row(0, named=True)
    assert sum(row[p.column] or 0 for p in PARTS) == row["e2e_ns"]
    return {p.name: row[p.column] // S for p in PARTS if row[p.column] and p.name.startswith("queue")}


def usage(values: dict[int, float]) -> list[dict[str, Any]]:
    name = 'vllm:kv_cache_usage_perc{engine="0"}'
    return [{"entity": "server:s", "name": name, "time_ns": t * S, "value_float": v, "status": "ok"} for t, v in values.items()]


@pytest.mark.parametrize(
    ("on", "part"),
    [("slot", "queue_slots"), ("kv", "queue_kv"), ("budget", "queue_budget"), (None, "queue_full"), ("x", "queue_full")],
)
def test_a_recorded_wait_says_what_was_full(on: str | None, part: str) -> None:
    wait = {"request": 1, "server": "s", "kind": "capacity", "on": on, "start_ns": 12 * S, "end_ns": 22 * S}
    assert waiting(Server(name="s", max_sequences=2), waits=[wait]) == {"queue_room": 10, part: 10}


def test_a_pool_that_nobody_watches_has_no_known_room() -> None:
    assert waiting() == {"queue_unknown": 20}
    assert waiting(Server(name="s", max_sequences=2)) == {"queue_room": 20}
    assert waiting(Server(name="s", max_sequences=1, block_size_tokens=16)) == {"queue_slots": 20}


def test_sampled_kv_tells_where_no_step_does() -> None:
    """At 95 % of 1,600 tokens 80 are free, the first in the queue needs 800; at 20 % there is room. A sample speaks half-way to
    its neighbours."""
    every = dict.fromkeys(range(20), 0.95) | dict.fromkeys(range(20, 62), 0.2)
    found = waiting(counters=usage(every))
    assert found == {"queue_kv": 9, "queue_room": 10} or found == {"queue_kv": 10, "queue_room": 10}
    assert waiting(counters=usage(dict.fromkeys(range(62), 0.2))) == {"queue_room": 20}
    # Samples that came to an end leave the rest unknown.
    found = waiting(counters=usage(dict.fromkeys(range(20), 0.2)))
    assert found.keys() == {"queue_room", "queue_unknown"}


def test_who_was_preempted_holds_no_slot() -> None:
    one = Server(name="s", max_sequences=1)
    steps = [
        {"server": "s", "step": i, "start_ns": i * 5 * S, "end_ns": (i + 1) * 5 * S, "origin": "observed", "prefill_tokens": 0,
         "prefill_context_tokens": 0, "decode_requests": 1, "decode_context_tokens": 9}
        for i in range(12)
    ]  # fmt: skip
    run = {"request": 2, "server": "s", "tokens_per_step": 1}
    held = [run | {"first_step": 0, "last_step": 11, "phase": "decode", "context_at_start": 9}]
    assert waiting(one, steps=steps, residency=held) == {"queue_slots": 20}
    lost = [
        run | {"first_step": 0, "last_step": 2, "phase": "decode", "context_at_start": 9},
        run | {"first_step": 3, "last_step": 4, "phase": "preempted", "tokens_per_step": 0},
        run | {"first_step": 5, "last_step": 11, "phase": "decode", "context_at_start": 12},
    ]
    # From 15 to 25 s it had no place.
    assert waiting(one, steps=steps, residency=lost) == {"queue_slots": 10, "queue_room": 10}


def test_a_replayed_preemption_is_preempted_not_queueing() -> None:
    """A replay writes its preemptions as waits for KV too: a place that was lost says more."""
    rows = {
        "requests": [{"request": 1, "arrival_ns": 0, "received_ns": 0, "finish_ns": 30, "last_token_ns": 30}],
        "stages": [{"request": 1, "stage": 0, "server": "s", "enqueued_ns": 0, "scheduled_ns": 0, "end_ns": 30}],
        "steps": [{"server": "s", "step": i, "start_ns": i * 10, "end_ns": i * 10 + 10, "origin": "replayed"} for i in range(3)],
        "residency": [
            {
                "request": 1,
                "server": "s",
                "first_step": i,
                "last_step": i,
                "phase": p,
                "tokens_per_step": 1,
                "context_at_start": 5,
            }
            for i, p in enumerate(("decode", "preempted", "decode"))
        ],
        "waits": [{"request": 1, "server": "s", "kind": "capacity", "on": "kv", "start_ns": 10, "end_ns": 20}],
    }
    row = account(MemoryTrace(rows)).parts.row(0, named=True)
    assert row["preempted_ns"] == 10 and not row["queue_kv_ns"]


# -- levels and tails ---------------------------------------------------------------------------------------------------


def test_levels_name_what_is_there() -> None:
    bare = MemoryTrace({"requests": [{"request": 1, "arrival_ns": 0, "finish_ns": 9}]})
    found = levels(bare, origin=None)
    assert found.name == "stamps" and "stamps" in found and "tokens" not in found and len(found.missing) == 6
    kv = {"request": 1, "object": "kv", "src": "memory:a", "dst": "memory:b", "start_ns": 1, "end_ns": 2}
    wait = {"request": 1, "kind": "host", "start_ns": 1, "end_ns": 2}
    run = {"request": 1, "server": "s", "first_step": 0, "last_step": 0, "phase": "decode"}
    full = MemoryTrace({"requests": [{"request": 1}], "moves": [kv], "waits": [wait], "residency": [run]})
    assert levels(full, origin="observed").name == "observed steps, residency, waits, moves"
    assert levels(full, origin="observed").missing == [] and levels(full, origin="observed, reconstructed").missing == []
    assert levels(full, origin="reconstructed").name == "reconstructed steps, waits, moves"
    # A client's messages and what belongs to no request are no moves of a request's state.
    others = [kv | {"src": "client"}, kv | {"request": None}, kv | {"object": "tokens"}]
    assert "moves" not in levels(MemoryTrace({"moves": others}), origin=None)
    assert all({"name", "present", "adds", "without"} == set(x) for x in found.as_dict()["levels"])


def _parts(lengths: list[int], by: str = "e2e") -> pl.DataFrame:
    rows = [{"request": i, f"{by}_ns": n} | {p.column: 0 for p in PARTS} | {"decode_ns": n} for i, n in enumerate(lengths)]
    return pl.DataFrame(rows)


def test_the_tail_takes_all_that_took_as_long() -> None:
    """1 % of 300 requests are three; four took longest, all alike: which three would be chance."""
    tail = tail_of(_parts([10] * 296 + [50] * 4))
    assert tail is not None and tail.slowest.requests == 4 and tail.slowest.e2e_ns == 50 and tail.more == [("decode", 40.0)]
    same = tail_of(_parts([7] * 200))
    assert same is not None and same.slowest.requests == same.median.requests == 200 and same.more == []
    assert tail_of(_parts([5])) is None
    two = tail_of(_parts([5, 9]))
    assert two is not None and (two.slowest.e2e_ns, two.median.e2e_ns) == (9, 5)
    assert compositions(_parts(list(range(1, 101))))["p50"].requests == 10


def test_the_tail_of_first_tokens_is_its_own() -> None:
    """sglang#7250: a p99 TTFT of 1,395 ms with a median of 150: what did the slowest wait for."""
    rows = _parts([150] * 99, "ttft").with_columns(pl.lit(0).alias("host_gap_ns"))
    slow = _parts([1395], "ttft").with_columns(
        pl.lit(99).alias("request"), pl.lit(150).alias("decode_ns"), pl.lit(1245).alias("queue_room_ns")
    )
    tail = tail_of(pl.concat([rows, slow.select(rows.columns)], how="vertical_relaxed"), by="ttft")
    assert tail is not None and tail.slowest.requests == 1 and tail.more == [("queue_room", 1245.0)]
    assert tail.as_dict()["slowest"]["ttft_ns"] == 1395 and "e2e_ns" not in tail.as_dict()["slowest"]


def test_an_accounting_has_both_tails() -> None:
    requests, stages = [], []
    for n in range(4):
        begin, queue = n * 100 * S, (40 if n == 3 else 5) * S
        requests.append({
            "request": n, "arrival_ns": begin, "received_ns": begin, "first_token_ns": begin + queue + 10 * S,
            "last_token_ns": begin + queue + (20 if n != 1 else 60) * S, "finish_ns": begin + queue + (20 if n != 1 else 60) * S,
        })  # fmt: skip
        stages.append(
            {"request": n, "stage": 0, "server": "s", "enqueued_ns": begin, "scheduled_ns": begin + queue, "end_ns": None}
        )
    for stay, r in zip(stages, requests, strict=True):
        stay["end_ns"] = r["finish_ns"]
    a: Accounting = account(MemoryTrace({"requests": requests, "stages": stages}))
    assert a.tail is not None and a.ttft_tail is not None
    # The slowest answer decoded longest; the slowest first token waited in the queue.
    assert a.tail.more[0][0] == "decode" and a.ttft_tail.more[0][0] == "queue_room"
    assert a.ttft_parts["ttft_ns"].to_list() == [15 * S, 15 * S, 15 * S, 50 * S]
