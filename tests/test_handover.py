"""Prefill on one server, decode on another: how much of the time between them is data, how much arranging, how much done twice.

The rows are those that the capture of a vLLM pair with NIXL writes (`test_vllm_real.py` makes one): two stays under one
`x-request-id`, the decoder's first step computing the prompt's last token again, transfers told by the step in which they ended.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.memory import MemoryTrace

from hoptrace.analysis.latency.accounting import account
from hoptrace.analysis.latency.parts import PARTS
from hoptrace.manifest import Manifest, Server

MS = 1_000_000
PROMPT = 1024
END = 300 * MS  # the prefill server is done
FIRST = END + 263 * MS  # the first token leaves the decoder: vllm#50913, p50
PAIR = Manifest(
    origin="recorded",
    servers=[
        Server(name="p", max_sequences=4, max_batched_tokens=8192),
        Server(name="d", max_sequences=1, max_batched_tokens=8192),
    ],
    closed=True,
)


def step(server: str, number: int, start: int, end: int, prefill: int, context: int, decode: int = 0) -> dict[str, Any]:
    return {
        "server": server, "step": number, "start_ns": start, "end_ns": end, "origin": "observed", "running": 1, "preempted": 0,
        "prefill_requests": int(prefill > 0), "prefill_tokens": prefill, "prefill_context_tokens": context,
        "decode_requests": decode, "decode_tokens": decode, "decode_context_tokens": PROMPT * decode,
        "kv_used_tokens": 2048, "kv_capacity_tokens": 100_000,
    }  # fmt: skip


def run(server: str, first: int, last: int, phase: str, tokens: int, context: int) -> dict[str, Any]:
    return {
        "request": 1, "server": server, "first_step": first, "last_step": last, "phase": phase, "tokens_per_step": tokens,
        "context_at_start": context,
    }  # fmt: skip


def pair(*, computed: int = 1, work_ns: int = 58 * MS) -> dict[str, list[dict[str, Any]]]:
    """One request: 100 ms of queueing and 200 ms of prefill on p; enqueued on d after 40 ms, 29 ms of transfer, the first step on
    d (``computed`` tokens of the prompt, ``work_ns``) ends with the first token 263 ms after the prefill's end."""
    begin = FIRST - work_ns
    return {
        "requests": [{
            "request": 1, "received_ns": 0, "arrival_ns": 0, "arrival_of": "received", "engine_first_token_ns": FIRST,
            "first_token_ns": FIRST, "last_token_ns": FIRST + 20 * MS, "finish_ns": FIRST + 20 * MS, "prompt_tokens": PROMPT,
            "output_tokens": 2,
        }],
        "stages": [
            {"request": 1, "stage": 0, "server": "p", "role": "prefill", "enqueued_ns": 0, "scheduled_ns": 100 * MS,
             "end_ns": END, "end_reason": "handed over", "prompt_tokens": PROMPT},
            {"request": 1, "stage": 1, "server": "d", "role": "decode", "enqueued_ns": END + 40 * MS, "scheduled_ns": begin,
             "end_ns": FIRST + 20 * MS, "end_reason": "done", "prompt_tokens": PROMPT, "cached_tokens": PROMPT},
        ],
        "steps": [
            step("p", 0, 100 * MS, END, PROMPT, 0),
            step("d", 0, begin, FIRST, computed, PROMPT - computed), step("d", 1, FIRST, FIRST + 20 * MS, 0, 0, 1),
        ],
        "residency": [
            run("p", 0, 0, "chunk", PROMPT, 0),
            run("d", 0, 0, "chunk", computed, PROMPT - computed), run("d", 1, 1, "decode", 1, PROMPT),
        ],
        # As `vllm_moves.py` writes them: posting the transfer, then waiting for it.
        "waits": [
            {"request": 1, "server": "d", "kind": "serialize", "on": "NixlConnector", "start_ns": END + 78 * MS,
             "end_ns": END + 80 * MS, "count": 1},
            {"request": 1, "server": "d", "kind": "transfer", "on": "NixlConnector", "start_ns": END + 80 * MS,
             "end_ns": END + 109 * MS, "count": 1},
        ],
        "moves": [
            {"request": 1, "server": "d", "object": "kv", "src": "remote", "dst": "server:d", "start_ns": END + 78 * MS,
             "end_ns": END + 109 * MS, "bytes": 1 << 27, "transfers": 64, "mechanism": "rdma", "basis": "counted"},
        ],
    }  # fmt: skip


def parts(rows: dict[str, list[dict[str, Any]]], manifest: Manifest = PAIR) -> dict[str, float]:
    """What request 1 spent in each part, in ms; exact, and only parts with some time."""
    a = account(MemoryTrace(rows, manifest))
    row = a.parts.row(0, named=True)
    assert sum(row[p.column] or 0 for p in PARTS) == row["e2e_ns"]
    return {p.name: row[p.column] / MS for p in PARTS if row[p.column]}


def test_data_arranging_and_what_is_done_twice() -> None:
    """vllm#50913: 263 ms from the prefill's end to the first token are 29 of transfer, 58 of computing the first token's input
    again, and the rest arranging."""
    found = parts(pair())
    assert found == {"queue_room": 100, "prefill": 200, "handover": 176, "transfer": 29, "recompute": 58, "decode": 20}
    assert found["handover"] + found["transfer"] + found["recompute"] == 263
    # A user's first token: the same, without the decoding.
    first = account(MemoryTrace(pair(), PAIR)).ttft_parts.row(0, named=True)
    assert {p.name: first[p.column] / MS for p in PARTS if first[p.column]} == {k: v for k, v in found.items() if k != "decode"}
    assert account(MemoryTrace(pair(), PAIR)).compositions["all"].classes == {
        "work": 220 * MS, "coordination": 276 * MS, "carrying": 29 * MS, "repeated work": 58 * MS, "sharing": None, "capacity": 0,
        "unexplained": 0,
    }  # fmt: skip


def test_a_decoder_that_computes_the_prompt_again() -> None:
    """vllm#21037: the decode side takes as long for its prefill as the prefill side did: it did not use what it was sent."""
    found = parts(pair(computed=PROMPT, work_ns=150 * MS))
    assert found["recompute"] == 150 and found["prefill"] == 200
    assert found["handover"] == 263 - 150 - 29
    # Half of the prompt was in its own cache already: the other half is computed again.
    assert parts(pair(computed=PROMPT // 2, work_ns=75 * MS))["recompute"] == 75


def test_a_decoder_watched_alone_still_computes_a_token_again() -> None:
    """Nobody watched the prefill server: that the prompt had been computed is what the decoder found."""
    rows = pair()
    rows["stages"] = rows["stages"][1:]
    rows["steps"] = [s for s in rows["steps"] if s["server"] == "d"]
    rows["residency"] = [r for r in rows["residency"] if r["server"] == "d"]
    assert parts(rows)["recompute"] == 58
    # What a cache held and the decoder does not compute is no repeated work.
    rows["residency"][0]["context_at_start"] = rows["stages"][0]["cached_tokens"] = 512
    assert "recompute" not in parts(rows)


def test_a_full_decoder_is_waited_for() -> None:
    rows = pair()
    rows["requests"].append({"request": 2, "arrival_ns": 0, "received_ns": 0})
    rows["stages"].append(
        {
            "request": 2,
            "stage": 0,
            "server": "d",
            "role": "both",
            "enqueued_ns": 0,
            "scheduled_ns": 10 * MS,
            "end_ns": END + 150 * MS,
        }
    )
    # Its one slot is taken from before the hand-over until 150 ms after: 40 on the way, then 29 of transfer, the rest no slot.
    assert parts(rows) == {
        "queue_room": 100, "prefill": 200, "handover": 40 + 55, "queue_slots": 150 - 40 - 29, "transfer": 29, "recompute": 58,
        "decode": 20,
    }  # fmt: skip


def test_transfers_that_are_nobodys_stay_in_the_hand_over_and_are_told() -> None:
    """Several transfers ended in one step: which request each was for is not known."""
    rows = pair()
    for table in ("waits", "moves"):
        rows[table] = [row | {"request": None} for row in rows[table]]
    a = account(MemoryTrace(rows, PAIR))
    assert a.parts["handover_ns"].to_list() == [(176 + 29) * MS] and a.parts["transfer_ns"].to_list() == [None]
    assert any(s.startswith("Transfers: 1 moves of KV do not say whose they are") for s in a.unseen)


def test_nobody_waits_for_what_is_put_into_a_store() -> None:
    """A write to host memory is nobody's, and is not said to hide in the hand-over."""
    rows = pair()
    rows["moves"].append(rows["moves"][0] | {"request": None, "src": "memory:d", "dst": "host"})
    store = PAIR.model_copy(update={"platform": {"nodes": [{"name": "host", "kind": "dram"}]}})
    assert not any("whose they are" in s for s in account(MemoryTrace(rows, store)).unseen)
    assert any("whose they are" in s for s in account(MemoryTrace(rows, PAIR)).unseen)


def test_moves_stand_in_for_waits_request_by_request() -> None:
    """One request's transfer is told as a wait, the other's only as a move: both were carried."""
    rows = pair()
    for table, had in list(rows.items()):
        keys = ("request",) if table != "steps" else ()
        rows[table] = had + [r | dict.fromkeys(keys, 7) for r in had if table not in ("steps", "waits")]
    a = account(MemoryTrace(rows, PAIR))
    assert a.parts["transfer_ns"].to_list() == [29 * MS, 31 * MS]  # the move includes the posting


def test_a_stay_that_failed_is_tried_again_by_the_router() -> None:
    for reason in ("failed", "refused", "cancelled"):
        rows = pair()
        rows["stages"][0]["end_reason"] = reason
        found = parts(rows)
        assert found["proxy"] == 40 and "handover" not in found
        assert found["queue_room"] == 100 + (263 - 40 - 58 - 29 - 2) and found["host_gap"] == 2


def test_roles_tell_a_hand_over_where_no_end_does() -> None:
    rows = pair()
    rows["stages"][0]["end_reason"] = "done"  # as vLLM ends a prompt with one token
    assert parts(rows)["handover"] == 176
    rows["stages"][0]["role"] = "both"
    assert "handover" not in parts(rows)


def test_a_router_around_both_hides_nothing() -> None:
    """Its own stay lasts as long as all that it routes."""
    rows = pair()
    for row in rows["stages"]:
        row["stage"] += 1
        row["enqueued_ns"] += 3 * MS
    rows["stages"].insert(
        0,
        {
            "request": 1,
            "stage": 0,
            "server": "r",
            "role": "route",
            "enqueued_ns": MS,
            "end_ns": FIRST + 20 * MS,
            "end_reason": "done",
        },
    )
    assert parts(rows) == {
        "proxy": 3, "queue_room": 97, "prefill": 200, "handover": 176, "transfer": 29, "recompute": 58, "decode": 20,
    }  # fmt: skip
    bare = {k: v for k, v in rows.items() if k in ("requests", "stages", "waits")}
    assert parts(bare) == {"proxy": 3, "queue_room": 97, "prefill": 200, "handover": 176, "transfer": 29, "decode": 78}


@pytest.mark.parametrize("delay", [10 * MS, 500 * MS])
@pytest.mark.parametrize(
    ("where", "part"), [(0, "handover"), (60, "handover"), (90, "transfer"), (150, "handover"), (230, "recompute")]
)
def test_a_planted_delay_in_a_hand_over(where: int, part: str, delay: int) -> None:
    """All that comes later than ``where`` ms after the prefill's end is put off."""
    rows = pair()
    before = parts(rows)
    for table in rows.values():
        for row in table:
            for column, value in row.items():
                if column.endswith("_ns") and isinstance(value, int) and value > END + where * MS:
                    row[column] = value + delay
    after = parts(rows)
    assert {p: after[p] - before.get(p, 0) for p in after if after[p] != before.get(p, 0)} == {part: delay / MS}
