"""Waiting for KV space: who stands at the head of the queue, and what he needs."""

from __future__ import annotations

from typing import Any

from support.memory import MemoryTrace

from hoptrace.analysis.latency.accounting import account
from hoptrace.manifest import Manifest, Server

MS = 1_000_000
SERVER = Server(name="s", max_sequences=4, block_size_tokens=16, kv_capacity_tokens=1_000)


def request(number: int, received: int, scheduled: int, finish: int, prompt: int, **kw: Any) -> dict[str, Any]:
    times = {"received_ns": received, "scheduled_ns": scheduled, "finish_ns": finish, "arrival_ns": received}
    return {"request": number, "prompt_tokens": prompt, "arrival_of": "received"} | {k: v * MS for k, v in times.items()} | kw


def step(number: int, used: int, **kw: Any) -> dict[str, Any]:
    """One of 10 ms."""
    return {
        "server": "s", "step": number, "start_ns": number * 10 * MS, "end_ns": (number + 1) * 10 * MS, "origin": "observed",
        "kv_used_tokens": used, "kv_capacity_tokens": 1_000, "preempted": 0, "queued_decode_requests": 0,
        "queued_decode_context_tokens": 0, "decode_requests": 1, "decode_tokens": 1, "prefill_tokens": 0,
    } | kw  # fmt: skip


def run(number: int, first: int, last: int, phase: str = "decode") -> dict[str, Any]:
    return {
        "request": number, "server": "s", "first_step": first, "last_step": last, "phase": phase,
        "tokens_per_step": 0 if phase == "preempted" else 1,
    }  # fmt: skip


def stay(number: int, enqueued: int | None, scheduled: int, end: int) -> dict[str, Any]:
    times = {"enqueued_ns": enqueued, "scheduled_ns": scheduled, "end_ns": end}
    return {"request": number, "stage": 0, "server": "s"} | {k: None if v is None else v * MS for k, v in times.items()}


def of_queue(rows: dict[str, list[dict[str, Any]]], number: int) -> dict[str, float]:
    """ms of each part of the request's queueing."""
    trace = MemoryTrace(rows, Manifest(origin="recorded", servers=[SERVER], closed=True))
    row = next(r for r in account(trace).parts.to_dicts() if r["request"] == number)
    return {k[6:-3]: v / MS for k, v in row.items() if k.startswith("queue_") and v}


def preempted(**told: Any) -> dict[str, list[dict[str, Any]]]:
    """Request 0 decodes all the time; 1 loses its place from step 2 to 7 and had 400 tokens; 2, of 50, comes at 20 and waits
    until 80 while 200 tokens are free."""
    lost = {"queued_decode_requests": 1, "queued_decode_context_tokens": 400} | told
    return {
        "requests": [request(0, 0, 0, 100, 16), request(1, 0, 0, 100, 300), request(2, 20, 80, 100, 50)],
        "stages": [stay(0, 0, 0, 100), stay(1, 0, 0, 100), stay(2, 20, 80, 100)],
        "steps": [step(i, 800, **(lost if 2 <= i < 8 else {}), **({"preempted": 1} if i == 2 else {})) for i in range(10)],
        "residency": [run(0, 0, 9), run(1, 0, 1), run(1, 2, 7, "preempted"), run(1, 8, 9), run(2, 8, 9)],
    }


def test_who_was_preempted_heads_the_queue() -> None:
    assert of_queue(preempted(), 2) == {"kv": 60.0}


def test_who_was_preempted_and_would_fit_does_not_lack_kv() -> None:
    """In the step that preempts nobody is admitted; after it 200 tokens are free for one that had 100."""
    assert of_queue(preempted(queued_decode_context_tokens=100), 2) == {"kv": 10.0, "room": 50.0}


def test_nobody_tells_what_the_preempted_one_had() -> None:
    assert of_queue(preempted(queued_decode_requests=None, queued_decode_context_tokens=None), 2) == {"kv": 60.0}


def test_waiting_to_decode_without_preemption_is_no_want_of_kv() -> None:
    """Handed over from a prefill server: what it needs is there already."""
    rows = preempted()
    rows["residency"] = [run(0, 0, 9), run(1, 0, 9), run(2, 8, 9)]
    rows["steps"] = [s | {"preempted": 0} for s in rows["steps"]]
    assert of_queue(rows, 2) == {"room": 60.0}


def test_the_head_is_known_without_a_stamp_of_its_entry() -> None:
    """Nobody saw when they were enqueued: since they were received they wait, and 200 free tokens are too few for the first."""
    rows = {
        "requests": [request(0, 0, 0, 100, 16), request(1, 10, 60, 100, 500), request(2, 20, 80, 100, 50)],
        "stages": [stay(0, None, 0, 100), stay(1, None, 60, 100), stay(2, None, 80, 100)],
        "steps": [step(i, 800) for i in range(10)],
        "residency": [run(0, 0, 9), run(1, 6, 9), run(2, 8, 9)],
    }
    assert of_queue(rows, 1) == {"kv": 50.0}
    assert of_queue(rows, 2) == {"kv": 40.0, "room": 20.0}


def test_a_head_of_unknown_length_may_lack_kv_or_not() -> None:
    """200 tokens are free: enough for 50, too few for 500, and who knows for whom nobody counted."""
    rows = {
        "requests": [request(0, 0, 0, 100, 16), request(1, 10, 60, 100, 500), request(2, 20, 80, 100, 50)],
        "stages": [stay(0, 0, 0, 100), stay(1, 10, 60, 100), stay(2, 20, 80, 100)],
        "steps": [step(i, 800) for i in range(10)],
        "residency": [run(0, 0, 9), run(1, 6, 9), run(2, 8, 9)],
    }
    rows["requests"][1].pop("prompt_tokens")
    assert of_queue(rows, 1) == {"unknown": 50.0}
    assert of_queue(rows, 2) == {"unknown": 40.0, "room": 20.0}
    # With less than a block free nobody fits.
    rows["steps"] = [s | {"kv_used_tokens": 990} for s in rows["steps"]]
    assert of_queue(rows, 2) == {"kv": 60.0}
